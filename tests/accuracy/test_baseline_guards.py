"""What no digest of a weight shows, and a check still fails on or refuses."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import tiny_checkpoints as tiny
import torch
from safetensors.torch import load_file, save_file

from quantload import api, api_baseline
from quantload.accuracy.baseline import content_digest
from quantload.accuracy.baseline_file import read_baseline
from quantload.accuracy.baseline_sketch import Sketch, read_sketch
from quantload.errors import BaselineError, NotComparable, OutputError
from quantload.loader.plan_options import PlanOptions
from quantload.loader.stats import InputStatistics

UP = "model.layers.1.mlp.up_proj"
SEQUENCES = [[1, 5, 9, 2, 8, 3, 11], [4, 4, 7]]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A reference, FP8 with fixed input scales, its baselines without and with tokens."""
    folder = tmp_path_factory.mktemp("guards")
    source = tiny.llama(folder / "source")
    stated = PlanOptions(stats=InputStatistics(stated=4.0))
    output = api.convert(source, folder / "out", "FP8", verify_output=False, options=stated)
    files = folder / "weights.json", folder / "tokens.json"
    api_baseline.write_baseline(source, output.folder, files[0])
    api_baseline.write_baseline(source, output.folder, files[1], sequences=SEQUENCES, device="cpu")
    return source, output.folder, *files


def copied(folder, made_from, *, config=None, tensors=None):
    """A copy of a checkpoint with another config, and tensors changed in place."""
    shutil.copytree(made_from, folder)
    if config:
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(content | config))
    if tensors:
        held = load_file(folder / "model.safetensors")
        tensors(held)
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def check(candidate, file, **options):
    return api_baseline.check_baseline(candidate, file, device="cpu", **options)


# -- the config ------------------------------------------------------------------------------------


def test_a_changed_config_fails_and_is_run(made, tmp_path):
    source, output, weights, tokens = made
    other = copied(tmp_path / "eps", output, config={"rms_norm_eps": 0.1})
    report = check(other, weights)
    assert not report.passed
    assert report.layers == ()
    assert report.config == ("config: `rms_norm_eps` is `0.1`, expected `1e-05`",)
    report = check(other, tokens, reference=source)
    assert not report.passed
    assert any(gate.what == "blocks" and gate.failed for gate in report.gates)
    assert report.now.candidate_config["rms_norm_eps"] == 0.1
    assert check(output, tokens, reference=source).config == ()


def test_a_config_that_no_model_can_be_built_with_fails_too(made, tmp_path):
    source, output, _, tokens = made
    for number, config in enumerate(
        ({"num_hidden_layers": 1}, {"head_dim": 8}, {"vocab_size": 90}, {"hidden_act": "nothing"})
    ):
        other = copied(tmp_path / str(number), output, config=config)
        report = check(other, tokens, reference=source)
        assert not report.passed
        assert any(next(iter(config)) in line for line in report.config)


def test_config_of_other_bookkeeping_is_no_change(made, tmp_path):
    source, output, _, tokens = made
    config = {"transformers_version": "9", "use_cache": False, "attention_bias": False}
    assert check(copied(tmp_path / "same", output, config=config), tokens, reference=source).passed


# -- the reference ---------------------------------------------------------------------------------


def test_another_reference_is_never_a_pass(made, tmp_path):
    """Although nothing of the candidate has changed."""
    source, output, weights, tokens = made
    stranger = tiny.llama(tmp_path / "stranger", seed=5)
    for file in (weights, tokens):
        assert check(output, file, reference=source).passed
        with pytest.raises(NotComparable, match=r"has digest `.*`, in the baseline it has `"):
            check(output, file, reference=stranger)
    other = copied(tmp_path / "eps", source, config={"rms_norm_eps": 0.1})
    with pytest.raises(NotComparable, match="another than the baseline's: config: `rms_norm_eps`"):
        check(output, weights, reference=other)


def test_a_reference_in_another_dtype_is_the_same(made, tmp_path):
    source, output, weights, _ = made

    def widen(tensors):
        for name in tensors:
            tensors[name] = tensors[name].float()

    wide = copied(tmp_path / "wide", source, tensors=widen)
    assert check(output, weights, reference=wide).passed


