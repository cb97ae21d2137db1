"""Static inputs: the number of each layer comes from statistics, the user, or a default."""

import pytest
import tiny_checkpoints as tiny
import torch
from click.testing import CliRunner
from converting import converted, opened, plan_of, rows_of
from safetensors.torch import load_file, save_file

from quantload.cli import main
from quantload.errors import ConfigError, ShapeError
from quantload.loader.formats.targets import target_named
from quantload.loader.layer_selection import select_layers
from quantload.loader.plan import PlanOptions, make_plan
from quantload.loader.stats import InputStatistics, read_stats
from quantload.mappers.facts import facts_from_names
from quantload.quant.rules import QuantConfig

QKV = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture
def folder(tmp_path):
    return tiny.llama(tmp_path / "source")


def test_fp8_takes_the_largest_of_a_fused_group(tmp_path, folder):
    modules = [row.module for row in plan_of(folder, "W8A8").rows if row.scheme]
    absmax = {module: torch.tensor([8.0]) for module in modules} | {QKV[1]: torch.tensor([28.0])}
    absmax["of.another.model"] = torch.tensor([1.0])
    file = tmp_path / "stats.safetensors"
    save_file({f"{module}.input_absmax": value for module, value in absmax.items()}, file)
    plan = plan_of(folder, "FP8", stats=read_stats(file))
    assert [w for w in plan.warnings if "is used by no layer: `of.another.model`" in w]
    out = converted(folder, tmp_path / "out", "FP8", stats=read_stats(file))
    written = load_file(out / "model.safetensors")
    for module in modules:
        expected = torch.tensor([28.0 if module in QKV else 8.0]).bfloat16() / 448
        assert torch.equal(written[f"{module}.input_scale"], expected), module
        assert written[f"{module}.weight_scale"].shape == (1,)


def test_fp8_without_a_number_is_refused(folder):
    with pytest.raises(ConfigError, match="nothing says how large that input gets"):
        plan_of(folder, "FP8")


def test_nvfp4_has_a_default_that_is_told(tmp_path, folder):
    plan = plan_of(folder, "NVFP4")
    assert [w for w in plan.warnings if "covered up to 2688, a default without data" in w]
    out = converted(folder, tmp_path / "out", "NVFP4")
    written = load_file(out / "model.safetensors")
    assert written[f"{DOWN}.input_global_scale"].tolist() == [1.0]
    stated = plan_of(folder, "NVFP4", stats=InputStatistics(stated=448.0))
    assert not [w for w in stated.warnings if "default" in w]
    assert rows_of(stated)[DOWN].input_absmax.value == 448.0


