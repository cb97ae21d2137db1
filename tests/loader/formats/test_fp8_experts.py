"""FP8 experts of a block in one parameter, against one expert at a time."""

import pytest
import torch
from faults import silent_faults
from fp8_files import BF16, E8M0, F32, FP8, codes, opened, reference, scales, write

from quantload.errors import FormatMismatch, MissingTensor

P = "model.layers.0.mlp.experts.gate_up_proj"


def check(folder, tensors, config, expected, *, shape, is_transposed=False):
    source = opened(write(folder, tensors, config))
    weight = source.weights[P]
    assert (weight.shape, weight.experts) == (shape, expected.shape[0])
    assert weight.is_transposed is is_transposed
    assert weight.parameter_shape == tuple(expected.shape)
    assert torch.equal(source.read_parameter(P), expected)
    return source


@pytest.mark.parametrize("ending", ["_scale_inv", "_scale", "_weight_scale", "_weight_scale_inv"])
@pytest.mark.parametrize("block", [(8, 16), (16, 16), (1, 32), (128, 128), (7, 5)])
@pytest.mark.parametrize("dtype", [F32, E8M0, torch.uint8])
def test_blocks(tmp_path, ending, block, dtype):
    q = codes((3, 24, 40))
    s = scales((3, -(-24 // block[0]), -(-40 // block[1])), dtype)
    expected = torch.stack([reference(q[e], s[e], block, result=BF16) for e in range(3)])
    config = {**FP8, "weight_block_size": list(block)}
    check(tmp_path, {P: q, P + ending: s}, config, expected, shape=(24, 40))


@pytest.mark.parametrize(
    ("spelled", "block"),
    [((), None), ((1,), None), ((3,), None), ((3, 1), None), ((3, 1, 1), None), ((3, 24, 1), 1)],
)
def test_one_scale_for_all_or_an_expert_or_a_row(tmp_path, spelled, block):
    q, s = codes((3, 24, 40)), scales(spelled, F32)
    each = s.expand(3) if s.numel() == 1 else s.reshape(3, -1)
    rows = block or 24
    parts = [reference(q[e], each[e].reshape(-1, 1), (rows, 40), result=BF16) for e in range(3)]
    check(tmp_path, {P: q, f"{P}_scale": s}, FP8, torch.stack(parts), shape=(24, 40))


def test_one_scale_a_column(tmp_path):
    """Llama 4 in FBGEMM: input features first."""
    q, s = codes((3, 24, 40)), scales((3, 1, 40), F32)
    parts = [reference(q[e].T.contiguous(), s[e].T, (1, 24)).T for e in range(3)]
    config = {"quant_method": "fbgemm_fp8"}
    tensors = {P: q, f"{P}_scale": s}
    check(tmp_path, tensors, config, torch.stack(parts), shape=(40, 24), is_transposed=True)


def test_input_scales_are_taken_along(tmp_path):
    tensors = {P: codes((2, 8, 8)), f"{P}_scale": scales((2,), F32)}
    tensors[f"{P}_input_scale"] = torch.ones(2)
    source = opened(write(tmp_path, tensors, {**FP8, "activation_scheme": "static"}))
    assert not source.plain
    source.read_parameter(P)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"": None}, MissingTensor, f"`{P}` is missing"),
        ({"": torch.zeros(2, 8, 8)}, FormatMismatch, "expected FP8 beside its scale"),
        ({"": torch.zeros(2, 8, 8, dtype=torch.uint8)}, FormatMismatch, "uint8"),
        ({"_scale_inv": None}, MissingTensor, f"no scale for tensor `{P}`"),
        ({"_scale": torch.ones(2, 1, 1)}, FormatMismatch, "both"),
        ({"_scale_inv": torch.ones(2, 2, 1)}, FormatMismatch, "_scale_inv"),
        ({"_scale_inv": torch.ones(2, 1, 1, dtype=torch.int32)}, FormatMismatch, "int32"),
        ({"": torch.zeros(2, 8, 8).to(torch.float8_e5m2)}, FormatMismatch, "e5m2"),
    ],
)
def test_files_that_do_not_fit(tmp_path, changes, error, match):
    parts = {"": codes((2, 8, 8)), "_scale_inv": torch.ones(2, 1, 1), **changes}
    tensors = {P + ending: part for ending, part in parts.items() if part is not None}
    with pytest.raises(error, match=match):
        opened(write(tmp_path, tensors, {**FP8, "weight_block_size": [8, 8]}))


def test_no_fault_is_silent_that_a_header_shows(tmp_path):
    tensors = {P: codes((2, 24, 40)), f"{P}_scale_inv": scales((2, 3, 5), F32)}
    tensors["model.norm.weight"] = torch.ones(8, dtype=BF16)
    config = {**FP8, "weight_block_size": [8, 8]}
    silent = silent_faults(write(tmp_path / "sound", tensors, config), tmp_path)
    assert {key.split()[0] for key in silent} <= {"narrow"}  # by less than a block
    assert all(key.split()[1] == P for key in silent)