# -- input scales ----------------------------------------------------------------------------------


def test_an_input_scale_that_changed_fails_where_nothing_is_run(made, tmp_path):
    source, output, weights, tokens = made

    def scale(factor):
        def change(tensors):
            tensors[f"{UP}.input_scale"] *= factor

        return change

    broken = copied(tmp_path / "broken", output, tensors=scale(1e-6))
    report = check(broken, weights, reference=source)
    (verdict,) = (layer for layer in report.layers if layer.failure)
    assert verdict.name == UP
    was, now = verdict.before.input, verdict.now.input
    assert float(now) == pytest.approx(1e-6 * float(was), rel=1e-3)
    assert f"its input scale changed from {was} to {now}" in verdict.failure
    assert "output error" in check(broken, tokens, reference=source).worst()[0].failure
    nudged = copied(tmp_path / "nudged", output, tensors=scale(1.01))
    assert not check(nudged, weights, reference=source).passed
    assert not check(nudged, tokens, reference=source, run=False).passed
    report = check(nudged, tokens, reference=source)  # what it costs is measured
    assert not any(layer.failure for layer in report.layers)


# -- layers that came or went ----------------------------------------------------------------------


def test_layers_that_came_or_went_fail_with_tokens_too(made, tmp_path):
    source, output, weights, tokens = made

    def drop(tensors):
        for name in [name for name in tensors if name.startswith(UP)]:
            del tensors[name]

    def add(tensors):
        tensors["model.layers.0.mlp.extra.weight"] = torch.ones(4, 4, dtype=torch.bfloat16)
        tensors["model.layers.0.numbers"] = torch.arange(4)

    gone = copied(tmp_path / "gone", output, tensors=drop)
    more = copied(tmp_path / "more", output, tensors=add)
    for file in (weights, tokens):
        for reference in (None, source):
            report = check(gone, file, reference=reference)
            assert (report.passed, report.removed) == (False, (UP,))
            report = check(more, file, reference=reference)
            assert not report.passed
            assert set(report.added) == {
                "model.layers.0.mlp.extra",
                "model.layers.0.numbers",
            }
    assert any(
        "layers came or went" in note for note in check(more, tokens, reference=source).notes
    )


def test_a_tensor_that_the_reference_lacks_may_not_change(made, tmp_path):
    source, output, *_ = made
    name = "model.layers.0.self_attn.k_scale"

    def add(value):
        def change(tensors):
            tensors[name] = torch.tensor([value])

        return change

    before = copied(tmp_path / "before", output, tensors=add(1.0))
    after = copied(tmp_path / "after", output, tensors=add(2.0))
    file = tmp_path / "baseline.json"
    api_baseline.write_baseline(source, before, file)
    assert check(before, file, reference=source).passed
    for reference in (None, source):
        report = check(after, file, reference=reference)
        assert "the reference has none to measure them by" in report.worst()[0].failure


# -- the file --------------------------------------------------------------------------------------


def edited(file, place, change, *, is_signed=False):
    content = json.loads(file.read_text())
    change(content)
    if is_signed:
        content["sha256"] = content_digest(content)
    place.write_text(json.dumps(content))
    return place


