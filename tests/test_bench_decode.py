"""Peers of the decode benchmark without a card: they compute what transformers' Llama does."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).parent.parent / "benchmarks"
LENGTHS = (7, 3)
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}  # fmt: skip


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import compiled_llama
    import llama_reference

    yield llama_reference, compiled_llama
    for name in ("compiled_llama", "llama_reference", "gemm_cells"):
        sys.modules.pop(name, None)


def test_the_reference_is_transformers_llama(peers):
    reference, _ = peers
    weights = reference.RandomWeights(reference.LlamaShape.of(CONFIG), "bf16", torch.device("cpu"))
    model = _transformers_model(weights)
    tokens = torch.tensor([4, 9])
    expected, cached = [], []
    with torch.no_grad():
        for length, token in zip(LENGTHS, tokens, strict=True):
            prompt = torch.arange(length) + 1
            cache = model(prompt[None]).past_key_values
            cached.append([(layer.keys[0], layer.values[0]) for layer in cache.layers])
            expected.append(model(torch.cat([prompt, token[None]])[None]).logits[0, -1])
    keys, values = (
        [[of_row[layer][part].transpose(0, 1) for of_row in cached] for layer in range(2)]
        for part in range(2)
    )
    found = reference.exact_step(weights, "bf16", tokens, keys, values)
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-5, atol=1e-6)
    wrong = reference.exact_step(weights, "bf16", tokens, keys, values, turns=False)
    assert float((wrong - found).norm() / found.norm()) > 0.1


@pytest.mark.parametrize("fmt", ["w4a16_g128", "fp8_ch"])
def test_the_reference_uses_what_was_quantized(peers, fmt):
    reference, _ = peers
    shape = reference.LlamaShape.of(CONFIG | {"hidden_size": 128, "intermediate_size": 128})
    dense, rounded = (
        reference.RandomWeights(shape, name, torch.device("cpu")) for name in ("bf16", fmt)
    )
    kept = [[torch.randn(5, 2, 32, generator=torch.Generator().manual_seed(3))]] * 2
    one, two = (
        reference.exact_step(weights, name, torch.tensor([3]), kept, kept)
        for weights, name in ((dense, "bf16"), (rounded, fmt))
    )
    assert 0.005 < float((one - two).norm() / one.norm()) < 0.5


def _transformers_model(weights):
    """Return a float64 model with these weights, as transformers builds it."""
    config = {key: value for key, value in CONFIG.items() if key != "model_type"}
    model = LlamaForCausalLM(LlamaConfig(**config, tie_word_embeddings=False)).double().eval()
    shape, state = weights.shape, {}
    state["model.embed_tokens.weight"], state["lm_head.weight"] = weights.embedding, weights.head
    state["model.norm.weight"] = weights.norm(2 * shape.layers)
    sizes = [heads * shape.head_dim for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
    for number in range(shape.layers):
        layer, at = weights.layer(number), f"model.layers.{number}"
        parts = zip("qkv", layer["qkv"].split(sizes), strict=True)
        state |= {f"{at}.self_attn.{part}_proj.weight": rows for part, rows in parts}
        state[f"{at}.self_attn.o_proj.weight"] = layer["o"]
        gate, up = layer["gate_up"].chunk(2)
        state |= {f"{at}.mlp.gate_proj.weight": gate, f"{at}.mlp.up_proj.weight": up}
        state[f"{at}.mlp.down_proj.weight"] = layer["down"]
        state[f"{at}.input_layernorm.weight"] = weights.norm(2 * number)
        state[f"{at}.post_attention_layernorm.weight"] = weights.norm(2 * number + 1)
    model.load_state_dict({name: value.double() for name, value in state.items()})
    return model


@torch.no_grad()
def test_the_compiled_peer_is_transformers_llama(peers):
    reference, compiled = peers
    weights = reference.RandomWeights(reference.LlamaShape.of(CONFIG), "bf16", torch.device("cpu"))
    model = _transformers_model(weights).float()
    steps = compiled.CompiledLlama(model, compiled=False)
    cache = steps.new_cache(2, 16)
    ids, lengths = torch.arange(14).reshape(2, 7) + 1, torch.tensor(LENGTHS)
    tokens = torch.tensor([4, 9])
    found = [steps.prefill(ids, lengths, cache), steps.step(tokens, lengths, cache)]
    for row, length in enumerate(LENGTHS):
        whole = torch.cat([ids[row, :length], tokens[row, None]])
        expected = model(whole[None]).logits[0]
        torch.testing.assert_close(found[0][row], expected[length - 1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[1][row], expected[length], rtol=1e-4, atol=1e-5)
