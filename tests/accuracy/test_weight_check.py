"""Damage that leaves a layer's error small is found in its rows, or in its elements."""

import json
from dataclasses import replace

import pytest
import tiny_checkpoints as tiny
import torch
from converting import converted, opened
from safetensors.torch import load_file

from quantload import api
from quantload.accuracy.verify import verify_sources
from quantload.accuracy.weight_check import WeightChecker
from quantload.loader.formats.targets import target_named
from quantload.loader.manifest import MANIFEST
from quantload.loader.plan import PlanOptions
from quantload.loader.stats import InputStatistics
from quantload.progress import Silent
from quantload.quant.rtn import quantize_rtn
from quantload.quant.scheme import PRESETS, parse_scheme

UP = "model.layers.0.mlp.up_proj"
GATE = "model.layers.0.mlp.gate_proj"
OTHER = "model.layers.1.mlp.up_proj"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SCHEMES = [
    *{scheme.weight: name for name, scheme in reversed(PRESETS.items()) if scheme.weight}.values(),
    "W4A16:g32",
    "W4A16_ASYM:channel",
]


def source_in(folder, *, intermediate=256):
    """A llama whose layers all have the same spread, so that their scales are alike."""
    content = tiny.config(hidden=128, intermediate=intermediate)
    generator = torch.Generator().manual_seed(5)
    made = {
        name: (torch.randn(tensor.shape, generator=generator) * 0.05).bfloat16()
        for name, tensor in tiny.tensors(content).items()
    }
    return tiny.write(folder, content, made)


def check_quantized(candidate, reference, scheme, *, nearest):
    checker = WeightChecker(scheme, nearest=nearest)
    checker.add(candidate, reference)
    return checker.result()


def swapped(one, two, leaf):
    def swap(tensors):
        names = f"{one}.{leaf}", f"{two}.{leaf}"
        tensors[names[0]], tensors[names[1]] = tensors[names[1]], tensors[names[0]]

    return swap


def rows_moved(first, second, leaf="weight_packed"):
    def move(tensors):
        codes = tensors[f"{UP}.{leaf}"]
        codes[[*first, *second]] = codes[[*second, *first]]

    return move


def shifted_by_a_byte(tensors):
    row = tensors[f"{UP}.weight_packed"][7]
    row.copy_(row.view(torch.uint8).roll(1).view(torch.int32))


def scaled(factor, rows=slice(None)):
    def scale(tensors):
        tensors[f"{UP}.weight_scale"][rows] *= factor

    return scale


def zero_points_off(tensors):
    tensors[f"{UP}.weight_zero_point"] ^= 1  # eight rows share a word: the first of them


def rolled(tensors):
    codes = tensors[f"{UP}.weight"].view(torch.uint8)
    codes[9] = codes[9].roll(7)


REVERSED = rows_moved(range(16), range(31, 15, -1))
INT4, BOTH = ("W4A16", "W4A16_ASYM"), ("FP8_DYNAMIC", "FP8_BLOCK")
IN_ROWS = [  # edit, schemes, rows of the layer, what is said of it
    ("two rows", rows_moved([3], [200]), INT4, 256, "noise of 2 rows is more than 10 times"),
    ("a byte", shifted_by_a_byte, INT4, 256, "noise of 1 row is more than 10 times"),
    ("a sign", scaled(-1, 0), INT4, 256, "noise of 1 row is more than 10 times"),
    ("zero points", zero_points_off, INT4[1:], 256, "noise of "),
    ("32 of 2048", REVERSED, INT4, 2048, "noise of 32 rows is more than 10 times"),
    ("8 of 2048", scaled(4, slice(8)), INT4, 2048, "noise of 8 rows is more than 10 times"),
    ("a roll", rolled, BOTH, 256, "noise is "),
]
IN_ELEMENTS = [
    ("scales of a layer", swapped(UP, OTHER, "weight_scale"), INT4),
    ("scales of a sibling", swapped(UP, GATE, "weight_scale"), (*INT4, "FP8_BLOCK")),
    ("all scales", scaled(1.15), INT4),
]


def cases(table):
    return [
        pytest.param(edit, scheme, *rest, id=f"{name}-{scheme}")
        for name, edit, schemes, *rest in table
        for scheme in schemes
    ]


def damaged(tmp_path, edit, scheme, intermediate=256):
    source = source_in(tmp_path / "source", intermediate=intermediate)
    output = converted(source, tmp_path / "out", scheme)
    for nearest in (False, True):
        assert verified(output, source, nearest=nearest).failures() == []
    tensors = load_file(output / "model.safetensors")
    edit(tensors)
    made = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    tiny.save_file(made, output / "model.safetensors", metadata={"format": "pt"})
    return output, source


