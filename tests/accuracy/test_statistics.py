"""Statistics of inputs, held against hooks on the plain model of transformers."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
import tiny_checkpoints as tiny
import torch
from moe_models import moe_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from shared_models import write_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

import quantload
from quantload import api, api_stats
from quantload.accuracy import statistics_file, streaming
from quantload.accuracy.input_sums import InputSums
from quantload.accuracy.statistics import collect_statistics
from quantload.errors import ConfigError, ModelError, OutputError
from quantload.loader.plan import PlanOptions
from quantload.loader.stats import read_stats

CPU = torch.device("cpu")
SEQUENCES = [[1, 5, 9, 2, 77], [7, 7, 3], [4, 8, 15, 16, 23], [42, 6, 90]]


# -- the oracle ------------------------------------------------------------------------------------


def oracle(model, sequences, dtype):
    """{module of the model: (tokens, E[x^2], min, max)}, one sequence at a time, plain hooks."""
    rows: dict[str, list[torch.Tensor]] = {}
    model = model.to(dtype)
    model.set_experts_implementation("eager")  # the grouped product of torch takes no float64
    handles = [
        module.register_forward_pre_hook(
            lambda _, x, path=path: rows.setdefault(path, []).append(x[0][0].double())
        )
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    ]
    handles += [
        module.register_forward_pre_hook(
            lambda m, x, path=path: route(m, path, *x, rows), with_kwargs=False
        )
        for path, module in model.named_modules()
        if "gate_up_proj" in module._parameters
    ]
    with torch.no_grad():
        for ids in sequences:
            model(torch.tensor([ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    return {path: summary(torch.cat(seen)) for path, seen in rows.items()}


def route(module, path, hidden, index, weights, rows):
    """What enters gate, up and down of every expert, by the definition of a mixture."""
    for expert in range(module.gate_up_proj.shape[0]):
        tokens = hidden[(index == expert).any(dim=-1)]
        gate, up = (tokens @ module.gate_up_proj[expert].T).chunk(2, dim=-1)
        if len(tokens):
            rows.setdefault(f"{path}.{expert}.up", []).append(tokens.double())
            inner = torch.nn.functional.silu(gate) * up
            rows.setdefault(f"{path}.{expert}.down", []).append(inner.double())


def summary(rows):
    return len(rows), rows.square().mean(0), rows.amin(0), rows.amax(0)


def collected(folder, dtype=torch.float32, sequences=SEQUENCES, **options):
    return collect_statistics(api.inspect(folder), sequences, device=CPU, dtype=dtype, **options)


def check(report, module, expected, *, within):
    count, squares, low, high = expected
    found = report.sums[module]
    assert found.count == count, module
    pairs = ((found.mean_square, squares), (found.low, low.float()), (found.high, high.float()))
    for got, right in pairs:
        error = (got.double() - right.double()).norm() / right.double().norm()
        assert error <= within, (module, float(error))
    assert found.absmax == pytest.approx(float(torch.maximum(high, -low).max()), rel=within)


LIMITS = [(torch.float64, 1e-7), (torch.float32, 1e-6)]  # float64: min and max are float32


@pytest.mark.parametrize(("dtype", "within"), LIMITS)
def test_llama(tmp_path, dtype, within):
    folder = tiny.llama(tmp_path / "m", dtype=torch.float32)
    expected = oracle(AutoModelForCausalLM.from_pretrained(folder), SEQUENCES, dtype)
    report = collected(folder, dtype)
    assert report.sums.keys() == expected.keys()
    assert len(expected) == 2 * 7 + 1
    assert report.warnings == ()
    assert report.uncovered == ("model.embed_tokens",)
    for module, numbers in expected.items():
        check(report, module, numbers, within=within)


@pytest.mark.parametrize(("dtype", "within"), LIMITS)
def test_gpt2_whose_weights_are_transposed(tmp_path, dtype, within):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gpt2", n_embd=32, n_head=2, n_layer=2, vocab_size=96, n_positions=16
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path / "m")
    expected = oracle(model, SEQUENCES, dtype)
    report = collected(tmp_path / "m", dtype)
    assert report.why_whole == ""
    names = {name.removeprefix("transformer."): name for name in expected}
    found = {name.removeprefix("transformer."): name for name in report.sums}
    assert found.keys() == names.keys() - {"lm_head"}  # the file has it as the embedding
    for short, name in found.items():
        check(report, name, expected[names[short]], within=within)


@pytest.mark.parametrize("is_joined", [True, False], ids=["3-D", "one by one"])
@pytest.mark.parametrize(("dtype", "within"), LIMITS)
def test_experts_of_mixtral(tmp_path, is_joined, dtype, within):
    model = moe_model("mixtral")
    folder = tmp_path / "m"
    model.save_pretrained(folder)
    if is_joined:
        tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    expected = oracle(model, SEQUENCES, dtype)
    report = collected(folder, dtype)
    block = "model.layers.{}.block_sparse_moe.experts.{}.{}"
    reached = 0
    for layer in range(2):
        for expert in range(4):
            for name, side in (("w1", "up"), ("w3", "up"), ("w2", "down")):
                module = block.format(layer, expert, name)
                numbers = expected.get(f"model.layers.{layer}.mlp.experts.{expert}.{side}")
                if numbers is None:
                    assert module in report.unseen
                    continue
                reached += 1
                check(report, module, numbers, within=within)
        q_proj = f"model.layers.{layer}.self_attn.q_proj"
        check(report, q_proj, expected[q_proj], within=within)
    assert reached > 12
    assert {f"model.layers.{n}.block_sparse_moe.gate" for n in (0, 1)} < set(report.uncovered)


@pytest.mark.parametrize(("dtype", "within"), LIMITS)
def test_experts_of_llama4_that_are_handed_all_tokens(tmp_path, dtype, within):
    """Tokens of other experts come as rows of zeros, which count for nothing."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 32, "intermediate_size_mlp": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = AutoConfig.for_model(
        "llama4_text", **sizes, **heads, num_hidden_layers=2, num_local_experts=4, vocab_size=128
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path / "m")
    model = model.to(dtype)
    rows: dict[str, list[torch.Tensor]] = {}

    def enter(block, inputs, path):
        hidden = inputs[0].reshape(-1, 64)
        logits = hidden @ block.router.weight.T
        for expert in range(4):
            chosen = logits.argmax(-1) == expert
            tokens = hidden[chosen] * logits[chosen, expert, None].float().sigmoid().to(dtype)
            gate, up = (tokens @ block.experts.gate_up_proj[expert]).chunk(2, dim=-1)
            inner = torch.nn.functional.silu(gate) * up
            for name, x in (("gate_proj", tokens), ("up_proj", tokens), ("down_proj", inner)):
                rows.setdefault(f"{path}.experts.{expert}.{name}", []).append(x.double())

    for path, module in model.named_modules():
        if hasattr(module, "experts"):
            module.register_forward_pre_hook(lambda m, x, path=path: enter(m, x, path))
    with torch.no_grad():
        for ids in SEQUENCES:
            model(torch.tensor([ids]), use_cache=False)
    report = collected(tmp_path / "m", dtype)
    assert report.why_whole == ""
    seen = {module: torch.cat(parts) for module, parts in rows.items()}
    assert set(report.unseen) == {module for module, x in seen.items() if not len(x)}
    for module, x in seen.items():
        if len(x):
            check(report, module, summary(x), within=within)


