"""ModelOpt: experts in one parameter, against one expert after the other."""

import numpy as np
import pytest
import torch
from converting import opened
from faults import silent_faults
from modelopt_encoder import encoded, flat, write

from quantload.errors import UnsupportedVariant

EXPERTS = "model.layers.0.mlp.experts"
NAME = f"{EXPERTS}.down_proj"


def stacked(algorithm, rows, columns, *, is_transposed, count=3):
    """Experts in one parameter: (tensors by full name, values [E, N, K])."""
    made = [encoded(algorithm, rows, columns, seed=number) for number in range(count)]

    def turned(leaf):
        parts = torch.stack([expert.leaves[leaf].view(torch.uint8) for expert in made])
        parts = parts.view(made[0].leaves[leaf].dtype)
        return parts.transpose(1, 2).contiguous() if is_transposed and parts.ndim == 3 else parts

    tensors = {NAME: turned("weight")}
    for leaf in ("weight_scale", "weight_scale_2", "input_scale"):
        if leaf in made[0].leaves:
            scalar = made[0].leaves[leaf].ndim == 0
            parts = (
                torch.stack([expert.leaves[leaf] for expert in made]) if scalar else turned(leaf)
            )
            tensors[f"{NAME}_{leaf}"] = parts
    return tensors, np.stack([expert.values for expert in made])


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(("algorithm", "columns"), [("NVFP4", 48), ("W4A8_NVFP4_FP8", 32)])
def test_nvfp4(algorithm, columns, is_transposed, tmp_path):
    tensors, values = stacked(algorithm, 6, columns, is_transposed=is_transposed)
    folder = write(tmp_path / "source", {}, flat(algorithm), plain=tensors)
    source = opened(folder)
    weight = source.weights[NAME]
    assert (weight.experts, weight.shape, weight.is_transposed) == (3, (6, columns), is_transposed)
    assert weight.parameter_name == NAME
    expected = values.transpose(0, 2, 1) if is_transposed else values
    assert np.array_equal(source.read_parameter(NAME).numpy(), expected)
    assert NAME not in source.plain
    assert set(tensors) == set(weight.leaves.values())


@pytest.mark.parametrize("count", [1, 3])
def test_fp8_with_a_scale_an_expert(count, tmp_path):
    tensors, values = stacked("FP8", 6, 10, is_transposed=False, count=count)
    source = opened(write(tmp_path / "source", {}, flat("FP8"), plain=tensors))
    assert np.array_equal(source.read_parameter(NAME).numpy(), values)
    tensors[f"{NAME}_weight_scale"] = torch.tensor(0.5)
    source = opened(write(tmp_path / "one", {}, flat("FP8"), plain=tensors))
    codes = tensors[NAME].float()
    assert torch.equal(source.read_parameter(NAME), codes * 0.5)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_fp8_with_a_scale_a_row(is_transposed, tmp_path):
    algorithm = "FP8_PER_CHANNEL_PER_TOKEN"
    tensors, values = stacked(algorithm, 6, 10, is_transposed=is_transposed)
    source = opened(write(tmp_path / "source", {}, flat(algorithm), plain=tensors))
    expected = values.transpose(0, 2, 1) if is_transposed else values
    assert np.array_equal(source.read_parameter(NAME).numpy(), expected)


def test_what_is_not_read(tmp_path):
    tensors, _ = stacked("FP8_PER_CHANNEL_PER_TOKEN", 6, 6, is_transposed=False)
    folder = write(tmp_path / "square", {}, flat("FP8_PER_CHANNEL_PER_TOKEN"), plain=tensors)
    with pytest.raises(UnsupportedVariant, match="rows or of columns"):
        opened(folder)
    tensors, _ = stacked("MXFP8", 6, 32, is_transposed=False)
    folder = write(tmp_path / "mx", {}, flat("MXFP8"), plain=tensors)
    with pytest.raises(UnsupportedVariant, match="is not read in `MXFP8`"):
        opened(folder)


def test_no_fault_goes_unnoticed(tmp_path):
    tensors, _ = stacked("NVFP4", 6, 48, is_transposed=True)
    beside = {"model.layers.0.mlp.gate_proj": encoded("NVFP4", 4, 32)}
    folder = write(tmp_path / "source", beside, flat("NVFP4"), plain=tensors)
    assert silent_faults(folder, tmp_path) == {}
