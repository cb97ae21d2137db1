"""An output is held to what its manifest says of it: which layers, and how it was rounded."""

import json

import pytest
import tiny_checkpoints as tiny
import torch
from converting import opened
from safetensors.torch import load_file, save_file

import quantload
from quantload.errors import SourceNotFound, UnknownFormat, UnsupportedVariant
from quantload.loader.manifest import MANIFEST
from quantload.loader.plan import PlanOptions

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path):
    return tiny.llama(tmp_path / "source", layers=3)


def written(folder, output, **options):
    options = PlanOptions(**options)
    quantload.convert(folder, output, "W8A8", options=options, verify_output=False)
    return output


def test_layers_that_were_written_are_compared(folder, tmp_path):
    output = written(folder, tmp_path / "out", layers="1-2")
    report = quantload.verify(output, folder)
    assert report.failures() == []
    assert len([layer for layer in report.layers if layer.scheme == "W8A8"]) == 2 * 7
    assert report.notes[0] == f"`{MANIFEST}` says: only layers 1-2 of the source were written"
    wrong = json.loads((output / MANIFEST).read_text())
    wrong["decisions"]["options"]["layers"] = "0-1"
    (output / MANIFEST).write_text(json.dumps(wrong))
    assert not quantload.verify(output, folder).passed
    (output / MANIFEST).unlink()  # as if another tool had made it
    assert "tensors of the source are missing" in str(quantload.verify(output, folder).failures())


@pytest.mark.parametrize(("is_ours", "is_noticed"), [(True, True), (False, False)])
def test_what_was_rounded_to_nearest_is_held_to_it(folder, tmp_path, is_ours, is_noticed):
    output = written(folder, tmp_path / "out")
    made = load_file(output / WEIGHTS)
    codes = made["model.layers.0.mlp.up_proj.weight"]
    codes[0, :3] = torch.where(codes[0, :3] > 0, codes[0, :3] - 1, codes[0, :3] + 1)
    save_file(made, output / WEIGHTS, metadata={"format": "pt"})
    if not is_ours:
        (output / MANIFEST).unlink()
    report = quantload.verify(output, folder)
    assert [note for note in report.notes if "rounded to nearest" in note] == list(report.notes)
    assert bool(report.notes) is is_ours
    failed = [failure for failure in report.failures() if "are not rounded to nearest" in failure]
    assert bool(failed) is is_noticed


def test_a_searched_output_is_not_held_to_the_nearest(folder, tmp_path):
    output = written(folder, tmp_path / "out", observer="search")
    report = quantload.verify(output, folder)
    assert report.failures() == []
    assert report.notes == ()


@pytest.mark.parametrize("content", ["{", "[]", "", '{"quantload_manifest": 1}'])
def test_a_manifest_that_is_not_sound_fails(folder, tmp_path, content):
    output = written(folder, tmp_path / "out")
    (output / MANIFEST).write_text(content)
    assert opened(output).is_quantized
    report = quantload.verify(output, folder)
    assert len(report.layers) == len(opened(output).weights)
    assert len(report.failures()) == 1
    assert MANIFEST in report.failures()[0]


def test_a_manifest_without_its_options_fails(folder, tmp_path):
    output = written(folder, tmp_path / "out")
    content = json.loads((output / MANIFEST).read_text())
    content["decision"] = content.pop("decisions")
    (output / MANIFEST).write_text(json.dumps(content))
    (failure,) = quantload.verify(output, folder).failures()
    assert "holds no `decisions` with `options`" in failure


def changed(output, **fields):
    content = json.loads((output / "config.json").read_text())
    content["quantization_config"].update(fields)
    (output / "config.json").write_text(json.dumps(content))


DAMAGE = {
    "no weights": lambda out: (out / WEIGHTS).unlink(),
    "other name": lambda out: (out / WEIGHTS).rename(out / "consolidated.safetensors"),
    "method": lambda out: changed(out, quant_method="unheard-of"),
    "sparsity": lambda out: changed(out, sparsity_config={"format": "sparse-24-bitmask"}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_was_written_fails_where_it_cannot_be_read(folder, tmp_path, damage):
    """Of what another tool wrote nobody knows whether it is damaged, or in an unread format."""
    output = written(folder, tmp_path / "out")
    DAMAGE[damage](output)
    report = quantload.verify(output, folder)
    assert not report.passed
    assert report.layers == ()
    (output / MANIFEST).unlink()
    with pytest.raises((SourceNotFound, UnknownFormat, UnsupportedVariant)):
        quantload.verify(output, folder)