def test_a_quantized_source_is_run_with_its_weights_and_plain_inputs(tmp_path):
    source = tiny.llama(tmp_path / "source", dtype=torch.float32)
    folder = api.convert(source, tmp_path / "out", "W8A8").folder
    model = AutoModelForCausalLM.from_pretrained(source)
    opened = api.inspect(folder)
    for module, weight in opened.weights.items():
        if weight.is_quantized:
            model.get_submodule(module).weight.data = opened.read_dense(module, torch.float32)
    expected = oracle(model, SEQUENCES, torch.float32)
    report = collected(folder)
    for module, numbers in expected.items():
        check(report, module, numbers, within=2e-5)


# -- streaming -------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_batches_do_not_matter(tmp_path, model_type):
    folder = tmp_path / "m"
    if model_type == "llama":
        tiny.llama(folder, dtype=torch.float32)
    else:
        moe_model("mixtral").save_pretrained(folder)
    one = collected(folder, torch.float64, batch_tokens=1)
    many = collected(folder, torch.float64, batch_tokens=1000)
    turned = collected(folder, torch.float64, SEQUENCES[::-1])
    assert one.sums.keys() == many.sums.keys() == turned.sums.keys()
    for module, sums in one.sums.items():
        for other in (many.sums[module], turned.sums[module]):
            assert other.count == sums.count
            torch.testing.assert_close(other.squares, sums.squares, rtol=1e-12, atol=1e-300)
            torch.testing.assert_close(other.low, sums.low, rtol=1e-6, atol=0)


