"""Sketches of a reference: what they estimate, and what they cannot see."""

from __future__ import annotations

import math
import random

import pytest
import tiny_checkpoints as tiny
import torch
from breaks import breaks_of, broken
from safetensors.torch import load_file, save_file
from smollm2 import smollm2_file

from quantload import api, api_baseline
from quantload.accuracy.baseline_file import read_baseline
from quantload.accuracy.baseline_sketch import Sketch, read_sketch
from quantload.accuracy.baseline_verdict import change_db
from quantload.errors import BaselineError, NotComparable


def estimates(shape, relative, *, count=80, seed=0):
    """By how many dB estimates of known errors are off."""
    generator = torch.Generator().manual_seed(seed)
    off = []
    for number in range(count):
        reference = torch.randn(shape, generator=generator)
        noise = torch.randn(shape, generator=generator)
        candidate = reference + noise * (relative * reference.norm() / noise.norm())
        sketch = Sketch()
        sketch.add(f"layer {number}", reference)
        off.append(change_db(relative, sketch.relative_error(f"layer {number}", candidate)))
    return torch.tensor(off)


@pytest.mark.parametrize("relative", [0.1, 0.005])
@pytest.mark.parametrize("shape", [(96, 160), (300, 24)])
def test_estimates_are_unbiased_and_as_sure_as_theory_says(shape, relative):
    """1,024 squares, which the sides' lengths tie together: for noise without structure."""
    off = estimates(shape, relative)
    variance = 2 / (64 * 16) * (1 + 64 / shape[0]) * (1 + 16 / shape[1])
    sigma = 10 / math.log(10) * math.sqrt(variance)  # in dB
    assert float(off.mean()) == pytest.approx(0, abs=4 * sigma / math.sqrt(off.numel()) + 0.02)
    assert sigma * 0.75 < float(off.std()) < sigma * 1.3


def test_small_sides_are_not_mixed():
    reference = torch.randn(20, 10)
    candidate = reference.clone()
    candidate[3, 4] += 1.0
    sketch = Sketch()
    sketch.add("a", reference)
    exact = float(1 / reference.norm())
    assert sketch.relative_error("a", candidate) == pytest.approx(exact, rel=0.02)


def test_equal_values_have_no_error_and_every_element_counts():
    reference = torch.randn(200, 100)
    norm = torch.ones(576)
    sketch = Sketch()
    sketch.add("a", reference)
    sketch.add("norm", norm)
    assert sketch.relative_error("a", reference) == 0.0
    assert sketch.relative_error("norm", norm) == 0.0
    swapped = reference.clone()
    swapped[[150, 199]] = swapped[[199, 150]]
    exact = float((swapped - reference).norm() / reference.norm())
    assert abs(change_db(exact, sketch.relative_error("a", swapped))) < 4
    moved = norm.clone()
    moved[3] += 0.25
    assert sketch.relative_error("norm", moved) == pytest.approx(0.25 / 24, rel=0.05)


def test_a_file_comes_back_and_another_is_refused(tmp_path):
    sketch = Sketch()
    for name in ("b", "a.weight"):
        sketch.add(name, torch.randn(80, 70))
    file = tmp_path / "x.sketch.safetensors"
    digest = sketch.write(file)
    found = read_sketch(file, digest)
    assert found.norms == pytest.approx(sketch.norms)
    assert all(torch.equal(found.parts[name], sketch.parts[name]) for name in ("b", "a.weight"))
    assert load_file(file)["sketch.b"].dtype == torch.float16
    first = file.read_bytes()
    assert sketch.write(file) == digest
    assert file.read_bytes() == first
    with pytest.raises(BaselineError, match="has another shape"):
        found.relative_error("b", torch.zeros(60, 70))
    with pytest.raises(BaselineError, match="is not the sketch"):
        read_sketch(file, "0" * 64)
    with pytest.raises(BaselineError, match="there is no"):
        read_sketch(tmp_path / "none", digest)


# -- in a baseline ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sketch")
    source = tiny.llama(folder / "source", hidden=128, intermediate=256)
    output = api.convert(source, folder / "out", "W4A16:g32").folder
    file = folder / "w4.json"
    api_baseline.write_baseline(source, output, file, sketch=True, sequences=[[1, 2, 3]])
    return source, output, file


