"""How two checkpoints hold their layers: bits, scales, and layers that were left out."""

from __future__ import annotations

import math

import pytest
import tiny_checkpoints as tiny
import torch
from safetensors.torch import load_file, save_file
from truth import CHECKPOINTS

from quantload import api
from quantload.accuracy.structure import compare_structure, skipped_layers
from quantload.errors import NotComparable, QuantloadError
from quantload.progress import Silent

UP = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny.llama(tmp_path_factory.mktemp("structure") / "source", hidden=96)


def converted(source, tmp_path, scheme="W4A16:g32"):
    return api.convert(source, tmp_path / "out", scheme).folder


def structure(reference, candidate):
    return compare_structure(api.inspect(reference), api.inspect(candidate), Silent())


def changed(folder, change):
    """Change the tensors of a folder in place."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return folder


def test_bits_are_those_of_the_files(source, tmp_path):
    """Oracle: bytes of the tensors by name; 96 columns in groups of 32 and packed by eight."""
    output = converted(source, tmp_path, "W4A16:g32")
    found = structure(source, output)
    stored = load_file(next(output.glob("*.safetensors")))
    before = load_file(source / "model.safetensors")
    bits = {
        module: 8 * sum(t.nbytes for name, t in stored.items() if name.startswith(f"{module}."))
        for module in (name.removesuffix(".weight") for name, t in before.items() if t.ndim == 2)
    }
    by_module = {layer.module: layer for layer in found.layers}
    assert list(by_module) == list(api.inspect(source).weights)
    for module, layer in by_module.items():
        elements = before[f"{module}.weight"].numel()
        assert layer.bits == pytest.approx(bits[module] / elements), module
        assert layer.reference_bits == 16
        assert layer.shape == tuple(before[f"{module}.weight"].shape)
    total = sum(before[f"{module}.weight"].numel() for module in bits)
    assert found.bits == pytest.approx(sum(bits.values()) / total)
    assert found.reference_bits == 16
    assert 4.5 <= found.quantized_bits < 5  # codes and bfloat16 scales, and shapes
    assert by_module[UP].tensors["weight_packed"] == f"{UP}.weight_packed"
    assert by_module[UP].reference_tensors == {"weight": f"{UP}.weight"}
    assert (found.problems, found.skipped) == ((), ())


def test_a_layer_that_was_left_out(source, tmp_path):
    """The config says `Linear`, and one of two layers of its kind is in full precision."""
    output = converted(source, tmp_path)
    weight = load_file(source / "model.safetensors")[f"{UP}.weight"]

    def leave_out(tensors):
        for leaf in ("weight_packed", "weight_scale", "weight_shape"):
            del tensors[f"{UP}.{leaf}"]
        tensors[f"{UP}.weight"] = weight

    changed(output, leave_out)
    opened = api.inspect(output)
    assert not opened.weights[UP].is_quantized
    assert skipped_layers(opened) == (UP,)
    (problem,) = structure(source, output).problems
    assert problem.startswith(f"`{UP}` is in full precision")
    assert not api.compare(source, output, tier="structure").passed


@pytest.mark.parametrize(
    ("scheme", "value", "problem"),
    [
        ("W4A16:g32", math.nan, "not finite"),
        ("FP8_DYNAMIC", math.inf, "not finite"),
        ("FP8_DYNAMIC", -1.0, "negative"),
    ],
)
def test_scales_that_no_scale_can_be(source, tmp_path, scheme, value, problem):
    def damage(tensors):
        tensors[f"{UP}.weight_scale"][3, 0] = value

    found = structure(source, changed(converted(source, tmp_path, scheme), damage))
    assert len(found.problems) == 1
    assert found.problems[0].startswith(f"`{UP}`: `{UP}.weight_scale` with 1 of ")
    assert problem in found.problems[0]


def test_scales_of_zero_are_counted(source, tmp_path):
    def damage(tensors):
        tensors[f"{UP}.weight_scale"][3:5, 0] = 0

    found = structure(source, changed(converted(source, tmp_path, "W4A16:g32"), damage))
    assert {layer.module: layer.zero_scales for layer in found.layers if layer.zero_scales} == {
        UP: 2
    }


def test_layers_of_one_side(source, tmp_path):
    output = converted(source, tmp_path)

    def take(tensors):
        for name in [name for name in tensors if name.startswith(UP)]:
            del tensors[name]
        tensors["extra.weight"] = torch.zeros(4, 4)

    changed(output, take)
    found = api.compare(source, output, tier="structure")
    assert (found.only_in_reference, found.only_in_candidate) == ((UP,), ("extra",))
    by_module = {layer.module: layer for layer in found.structure.layers}
    assert (by_module[UP].candidate, by_module[UP].bits) == ("", 0.0)
    assert (by_module["extra"].reference, by_module["extra"].reference_bits) == ("", 0.0)
    assert not found.passed
    assert found.layers == ()


def test_a_bias_or_norm_that_only_the_candidate_has(source, tmp_path):
    output = converted(source, tmp_path)
    bias = torch.zeros(64)
    changed(output, lambda tensors: tensors.update({f"{UP}.bias": bias}))
    assert structure(source, output).problems == ()  # AutoGPTQ writes such
    bias[3] = 1.0
    changed(
        output, lambda tensors: tensors.update({f"{UP}.bias": bias, "k_norm.weight": bias.clone()})
    )
    (problem,) = structure(source, output).problems
    assert problem == f"tensors that the reference lacks: `k_norm.weight`, `{UP}.bias`"
    assert not api.compare(source, output, tier="structure").passed
    found = api.compare(source, output, sequences=[[1, 2, 3]])  # transformers has no place for it
    assert problem in found.problems
    assert "bias" in found.not_run


def test_other_models_are_not_comparable(source, tmp_path):
    other = tiny.llama(tmp_path / "other", hidden=96, intermediate=64)
    with pytest.raises(NotComparable, match="has shape"):
        structure(source, other)


# -- checkpoints of other tools --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason="no folder shared/checkpoints")
def test_checkpoints_of_tools_are_sound():
    """Nothing was left out, and stored bits are those of the tensors, whatever the tool."""
    bases = sorted((p.name for p in (CHECKPOINTS / "base").iterdir() if p.is_dir()), key=len)
    compared = 0
    for folder in sorted(path for path in CHECKPOINTS.glob("*/*") if path.is_dir()):
        base = next((name for name in bases[::-1] if folder.name.startswith(name)), None)
        if base is None or folder.parent.name == "base":
            continue
        try:
            candidate = api.inspect(folder)
            found = compare_structure(api.inspect(CHECKPOINTS / "base" / base), candidate, Silent())
        except QuantloadError:
            continue  # what is not read is refused, and so is another model
        assert (found.problems, found.skipped) == ((), ()), folder
        held = {name for layer in found.layers for name in layer.tensors.values()}
        elements = sum(math.prod(layer.shape) for layer in found.layers if layer.candidate)
        tensors = candidate.checkpoint.tensors
        if held <= set(tensors):  # experts that are one tensor in the files are apart here
            num_bytes = sum(tensors[name].num_bytes for name in held)
            assert found.bits == pytest.approx(8 * num_bytes / elements), folder
        compared += 1
    assert compared > 150
