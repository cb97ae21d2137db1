"""Steps of a single row: against the models' own forward, with products written in torch."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from quantload.layers import fused_decoder as module
from quantload.layers import fused_row
from quantload.layers.fused_decoder import FusedDecoder, fused_decoder

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip


def build(kind, device, **settings):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SIZES | settings))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().to(device)
    for name, weight in model.named_parameters():  # norms of ones would hide where they belong
        if "norm" in name:
            nn.init.uniform_(weight, 0.5, 1.5)
    return model


def decoder_of(model):
    found = fused_decoder(model)
    assert isinstance(found, FusedDecoder), found
    return found


def own_logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids[None]).logits[0, -1]


class Dense:
    """Stands for the kernels of `one_token.py`: the same contracts, of dense weights."""

    factor = 1.0

    def _product(self, weight, x, bias):
        from quantload.runtime.kernels.one_token import Waiting

        waits = x if isinstance(x, Waiting) else Waiting(x)
        y = waits.values.float() @ weight.float().T * self.factor
        if waits.squares is not None:
            assert waits.hidden is not None
            y = y * (waits.squares.sum() / waits.hidden.numel() + waits.eps).rsqrt()
        return y if bias is None else y + bias.float()

    def product(self, weight, x, bias=None):
        return self._product(weight, x, bias)

    def gated_product(self, weight, x, bias=None, *, peaks):
        from quantload.runtime.kernels.one_token import Waiting

        gate, up = self._product(weight, x, bias).chunk(2, -1)
        assert not peaks
        return Waiting(nn.functional.silu(gate) * up)

    def added_product(self, weight, x, bias, hidden, norm, *, peaks):
        from quantload.runtime.kernels.one_token import Waiting

        stream = hidden + self._product(weight, x, bias)
        assert not peaks
        squares = stream.float().reshape(-1, 16).square().sum(1)
        return Waiting(stream * norm.weight, None, None, stream, squares, norm.eps)


@pytest.fixture
def dense(monkeypatch, kernel_device):
    from quantload.runtime.kernels import one_token

    made = Dense()
    # the interpreter's bfloat16 is of no use
    monkeypatch.setattr(module, "_SINGLE_DTYPE", torch.float32)
    for name in ("product", "gated_product", "added_product"):
        monkeypatch.setattr(one_token, name, getattr(made, name))
    monkeypatch.setattr(
        fused_row, "_product", lambda m: fused_row._Product(m.weight, m.bias, False, m)
    )
    return made


def phi3(device):
    """A model with one layer for q, k and v, and one for gate and up."""
    return build("phi3", device, num_hidden_layers=3, eos_token_id=2, bos_token_id=1)


def test_logits_of_one_row_are_the_models(dense, kernel_device, monkeypatch):
    model = phi3(kernel_device)
    decoder = decoder_of(model)
    assert decoder.why_no_single == ""
    ids = torch.randint(3, 64, (7,), device=kernel_device)
    places = torch.tensor([7], device=kernel_device)
    cache = decoder.new_cache(1, 16)
    logits = decoder.prefill(ids[None], places, cache)
    asked = []
    plain = decoder._single.step
    monkeypatch.setattr(decoder._single, "step", lambda *a: asked.append(1) or plain(*a))
    for _ in range(3):
        token = logits.argmax(-1)
        ids = torch.cat((ids, token))
        logits = decoder.step(token, places, cache)
        places = places + 1
        torch.testing.assert_close(logits[0], own_logits(model, ids), rtol=2e-4, atol=2e-4)
    assert len(asked) == 3
    decoder.step(token.repeat(2), places.repeat(2), decoder.new_cache(2, 16))
    assert len(asked) == 3, "two rows run as before"


def test_what_differs_is_not_used(dense, kernel_device):
    dense.factor = 1.2
    decoder = decoder_of(phi3(kernel_device))
    assert "differs" in decoder.why_no_single
    assert decoder._single is None


def test_what_cannot_be_tried_is_not_used(dense, kernel_device, monkeypatch):
    monkeypatch.setattr(dense, "_product", None)
    decoder = decoder_of(phi3(kernel_device))
    assert "could not be tried: TypeError" in decoder.why_no_single


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("gemma2", "norms behind"), ("llama", "no one product")],
)
def test_other_layers_are_refused(dense, kernel_device, kind, reason):
    decoder = decoder_of(build(kind, kernel_device))
    assert reason in decoder.why_no_single


def test_layers_that_are_not_quantized_are_refused(kernel_device, monkeypatch):
    model = phi3(kernel_device)
    assert "torch.float32, expected torch.bfloat16" in decoder_of(model).why_no_single
    monkeypatch.setattr(module, "_SINGLE_DTYPE", torch.float32)
    assert "not quantized" in decoder_of(model).why_no_single
