"""The fused decode step against the models' own forward: logits of every step, and greedy ids."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from quantload.errors import ConfigError
from quantload.layers.fused_decoder import FusedDecoder, fused_decoder
from quantload.runtime.step_model import CacheScales

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
FUSED = {  # what each kind of model has that others have not
    "llama": {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
    "mistral": {"sliding_window": 6},
    "gemma2": {"head_dim": 8, "sliding_window": 6, "attn_logit_softcapping": 2.0},
    "phi3": {"partial_rotary_factor": 0.5, "attention_bias": True},
    "olmo2": {},
    "qwen3_moe": EXPERTS | {"decoder_sparse_step": 1},
    "gpt_oss": {"head_dim": 8, "sliding_window": 6, "num_local_experts": 4},
}
REFUSED = {
    "cohere": "does not go into one norm",
    "gpt_neox": "does not go into one norm",
}


def build(kind: str, device: torch.device, **settings: object) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SIZES | FUSED.get(kind, {}) | settings))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().to(device)
    for module in model.modules():  # norms of ones would hide where a weight belongs
        for name, weight in module.named_parameters(recurse=False):
            if weight.ndim == 1 and name == "weight":
                nn.init.uniform_(weight, 0.5, 1.5)
    return model


def decoder_of(model: nn.Module) -> FusedDecoder:
    found = fused_decoder(model)
    assert isinstance(found, FusedDecoder), found
    return found


def own_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids[None]).logits[0, -1]


@pytest.mark.parametrize("kind", FUSED)
def test_logits_of_every_step_are_the_models(kind: str, kernel_device: torch.device) -> None:
    model = build(kind, kernel_device)
    decoder = decoder_of(model)
    rows = [torch.randint(3, 64, (n,), device=kernel_device) for n in (9, 4)]
    ids = torch.stack([torch.cat((row, row.new_zeros(9 - len(row)))) for row in rows])
    positions = torch.tensor([len(row) for row in rows], device=kernel_device)
    cache = decoder.new_cache(2, 40)
    logits = decoder.prefill(ids, positions, cache)
    for _ in range(2):
        expected = torch.stack([own_logits(model, row) for row in rows])
        torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-4)
        tokens = logits.argmax(-1)
        rows = [torch.cat((row, token[None])) for row, token in zip(rows, tokens, strict=True)]
        logits = decoder.step(tokens, positions, cache)
        positions = positions + 1


def test_greedy_ids_are_those_of_generate(kernel_device: torch.device) -> None:
    model = build("qwen2", kernel_device)
    decoder = decoder_of(model)
    ids = torch.randint(3, 64, (1, 5), device=kernel_device)
    expected = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)[0, 5:]
    cache, positions = decoder.new_cache(1, 16), torch.tensor([5], device=kernel_device)
    token, found = decoder.prefill(ids, positions, cache).argmax(-1), []
    for _ in range(6):
        found.append(int(token))
        token = decoder.step(token, positions, cache).argmax(-1)
        positions = positions + 1
    assert found == expected.tolist()


@pytest.mark.parametrize("kind", REFUSED)
def test_models_of_another_kind_are_told(kind: str, kernel_device: torch.device) -> None:
    assert REFUSED[kind] in str(fused_decoder(build(kind, kernel_device)))


def test_a_layer_that_computes_something_else_is_found(kernel_device: torch.device) -> None:
    model = build("llama", kernel_device)
    layer = model.model.layers[1]
    plain = layer.forward

    @functools.wraps(plain)
    def scaled(x: Tensor, **options: object) -> Tensor:
        return x + 1.2 * (plain(x, **options) - x)

    layer.forward = scaled
    assert "layer 1" in str(fused_decoder(model))


def test_nothing_keeps_a_model_alive(kernel_device: torch.device) -> None:
    model = build("llama", kernel_device, num_hidden_layers=1)
    kept = weakref.ref(model.model.layers[0].mlp)
    decoder_of(model)
    del model
    gc.collect()
    assert kept() is None


def test_a_cpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "run on CUDA" in str(fused_decoder(build("llama", torch.device("cpu"))))
    assert "no model of transformers" in str(fused_decoder(nn.Linear(2, 2)))


def test_caches(kernel_device: torch.device) -> None:
    decoder = decoder_of(build("mistral", kernel_device, num_hidden_layers=1))
    cache = decoder.new_cache(3, 20)
    assert (cache.batch, cache.length) == (3, 20)
    assert cache.num_bytes == 2 * 3 * 2 * 20 * 8 * 4
    assert cache.bytes_read(4) == 2 * 3 * 2 * 4 * 8 * 4
    assert cache.bytes_read(19) == cache.bytes_read(6)  # the window
    with pytest.raises(ConfigError, match=r"a cache of torch\.int8"):
        decoder.new_cache(1, 8, torch.int8)
    with pytest.raises(ConfigError, match="without scales"):
        decoder.new_cache(1, 8, torch.float8_e4m3fn)
    scales = CacheScales(torch.ones(2), torch.ones(1))
    with pytest.raises(ConfigError, match="scales of 2 and 1 layers"):
        decoder.new_cache(1, 8, torch.float8_e4m3fn, scales=scales)


def test_a_cache_of_codes_gives_nearly_the_same(kernel_device: torch.device) -> None:
    decoder = decoder_of(build("llama", kernel_device, num_hidden_layers=1))
    ids = torch.randint(3, 64, (1, 8), device=kernel_device)
    positions = torch.tensor([8], device=kernel_device)
    scales = CacheScales(torch.tensor([0.01]), torch.tensor([0.02]))
    results = []
    for dtype in (None, torch.float8_e4m3fn):
        cache = decoder.new_cache(1, 16, dtype, scales=scales)
        token = decoder.prefill(ids, positions, cache).argmax(-1)
        results.append(decoder.step(token, positions, cache))
    error = (results[1] - results[0]).norm() / results[0].norm()
    assert 1e-6 < float(error) < 0.05
