"""Weights are compared some rows at a time: the same as at once, whatever holds them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tiny_checkpoints as tiny
import torch
from safetensors.torch import load_file, save_file
from truth import CHECKPOINTS

from quantload import api
from quantload.accuracy import compare_weights as module
from quantload.accuracy import stored_rows
from quantload.accuracy.compare_weights import compare_values, compare_weights
from quantload.errors import NotComparable, QuantloadError
from quantload.loader.workers import Resources
from quantload.progress import Silent
from quantload.quant.qtensor import QuantTensor

SCHEMES = ["W4A16:g32", "W4A16_ASYM:g32", "W8A8", "FP8_BLOCK", "NVFP4A16"]
UP = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny.llama(tmp_path_factory.mktemp("weights") / "source", intermediate=160)


@pytest.fixture
def slices(monkeypatch):
    """Rows are read by themselves, and 40 are in work at a time."""
    monkeypatch.setattr(stored_rows, "_DECODED_WHOLE", 0)
    monkeypatch.setattr(module, "_ELEMENTS", 40 * 64)


def rows_of(reference, candidate, **resources):
    found = compare_weights(
        api.inspect(reference), api.inspect(candidate), Silent(), resources=Resources(**resources)
    )
    return {row.module: row for row in found.layers}


def numpy_errors(candidate, reference):
    """Relative error of the matrix, and of each row, in NumPy and float64."""
    got, wanted = (np.asarray(t.double()) for t in (candidate, reference))
    noise, signal = ((got - wanted) ** 2).sum(axis=1), (wanted**2).sum(axis=1)
    return math.sqrt(noise.sum() / signal.sum()), np.sqrt(noise / signal)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.usefixtures("slices")
def test_rows_at_a_time_are_the_whole(source, tmp_path, scheme):
    """Oracles: NumPy over whole weights, and the comparison of weights that are in memory."""
    output = api.convert(source, tmp_path / "out", scheme).folder
    one, other = api.inspect(source), api.inspect(output)
    for name, row in rows_of(source, output, workers=2).items():
        error, of_rows = numpy_errors(other.read_dense(name), one.read_dense(name))
        assert row.weight.sqnr_db == pytest.approx(
            -20 * math.log10(error) if error else math.inf, abs=1e-6
        )
        assert row.weight.count == math.prod(one.weights[name].shape)
        whole = compare_values(
            (one.weights[name], one.read_weight(name)),
            (other.weights[name], other.read_weight(name)),
        )
        assert row.rounding == whole.rounding or row.rounding.bias == pytest.approx(
            whole.rounding.bias, abs=1e-12
        )
        if error == 0:
            assert (row.worst_row, row.worst_row_error) == (None, None)
            continue
        assert row.worst_row == whole.worst_row == int(of_rows.argmax())
        assert row.worst_row_error == pytest.approx(of_rows.max(), rel=1e-9)
        assert sum(row.rounding.histogram) == row.weight.count


@pytest.mark.usefixtures("slices")
def test_no_more_rows_than_asked_for_are_decoded(source, tmp_path, monkeypatch):
    output = api.convert(source, tmp_path / "out", "W4A16:g32").folder
    decoded = []
    plain = QuantTensor.dequantize
    monkeypatch.setattr(
        QuantTensor, "dequantize", lambda q, *a: (decoded.append(q.shape[0]), plain(q, *a))[1]
    )
    rows_of(source, output, workers=1)
    assert max(decoded) == 40
    assert 160 in {weight.shape[0] for weight in api.inspect(source).weights.values()}


@pytest.mark.usefixtures("slices")
def test_a_row_that_stands_out_is_named(source, tmp_path):
    output = api.convert(source, tmp_path / "out", "W8A8").folder
    (file,) = output.glob("*.safetensors")
    tensors = load_file(file)
    tensors[f"{UP}.weight_scale"][117] *= 1.25
    save_file(tensors, file)
    row = rows_of(source, output)[UP]
    assert row.worst_row == 117
    assert row.worst_row_error == pytest.approx(0.25, rel=0.01)


def test_a_shift_of_all_codes_is_a_bias(source, tmp_path):
    output = api.convert(source, tmp_path / "out", "W8A16").folder
    (file,) = output.glob("*.safetensors")
    tensors = load_file(file)
    before = rows_of(source, output)[UP].rounding
    raw = tensors[f"{UP}.weight_packed"].view(torch.uint8)
    raw += (raw < 255).to(torch.uint8)
    save_file(tensors, file)
    after = rows_of(source, output)[UP].rounding
    assert abs(before.bias) < 0.02
    assert after.bias == pytest.approx(1 + before.bias, abs=0.02)
    assert sum(before.histogram[31:]) < 0.1 * sum(before.histogram)
    assert sum(after.histogram[31:]) > 0.9 * sum(after.histogram)


@pytest.mark.parametrize("workers", [1, 2])
def test_rows_keep_the_order_of_the_reference(source, tmp_path, workers):
    output = api.convert(source, tmp_path / "out", "FP8_DYNAMIC").folder
    assert list(rows_of(source, output, workers=workers)) == list(api.inspect(source).weights)


def test_a_quantized_reference(source, tmp_path):
    """Two schemes of one model; errors against the reference's values, no steps to count in."""
    folders = [api.convert(source, tmp_path / s[:3], s).folder for s in ("W8A8", "W4A16:g32")]
    one, other = (api.inspect(folder) for folder in folders)
    row = rows_of(*folders)[UP]
    error, of_rows = numpy_errors(other.read_dense(UP), one.read_dense(UP))
    assert row.weight.relative == pytest.approx(error, rel=1e-9)
    assert row.worst_row == int(of_rows.argmax())
    assert row.rounding is None
    assert row.reference != row.candidate
    alike = rows_of(folders[0], folders[0])
    assert {r.weight.noise for r in alike.values()} == {0.0}
    assert {r.weight_limit for r in alike.values()} == {0.0}