def test_halves_add_up(tmp_path):
    folder = tiny.llama(tmp_path / "m", dtype=torch.float32)
    halves = [collected(folder, torch.float64, part) for part in (SEQUENCES[:2], SEQUENCES[2:])]
    for module, sums in collected(folder, torch.float64).sums.items():
        both = halves[0].sums[module] + halves[1].sums[module]
        assert both.count == sums.count
        torch.testing.assert_close(both.mean_square, sums.mean_square, rtol=1e-12, atol=1e-300)
        torch.testing.assert_close(both.low, sums.low, rtol=1e-6, atol=0)
        torch.testing.assert_close(both.high, sums.high, rtol=1e-6, atol=0)


def test_one_layer_is_in_memory_at_a_time(tmp_path):
    folder = tiny.llama(tmp_path / "m", layers=4, dtype=torch.float32)
    streamed = streaming.open_streamed(api.inspect(folder), device=CPU, dtype=torch.float32)
    layers = streamed.model.get_submodule("model.layers")
    seen = []

    def watch(modules):
        loaded = [n for n, layer in enumerate(layers) if any(True for _ in layer.parameters())]
        linears = {path for path in modules if path.endswith("q_proj")}
        seen.append((loaded, linears))
        assert all(p.device.type == "cpu" for p in layers[loaded[0]].parameters())
        assert not any(True for _ in streamed.model.get_submodule("lm_head").parameters())
        return nullcontext()

    streamed.run(SEQUENCES, watch, quantload.progress.Silent())
    assert seen == [([n], {f"model.layers.{n}.self_attn.q_proj"}) for n in range(4)]


def test_a_model_that_cannot_be_cut_is_run_as_a_whole(tmp_path, monkeypatch):
    folder = tiny.llama(tmp_path / "m", dtype=torch.float32)
    apart = collected(folder, torch.float64)

    def refuse(model, stages):
        raise ModelError("`M` cannot be cut into stages: its layers run in a ring")

    monkeypatch.setattr(streaming, "find_cut", refuse)
    whole = collected(folder, torch.float64)
    assert whole.why_whole == "its layers run in a ring"
    assert whole.warnings == ("the model was in memory as a whole: its layers run in a ring",)
    assert whole.sums.keys() == apart.sums.keys()
    for module, sums in whole.sums.items():
        torch.testing.assert_close(sums.squares, apart.sums[module].squares, rtol=1e-12, atol=0)


def test_tied_embeddings(tmp_path):
    folder = tiny.llama(tmp_path / "m", tied=True, dtype=torch.float32)
    expected = oracle(AutoModelForCausalLM.from_pretrained(folder), SEQUENCES, torch.float64)
    report = collected(folder, torch.float64)
    assert report.sums.keys() == expected.keys() - {"lm_head"}
    last = "model.layers.1.mlp.down_proj"
    check(report, last, expected[last], within=1e-7)


