"""A layer that is broken is found and named by verify, compare and the baseline check."""

from __future__ import annotations

import json
import random

import pytest
import tiny_checkpoints as tiny
import torch
from breaks import breaks_of, broken
from safetensors.torch import load_file
from tiny_moe import tiny_moe

from quantload import api, api_baseline

SCHEMES = ("W4A16:g32", "W4A16_ASYM:g32", "FP8_DYNAMIC", "W8A8", "NVFP4A16")
KINDS = ("llama", "moe")
FEW, MANY = 1, 8


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    found = {}

    def make(kind, scheme):
        if (kind, scheme) not in found:
            folder = tmp_path_factory.mktemp("breaks")
            if kind == "llama":
                source = tiny.llama(folder / "source", hidden=256, intermediate=256)
            else:
                source = tiny_moe(folder / "source")
            output = api.convert(source, folder / "out", scheme).folder
            api_baseline.write_baseline(source, output, folder / "baseline.json")
            found[kind, scheme] = source, output, folder / "baseline.json"
        return found[kind, scheme]

    return make


def found_by_all(source, candidate, file):
    """The modules that each of the three names."""
    verified = api.verify(candidate, source, nearest=True)
    by_verify = {layer.module for layer in verified.layers if layer.problem}
    by_compare = {row.module for row in api.compare(source, candidate).layers if row.failure}
    report = api_baseline.check_baseline(candidate, file, reference=source)
    by_check = {verdict.name for verdict in report.layers if verdict.failure}
    return {"verify": by_verify, "compare": by_compare, "baseline": by_check}


def hold_breaks(made, tmp_path, kind, scheme, count):
    source, output, file = made(kind, scheme)
    tensors = load_file(output / "model.safetensors")
    missed = []
    for name, how in breaks_of(tensors).items():
        for seed in range(count):
            folder = tmp_path / f"{how.__name__}-{seed}"
            modules = broken(folder, output, how, random.Random(seed))
            for tool, named in found_by_all(source, folder, file).items():
                if not named or not named <= modules:
                    missed.append((tool, name, seed, sorted(modules), sorted(named)))
    assert missed == []


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_layer_is_named(made, tmp_path, kind, scheme):
    hold_breaks(made, tmp_path, kind, scheme, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", KINDS)
def test_hundreds_of_broken_layers_are_named(made, tmp_path, kind, scheme):
    hold_breaks(made, tmp_path, kind, scheme, MANY)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_broken_passes(made, tmp_path, kind, scheme):
    """No false alarm either: the same weights in a copy, and converted once more."""
    source, output, file = made(kind, scheme)
    again = api.convert(source, tmp_path / "again", scheme).folder
    for candidate in (output, again):
        assert found_by_all(source, candidate, file) == {
            "verify": set(),
            "compare": set(),
            "baseline": set(),
        }
        assert api_baseline.check_baseline(candidate, file).passed


def test_nibbles_of_one_group_of_a_large_weight(tmp_path):
    """The relative error of the weight hides one group in 8,192."""
    content = tiny.config(hidden=1024, intermediate=1024, layers=1)
    source = tiny.write(tmp_path / "source", content, tiny.tensors(content))
    output = api.convert(source, tmp_path / "out", "W4A16").folder
    file = tmp_path / "baseline.json"
    api_baseline.write_baseline(source, output, file)
    how = breaks_of(load_file(output / "model.safetensors"))["nibbles of one group swapped"]
    modules = broken(tmp_path / "broken", output, how, random.Random(1))
    found = found_by_all(source, tmp_path / "broken", file)
    assert found == dict.fromkeys(found, modules)
    before = json.loads(file.read_text())["layers"][next(iter(modules))]["weight"]
    rows = {row.module: row for row in api.compare(source, tmp_path / "broken").layers}
    assert rows[next(iter(modules))].weight.relative < before * 1.02


def test_breaks_change_the_file(made, tmp_path):
    _, output, _ = made("llama", "W4A16_ASYM:g32")
    original = load_file(output / "model.safetensors")
    for number, how in enumerate(breaks_of(original).values()):
        folder = tmp_path / str(number)
        modules = broken(folder, output, how, random.Random(0))
        tensors = load_file(folder / "model.safetensors")
        differing = {name for name in original if not torch.equal(original[name], tensors[name])}
        assert {name.rpartition(".")[0] for name in differing} == modules