DAMAGE = {
    "is `Infinity`|holds `Infinity`": lambda c: c["layers"][UP].update(weight=float("inf")),
    "holds `NaN`": lambda c: c["layers"][UP].update(weight=float("nan")),
    "`weight` is `-1.0`": lambda c: c["layers"][UP].update(weight=-1.0),
    "`weight` is `1000": lambda c: c["layers"][UP].update(weight=10**400),
    "no layers": lambda c: c.update(layers={}),
    "`layers` is `\\[\\]`, expected an object": lambda c: c.update(layers=[]),
    "`tolerances` is `null`, expected an object": lambda c: c.update(tolerances=None),
    f"`{UP}` is `null`": lambda c: c["layers"].update({UP: None}),
    f"layer `{UP}`: there is no `candidate`": lambda c: c["layers"].update({UP: {}}),
    "`kl_mean` of `end`": lambda c: c["end"].update(kl_mean=[1]),
    "expected to be lists of token ids": lambda c: c["tokens"].update(ids=["12"]),
    "token ids are not those of sha256": lambda c: c["tokens"]["ids"][0].__setitem__(0, 7),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damage_is_named_even_where_the_file_is_signed(made, tmp_path, message):
    place = edited(made[-1], tmp_path / "bad.json", DAMAGE[message], is_signed=True)
    with pytest.raises(BaselineError, match=message):
        read_baseline(place)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.pop("blocks"),
        lambda c: c.update(end={}),
        lambda c: c["layers"][UP].update(weight=0),
        lambda c: c["layers"][UP].update(weight=10.0),
        lambda c: c["candidate_config"].update(rms_norm_eps=0.1),
        lambda c: c["layers"][UP].pop("output"),
    ],
)
def test_what_was_edited_is_refused_but_for_tolerances(made, tmp_path, change):
    with pytest.raises(BaselineError, match="does not have the sha256"):
        read_baseline(edited(made[-1], tmp_path / "bad.json", change))
    free = edited(
        made[-1], tmp_path / "ok.json", lambda c: c["tolerances"].update(layers={"*": {}})
    )
    assert read_baseline(free).layers.keys() == read_baseline(made[-1]).layers.keys()


def test_a_file_that_is_nested_too_deep(tmp_path):
    (tmp_path / "bad.json").write_text("[" * 100_000)
    with pytest.raises(BaselineError, match="nested too deep"):
        read_baseline(tmp_path / "bad.json")


def test_links_pipes_and_folders_are_written_as_what_they_are(tmp_path):
    target, link = tmp_path / "there" / "b.json", tmp_path / "link.json"
    target.parent.mkdir()
    link.symlink_to(target)
    for text in ("one", "two"):  # it leads to nothing at first
        api_baseline.write_text(link, text)
        assert link.is_symlink()
        assert target.read_text() == text
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    api_baseline.write_text(tmp_path / "pipe", "three")
    assert os.read(reader, 100) == b"three"
    os.close(reader)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for bad in (tmp_path, Path(), Path(".."), link / "x.json", loop):
        with pytest.raises(OutputError, match="cannot write"):
            api_baseline.write_text(bad, "four")
    assert {file.name for file in tmp_path.iterdir()} == {"there", "link.json", "pipe", "loop"}
    assert [file.name for file in target.parent.iterdir()] == ["b.json"]


def test_a_sketch_lies_beside_the_baseline_that_a_link_leads_to(made, tmp_path):
    source, output, *_ = made
    for name in ("there", "here"):
        (tmp_path / name).mkdir()
    real, link = tmp_path / "there" / "b.json", tmp_path / "here" / "link.json"
    link.symlink_to(real)

    def halve(tensors):
        tensors[f"{UP}.weight_scale"] /= 2

    other = copied(tmp_path / "other", output, tensors=halve)
    for _ in range(2):  # it replaces what it wrote
        kept = api_baseline.write_baseline(source, output, link, sketch=True, overwrite=True)
        for file in (link, real):
            report = check(other, file)
            assert [verdict.name for verdict in report.estimated] == [UP]
    assert [file.name for file in link.parent.iterdir()] == ["link.json"]
    here = link.with_name(kept.sketch.file)
    real.with_name(kept.sketch.file).rename(here)
    assert check(other, link).estimated  # as a build that links each file has it


def test_sketches_are_written_through_links_and_a_full_disk_is_no_half_work(tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    link = tmp_path / "x.safetensors"
    link.symlink_to(tmp_path / "there" / "x.safetensors")
    sketch = Sketch()
    sketch.add("layer", torch.ones(4, 4))
    digest = sketch.write(link)
    assert link.is_symlink()
    assert read_sketch(link, digest).parts["layer"].shape == (4, 4)

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError) as caught:
        sketch.write(link)
    assert str(caught.value).endswith("hint: make room and run the same command again")