def test_sums_of_long_inputs_are_those_of_their_parts():
    x = torch.randn(3000, 512)
    sums = InputSums.of(x.view(3, 1000, 512))
    torch.testing.assert_close(sums.squares, x.double().square().sum(0), rtol=1e-13, atol=0)
    assert sums.count == 3000
    assert torch.equal(sums.high, x.amax(0))


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([], "no tokens"),
        ([[]], "no tokens"),
        ([[1, 96]], "token id `96` in sequence 0, expected 0 to 96"),
        ([[1], [-1]], "token id `-1` in sequence 1"),
        ([[1] * 129], "sequence 0 has 129 tokens, expected at most 128"),
    ],
)
def test_sequences_of_another_model(tmp_path, sequences, message):
    folder = tiny.llama(tmp_path / "m")
    with pytest.raises(ConfigError, match=message):
        collected(folder, sequences=sequences)


def test_inputs_that_are_not_finite(tmp_path):
    content = tiny.config(dtype=torch.float32)
    tensors = tiny.tensors(content)
    tensors["model.layers.1.input_layernorm.weight"] *= 1e38
    folder = tiny.write(tmp_path / "m", content, tensors)
    with pytest.raises(ModelError, match=r"inputs of `model\.layers\.1\.\S+` are not finite"):
        collected(folder)


# -- the file --------------------------------------------------------------------------------------


def test_the_file(tmp_path):
    folder = tiny.llama(tmp_path / "m", dtype=torch.float32)
    file = tmp_path / "stats.safetensors"
    report = quantload.stats(folder, file, sequences=SEQUENCES, device="cpu")
    assert report.file == file
    tensors = load_file(file)
    for module, sums in collected(folder).sums.items():
        assert torch.equal(tensors.pop(f"{module}.input_mean_square"), sums.mean_square.float())
        assert tensors.pop(f"{module}.input_absmax").tolist() == [sums.absmax]
        assert torch.equal(tensors.pop(f"{module}.input_min"), sums.low)
        assert torch.equal(tensors.pop(f"{module}.input_max"), sums.high)
        tokens = tensors.pop(f"{module}.tokens")
        assert tokens.tolist() == [16]
        assert tokens.dtype == torch.int64
    assert tensors == {}
    with safe_open(file, "pt") as opened:
        told = opened.metadata()
    assert told["format"] == "quantload statistics"
    assert (told["version"], told["source"], told["num_tokens"]) == ("1", "m", "16")
    assert told["torch"] == torch.__version__
    again = quantload.stats(folder, tmp_path / "b", sequences=SEQUENCES[:3], device="cpu")
    assert again.metadata["source_sha256"] == told["source_sha256"]
    assert again.metadata["token_ids_sha256"] != told["token_ids_sha256"]
    other = tiny.llama(tmp_path / "other", hidden=32)
    theirs = quantload.stats(other, tmp_path / "c", sequences=SEQUENCES, device="cpu")
    assert theirs.metadata["source_sha256"] != told["source_sha256"]


def test_experts_without_tokens_are_named_and_not_written(tmp_path):
    moe_model("mixtral").save_pretrained(tmp_path / "m")
    file = tmp_path / "stats.safetensors"
    report = quantload.stats(tmp_path / "m", file, sequences=[[5]], device="cpu")
    # two of four experts for one token, in each of two layers
    assert len(report.unseen) == 2 * 2 * 3
    assert all(".experts." in module for module in report.unseen)
    assert report.warnings[0].startswith("no token reached 12 modules of experts")
    written = {name.rpartition(".")[0] for name in load_file(file)}
    assert not written & set(report.unseen)
    assert len(written) == 2 * (4 + 2 * 3) + 1