def test_values_that_are_not_finite_in_one_slice(source, tmp_path, slices):
    tensors = load_file(source / "model.safetensors")
    tensors[f"{UP}.weight"][150, 3] = math.nan
    other = tiny.write(tmp_path / "other", {**tiny.config(intermediate=160)}, tensors)
    row = rows_of(source, other)[UP]
    assert row.problem == "1 values of the candidate are not finite"
    assert (row.worst_row, row.worst_row_error) == (150, math.inf)


def test_errors_in_a_thread_come_out(source, tmp_path):
    output = api.convert(source, tmp_path / "out", "W8A8").folder
    opened = api.inspect(output)
    (file,) = output.glob("*.safetensors")
    with file.open("r+b") as cut:
        cut.truncate(file.stat().st_size - 64)
    with pytest.raises(QuantloadError, match="ends inside tensor"):
        compare_weights(api.inspect(source), opened, Silent())


# -- checkpoints of other tools --------------------------------------------------------------------

needs_shared = pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason="no folder shared/checkpoints")
PAIRS = [  # one scheme by two tools: rounded to nearest on equal scales, or nearly
    ("llmcompressor-0.14.0.1/nano-llama-FP8_DYNAMIC", "amd-quark-0.13/nano-llama-FP8-PTPC"),
    ("llmcompressor-0.14.0.1/nano-llama-W4A16", "amd-quark-0.13/nano-llama-INT4-sym-g32"),
]


@needs_shared
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[1].split("/")[0])
@pytest.mark.usefixtures("slices")
def test_two_tools(pair):
    """Oracle: NumPy over the values that each tool's own code gave."""
    one, other = (CHECKPOINTS / name for name in pair)
    if not one.is_dir() or not other.is_dir():
        pytest.skip("not among the shared checkpoints")
    expected = [load_file(folder / "expected.safetensors") for folder in (one, other)]
    compared = 0
    for name, row in rows_of(one, other).items():
        wanted, got = (values.get(f"{name}.weight") for values in expected)
        if wanted is None or got is None or wanted.ndim != 2:
            continue
        error, _ = numpy_errors(got, wanted)
        assert row.weight.relative == pytest.approx(error, rel=2e-2, abs=1e-4)
        compared += 1
    assert compared >= 7


@needs_shared
def test_models_that_differ():
    with pytest.raises(NotComparable):
        rows_of(CHECKPOINTS / "base" / "nano-llama", CHECKPOINTS / "base" / "tiny-qwen2")


@pytest.mark.slow
@needs_shared
@pytest.mark.usefixtures("slices")
def test_errors_of_what_other_tools_wrote():
    """Oracle: NumPy over the values that each tool's own code gave, and those of the base."""
    bases = {p.name: p for p in (CHECKPOINTS / "base").iterdir() if p.is_dir()}
    compared, wrong = 0, []
    for folder in sorted(p.parent for p in CHECKPOINTS.glob("*/*/expected.safetensors")):
        base = max((b for b in bases if folder.name.startswith(b)), key=len, default=None)
        if base is None or not (bases[base] / "model.safetensors").is_file():
            continue
        if folder.name.endswith(("_SQ", "_SVDQUANT")) or "awq" in folder.name.lower():
            continue  # values that some tools give leave out the factors of the columns
        try:
            rows = rows_of(bases[base], folder)
        except QuantloadError:
            continue
        expected = load_file(folder / "expected.safetensors")
        original = load_file(bases[base] / "model.safetensors")
        for name, row in rows.items():
            got, wanted = expected.get(f"{name}.weight"), original.get(f"{name}.weight")
            if got is None or wanted is None or got.shape != wanted.shape or got.ndim != 2:
                continue
            error, _ = numpy_errors(got, wanted)
            if row.weight.relative != pytest.approx(error, rel=1e-2, abs=2e-3):
                wrong.append((folder.name, name, row.weight.relative, error))
            compared += 1
    assert {folder for folder, *_ in wrong} == set(), wrong[:3]
    assert compared > 500
