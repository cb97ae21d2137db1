"""Static inputs: the number of each layer comes from statistics, the user, or a default."""

import pytest
import tiny_checkpoints as tiny
import torch
from click.testing import CliRunner
from converting import converted, plan_of, rows_of
from safetensors.torch import load_file, save_file

from quantload.cli import main
from quantload.errors import ConfigError
from quantload.loader.formats.targets import target_named
from quantload.loader.stats import InputStatistics, read_stats

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
