"""Baselines of experts: one by one in one file, in one tensor in the other."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_moe import tiny_moe
from truth import CHECKPOINTS

from quantload import api_baseline
from quantload.accuracy.baseline_file import read_baseline

BROKEN = "model.layers.1.mlp.experts.2.up_proj"


def variant(folder, made_from, *, is_joined, noise=0.0, broken=False):
    """A copy whose experts lie apart or in one tensor, all with noise, one broken."""
    shutil.copytree(made_from, folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    for name in sorted(tensors):
        if ".experts." in name:
            tensors[name] += (
                noise * torch.randn(tensors[name].shape, generator=generator).bfloat16()
            )
    if broken:
        tensors[f"{BROKEN}.weight"] *= 2
    if is_joined:
        for layer in range(2):
            block = f"model.layers.{layer}.mlp.experts"
            gate, up, down = (
                torch.stack([tensors.pop(f"{block}.{e}.{name}.weight") for e in range(4)])
                for name in ("gate_proj", "up_proj", "down_proj")
            )
            tensors[f"{block}.gate_up_proj"] = torch.cat([gate, up], dim=1)
            tensors[f"{block}.down_proj"] = down
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def variants(tmp_path_factory):
    """Reference and candidate, each in both forms."""
    folder = tmp_path_factory.mktemp("experts")
    source = tiny_moe(folder / "source")
    return {
        (what, is_joined): variant(
            folder / f"{what}{is_joined}", source, is_joined=is_joined, noise=noise
        )
        for what, noise in (("reference", 0.0), ("candidate", 0.01))
        for is_joined in (False, True)
    }


@pytest.mark.parametrize("reference_joined", [False, True])
@pytest.mark.parametrize("candidate_joined", [False, True])
def test_either_form_is_no_change(variants, tmp_path, reference_joined, candidate_joined):
    file = tmp_path / "b.json"
    made = api_baseline.write_baseline(
        variants["reference", reference_joined],
        variants["candidate", candidate_joined],
        file,
        sketch=True,
    )
    assert made.layers[BROKEN].weight > 0.01
    for is_joined in (False, True):
        for reference in (None, variants["reference", False], variants["reference", True]):
            candidate = variants["candidate", is_joined]
            report = api_baseline.check_baseline(candidate, file, reference=reference)
            assert report.passed, report
            assert report.unchanged == len(made.layers)
            assert not report.layers
        broken = variant(
            tmp_path / f"broken{is_joined}",
            variants["candidate", False],
            is_joined=is_joined,
            broken=True,
        )
        for reference in (None, variants["reference", reference_joined]):
            report = api_baseline.check_baseline(broken, file, reference=reference)
            assert [verdict.name for verdict in report.layers if verdict.failure] == [BROKEN]
            assert (report.added, report.removed) == ((), ())


def test_outputs_of_experts_in_one_tensor_are_kept(variants, tmp_path):
    ids = [[(7 * i + j * j) % 96 for i in range(24)] for j in range(8)]
    kept = [
        api_baseline.write_baseline(
            variants["reference", is_joined],
            variants["candidate", is_joined],
            tmp_path / f"{is_joined}.json",
            sequences=ids,
            device="cpu",
        ).layers
        for is_joined in (False, True)
    ]
    measured = {name for name, layer in kept[0].items() if layer.output is not None}
    assert any(".experts." in name for name in measured)
    assert measured == {name for name, layer in kept[1].items() if layer.output is not None}
    for name in measured:
        assert kept[1][name].output == pytest.approx(kept[0][name].output, rel=1e-4)


def test_experts_that_a_baseline_has_in_one_tensor_stay_so(variants, tmp_path, monkeypatch):
    """As they were written before."""
    from quantload.accuracy import baseline_check

    file = tmp_path / "b.json"
    pair = variants["reference", True], variants["candidate", True]
    with monkeypatch.context() as patch:
        patch.setattr(baseline_check, "_in_form_of", lambda source, known: source)
        api_baseline.write_baseline(*pair, file)
    assert "model.layers.0.mlp.experts.down_proj" in read_baseline(file).layers
    for reference in (None, pair[0]):
        assert api_baseline.check_baseline(pair[1], file, reference=reference).passed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["micro-qwen3-moe-FP8", "micro-qwen3-moe-MXFP4"])
def test_codes_of_experts_in_one_tensor(tmp_path, name):
    candidate = CHECKPOINTS / "amd-quark-0.13" / name
    if not candidate.is_dir():
        pytest.skip(f"needs {candidate}")
    file = tmp_path / "b.json"
    api_baseline.write_baseline(CHECKPOINTS / "base" / "micro-qwen3-moe", candidate, file)
    report = api_baseline.check_baseline(candidate, file)
    assert report.passed, report
