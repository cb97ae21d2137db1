"""Two checkpoints run side by side, against plain transformers."""

from __future__ import annotations

import json
import math

import pytest
import tiny_checkpoints as tiny
import torch
from safetensors.torch import load_file
from tiny_moe import tiny_moe
from transformers import AutoModelForCausalLM

from quantload import api
from quantload.accuracy import experts_in_file, streaming, streaming_load
from quantload.accuracy.compare_outputs import compare_running
from quantload.accuracy.end_metrics import EndMetrics, EndSums
from quantload.accuracy.output_errors import OutputErrors
from quantload.errors import NotComparable
from quantload.progress import Silent
from quantload.quant.metrics import error_sums

CPU = torch.device("cpu")
SEQUENCES = [[1, 5, 9, 2, 33], [7, 7, 3]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("outputs")
    source = tiny.llama(folder / "source", layers=3)
    return source, api.convert(source, folder / "out", "W4A16:g32").folder


def dense(folder, name):
    """Plain transformers with the dequantized weights."""
    api.convert(folder, folder.parent / name, "dense", options=api.PlanOptions(dtype=torch.float32))
    model = AutoModelForCausalLM.from_pretrained(folder.parent / name, dtype=torch.float32)
    return model.eval()


def running(one, other, sequences=SEQUENCES):
    return compare_running(
        api.inspect(one),
        api.inspect(other),
        sequences,
        Silent(),
        device=CPU,
        dtype=torch.float32,
    )


def states(model, ids, given=None):
    """Hidden states after each layer, of plain transformers."""
    with torch.no_grad():
        found = model(input_ids=torch.tensor([ids]), output_hidden_states=True)
    return found.hidden_states, found.logits[0]


def test_blocks_and_the_end_are_those_of_transformers(folders):
    source, output = folders
    found = running(source, output)
    one, other = dense(source, "one"), dense(output, "other")
    expected = [OutputErrors() for _ in range(2)]
    end = EndSums()
    for ids in SEQUENCES:
        (of_one, logits), (of_other, other_logits) = states(one, ids), states(other, ids)
        for number in range(2):  # the state after the last layer is normed by transformers
            expected[number].add(of_other[number + 1][0], of_one[number + 1][0])
        end.add(logits, other_logits, ids)
    for number, errors in enumerate(expected):
        path = f"model.layers.{number}"
        got = found.propagated[path]
        assert got.sums.relative == pytest.approx(errors.sums.relative, rel=1e-3)
        assert got.median == pytest.approx(errors.median, rel=1e-3)
        assert got.num_tokens == 8
    metrics = end.metrics()
    assert found.end.kl_mean == pytest.approx(metrics.kl_mean, rel=1e-3)
    assert found.end.top1 == metrics.top1
    assert found.end.loss_mean_change == pytest.approx(metrics.loss_mean_change, abs=1e-5)


def test_what_a_block_adds_is_measured_on_the_states_of_the_reference(folders, tmp_path):
    """Only layer 1 differs: layer 0 adds nothing, layer 1 adds all that has gathered."""
    source, _ = folders
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] *= 1.5
    other = tiny.write(tmp_path / "other", tiny.config(layers=3), tensors)
    found = running(source, other)
    assert found.injected["model.layers.0"].sums.noise == 0.0
    assert found.injected["model.layers.1"].sums.relative > 0.01
    assert found.propagated["model.layers.1"].sums == found.injected["model.layers.1"].sums
    assert list(found.propagated) == [f"model.layers.{number}" for number in range(3)]
    assert (
        found.injected["model.layers.2"].sums.noise < found.propagated["model.layers.2"].sums.noise
    )
    changed = {name for name, errors in found.isolated.items() if errors.sums.noise}
    assert changed == {"model.layers.1.mlp.up_proj"}
    assert found.why_whole == ""


def test_equal_checkpoints(folders):
    source, _ = folders
    found = running(source, source)
    assert all(errors.sums.noise == 0.0 for errors in found.isolated.values())
    assert found.end.kl_mean == 0.0
    assert found.end.top1 == 1.0
    assert found.end.loss_mean_change == 0.0


def test_experts_are_compared_one_by_one_and_unseen_ones_are_named(tmp_path):
    source = tiny_moe(tmp_path / "source")
    output = api.convert(source, tmp_path / "out", "W4A16:g32").folder
    found = running(source, output, [[1, 5]])
    experts = [name for name in found.isolated if ".experts." in name]
    assert experts
    assert all(found.isolated[name].sums.relative > 0.01 for name in experts)
    assert found.unseen
    assert set(found.few) | set(found.unseen) >= set(experts)
    assert not set(found.unseen) & set(experts)
    assert all(name.count(".experts.") == 1 for name in found.unseen)


