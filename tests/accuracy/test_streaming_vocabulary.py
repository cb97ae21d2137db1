"""Embeddings and heads that stay in the file, against plain transformers with all of the model."""

from __future__ import annotations

import pytest
import tiny_checkpoints as tiny
import torch
from safetensors.torch import load_file
from tiny_architectures import architectures, tiny_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from quantload import api
from quantload.accuracy import streaming_end, vocabulary_in_file
from quantload.accuracy.compare_outputs import compare_running
from quantload.accuracy.held_weights import HeldLinear, multiply
from quantload.accuracy.streaming import open_streamed
from quantload.accuracy.vocabulary_in_file import HeadInFile
from quantload.errors import NonFiniteWeight
from quantload.layers.vocabulary_table import ReadTable
from quantload.progress import Silent

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
MODELS = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "gemma, scaled": ("gemma", {}),
    "gemma2, capped": ("gemma2", {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8}),
    "granite, scaled": (
        "granite",
        {"logits_scaling": 7.0, "embedding_multiplier": 12.0, "tie_word_embeddings": False},
    ),
    "cohere, scaled": ("cohere", {"logit_scale": 0.3}),
    "phi, bias": ("phi", {"tie_word_embeddings": False}),
    "padded": ("llama", {"vocab_size": 101, "tie_word_embeddings": False}),
}
IDS = torch.tensor([[5, 9, 2, 77, 9, 95, 0], [1, 8, 8, 3, 94, 2, 5]])
DISTINCT = len(IDS.unique())


@pytest.fixture
def in_pieces(monkeypatch):
    """Read a few rows of a head at a time, and compute logits of three tokens at a time."""
    monkeypatch.setattr(vocabulary_in_file, "CHUNK_ELEMENTS", 32 * 7)
    monkeypatch.setattr(streaming_end, "LOGITS_BYTES", 3 * 4 * 96)


def written(folder, name):
    """A tiny model with random parameters, biases too."""
    kind, options = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **options}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.eval().save_pretrained(folder)
    return model


def opened(folder):
    return open_streamed(api.inspect(folder), device=CPU, dtype=torch.float32)


def apart(streamed):
    """Logits of all tokens, computed some at a time, and how many parts these were."""
    state = None
    for block in streamed.blocks(apart=True):
        state = block.step(IDS, state)
    end = streamed.end()
    assert end.is_per_token(IDS)
    given, parts = end.head_inputs(IDS, state), list(end.parts(IDS))
    found = torch.full((*IDS.shape, end.head.out_features), float("nan"))
    for place in parts:
        found[place] = end.logits(IDS[place], given[place])
    return found, len(parts)


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_whole_model(tmp_path, name):
    model = written(tmp_path / "m", name)
    with torch.no_grad():
        expected = model(IDS).logits
    streamed = opened(tmp_path / "m")
    found, parts = apart(streamed)
    assert parts > 2
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=2e-6)
    head = streamed.model.get_output_embeddings()
    embedding = streamed.model.get_input_embeddings()
    assert isinstance(head, HeadInFile)
    assert isinstance(embedding.table, ReadTable)
    assert embedding.table.num_kept == DISTINCT
    tensors = (*streamed.model.parameters(), *streamed.model.buffers())
    assert not [t.shape for t in tensors if t.ndim == 2 and len(t) >= 96]
    assert type(embedding).__name__ == type(model.get_input_embeddings()).__name__ or (
        type(model.get_input_embeddings()) is nn.Embedding
    )


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("name", ["llama, tied", "gemma2, capped"])
def test_logits_of_the_last_block(tmp_path, name):
    model = written(tmp_path / "m", name)
    state = None
    for block in opened(tmp_path / "m").blocks(with_logits=True):
        state = block.step(IDS, state)
    with torch.no_grad():
        torch.testing.assert_close(state, model(IDS).logits, rtol=1e-6, atol=2e-6)


@pytest.mark.usefixtures("in_pieces")
def test_a_model_whose_logits_are_not_per_token_gets_whole_sequences(tmp_path, monkeypatch):
    """Oracle: the same model with its logits centred over the sequence."""
    model = written(tmp_path / "m", "llama")
    kind = type(model)
    forward = kind.forward

    def centred(self, *args, **kwargs):
        result = forward(self, *args, **kwargs)
        result.logits = result.logits - result.logits.mean(dim=1, keepdim=True)
        return result

    monkeypatch.setattr(kind, "forward", centred)
    streamed, state = opened(tmp_path / "m"), None
    for block in streamed.blocks(apart=True):
        state = block.step(IDS, state)
    end = streamed.end()
    assert not end.is_per_token(IDS)
    with torch.no_grad():
        torch.testing.assert_close(end.all_logits(IDS, state), model(IDS).logits)


