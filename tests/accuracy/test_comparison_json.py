"""The JSON of a comparison: its keys are a promise, its numbers are known."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import tiny_checkpoints as tiny
import torch
from safetensors.torch import load_file

from quantload import api
from quantload.accuracy.comparison_json import comparison_json
from quantload.quant.qtensor import QuantTensor

GOLDEN = Path(__file__).parent.parent / "golden" / "compare" / "tiny_w4a16.json"
LAYER = "model.layers.0.self_attn.k_proj"


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    base = tmp_path_factory.mktemp("json")
    source = tiny.llama(base / "source", layers=1, vocabulary=48)
    output = api.convert(source, base / "out", "W4A16:g32", verify_output=False).folder
    found = api.compare(
        source, output, sequences=[[1, 5, 9, 2], [7, 7, 3]], device="cpu", limits=["bits>4"]
    )
    return source, output, comparison_json(found)


def alike(found, expected, where=""):
    """Say where two contents differ by more than arithmetic of another machine may."""
    if isinstance(expected, dict):
        if list(found) != list(expected):
            return [f"{where}: {list(found)}"]
        return [
            text for key in expected for text in alike(found[key], expected[key], f"{where}.{key}")
        ]
    if isinstance(expected, list):
        if len(found) != len(expected):
            return [f"{where}: {len(found)} entries"]
        pairs = zip(found, expected, strict=True)
        return [t for n, pair in enumerate(pairs) for t in alike(*pair, f"{where}[{n}]")]
    if isinstance(expected, float):
        near = isinstance(found, float) and math.isclose(
            found, expected, rel_tol=1e-3, abs_tol=1e-7
        )
        return [] if near else [f"{where}: {found} for {expected}"]
    return [] if found == expected else [f"{where}: {found} for {expected}"]


def test_golden(content):
    """Written by this version; a change of keys, or of their order, is a new version."""
    expected = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert alike(content[2], expected) == []
    assert json.loads(json.dumps(content[2], allow_nan=False)) == content[2]


def test_numbers_of_a_layer(content):
    """Oracle: the two weights, in float64 and by hand."""
    source, output, found = content
    wanted = load_file(source / "model.safetensors")[f"{LAYER}.weight"].double()
    held = api.inspect(output).read_weight(LAYER)
    assert isinstance(held, QuantTensor)
    got, size = held.dequantize().double(), held.scale.double().repeat_interleave(32, dim=1)
    row = next(row for row in found["layers"] if row["module"] == LAYER)
    relative = ((got - wanted).norm() / wanted.norm()).item()
    assert row["weight"]["relative_error"] == pytest.approx(relative, rel=1e-9)
    assert row["weight"]["sqnr_db"] == pytest.approx(-20 * math.log10(relative), abs=1e-6)
    of_rows = (got - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert row["worst_row"] == int(of_rows.argmax())
    assert row["worst_row_error"] == pytest.approx(float(of_rows.max()), rel=1e-9)
    steps = (got - wanted) / size
    rounding = row["rounding"]
    assert rounding["max_steps"] == pytest.approx(float(steps.abs().max()), rel=1e-6)
    assert rounding["bias"] == pytest.approx(float(steps.mean()), abs=1e-9)
    places = (steps * 20 + 21).floor().clamp(0, 41).long().flatten()
    assert rounding["histogram"] == torch.bincount(places, minlength=42).tolist()
    codes = held.codes.flatten()
    assert rounding["rail_share"] == float(((codes <= -7) | (codes == 7)).double().mean())
    assert rounding["codes_used"] == len(codes.unique())
    assert rounding["codes"] == 16


def test_limits_and_structure(content):
    _, _, found = content
    assert found["limits"] == ["bits>4"]
    assert found["exceeded"] == [
        {"limit": "bits>4", "where": "", "value": found["structure"]["bits"]}
    ]
    assert not found["passed"]
    assert [layer["module"] for layer in found["structure"]["layers"]] == [
        row["module"] for row in found["layers"]
    ]
