"""Every fault of a checkpoint is an error that names the tensor; ties follow the contents."""

from __future__ import annotations

import logging

import pytest
import torch
from fake_source import FakeModel, quantized_model
from torch import nn

from quantload.api import load_model
from quantload.errors import (
    FormatMismatch,
    MissingTensor,
    NonFiniteWeight,
    ShapeError,
    UnexpectedTensor,
)
from quantload.quant.rtn import quantize_rtn
from quantload.quant.scheme import parse_scheme

CPU = torch.device("cpu")
NORM = "model.layers.1.input_layernorm.weight"
BIAS = "model.layers.0.self_attn.k_proj.bias"
UP = "model.layers.0.mlp.up_proj"


@pytest.fixture
def fake() -> FakeModel:
    return quantized_model("qwen2")


def load(fake: FakeModel) -> nn.Module:
    return load_model(fake.source, device=CPU)


def test_missing_plain_tensor(fake: FakeModel) -> None:
    del fake.tensors[NORM]
    with pytest.raises(MissingTensor, match=NORM):
        load(fake)


def test_missing_member_of_a_stack(fake: FakeModel) -> None:
    del fake.quantized[UP]
    with pytest.raises(MissingTensor, match="up_proj"):
        load(fake)


def test_missing_bias_of_a_stack(fake: FakeModel) -> None:
    del fake.tensors[BIAS]
    with pytest.raises(
        MissingTensor, match=r"no tensor for `model\.layers\.0\.self_attn\.k_proj\.bias`"
    ):
        load(fake)


def test_renamed_tensor(fake: FakeModel) -> None:
    fake.tensors["model.layers.1.input_layer_norm.weight"] = fake.tensors.pop(NORM)
    with pytest.raises(UnexpectedTensor, match="input_layer_norm") as caught:
        load(fake)
    assert "nearest module `model.layers.1.input_layernorm`" in str(caught.value)


def test_two_tensors_for_one_place(fake: FakeModel) -> None:
    fake.tensors[NORM.removeprefix("model.")] = fake.tensors[NORM]
    with pytest.raises(UnexpectedTensor, match="two tensors for one place") as caught:
        load(fake)
    assert f"`{NORM}`" in str(caught.value)


def test_quantized_and_dense_weight_of_one_module(fake: FakeModel) -> None:
    fake.tensors[f"{UP.removeprefix('model.')}.weight"] = fake.quantized[UP][1].dequantize()
    with pytest.raises(UnexpectedTensor, match="two tensors for one place"):
        load(fake)


def test_wrong_shape(fake: FakeModel) -> None:
    fake.tensors[NORM] = torch.ones(63)
    with pytest.raises(ShapeError, match=r"`\(63,\)`, expected `\(64,\)`") as caught:
        load(fake)
    assert NORM in str(caught.value)


def test_wrong_shape_of_a_quantized_weight(fake: FakeModel) -> None:
    scheme, weight = fake.quantized[UP]
    fake.quantized[UP] = (scheme, weight.rows(0, 95))
    with pytest.raises(ShapeError, match="up_proj"):
        load(fake)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_codes_are_never_cast_to_floats(fake: FakeModel, dtype: torch.dtype) -> None:
    fake.tensors[NORM] = torch.ones(64).to(dtype)
    with pytest.raises(FormatMismatch, match=f"`{NORM}` is `{dtype}`"):
        load(fake)


def test_codes_as_the_weight_of_a_linear(fake: FakeModel) -> None:
    fake.tensors[f"{UP}.weight"] = fake.quantized.pop(UP)[1].codes
    with pytest.raises(FormatMismatch, match="up_proj"):
        load(fake)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [NORM, BIAS, "model.embed_tokens.weight"])
def test_floats_that_are_not_finite(fake: FakeModel, name: str, value: float) -> None:
    fake.tensors[name].reshape(-1)[-1] = value
    with pytest.raises(NonFiniteWeight, match=f"`{name}` holds NaN or infinity"):
        load(fake)