@pytest.mark.parametrize("format_name", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize(("scheme", "leaf"), [("FP8", "input_scale"), ("NVFP4", "input_scale")])
def test_numbers_of_a_quantized_source_are_kept(tmp_path, folder, scheme, leaf, format_name):
    """From one format to another and back, without statistics."""
    first = converted(folder, tmp_path / "ct", scheme, stats=InputStatistics(stated=7.0))
    target = target_named(format_name)
    plan = plan_of(first, scheme, target=target)
    assert not [w for w in plan.warnings if "input" in w]
    second = converted(first, tmp_path / "two", scheme, target=target)
    written = load_file(second / "model.safetensors")
    if format_name == "modelopt":
        reach = 448.0 if scheme == "FP8" else 2688.0
        assert float(written[f"{DOWN}.{leaf}"]) == pytest.approx(7.0 / reach, rel=2**-8)
    third = converted(second, tmp_path / "three", scheme)
    one, three = (load_file(f / "model.safetensors") for f in (first, third))
    name = f"{DOWN}.input_scale" if scheme == "FP8" else f"{DOWN}.input_global_scale"
    assert float(three[name]) == pytest.approx(float(one[name]), rel=2**-8)


def test_what_the_user_states_beats_the_source(tmp_path, folder):
    first = converted(folder, tmp_path / "ct", "FP8", stats=InputStatistics(stated=7.0))
    stated = plan_of(
        first, "FP8", target=target_named("modelopt"), stats=InputStatistics(stated=14.0)
    )
    assert rows_of(stated)[DOWN].input_absmax.value == 14.0


@pytest.mark.parametrize("number", ["nan", "inf", "0", "-3"])
def test_numbers_that_no_input_reaches(tmp_path, folder, number):
    command = ["convert", str(folder), str(tmp_path / "out"), "--scheme", "W8A8", "-q"]
    done = CliRunner().invoke(main, [*command, "--input-absmax", number])
    assert done.exit_code == 2
    assert "expected a finite number above zero" in done.output


def test_the_command_line(tmp_path, folder):
    command = ["convert", str(folder), str(tmp_path / "out"), "--scheme", "FP8", "-q"]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 2
    assert "--input-absmax X" in done.output
    done = CliRunner().invoke(main, [*command, "--input-absmax", "56"])
    assert done.exit_code == 0, done.output
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written[f"{DOWN}.input_scale"].tolist() == [0.125]


# -- mean squares, for the search ------------------------------------------------------------------


def statistics(tmp_path, folder, *, without=(), **others):
    """Write and read a file with a mean square of every module that W8A8 quantizes."""
    rows = [row for row in plan_of(folder, "W8A8").rows if row.scheme]
    made = {
        f"{row.module}.input_mean_square": torch.rand(row.shape[1]) + 0.1
        for row in rows
        if row.module not in without
    }
    file = tmp_path / "stats.safetensors"
    save_file({**made, **others}, file)
    return read_stats(file)


def searched(folder, stats, **options):
    return plan_of(folder, "W4A16:g32", observer="search", stats=stats, **options)


def test_every_searched_module_takes_the_mean_square_of_its_own_name(tmp_path, folder):
    plan = searched(folder, statistics(tmp_path, folder))
    rows = [row for row in plan.rows if row.scheme]
    assert [row.mean_square.entry.name for row in rows] == [
        f"{row.module}.input_mean_square" for row in rows
    ]
    assert not [w for w in plan.warnings if "stats.safetensors" in w]


def test_siblings_do_not_lend_each_other_mean_squares(tmp_path, folder):
    plan = searched(folder, statistics(tmp_path, folder, without=QKV[1:]))
    rows = rows_of(plan)
    assert rows[QKV[0]].mean_square
    assert [rows[name].mean_square for name in QKV[1:]] == [None, None]
    count = sum(row.scheme is not None for row in plan.rows)
    (told,) = [w for w in plan.warnings if "all columns alike" in w]
    assert told == (
        f"2 of {count} layers are searched with all columns alike, since "
        f"`{tmp_path / 'stats.safetensors'}` has no input_mean_square above zero of them: "
        f"`{QKV[1]}`, `{QKV[2]}`"
    )


def test_inputs_that_were_never_met_are_told(tmp_path, folder):
    columns = rows_of(plan_of(folder, "W8A8"))[DOWN].shape[1]
    zeros = {f"{DOWN}.input_mean_square": torch.zeros(columns)}
    stats = statistics(tmp_path, folder, without=[DOWN], **zeros)
    plan = searched(folder, stats)
    assert rows_of(plan)[DOWN].mean_square is None
    (told,) = [w for w in plan.warnings if "stats.safetensors" in w]
    assert told.startswith("1 of ")
    assert told.endswith(f"above zero of it: `{DOWN}`")


def test_statistics_without_any_mean_square_are_told(tmp_path, folder):
    file = tmp_path / "stats.safetensors"
    save_file({f"{DOWN}.input_absmax": torch.ones(1)}, file)
    plan = searched(folder, read_stats(file))
    count = sum(row.scheme is not None for row in plan.rows)
    assert [w for w in plan.warnings if w.startswith(f"{count} of {count} layers are searched")]


def test_mean_squares_of_other_modules_are_told(tmp_path, folder):
    others = {"other.input_mean_square": torch.ones(3), f"{DOWN}.hessian": torch.ones(1)}
    plan = searched(folder, statistics(tmp_path, folder, **others))
    told = [w for w in plan.warnings if "stats.safetensors" in w]
    assert len(told) == 2
    assert told[0].startswith("1 entry of ")
    assert told[0].endswith("is used by no layer: `other`")
    assert told[1].startswith("1 tensor of ")
    assert told[1].endswith(f"is used by no layer: `{DOWN}.hessian`")


def test_minmax_does_not_use_them_and_says_so(tmp_path, folder):
    plan = plan_of(folder, "W4A16:g32", stats=statistics(tmp_path, folder))
    assert [w for w in plan.warnings if "not used: they are for `--observer search`" in w]
    assert not any(row.mean_square for row in plan.rows)


def test_statistics_of_another_model_are_refused(tmp_path, folder):
    file = tmp_path / "stats.safetensors"
    save_file({"other.input_mean_square": torch.ones(3)}, file)
    with pytest.raises(ConfigError) as error:
        searched(folder, read_stats(file))
    assert f"`{file}` has statistics of no module of this model: found `other`, " in str(
        error.value
    )
    assert f"expected `{DOWN}`, " in str(error.value)
    assert "hint: statistics have the names of modules in the checkpoint" in str(error.value)


def test_another_number_of_features_is_refused(tmp_path, folder):
    stats = statistics(
        tmp_path, folder, without=[DOWN], **{f"{DOWN}.input_mean_square": torch.ones(3)}
    )
    columns = rows_of(plan_of(folder, "W8A8"))[DOWN].shape[1]
    with pytest.raises(ShapeError) as error:
        searched(folder, stats)
    assert (
        f"tensor `{DOWN}.input_mean_square` has shape `(3,)`, expected `({columns},)`: a number "
        f"for each column of `{DOWN}.weight`, in `{tmp_path / 'stats.safetensors'}`"
    ) in str(error.value)


def test_layers_with_new_numbers_take_no_statistics_of_the_old_ones(tmp_path):
    folder = tiny.llama(tmp_path / "source", layers=3)
    stats = statistics(tmp_path, folder)
    whole = opened(folder)
    facts = facts_from_names(whole.weights, tied_head=False)
    config = QuantConfig.from_options("W4A16:g32", ())
    options = PlanOptions(observer="search", stats=stats)
    plan = make_plan(select_layers(whole, "0-1"), config, facts, options)
    assert any(row.mean_square for row in plan.rows)
    with pytest.raises(ConfigError, match="`--layers 2` gives layers new numbers") as error:
        make_plan(select_layers(whole, "2"), config, facts, options)
    assert "`--layers 0-0`" in str(error.value)