def test_a_head_that_the_checkpoint_unties(tmp_path):
    """The config ties both, the file has other values for the head: these count."""
    written(tmp_path / "m", "llama, tied")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn(96, 32)
    content = AutoConfig.from_pretrained(tmp_path / "m").to_dict()
    tiny.write(tmp_path / "untied", content, tensors)
    content["tie_word_embeddings"] = False
    tiny.write(tmp_path / "plain", content, tensors)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")(IDS).logits
    torch.testing.assert_close(apart(opened(tmp_path / "untied"))[0], expected)


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("scheme", ["W8A16:channel", "W4A16:g32", "FP8_DYNAMIC"])
def test_quantized_embeddings_and_heads(tmp_path, scheme, is_tied):
    """Oracle: the loaded model, whose tables are in memory."""
    source = tiny.llama(tmp_path / "source", tied=is_tied)
    rules = {"lm_head": scheme} if not is_tied else {}
    rules["model.embed_tokens"] = scheme if scheme != "FP8_DYNAMIC" else "FP8_DYNAMIC"
    if is_tied:
        rules["lm_head"] = scheme
    output = api.convert(source, tmp_path / "out", "W4A16:g32", rules=rules).folder
    loaded = api.load(output, device=CPU, dtype=torch.float32, fuse=False)
    with torch.no_grad():
        expected = loaded(IDS).logits
    streamed = open_streamed(
        api.inspect(output), device=CPU, dtype=torch.float32, round_inputs=True
    )
    found, _ = apart(streamed)
    assert isinstance(streamed.model.get_output_embeddings(), HeadInFile)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation gives, on the CPU."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.device.type == "cpu":
                self.elements = max(self.elements, x.untyped_storage().nbytes() // 4)
        return result


@pytest.mark.parametrize("is_tied", [False, True])
def test_no_vocabulary_is_ever_in_memory(tmp_path, monkeypatch, is_tied):
    vocabulary, hidden = 66_000, 64  # models of less are built on the CPU first
    folder = tiny.llama(tmp_path / "m", vocabulary=vocabulary, hidden=hidden, tied=is_tied)
    monkeypatch.setattr(vocabulary_in_file, "CHUNK_ELEMENTS", 1 << 14)
    monkeypatch.setattr(streaming_end, "LOGITS_BYTES", 4 * vocabulary * 4)  # four tokens
    source = api.inspect(folder)
    ids = [[1, 5, 65_999, 2, 33, 8, 9, 77], [7, 7, 3]]
    with Largest() as seen:
        found = compare_running(source, source, ids, Silent(), device=CPU, dtype=torch.float32)
    assert found.end.num_tokens == 11
    assert 4 * vocabulary <= seen.elements < vocabulary * hidden // 4


# -- weights that wait in the dtype of the file ----------------------------------------------------


def test_layers_keep_bfloat16(tmp_path):
    folder = tiny.llama(tmp_path / "m")
    streamed = opened(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    layers = streamed.model.get_submodule("model.layers")
    for number, block in enumerate(streamed.blocks()):
        held = [m for m in layers[number].modules() if isinstance(m, HeldLinear)]
        assert len(held) == 7
        assert all(m._buffers["weight"].dtype == torch.bfloat16 for m in held)
        path = f"model.layers.{number}.mlp.up_proj"
        own, plain = block.modules[path], model.get_submodule(path)
        assert torch.equal(own.weight + 0, plain.weight)
        x = torch.randn(3, 64)
        assert torch.equal(own(x), plain(x))
        assert streamed.model.dtype == torch.float32


def test_a_wide_product_in_parts_has_the_gradient_of_the_whole(monkeypatch):
    monkeypatch.setattr("quantload.accuracy.held_weights._CHUNK_ELEMENTS", 40)
    weight, bias = torch.randn(11, 8, dtype=torch.bfloat16), torch.randn(11)
    inputs = [torch.randn(2, 3, 8) for _ in range(1)] * 2
    one, two = (x.clone().requires_grad_() for x in inputs)
    expected = nn.functional.linear(one, weight.float(), bias)
    found = multiply(two, weight, bias)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(multiply(inputs[0], weight, bias), expected.detach())
    upstream = torch.randn_like(expected)
    expected.backward(upstream)
    found.backward(upstream)
    torch.testing.assert_close(two.grad, one.grad)


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_through_a_head_in_the_file(tmp_path, dtype):
    folder = tiny.llama(tmp_path / "m", dtype=dtype)
    streamed = opened(folder)
    list(streamed.blocks(apart=True))
    head = streamed.model.get_output_embeddings()
    weight = load_file(folder / "model.safetensors")["lm_head.weight"].float()
    assert torch.equal(head.weight + 0, weight)
    one, two = (torch.ones(2, 3, 64).requires_grad_() for _ in range(2))
    (head(one) ** 2).sum().backward()
    (nn.functional.linear(two, weight) ** 2).sum().backward()
    torch.testing.assert_close(one.grad, two.grad)


@pytest.mark.parametrize("kind", ["mamba", "xmod"])
def test_other_ways_to_write_a_model(tmp_path, kind):
    """Mamba asks its head for the dtype of the weight, X-MOD its layers for their parts."""
    model = tiny_model(kind, architectures()[kind]).eval()
    model.save_pretrained(tmp_path / "m")
    ids = torch.tensor([[5, 9, 2, 7]])
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    streamed, state = opened(tmp_path / "m"), None
    for block in streamed.blocks(apart=True):
        state = block.step(ids, state)
    if kind == "xmod":
        assert "asks its layers for more than hidden states" in streamed.why_whole
        found = state
    else:
        end = streamed.end()
        assert end.is_per_token(ids)
        found = end.logits(ids, end.head_inputs(ids, state))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_rows_that_are_not_finite_are_named(tmp_path, name):
    tensors = load_file(tiny.llama(tmp_path / "source") / "model.safetensors")
    tensors[name][5, 0] = float("nan")
    broken = tiny.write(tmp_path / "broken", tiny.config(), tensors)
    with pytest.raises(NonFiniteWeight, match=f"tensor `{name}` holds NaN or infinity, in"):
        apart(opened(broken))
