"""The attention hook in transformers' models, against their own eager attention in float32."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
import torch
from fake_source import quantized_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, StaticCache
from transformers.masking_utils import create_causal_mask

from quantload.api import load_model
from quantload.errors import ModelError, ShapeError
from quantload.layers.attention import (
    ADDITIVE,
    ATTENTION,
    MASKED,
    TWO_SIDED,
    attention_forward,
    set_local_heads,
    use_attention,
)

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BOTH = ["sliding_attention", "full_attention"]
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 4},
    "gemma2": {"sliding_window": 4, "attn_logit_softcapping": 0.2, "query_pre_attn_scalar": 3},
    "gpt_oss": {
        **{"sliding_window": 4, "layer_types": BOTH},
        **{"num_local_experts": 4, "num_experts_per_tok": 2},
    },
    "deepseek_v3": {
        **{"num_key_value_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4},
        **{"v_head_dim": 6, "kv_lora_rank": 16, "q_lora_rank": 16, "first_k_dense_replace": 2},
        "head_dim": 4,
    },
    "bert": {},
    "modernbert": {"local_attention": 4, "global_attn_every_n_layers": 2},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
}
ENCODERS = ("bert", "modernbert")
IDS = torch.tensor([[1, 5, 9, 33, 7, 33, 2, 50, 11], [1, 6, 9, 17, 20, 3, 2, 4, 12]])
PADDED = torch.tensor([[1] * 9, [0, 0, 0, 1, 1, 1, 1, 1, 1]])


def tiny(name: str, **options: object) -> nn.Module:
    config = AutoConfig.for_model(name, **(SIZES | MODELS[name] | options))
    config.tie_word_embeddings = False
    auto = AutoModel if name in (*ENCODERS, "t5") else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    return model


def outputs(model: nn.Module, name: str, **inputs: object) -> Tensor:
    if name == "t5":
        inputs["decoder_input_ids"] = IDS
    with torch.no_grad():
        return model(input_ids=IDS, **inputs)[0]


def cached(model: nn.Module, cache: object) -> dict[str, object]:
    """The cache under the name that this version of transformers has for it."""
    named = inspect.signature(type(model).forward).parameters
    return {"cache" if "cache" in named else "past_key_values": cache}


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).norm() <= 1e-5 * expected.norm())


@pytest.mark.parametrize("name", MODELS)
def test_models_are_switched_and_equal(name: str) -> None:
    model = tiny(name)
    expected = outputs(model, name)
    padded = outputs(model, name, attention_mask=PADDED)
    reports = use_attention(model)  # type: ignore[arg-type]
    assert [report.reason for report in reports] == [""] * len(reports)
    chosen = TWO_SIDED if name in ENCODERS else ATTENTION if model._supports_sdpa else ADDITIVE
    part = model.decoder if name == "t5" else model
    assert part.config._attn_implementation == (MASKED if name == "t5" else chosen)
    assert close(outputs(model, name), expected)
    found = outputs(model, name, attention_mask=PADDED)
    assert close(found[0], padded[0])
    assert close(found[1, 3:], padded[1, 3:])


@pytest.mark.parametrize("name", [name for name in MODELS if name not in (*ENCODERS, "t5")])
@pytest.mark.parametrize("static", [False, True])
def test_generation_with_a_cache_is_equal(name: str, static: bool) -> None:
    model = tiny(name)

    def generated() -> tuple[Tensor, Tensor]:
        cache = StaticCache(config=model.config, max_cache_len=24) if static else None
        given = cached(model, cache) if static else {}
        found = model.generate(
            IDS,
            attention_mask=PADDED,
            **given,
            max_new_tokens=6,
            min_new_tokens=6,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            disable_compile=True,
        )
        return found.sequences, torch.stack(found.logits)

    tokens, logits = generated()
    use_attention(model)  # type: ignore[arg-type]
    found_tokens, found_logits = generated()
    assert torch.equal(found_tokens, tokens)
    assert close(found_logits, logits)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "llama"])
def test_several_tokens_behind_a_cache(name: str) -> None:
    model = tiny(name)

    def in_two_parts() -> Tensor:
        with torch.no_grad():
            first = cached(model, model(IDS[:, :4], use_cache=True).past_key_values)
            return model(IDS[:, 4:], **first).logits

    expected = in_two_parts()
    use_attention(model)  # type: ignore[arg-type]
    assert close(in_two_parts(), expected)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_weights_are_returned_where_asked_for(name: str) -> None:
    model = tiny(name)
    with torch.no_grad():
        expected = model(IDS, output_attentions=True).attentions
        use_attention(model)  # type: ignore[arg-type]
        found = model(IDS, output_attentions=True).attentions
    assert all(close(one, two) for one, two in zip(found, expected, strict=True))


def test_the_ratio_is_that_of_the_shapes() -> None:
    model = tiny("llama")
    expected = outputs(model, "llama")
    use_attention(model)  # type: ignore[arg-type]
    model.config.num_key_value_heads = 1
    for layer in model.model.layers:
        layer.self_attn.num_key_value_groups = 77
    assert close(outputs(model, "llama"), expected)


def test_a_quantized_model_is_switched() -> None:
    fake = quantized_model("gemma2", sliding_window=4, attn_logit_softcapping=0.2)
    fake.model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = fake.model(IDS).logits
    loaded = load_model(fake.source, device=torch.device("cpu"))
    assert [report.reason for report in use_attention(loaded)] == [""]
    with torch.no_grad():
        assert close(loaded(IDS).logits, expected)


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2"])
def test_models_on_the_meta_device_are_proven_too(name: str) -> None:
    model = tiny(name).to("meta")
    assert [report.reason for report in use_attention(model)] == [""]  # type: ignore[arg-type]


# -- parts of the heads ----------------------------------------------------------------------------


class Module(nn.Module):
    is_causal = True


def test_sinks_masks_and_biases_are_cut_to_the_heads_of_a_rank() -> None:
    query, key, value = (torch.randn(1, heads, 5, 8) for heads in (8, 4, 4))
    sinks, bias, mask = torch.randn(8), torch.randn(1, 8, 5, 5), torch.rand(1, 8, 5, 7) > 0.2
    mask[..., 0] = True
    options = {"s_aux": sinks, "position_bias": bias}
    whole = attention_forward(Module(), query, key, value, mask, **options)[0]
    for start in (0, 2, 4, 6):
        module = Module()
        set_local_heads(module, start, 2)
        one = slice(start // 2, start // 2 + 1)
        heads = query[:, start : start + 2]
        found = attention_forward(module, heads, key[:, one], value[:, one], mask, **options)[0]
        assert torch.allclose(found, whole[:, :, start : start + 2], atol=1e-6)
        local = {"s_aux": sinks[start : start + 2], "position_bias": bias[:, start : start + 2]}
        cut = mask[:, start : start + 2]
        again = attention_forward(Module(), heads, key[:, one], value[:, one], cut, **local)[0]
        assert torch.equal(found, again)


def test_sinks_of_other_heads_are_refused() -> None:
    query, key = torch.randn(1, 2, 5, 8), torch.randn(1, 1, 5, 8)
    with pytest.raises(ShapeError, match="of `8` heads for a query of `2`") as caught:
        attention_forward(Module(), query, key, key, None, s_aux=torch.zeros(8))
    assert "set_local_heads" in caught.value.hint


# -- what the masks do not say ---------------------------------------------------------------------


@pytest.mark.parametrize("additive", [False, True, None])
def test_chosen_keys_are_seen_alone(additive: bool | None) -> None:
    query, key = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 6, 8)
    indices = torch.stack([torch.randperm(6)[:2] for _ in range(6)]).view(2, 3, 2)
    chosen = torch.zeros(2, 1, 3, 6, dtype=torch.bool)
    for b in range(2):
        for t in range(3):
            chosen[b, 0, t, indices[b, t]] = True
    seen = torch.ones(1, 1, 3, 6, dtype=torch.bool)
    mask = {None: None, False: seen, True: torch.zeros(1, 1, 3, 6)}[additive]
    module = Module()
    module.is_causal = False
    found = attention_forward(module, query, key, key, mask, indices=indices)[0]
    assert torch.allclose(found, attention_forward(module, query, key, key, chosen)[0], atol=1e-6)


def test_a_module_of_a_causal_class_may_see_later_keys() -> None:
    """No mask means causal order to torch's kernels; the mask must then be made."""
    model = tiny("llama")
    model.config.is_causal = False  # transformers makes masks without order, modules stay causal
    expected = outputs(model, "llama")
    use_attention(model)  # type: ignore[arg-type]
    assert close(outputs(model, "llama"), expected)


