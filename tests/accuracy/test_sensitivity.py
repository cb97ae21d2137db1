"""Scores by gradients, against gradients that transformers and autograd give by themselves."""

from __future__ import annotations

import os
from functools import partial

import pytest
import tiny_checkpoints as tiny
import torch
from tiny_architectures import architectures, tiny_model
from tiny_moe import tiny_moe
from transformers import AutoModelForCausalLM

from quantload import api
from quantload.accuracy import scoring_memory
from quantload.accuracy.scoring_memory import scoring_bytes
from quantload.accuracy.sensitivity import gradient_scores, slopes
from quantload.accuracy.streaming import open_streamed
from quantload.errors import ConfigError
from quantload.loader.experts import apart_as_in
from quantload.loader.quantized_view import quantized_view
from quantload.progress import Silent

CPU = torch.device("cpu")
SEQUENCES = [[1, 5, 9, 2, 33, 8], [7, 7, 3, 20]]
TOKENS = sum(map(len, SEQUENCES))
SCHEMES = ("W4A16:g32", "W8A8")


def opened(source, **kwargs):
    return partial(open_streamed, source, device=CPU, dtype=torch.float32, **kwargs)


def scores_of(folder, scheme, sequences=SEQUENCES, **kwargs):
    source = api.inspect(folder)
    plan = api.plan(source, scheme)
    view = quantized_view(plan)
    modules = [row.module for row in plan.rows if row.scheme is not None]
    candidates = {scheme: opened(view, round_inputs=True)}
    found = gradient_scores(opened(source), candidates, modules, sequences, Silent(), **kwargs)
    return found, apart_as_in(source, view), view, modules


def with_addends(model, paths, seen, addends):
    """Add a dummy to each layer's output: its gradient is that of the output."""

    def hook(_, args, output, *, path):
        seen[path] = args[0].detach()[0].clone()  # models may add to it later
        addends[path] = torch.zeros_like(output, requires_grad=True)
        return output + addends[path]

    return [model.get_submodule(p).register_forward_hook(partial(hook, path=p)) for p in paths]


def rounded_int8(x):
    scale = x.abs().amax(-1, keepdim=True) / 127.5  # the grid's 255 steps, both ends used
    return torch.round(x / scale).clamp(-128, 127) * scale


@pytest.mark.parametrize("scheme", SCHEMES)
def test_scores_of_linear_layers(tmp_path, scheme):
    folder = tiny.llama(tmp_path / "source", dtype=torch.float32)
    found, source, view, modules = scores_of(folder, scheme)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = dict.fromkeys(modules, 0.0)
    for ids in SEQUENCES:
        seen, addends = {}, {}
        handles = with_addends(model, modules, seen, addends)
        logits = model(input_ids=torch.tensor([ids])).logits[0]
        labels = torch.tensor(ids[1:])
        torch.nn.functional.cross_entropy(logits[:-1], labels, reduction="sum").backward()
        for handle in handles:
            handle.remove()
        for m in modules:
            weight = source.read_dense(m, torch.float32)
            x = seen[m] if scheme == "W4A16:g32" else rounded_int8(seen[m])
            change = x @ view.read_dense(m, torch.float32).t() - seen[m] @ weight.t()
            expected[m] += float((addends[m].grad[0] * change).double().square().sum())
    for m in modules:
        assert found.scores[m][scheme] == pytest.approx(expected[m] / (2 * TOKENS), rel=1e-3)
        assert found.tokens[m] == TOKENS
    assert not found.unseen
    assert not found.hidden


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", ["phi3", "falcon"])
def test_scores_of_rows_that_are_fused_on_disk(tmp_path, model_type):
    """Falcon adds attention in place to what its last layer returned: not part of the change."""
    model = tiny_model(model_type, architectures()[model_type]).float()
    model.save_pretrained(tmp_path / "source")
    found, source, view, modules = scores_of(tmp_path / "source", "W4A16:g32")
    model.requires_grad_(False)
    expected = dict.fromkeys(modules, 0.0)
    for ids in SEQUENCES:
        seen, addends = {}, {}
        handles = with_addends(model, modules, seen, addends)
        logits = model(input_ids=torch.tensor([ids])).logits[0]
        labels = torch.tensor(ids[1:])
        torch.nn.functional.cross_entropy(logits[:-1], labels, reduction="sum").backward()
        for handle in handles:
            handle.remove()
        for m in modules:
            change = view.read_dense(m, torch.float32) - source.read_dense(m, torch.float32)
            products = addends[m].grad[0] * (seen[m] @ change.t())
            expected[m] += float(products.double().square().sum())
    assert any("qkv" in m or "query_key_value" in m for m in modules)
    for m in modules:
        assert found.scores[m]["W4A16:g32"] == pytest.approx(expected[m] / (2 * TOKENS), rel=1e-3)


def mean_kl(reference, logits_of):
    total = 0.0
    for ids in SEQUENCES:
        p = torch.log_softmax(reference(torch.tensor([ids])).logits[0].double(), -1)
        q = torch.log_softmax(logits_of(torch.tensor([ids])).logits[0].double(), -1)
        total += float((p.exp() * (p - q)).sum())
    return total / TOKENS