def test_a_check_without_the_reference_names_broken_layers(made, tmp_path):
    _, output, file = made
    kept = read_baseline(file)
    assert kept.sketch.file == "w4.sketch.safetensors"
    assert 0.02 < kept.sketch.sigma_db < 0.6
    tensors = load_file(output / "model.safetensors")
    for name, how in breaks_of(tensors).items():
        folder = tmp_path / how.__name__
        modules = broken(folder, output, how, random.Random(3))
        report = api_baseline.check_baseline(folder, file)
        assert {verdict.name for verdict in report.estimated} == modules
        assert any("nothing was run" in note for note in report.notes)
        assert any("estimated from the sketch" in note for note in report.notes)
        if name != "nibbles of one group swapped":
            failed = {verdict.name for verdict in report.layers if verdict.failure}
            assert failed, name
            assert "about" in report.worst()[0].failure
            assert "estimated from the sketch" in report.worst()[0].failure


def test_a_norm_that_changed_fails(made, tmp_path):
    _, output, file = made
    tensors = load_file(output / "model.safetensors")
    tensors["model.norm.weight"][5] += 0.125
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_bytes((output / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    report = api_baseline.check_baseline(tmp_path / "model", file)
    assert [verdict.name for verdict in report.layers if verdict.failure] == ["model.norm.weight"]


def test_the_sketch_must_be_there_only_if_a_layer_changed(made, tmp_path):
    source, output, file = made
    moved = tmp_path / "w4.json"
    moved.write_bytes(file.read_bytes())
    assert api_baseline.check_baseline(output, moved).passed
    how = breaks_of(load_file(output / "model.safetensors"))["scale doubled"]
    broken(tmp_path / "broken", output, how, random.Random(0))
    with pytest.raises(BaselineError, match="there is no"):
        api_baseline.check_baseline(tmp_path / "broken", moved)
    plain = tmp_path / "plain.json"
    api_baseline.write_baseline(source, output, plain)
    with pytest.raises(NotComparable, match="has changed since"):
        api_baseline.check_baseline(tmp_path / "broken", plain)
    report = api_baseline.check_baseline(tmp_path / "broken", moved, reference=source, run=False)
    assert not report.estimated
    assert not report.passed


def test_a_replaced_baseline_keeps_its_sketch(made, tmp_path):
    source, output, file = made
    copy = tmp_path / "w4.json"
    copy.write_bytes(file.read_bytes())
    made_again = api_baseline.write_baseline(source, output, copy, overwrite=True)
    assert made_again.sketch.sha256 == read_baseline(file).sketch.sha256
    assert (tmp_path / "w4.sketch.safetensors").is_file()
    without = api_baseline.write_baseline(source, output, copy, overwrite=True, sketch=False)
    assert without.sketch is None


@pytest.mark.slow
def test_estimates_of_smollm2(tmp_path):
    """int4 weights of a real model, whose errors are known; and what of its breaks shows."""
    source = smollm2_file()
    output = api.convert(source, tmp_path / "out", "W4A16", verify_output=False).folder
    file = tmp_path / "w4.json"
    kept = api_baseline.write_baseline(source, output, file, sketch=True)
    sketch = read_sketch(tmp_path / kept.sketch.file, kept.sketch.sha256)
    opened = api.inspect(output)
    off = torch.tensor(
        [
            change_db(layer.weight, sketch.relative_error(name, opened.read_dense(name)))
            for name, layer in kept.layers.items()
            if layer.weight
        ]
    )
    assert off.numel() >= 210
    size = (tmp_path / kept.sketch.file).stat().st_size
    print(  # noqa: T201 - with -s
        f"{off.numel()} layers, {size} bytes: median {off.abs().median():.3f} dB, largest "
        f"{off.abs().max():.3f} dB, mean {off.mean():.4f} dB, rms {kept.sketch.sigma_db:.3f} dB"
    )
    assert float(off.abs().median()) < 0.25
    assert float(off.abs().max()) < 1.0
    assert abs(float(off.mean())) < 0.05
    for name, how in breaks_of(load_file(output / "model.safetensors")).items():
        caught = 0
        for seed in range(5):
            modules = broken(tmp_path / "broken", output, how, random.Random(seed))
            report = api_baseline.check_baseline(tmp_path / "broken", file)
            failed = {verdict.name for verdict in report.layers if verdict.failure}
            assert failed <= modules
            caught += bool(failed)
        print(f"{name}: {caught} of 5")  # noqa: T201
        if name in ("scale doubled", "q and k scales exchanged"):
            assert caught == 5