def verified(output, source, *, nearest):
    return verify_sources(opened(output), opened(source), Silent(), nearest=nearest)


@pytest.mark.parametrize(("edit", "scheme", "rows", "message"), cases(IN_ROWS))
@pytest.mark.parametrize("nearest", [False, True])
def test_damage_in_few_rows(tmp_path, edit, scheme, rows, message, nearest):
    output, source = damaged(tmp_path, edit, scheme, rows)
    (failure,) = verified(output, source, nearest=nearest).failures()
    assert failure.startswith(f"`{UP}`: {message}")


@pytest.mark.parametrize(("edit", "scheme"), cases(IN_ELEMENTS))
def test_small_damage_everywhere(tmp_path, edit, scheme):
    output, source = damaged(tmp_path, edit, scheme)
    failures = verified(output, source, nearest=True).failures()
    assert any(line.startswith(f"`{UP}`") for line in failures)
    assert all(line.split("`")[1] in (UP, GATE, OTHER) for line in failures)


def test_the_worst_row_is_named(tmp_path):
    def negate(tensors):
        tensors[f"{UP}.weight_scale"][41] *= -1
        tensors[f"{UP}.weight_scale"][77] *= -0.5

    output, source = damaged(tmp_path, negate, "W4A16")
    (failure,) = verified(output, source, nearest=False).failures()
    assert failure.startswith(f"`{UP}`: noise of 2 rows")
    assert failure.endswith("times in row 77")  # in units of its own, smaller, scale


def test_one_code_that_is_off_by_one(tmp_path):
    def change(tensors):
        tensors[f"{UP}.weight_packed"].view(torch.uint8)[130, 3] += 2 << 4

    output, source = damaged(tmp_path, change, "W4A16")
    assert verified(output, source, nearest=False).passed
    (failure,) = verified(output, source, nearest=True).failures()
    assert failure.startswith(f"`{UP}`: 1 values are not rounded to nearest, the first in row 130")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("size", [0.05, 1e-3, 30.0])
@pytest.mark.parametrize("outlier", [1, 20, 1000])
def test_what_is_rounded_to_nearest_passes(name, dtype, size, outlier):
    scheme = parse_scheme(name)
    generator = torch.Generator().manual_seed(outlier)
    weight = torch.randn(130, 256, generator=generator) * size
    weight[::3, 5] = outlier * size
    weight[1::3, 7] = -outlier * size
    weight[:, 128:] *= torch.rand(130, 1, generator=generator)
    weight[4] = 0
    weight[9:50, 128:] = 0
    weight[:, 64] = 0
    weight = weight.to(dtype)
    found = check_quantized(quantize_rtn(weight, scheme.weight), weight, scheme, nearest=True)
    assert found.problem == ""
    rounded = torch.bfloat16 if scheme.weight.scale != "float" else dtype
    slack = {torch.bfloat16: 0.62, torch.float16: 0.09, torch.float32: 1e-4}[rounded]
    if dtype != torch.float16 or size > 1:  # else some scales are below its normal numbers
        assert found.max_steps <= 0.5 + slack


@pytest.mark.parametrize("name", SCHEMES)
def test_scales_below_the_range_of_float16(name):
    """The scale itself is rounded by up to a half: what it clips is still to nearest."""
    scheme = parse_scheme(name)
    weight = (torch.randn(256, 256, generator=torch.Generator().manual_seed(3)) * 3e-6).half()
    found = check_quantized(quantize_rtn(weight, scheme.weight), weight, scheme, nearest=True)
    assert "rounded to nearest" not in found.problem


def test_steps_of_scales_that_are_divisors():
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    scheme = PRESETS["FP8_DYNAMIC"]
    found = quantize_rtn(weight, scheme.weight)
    divided = replace(
        found, scale=1 / found.scale, evaluation=replace(found.evaluation, values="/")
    )
    one, two = (check_quantized(t, weight, scheme, nearest=False) for t in (found, divided))
    assert not two.problem
    assert two.max_steps == pytest.approx(one.max_steps, rel=1e-3)


def test_a_float32_source_is_cast_before_it_is_held_to_its_step():
    """As in a conversion of a GGUF file to bfloat16."""
    scheme = PRESETS["W8A8"]
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(4))
    quantized = quantize_rtn(weight.bfloat16(), scheme.weight)
    cast = check_quantized(quantized, weight.bfloat16(), scheme, nearest=True)
    found = check_quantized(quantized, weight, scheme, nearest=True)
    assert (found.problem, found.max_steps) == ("", cast.max_steps)
    assert check_quantized(quantized, weight, scheme, nearest=False).max_steps > cast.max_steps