def test_a_causal_mask_reaches_modules_that_call_themselves_two_sided() -> None:
    """As those of PaliGemma do; transformers' own `sdpa` then lets them see later keys."""
    model = tiny("llama")
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    expected = outputs(model, "llama")
    use_attention(model)  # type: ignore[arg-type]
    assert model.config._attn_implementation == TWO_SIDED
    assert close(outputs(model, "llama"), expected)
    model.model.layers[0].self_attn.is_causal = True
    use_attention(model)  # type: ignore[arg-type]
    assert model.config._attn_implementation == MASKED
    assert close(outputs(model, "llama"), expected)


def test_without_order_a_window_is_in_the_mask_alone() -> None:
    query, key = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    everything = attention_forward(Module(), query, key, key, None, is_causal=False)[0]
    windowed = attention_forward(
        Module(), query, key, key, None, is_causal=False, sliding_window=2
    )[0]
    assert torch.equal(windowed, everything)


def test_masks_may_be_widened_by_zeros_where_the_model_adds_them() -> None:
    model = tiny("gemma2")
    use_attention(model)  # type: ignore[arg-type]
    masks = create_causal_mask(model.config, torch.zeros(1, 4, 32), torch.ones(1, 4), None)
    assert masks.dtype == torch.float32
    assert torch.equal(masks[0, 0] == 0, torch.ones(4, 4, dtype=torch.bool).tril())


