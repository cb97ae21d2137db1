"""Baseline files: what is kept, what is refused, what passes and what fails."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import tiny_checkpoints as tiny
import torch
from safetensors.torch import load_file, save_file

from quantload import api, api_baseline
from quantload.accuracy.baseline import LayerBaseline, baseline_text
from quantload.accuracy.baseline_file import read_baseline
from quantload.accuracy.baseline_model_gates import about_blocks, about_end
from quantload.accuracy.baseline_tolerances import Tolerances
from quantload.accuracy.baseline_verdict import change_db, judge
from quantload.accuracy.value_digest import value_digest
from quantload.errors import BaselineError, NotComparable, OutputError

UP = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("baseline")
    source = tiny.llama(folder / "source", hidden=64, intermediate=128)
    output = api.convert(source, folder / "out", "W4A16:g32").folder
    file = folder / "baseline.json"
    api_baseline.write_baseline(source, output, file)
    return source, output, file


def changed(folder, made_from, change):
    """A copy of a checkpoint with its tensors changed in place."""
    folder.mkdir()
    (folder / "config.json").write_bytes((made_from / "config.json").read_bytes())
    tensors = load_file(made_from / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def double_scale(tensors):
    tensors[f"{UP}.weight_scale"] *= 2


def test_numbers_are_those_of_compare(made):
    source, output, file = made
    rows = {row.module: row for row in api.compare(source, output).layers}
    kept = read_baseline(file).layers
    assert kept[UP].weight == pytest.approx(rows[UP].weight.relative, rel=1e-5)
    assert kept[UP].steps == pytest.approx(rows[UP].rounding.max_steps, rel=1e-5)
    assert kept[UP].encoding == "W4A16:g32"
    assert kept["model.norm.weight"].weight == 0.0
    assert kept["model.norm.weight"].steps is None


def test_text_is_sorted_and_comes_back(made):
    *_, file = made
    text = file.read_text()
    found = read_baseline(file)
    assert baseline_text(found) == text
    names = [line.split('"')[1] for line in text.splitlines() if line.startswith('  "')]
    assert names == sorted(found.layers)
    assert json.loads(text)["quantload_baseline"] == 2


def test_an_unchanged_candidate_passes_without_its_reference(made):
    _, output, file = made
    report = api_baseline.check_baseline(output, file)
    assert report.passed
    assert report.layers == ()
    assert report.unchanged == len(read_baseline(file).layers)


def test_a_layer_with_another_scale_is_named(made, tmp_path):
    source, output, file = made
    broken = changed(tmp_path / "broken", output, double_scale)
    with pytest.raises(NotComparable, match=f"`{UP}` has changed"):
        api_baseline.check_baseline(broken, file)
    report = api_baseline.check_baseline(broken, file, reference=source)
    assert not report.passed
    assert [verdict.name for verdict in report.layers if verdict.failure] == [UP]
    assert "weight error" in report.worst()[0].failure
    assert report.now.layers[UP].weight > 0.5


def test_a_norm_that_changed_fails(made, tmp_path):
    source, output, file = made

    def nudge(tensors):
        tensors["model.norm.weight"][3] += 0.25

    report = api_baseline.check_baseline(
        changed(tmp_path / "broken", output, nudge), file, reference=source
    )
    assert [verdict.name for verdict in report.layers if verdict.failure] == ["model.norm.weight"]


def test_another_scheme_or_reference_is_not_comparable(made, tmp_path):
    source, output, file = made
    other = api.convert(source, tmp_path / "w8", "W8A16").folder
    with pytest.raises(NotComparable, match="in the baseline it is"):
        api_baseline.check_baseline(other, file, reference=source)
    broken = changed(tmp_path / "broken", output, double_scale)
    stranger = tiny.llama(tmp_path / "stranger", seed=5, hidden=64, intermediate=128)
    with pytest.raises(NotComparable, match="has digest"):
        api_baseline.check_baseline(broken, file, reference=stranger)


def test_another_scheme_of_equal_weights_is_not_comparable(made, tmp_path):
    """Digests are of weights: that inputs are not rounded any more does not show in them."""
    source, *_ = made
    output = api.convert(source, tmp_path / "w8a8", "W8A8").folder
    file = tmp_path / "baseline.json"
    api_baseline.write_baseline(source, output, file)
    other = changed(tmp_path / "w8a16", output, lambda tensors: None)
    content = json.loads((other / "config.json").read_text())
    (group,) = content["quantization_config"]["config_groups"].values()
    group["input_activations"] = None
    (other / "config.json").write_text(json.dumps(content))
    with pytest.raises(NotComparable, match="is `W8A16:channel`, in the baseline it is `W8A8`"):
        api_baseline.check_baseline(other, file)


def test_a_block_that_drifts_further_fails(made):
    *_, file = made
    baseline = replace(read_baseline(file), blocks={"a.0": 0.1, "a.1": 0.1, "a.2": 0.1})
    same = {"a.0": 0.1, "a.1": 0.105, "a.2": 0.09}
    (gate,) = about_blocks(baseline, same, dtype="float32")
    assert not gate.failed
    (gate,) = about_blocks(baseline, same | {"a.1": 0.11, "a.2": 0.12}, dtype="float32")
    assert gate.failed
    assert "after `a.1`" in gate.text
    assert "after 1 later block" in gate.text
    assert gate.change == pytest.approx(0.828, abs=1e-3)
    none = replace(baseline, blocks={"a.0": 0.0})
    (gate,) = about_blocks(none, {"a.0": 0.0}, dtype="float32")
    assert gate.change == 0.0
    assert "(+0.00 dB" in gate.text


def test_only_some_layers_are_looked_at_and_the_others_kept(made, tmp_path):
    source, output, file = made
    broken = changed(tmp_path / "broken", output, double_scale)
    report = api_baseline.check_baseline(broken, file, reference=source, only="*.layers.0.*")
    assert report.passed
    assert report.now.layers.keys() == read_baseline(file).layers.keys()
    with pytest.raises(BaselineError, match="matches no layer"):
        api_baseline.check_baseline(output, file, only="nothing")


def test_layers_that_came_or_went_fail(made):
    _, _, file = made
    baseline = read_baseline(file)
    now = dict(baseline.layers)
    now["new"] = now.pop(UP)
    report = judge(baseline, now)
    assert (report.added, report.removed) == (("new",), (UP,))
    assert not report.passed


def test_a_better_layer_passes_and_is_told(made):
    *_, file = made
    baseline = read_baseline(file)
    layer = baseline.layers[UP]
    now = baseline.layers | {UP: replace(layer, candidate="0" * 16, weight=layer.weight * 0.9)}
    report = judge(baseline, now)
    assert report.passed
    assert [verdict.name for verdict in report.better] == [UP]


def test_a_small_slip_of_all_layers_fails_in_the_mean(made):
    *_, file = made
    baseline = read_baseline(file)
    worse = {
        n: replace(x, candidate="0" * 16, weight=x.weight * 1.001)
        for n, x in baseline.layers.items()
    }
    report = judge(baseline, worse)  # 0.0087 dB each: below 0.02, above 0.005
    assert not any(verdict.failure for verdict in report.layers)
    assert len(report.failures) == 1
    assert not report.passed


def test_damage_to_one_block_fails(made):
    *_, file = made
    baseline = read_baseline(file)
    layer = baseline.layers[UP]
    now = baseline.layers | {UP: replace(layer, candidate="0" * 16, block=120.0)}
    assert "worst block" in judge(baseline, now).worst()[0].failure


def test_changes_in_db():
    assert change_db(0.1, 0.2) == pytest.approx(6.0206, abs=1e-4)
    assert change_db(0.0, 0.0) == 0.0
    assert change_db(0.0, 0.1) > 100
    assert change_db(0.1, 0.0) < -100


def test_the_end_is_held_to_a_part_and_to_its_standard_errors(made):
    *_, file = made
    baseline = replace(read_baseline(file), end={"kl_mean": (0.05, 0.001), "top1": (0.9, 0.01)})
    same = {"kl_mean": (0.054, 0.001), "top1": (0.87, 0.01)}
    assert [gate.failed for gate in about_end(baseline, same)] == [False, False]
    worse = {"kl_mean": (0.06, 0.001), "top1": (0.8, 0.01)}
    assert [gate.failed for gate in about_end(baseline, worse)] == [True, True]
    with pytest.raises(NotComparable):
        list(about_end(baseline, {}))


def test_files_that_cannot_be_used(made, tmp_path):
    source, output, file = made
    with pytest.raises(OutputError, match="is there already"):
        api_baseline.write_baseline(source, output, file)
    with pytest.raises(BaselineError, match="there is no baseline"):
        read_baseline(tmp_path / "none.json")
    text = file.read_text()
    bad = tmp_path / "bad.json"
    for wrong, message in (
        ("{", "cannot read"),
        ("[]", "version `null`"),
        (text.replace('"quantload_baseline": 2', '"quantload_baseline": 1'), "write it again"),
        (text.replace('"quantload_baseline": 2', '"quantload_baseline": "2"'), 'version `"2"`'),
        (text.replace("relative_l2/1", "mse/1"), "holds `mse/1`"),
        (text.replace('"tolerances"', '"tolerance"'), "no `tolerances`"),
        (text.replace('"weight": 0.0', '"weight": "x"', 1), "layer `lm_head`: `weight` is"),
        (text.replace(f'  "{UP}"', '  "other"'), "digests of the reference's layers"),
    ):
        bad.write_text(wrong)
        with pytest.raises(BaselineError, match=message):
            read_baseline(bad)


def test_a_baseline_with_tokens_holds_outputs_too(made, tmp_path):
    source, output, _ = made
    file = tmp_path / "tokens.json"
    sequences = [[1, 5, 9, 2, 8, 3, 11], [4, 4, 7]]
    api_baseline.write_baseline(source, output, file, sequences=sequences, device="cpu")
    kept = read_baseline(file)
    assert kept.tokens.ids == tuple(tuple(ids) for ids in sequences)
    compared = api.compare(source, output, sequences=sequences, device="cpu")
    rows = {row.module: row for row in compared.layers}
    assert kept.layers[UP].output == pytest.approx(rows[UP].output.relative, rel=1e-5)
    assert kept.layers[UP].output_median == pytest.approx(rows[UP].output_median, rel=1e-5)
    assert kept.layers[UP].tokens == 10
    assert kept.end["kl_mean"][0] == pytest.approx(compared.end.kl_mean, rel=1e-5)
    assert api_baseline.check_baseline(output, file).passed
    broken = changed(tmp_path / "broken", output, double_scale)
    report = api_baseline.check_baseline(broken, file, reference=source, device="cpu")
    assert "output error" in report.worst()[0].failure
    assert any(failure.startswith("kl_mean") for failure in report.failures)
    assert report.now.layers[UP].output > kept.layers[UP].output


def test_digests_are_of_values():
    weight = torch.arange(12.0).view(3, 4)
    assert value_digest(weight) == value_digest(weight.t().contiguous().t())
    assert value_digest(weight) != value_digest(weight.view(4, 3))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert value_digest(weight) == value_digest(weight.to(dtype))
    in_half = torch.tensor([1 + 2.0**-10, 3.0])  # no bfloat16
    assert value_digest(in_half) == value_digest(in_half.half())
    assert value_digest(in_half) != value_digest(in_half.bfloat16())
    assert value_digest(torch.tensor([0.0])) != value_digest(torch.tensor([-0.0]))
    assert value_digest(weight) != value_digest(weight.to(torch.int32))
    assert len(value_digest(weight)) == 16


def test_defaults_are_documented_numbers():
    assert Tolerances().weight_db == 0.02
    assert LayerBaseline(candidate="", reference="", encoding="", weight=0.0).tokens is None