def test_leftover_tensor(fake: FakeModel) -> None:
    fake.tensors["model.layers.7.mlp.weight"] = torch.ones(2, 2)
    with pytest.raises(UnexpectedTensor, match=r"model\.layers\.7\.mlp\.weight"):
        load(fake)


def test_computed_tensors_are_dropped(fake: FakeModel) -> None:
    fake.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    assert load(fake).training is False


def test_zero_bias_of_a_layer_without_bias(fake: FakeModel) -> None:
    fake.tensors[f"{UP}.bias"] = torch.zeros(96)
    load(fake)
    fake.tensors[f"{UP}.bias"][5] = 1.0
    with pytest.raises(UnexpectedTensor, match=r"up_proj\.bias"):
        load(fake)


def test_floats_are_cast_to_the_dtype_of_the_model(fake: FakeModel) -> None:
    model = load_model(fake.source, device=CPU, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    logits = model(torch.tensor([[1, 2, 3]])).logits
    expected = fake.model(torch.tensor([[1, 2, 3]])).logits
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - expected).norm() < 0.03 * expected.norm()


def test_progress_counts_all_bytes(fake: FakeModel) -> None:
    class Counting:
        total, done = 0, 0

        def start(self, phase: str, *, total: int, unit: str) -> None:
            self.total = total

        def advance(self, amount: int, *, note: str = "") -> None:
            self.done += amount

        def finish(self) -> None:
            self.done = -self.done

    progress = Counting()
    load_model(fake.source, device=CPU, progress=progress)
    assert progress.total > 0
    assert progress.done == -progress.total


# -- ties -----------------------------------------------------------------------------------------

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def tied() -> FakeModel:
    fake = quantized_model("gemma2")
    assert HEAD not in fake.tensors
    return fake


def is_tied(model: nn.Module) -> bool:
    return model.get_parameter(HEAD) is model.get_parameter(EMBED)


def test_tied_head_is_one_parameter(tied: FakeModel) -> None:
    assert is_tied(load(tied))


def test_equal_head_in_the_files_stays_tied(tied: FakeModel) -> None:
    tied.tensors[HEAD] = tied.tensors[EMBED].clone()
    assert is_tied(load(tied))


def test_only_the_head_in_the_files(tied: FakeModel) -> None:
    tied.tensors[HEAD] = tied.tensors.pop(EMBED)
    model = load(tied)
    assert is_tied(model)
    assert torch.equal(model.get_parameter(EMBED), tied.tensors[HEAD])


def test_other_head_in_the_files_unties(tied: FakeModel, caplog: pytest.LogCaptureFixture) -> None:
    tied.tensors[HEAD] = tied.tensors[EMBED] + 1
    with caplog.at_level(logging.WARNING, "quantload"):
        model = load(tied)
    assert not is_tied(model)
    assert "lm_head.weight" in caplog.text
    assert model.config.tie_word_embeddings is False
    assert torch.equal(model.get_parameter(HEAD), tied.tensors[HEAD])
    assert torch.equal(model.get_parameter(EMBED), tied.tensors[EMBED])


def test_neither_in_the_files(tied: FakeModel) -> None:
    del tied.tensors[EMBED]
    with pytest.raises(MissingTensor, match=r"embed_tokens\.weight"):
        load(tied)


def test_quantized_head_is_not_tied(tied: FakeModel) -> None:
    scheme = parse_scheme("W8A16:g32")
    assert scheme.weight is not None
    weight = quantize_rtn(tied.tensors[EMBED], scheme.weight)
    tied.quantized["lm_head"] = (scheme, weight)
    model = load(tied)
    assert torch.equal(model.get_submodule("lm_head").weight, weight.dequantize())
    assert model.config.tie_word_embeddings is False


def test_missing_head_of_an_untied_model(fake: FakeModel) -> None:
    del fake.tensors[HEAD]
    with pytest.raises(MissingTensor, match=r"lm_head\.weight"):
        load(fake)