def test_experts_in_full_precision_are_compared_one_by_one(tmp_path):
    source = tiny_moe(tmp_path / "source")
    found = running(source, source, [[1, 5]])
    assert found.uncompared == ()
    experts = {name: errors for name, errors in found.isolated.items() if ".experts." in name}
    assert experts
    assert all(errors.sums.noise == 0.0 for errors in experts.values())


def test_gate_and_up_of_an_expert_have_errors_of_their_own(tmp_path):
    """They are one product; a broken up_proj leaves what gate_proj makes as it was."""
    source = tiny_moe(tmp_path / "source")
    output = api.convert(source, tmp_path / "out", "W4A16:g32", verify_output=False).folder
    tensors = load_file(output / "model.safetensors")
    clean = running(source, output, [[1, 5, 9, 2, 33, 7, 3]]).isolated
    expert = next(n for n in clean if "layers.1." in n and n.endswith("up_proj")).rpartition(".")[0]
    up, gate = f"{expert}.up_proj", f"{expert}.gate_proj"
    tensors[f"{up}.weight_scale"] *= 3
    (tmp_path / "broken").mkdir()
    content = json.loads((output / "config.json").read_text())
    broken = tiny.write(tmp_path / "broken", content, tensors)
    found = running(source, broken, [[1, 5, 9, 2, 33, 7, 3]]).isolated
    assert found[gate].sums == clean[gate].sums
    assert found[gate].sums != found[up].sums
    assert found[up].sums.relative == pytest.approx(2.0, rel=0.1)
    assert set(found) == set(clean)
    shapes = {name: found[name].sums.count / found[name].num_tokens for name in (gate, up)}
    assert shapes == dict.fromkeys((gate, up), content["moe_intermediate_size"])


def test_experts_that_cannot_be_watched_are_named(tmp_path, monkeypatch):
    source = tiny_moe(tmp_path / "source")
    monkeypatch.setattr(streaming, "fused_experts", lambda *_, **__: "its forward is its own")
    found = running(source, source, [[1, 5]])
    assert found.uncompared == ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
    assert not any(".experts." in name for name in found.isolated)


def test_values_that_are_not_finite(folders, tmp_path):
    source, _ = folders
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"].fill_(3e38)
    folder = tmp_path / "broken"
    tiny.write(folder, tiny.config(layers=3), tensors)
    with pytest.raises(NotComparable, match="not finite"):
        running(source, folder)


def test_other_depths_are_not_comparable(folders, tmp_path):
    with pytest.raises(NotComparable, match="has `3` blocks, the candidate `2`"):
        running(folders[0], tiny.llama(tmp_path / "other", layers=2))


def test_loss_and_confidence_by_hand():
    logits = torch.zeros(2, 4)
    logits[0, 1] = math.log(3.0)  # 3/6 for token 1
    end = EndSums()
    end.add(logits, torch.zeros(2, 4), [0, 1])
    found = end.metrics()
    assert found.reference_loss == pytest.approx(math.log(2.0))
    assert found.loss_mean_change == pytest.approx(math.log(4.0) - math.log(2.0))
    assert found.confidence.tolist() == pytest.approx([0.5, 0.25])
    assert [(low, count) for low, count, *_ in found.by_confidence() if count] == [
        (0.25, 1),
        (0.5, 1),
    ]


def test_relative_error_of_each_token():
    errors = OutputErrors()
    reference = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0]])
    candidate = torch.tensor([[3.0, 4.5], [0.0, 0.0], [3.0, 0.0]])
    errors.add(candidate, reference)
    assert errors.of_tokens[0].tolist() == pytest.approx([0.1, 0.0, 2.0])
    assert errors.median == pytest.approx(0.1)
    assert errors.sums == error_sums(candidate, reference)
    assert isinstance(EndMetrics(kl=torch.zeros(1), same_top1=torch.ones(1).bool()).top1, float)


@pytest.mark.parametrize("scheme", ["W4A16:g32", "W8A8", "FP8_DYNAMIC"])
def test_large_experts_are_read_some_at_a_time(tmp_path, monkeypatch, scheme):
    source = tiny_moe(tmp_path / "source")
    output = api.convert(source, tmp_path / "out", scheme).folder
    expected = running(source, output)
    loaded = []
    monkeypatch.setattr(streaming_load, "BLOCK_BYTES", 0)
    monkeypatch.setattr(experts_in_file, "CHUNK_BYTES", 1)
    chosen = experts_in_file.choose_grouped
    monkeypatch.setattr(
        experts_in_file,
        "choose_grouped",
        lambda experts: loaded.append(len(experts)) or chosen(experts),
    )
    found = running(source, output)
    assert set(loaded) == {1}
    assert found.isolated.keys() == expected.isolated.keys()
    for name, errors in expected.isolated.items():
        assert found.isolated[name].sums.noise == pytest.approx(errors.sums.noise, rel=1e-4)
    assert found.isolated_inputs.keys() == expected.isolated_inputs.keys()
    assert found.end.kl_mean == pytest.approx(expected.end.kl_mean, rel=1e-4)
