"""An output is held to what its manifest says of it: which layers, and how it was rounded."""

import json

import pytest
import tiny_checkpoints as tiny
import torch
from converting import opened
from safetensors.torch import load_file, save_file

import quantload
from quantload.errors import CheckpointError
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


def test_a_manifest_that_is_not_sound_is_an_error(folder, tmp_path):
    output = written(folder, tmp_path / "out")
    (output / MANIFEST).write_text("{")
    assert opened(output).is_quantized
    with pytest.raises(CheckpointError, match="is damaged"):
        quantload.verify(output, folder)


def test_a_manifest_without_its_options_is_an_error(folder, tmp_path):
    output = written(folder, tmp_path / "out")
    content = json.loads((output / MANIFEST).read_text())
    content["decision"] = content.pop("decisions")
    (output / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="holds no `decisions` with `options`"):
        quantload.verify(output, folder)