def test_a_window_counts_where_there_is_no_mask() -> None:
    query, key = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    order = torch.ones(6, 6, dtype=torch.bool).tril()
    window = order & ~order.tril(-3)
    expected = attention_forward(Module(), query, key, key, window[None, None])[0]
    found = attention_forward(Module(), query, key, key, None, sliding_window=3)[0]
    assert torch.allclose(found, expected, atol=1e-6)
    last = attention_forward(Module(), query[:, :, -1:], key, key, None, sliding_window=3)[0]
    assert torch.allclose(last, expected[:, -1:], atol=1e-6)


def test_a_mask_may_let_a_query_see_later_keys() -> None:
    query, key = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    two_sided = Module()
    two_sided.is_causal = False
    expected = attention_forward(two_sided, query, key, key, None)[0]
    found = attention_forward(Module(), query, key, key, mask, sliding_window=2)[0]
    assert torch.allclose(found, expected, atol=1e-6)


def test_attention_over_chosen_blocks_is_refused() -> None:
    query = torch.randn(1, 2, 5, 8)
    with pytest.raises(ModelError, match="chosen blocks") as caught:
        attention_forward(Module(), query, query, query, None, block_indices=torch.zeros(1))
    assert "set_attn_implementation" in caught.value.hint


# -- models that are not switched ------------------------------------------------------------------


def test_attention_outside_the_interface_is_left_alone_with_the_reason() -> None:
    sizes = {"hidden_size": 32, "n_layer": 1, "n_head": 4, "vocab_size": 64}
    config = AutoConfig.for_model("bloom", **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    before = model.config._attn_implementation
    with torch.no_grad():
        expected = model(IDS).logits
    (report,) = use_attention(model)
    assert "does not dispatch through transformers' AttentionInterface" in report.reason
    assert report.implementation == model.config._attn_implementation == before
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, expected)


def test_attention_that_computes_something_else_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny("gpt_oss")
    home = sys.modules[type(model).__module__]
    eager = home.eager_attention_forward
    monkeypatch.setattr(
        home, "eager_attention_forward", lambda *a, **k: (eager(*a, **k)[0] * 1.001, None)
    )
    (report,) = use_attention(model)  # type: ignore[arg-type]
    assert "differs by 1.0e-03 relative" in report.reason
    assert model.config._attn_implementation == "eager"


def test_a_model_that_cannot_be_probed_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("gemma2")

    def broken(*_: object, **__: object) -> None:
        raise ValueError("no ids")

    monkeypatch.setattr(model, "forward", broken)
    (report,) = use_attention(model)  # type: ignore[arg-type]
    assert report.reason == "its attention could not be probed: ValueError: no ids"
    assert model.config._attn_implementation == "eager"