def test_what_is_never_called_is_named(tmp_path):
    """Jamba's own code reads the weight of `dt_proj` without calling it."""
    write_model("jamba", tmp_path / "m")
    report = collected(tmp_path / "m", sequences=[[1, 5, 9, 2, 77]])
    never = [f"model.layers.{n}.mamba.dt_proj" for n in (0, 2)]
    assert set(never) <= set(report.unseen)
    assert any(
        warning.startswith("2 modules were never called, and the file leaves them out: `model.")
        for warning in report.warnings
    )
    assert "model.layers.0.mamba.in_proj" in report.sums


def test_a_taken_place_is_refused_before_anything_is_run(tmp_path, monkeypatch):
    folder = tiny.llama(tmp_path / "m")
    file = tmp_path / "stats.safetensors"
    file.write_text("mine")
    with monkeypatch.context() as patched:
        patched.setattr(api_stats, "collect_statistics", None)
        with pytest.raises(OutputError, match="is there already"):
            quantload.stats(folder, file, sequences=SEQUENCES)
        with pytest.raises(OutputError, match="is a folder or a link"):
            quantload.stats(folder, folder, sequences=SEQUENCES, overwrite=True)
        with pytest.raises(OutputError, match="is not there"):
            quantload.stats(folder, tmp_path / "no" / "file", sequences=SEQUENCES)
    assert file.read_text() == "mine"
    quantload.stats(folder, file, sequences=SEQUENCES, device="cpu", overwrite=True)
    assert read_stats(file).absmax


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(tensor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(statistics_file, "_bytes_of", full)
    with pytest.raises(OutputError, match="No space left"):
        statistics_file.write_tensors(tmp_path / "stats", {"a": torch.ones(1)}, {}, overwrite=False)
    assert list(tmp_path.iterdir()) == []


# -- what convert makes of it ----------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["W4A16:g32", "FP8", "NVFP4"])
@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_convert_uses_every_module(tmp_path, model_type, scheme):
    folder = tmp_path / "m"
    if model_type == "llama":
        tiny.llama(folder)
    else:
        moe_model("mixtral").save_pretrained(folder)
    file = tmp_path / "stats.safetensors"
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 96, (4, 32), generator=random).tolist()
    assert quantload.stats(folder, file, sequences=ids, device="cpu").unseen == ()
    stats = read_stats(file)
    observer = "minmax" if scheme == "FP8" else "search"
    plan = api.plan(folder, scheme, options=PlanOptions(observer=observer, stats=stats))
    assert [w for w in plan.warnings if "stats" in w or "input" in w or "default" in w] == []
    rows = [row for row in plan.rows if row.scheme is not None]
    assert len(rows) == (14 if model_type == "llama" else 2 * (4 + 4 * 3))
    for row in rows:
        if observer == "search":
            assert row.mean_square.entry.name == f"{row.module}.input_mean_square"
        if scheme != "W4A16:g32":
            # the largest of its own and of the fused group's, which sees the same input
            assert row.input_absmax.value == stats.absmax[row.module]
    done = api.execute(plan, tmp_path / "out")
    assert done.report.passed, done.report.failures()[:3]


# -- tokens that the model makes up ----------------------------------------------------------------


def test_tokens_that_the_model_makes_up(tmp_path):
    folder = tiny.llama(tmp_path / "m")
    state = torch.random.get_rng_state()
    options = {"device": CPU, "dtype": torch.float32}
    made = api_stats.generated_tokens(api.inspect(folder), 300, **options)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [len(ids) for ids in made] == [128, 128, 128]  # as many as its positions
    assert all(ids[0] == 1 for ids in made)
    assert len({tuple(ids) for ids in made}) == 3
    assert made == api_stats.generated_tokens(api.inspect(folder), 300, **options)
    report = quantload.stats(folder, tmp_path / "s", max_tokens=300, device="cpu")
    assert (report.num_tokens, report.num_sequences) == (300, 3)
    assert json.loads(report.metadata["num_tokens"]) == 300
