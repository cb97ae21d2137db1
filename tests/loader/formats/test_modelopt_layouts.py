"""ModelOpt: damaged and contradicting checkpoints are refused, by the name of what is wrong."""

import pytest
import torch
from converting import opened
from faults import silent_faults
from modelopt_encoder import encoded, flat, with_low_rank, write

from quantload.errors import (
    FormatMismatch,
    MissingTensor,
    NonFiniteWeight,
    QuantloadError,
    UnsupportedVariant,
)

MODULE = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize("algorithm", ["FP8", "FP8_PB_WO", "NVFP4", "W4A8_AWQ", "MXFP8", "W8A16"])
def test_no_fault_goes_unnoticed(algorithm, tmp_path):
    rows, columns = (130, 140) if algorithm == "FP8_PB_WO" else (6, 64)
    made = encoded(algorithm, rows, columns, group_size=16)
    made.leaves["pre_quant_scale"] = torch.rand(columns).bfloat16() + 0.5
    group_size = 16 if algorithm in ("NVFP4", "W4A8_AWQ") else 0
    folder = write(tmp_path / "source", {MODULE: made}, flat(algorithm, group_size=group_size))
    found = silent_faults(folder, tmp_path)
    # Deleted, a factor of the input leaves no trace. An FP8 tensor with a row less is a smaller
    # layer, which does not fit its model.
    assert {f for f in found if f"{MODULE}.weight" not in f} == {f"delete {MODULE}.pre_quant_scale"}
    smaller = {f for f in found if f"{MODULE}.weight" in f}
    assert all(f.startswith("truncate") for f in smaller), smaller
    assert not smaller or algorithm in ("FP8", "FP8_PB_WO")


def test_no_fault_of_a_low_rank_product_goes_unnoticed(tmp_path):
    made = encoded("NVFP4_SVD", 6, 64)
    with_low_rank(made)
    folder = write(tmp_path / "source", {MODULE: made}, flat("NVFP4_SVD"))
    found = silent_faults(folder, tmp_path)
    zeroed = {f for f in found if f.startswith("zero")}
    assert set(found) - zeroed == {f"delete {MODULE}.pre_quant_scale"}
    assert all("svdquant_lora" in fault for fault in zeroed)


def test_messages(tmp_path):
    def problem(error, match, change, config=None):
        made = encoded("NVFP4", 6, 32)
        change(made.leaves)
        folder = write(
            tmp_path / f"{len(list(tmp_path.iterdir()))}", {MODULE: made}, config or flat("NVFP4")
        )
        with pytest.raises(error, match=match):
            opened(folder).read_dense(MODULE)

    problem(
        MissingTensor, rf"`{MODULE}.weight_scale_2` is missing", lambda m: m.pop("weight_scale_2")
    )
    problem(MissingTensor, rf"`{MODULE}.weight` is missing", lambda m: m.pop("weight"))
    problem(
        FormatMismatch,
        r"`torch.uint8`, expected `torch.float8_e4m3fn`",
        lambda m: None,
        flat("FP8"),
    )
    problem(UnsupportedVariant, "`W3A3` is not read", lambda m: None, flat("W3A3"))
    problem(FormatMismatch, "`group_size` .* is `64`", lambda m: None, flat("NVFP4", group_size=64))
    problem(
        NonFiniteWeight,
        r"`.*weight_scale_2` holds NaN or infinity",
        lambda m: m.update(weight_scale_2=torch.tensor(float("inf"))),
    )
    problem(
        UnsupportedVariant,
        r"tensors that are not read: `.*weight_amax`",
        lambda m: m.update(weight_amax=torch.ones(1)),
    )
    problem(
        FormatMismatch,
        "does not belong to a weight in `NVFP4`",
        lambda m: m.update(svdquant_lora_b=torch.ones(6, 2)),
    )
    problem(FormatMismatch, "does not say how", lambda m: None, flat(None))
    problem(
        FormatMismatch,
        "low-rank factors twice",
        lambda m: m.update(
            {n: torch.ones(2, 32) for n in ("svdquant_lora_a", "weight_quantizer._svdquant_lora_a")}
        ),
    )


def test_every_refusal_is_ours(tmp_path):
    """Values that no config should have."""
    made = encoded("NVFP4", 4, 32)
    for number, value in enumerate([None, -1, 0, 1.5, True, "x", [], [1], {}, {"a": 1}]):
        for key in ("quant_algo", "ignore", "group_size", "config_groups", "kv_cache_scheme"):
            folder = tmp_path / f"{key}-{number}"
            write(folder, {MODULE: made}, flat("NVFP4") | {key: value})
            try:
                found = opened(folder).read_dense(MODULE)
            except QuantloadError:
                continue
            assert torch.equal(found, torch.from_numpy(made.values)), (key, value)