def test_slopes_are_derivatives_of_the_kl(tmp_path):
    """Oracle: central differences along the change of one weight."""
    folder = tiny.llama(tmp_path / "source", dtype=torch.float32)
    source = api.inspect(folder)
    low, high = (quantized_view(api.plan(source, scheme)) for scheme in ("W4A16:g32", "W8A16:g32"))
    modules = [m for m in low.weights if low.weights[m].is_quantized]
    candidates = {"low": opened(low), "high": opened(high)}
    found = slopes(opened(low), opened(source), candidates, modules, SEQUENCES, Silent())
    load = partial(AutoModelForCausalLM.from_pretrained, folder, dtype=torch.float64)
    reference, mix = load(), load()
    with torch.no_grad():
        for m in modules:
            mix.get_submodule(m).weight.copy_(low.read_dense(m, torch.float64))
        for m in modules:
            assert abs(found.scores[m]["low"]) < 1e-9
            weight = mix.get_submodule(m).weight
            before = weight.clone()
            change = high.read_dense(m, torch.float64) - before
            kls = []
            for step in (1e-3, -1e-3):
                weight.copy_(before + step * change)
                kls.append(mean_kl(reference, mix))
            weight.copy_(before)
            expected = (kls[0] - kls[1]) / 2e-3
            assert found.scores[m]["high"] == pytest.approx(expected, rel=2e-2, abs=2e-7)


def expert_oracle(folder, source, view, modules, sequences):
    """Per expert, by a model whose experts are called one by one."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = dict.fromkeys(modules, 0.0)
    tokens = dict.fromkeys(modules, 0)
    calls = []

    def forward(x, index, weights, *, path, experts):
        result = torch.zeros_like(x)
        for expert in range(index.max() + 1):
            rows, choice = torch.where(index == expert)
            if not len(rows):
                continue
            outputs = {}
            given = {"gate_proj": x[rows], "up_proj": x[rows]}
            for name in ("gate_proj", "up_proj"):
                weight = source.read_dense(f"{path}.{expert}.{name}", torch.float32)
                outputs[name] = given[name] @ weight.t()
            given["down_proj"] = torch.nn.functional.silu(outputs["gate_proj"]) * outputs["up_proj"]
            weight = source.read_dense(f"{path}.{expert}.down_proj", torch.float32)
            outputs["down_proj"] = given["down_proj"] @ weight.t()
            for name, output in outputs.items():
                output.retain_grad()
                calls.append((f"{path}.{expert}.{name}", given[name].detach(), output))
            scaled = outputs["down_proj"] * weights[rows, choice, None]
            result = result.index_add(0, rows, scaled)
        return result

    for path, module in model.named_modules():
        if path.endswith(".experts"):
            module.forward = partial(forward, path=path, experts=module)
    model.requires_grad_(False)
    embedding = model.get_input_embeddings()
    embedding.register_forward_hook(lambda _, __, out: out.detach().requires_grad_())
    for ids in sequences:
        calls.clear()
        logits = model(input_ids=torch.tensor([ids])).logits[0]
        labels = torch.tensor(ids[1:])
        torch.nn.functional.cross_entropy(logits[:-1], labels, reduction="sum").backward()
        for name, x, output in calls:
            change = (
                x
                @ (
                    view.read_dense(name, torch.float32) - source.read_dense(name, torch.float32)
                ).t()
            )
            expected[name] += float((output.grad * change).double().square().sum())
            tokens[name] += len(x)
    return expected, tokens


def test_scores_of_experts_from_the_tokens_routed_to_them(tmp_path):
    folder = tiny_moe(tmp_path / "source")
    sequences = [[1, 5], [9, 7]]
    found, source, view, modules = scores_of(folder, "W4A16:g32", sequences)
    experts = [m for m in modules if ".experts." in m]
    assert len(experts) == 2 * 4 * 3
    expected, tokens = expert_oracle(folder, source, view, modules, sequences)
    total = sum(map(len, sequences))
    assert set(found.unseen) == {m for m in experts if not tokens[m]}
    for m in experts:
        assert found.tokens[m] == tokens[m]
        if tokens[m]:
            value = expected[m] / (2 * total)
            assert found.scores[m]["W4A16:g32"] == pytest.approx(value, rel=1e-3)
        else:
            assert m not in found.scores


def test_labels_that_the_model_draws(tmp_path):
    folder = tiny.llama(tmp_path / "source", dtype=torch.float32)
    one = scores_of(folder, "W4A16:g32", labels="sampled")[0]
    again = scores_of(folder, "W4A16:g32", labels="sampled")[0]
    other = scores_of(folder, "W4A16:g32", labels="sampled", seed=1)[0]
    assert one.scores == again.scores
    assert one.scores != other.scores


def test_too_few_tokens(tmp_path):
    folder = tiny.llama(tmp_path / "source", dtype=torch.float32)
    with pytest.raises(ConfigError, match="no sequence has two tokens"):
        scores_of(folder, "W4A16:g32", [[3], []])


def test_what_cannot_fit_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    folder = tiny.llama(tmp_path / "source", dtype=torch.float32)
    source = api.inspect(folder)
    needed = scoring_bytes(opened(source)(), candidates=2, num_tokens=10, batch_tokens=6)
    weights = (
        4
        * 3
        * sum(
            source.weights[m].shape[0] * source.weights[m].shape[1]
            for m in source.weights
            if ".layers.0." in m
        )
    )
    assert weights < needed[0] < 2 * weights + 6 * 4 * 6 * 256 + 4 * 6 * 64 * 64
    assert needed[1] == 4 * 10 * 64 * 3  # what enters both blocks, and a gradient
    monkeypatch.setattr(scoring_memory, "available_bytes", lambda: sum(needed) - 1)
    monkeypatch.setattr("quantload.accuracy.sensitivity.run_forward", None)
    with pytest.raises(ConfigError, match=r"scoring takes about .* GiB of this machine are free"):
        scores_of(folder, "W4A16:g32")


def test_memory_that_is_free_is_what_the_system_says():
    free = scoring_memory.available_bytes()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert free is None or 0 < free <= total