def test_the_largest_error_in_steps(tmp_path):
    source = source_in(tmp_path / "source")
    report = api.convert(source, tmp_path / "out", "W4A16").report
    layer = next(layer for layer in report.layers if layer.module == UP)
    weight = load_file(source / "model.safetensors")[f"{UP}.weight"].double()
    scale = load_file(tmp_path / "out" / "model.safetensors")[f"{UP}.weight_scale"].double()
    error = (opened(tmp_path / "out").read_dense(UP).double() - weight).abs() / scale
    assert layer.max_steps == float(error.max())
    dense = next(layer for layer in report.layers if layer.scheme == "dense")
    assert dense.max_steps != dense.max_steps  # NaN


def test_a_conversion_is_held_to_its_steps(tmp_path, monkeypatch):
    """A scale that is wrong, as a fault of the writer would make it."""
    source = source_in(tmp_path / "source")
    run_plan = api.run_plan

    def damaging(*arguments):
        made = run_plan(*arguments)
        tensors = load_file(made / "model.safetensors")
        tensors[f"{UP}.weight_scale"] *= 1.15
        tiny.save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
        return made

    monkeypatch.setattr(api, "run_plan", damaging)
    (failure,) = api.convert(source, tmp_path / "out", "W4A16").report.failures()
    assert "are not rounded to nearest" in failure
    assert not api.verify(tmp_path / "out", source).passed  # its manifest says how it was rounded
    (tmp_path / "out" / MANIFEST).unlink()
    assert api.verify(tmp_path / "out", source).passed
    assert not api.verify(tmp_path / "out", source, nearest=True).passed


def test_nearest_on_the_command_line(tmp_path):
    from click.testing import CliRunner

    from quantload.cli import main

    output, source = damaged(tmp_path, scaled(1.15), "W4A16")
    command = ["verify", str(output), "--source", str(source), "--json"]
    (output / MANIFEST).unlink()  # as if another tool had made it
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(main, [*command, "--nearest"])
    assert done.exit_code == 1
    layers = {layer["module"]: layer for layer in json.loads(done.stdout)["layers"]}
    assert 1 < layers[UP]["max_steps"] < 2
    assert 0.5 < layers[OTHER]["max_steps"] < 0.6
    assert layers["model.embed_tokens"]["max_steps"] is None


FORMATS = [("gptq", "W4A16:g64"), ("gptq", "W4A16_ASYM:g64"), ("awq", "W4A16:g64")]
FORMATS += [("fp8", "FP8_BLOCK"), ("modelopt", "W4A16:g64"), ("modelopt", "NVFP4A16")]


@pytest.mark.parametrize(("format_name", "scheme"), FORMATS)
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_that_are_cast_before_they_are_quantized(tmp_path, format_name, scheme, stored):
    """A float32 or float16 file of a bfloat16 model, as GGUF files and AWQ sources are."""
    content = tiny.config(hidden=128, intermediate=256)
    made = {name: tensor.to(stored) * 1.001 for name, tensor in tiny.tensors(content).items()}
    source = tiny.write(tmp_path / "source", content, made)
    options = PlanOptions(target=target_named(format_name), dtype=torch.bfloat16)
    done = api.convert(source, tmp_path / "out", scheme, options=options)
    assert done.report.failures() == []
    assert api.verify(tmp_path / "out", source).failures() == []


@pytest.mark.parametrize(("format_name", "scheme"), FORMATS[:3])
def test_formats_with_stored_scales_are_converted_once_more(tmp_path, format_name, scheme):
    source = source_in(tmp_path / "source")
    options = PlanOptions(target=target_named(format_name))
    first = api.convert(source, tmp_path / "one", scheme, options=options).folder
    assert api.convert(first, tmp_path / "two", scheme, options=options).report.failures() == []


@pytest.mark.parametrize("number", [0.0, -1.0])
def test_scales_of_inputs_are_positive(tmp_path, number):
    source = source_in(tmp_path / "source")
    options = PlanOptions(stats=InputStatistics(stated=12.0))
    output = api.convert(source, tmp_path / "out", "FP8", options=options).folder
    tensors = load_file(output / "model.safetensors")
    tensors[f"{UP}.input_scale"].fill_(number)
    tiny.save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    failures = verified(output, source, nearest=True).failures()
    assert [f for f in failures if "the scale of its input is" in f]


def test_what_the_codes_do_not_show_is_in_the_manifest(tmp_path):
    """A config that says less than it did, a number for inputs that is another."""
    source = source_in(tmp_path / "source")
    options = PlanOptions(stats=InputStatistics(stated=12.0))
    output = api.convert(source, tmp_path / "out", "FP8", options=options).folder
    tensors = load_file(output / "model.safetensors")
    tensors[f"{UP}.input_scale"] *= 2
    tiny.save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    report = api.verify(output, source)
    assert [problem for problem in report.problems if "the manifest says" in problem]
