"""What may be done with a loaded model: copies, pickles, moves; and what it refuses."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_source import quantized_model
from torch import Tensor, nn

from quantload.api import load_model
from quantload.errors import ModelError

CPU = torch.device("cpu")
IDS = torch.tensor([[1, 5, 9, 100, 7, 33, 2, 64]])


def load(scheme: object, dtype: torch.dtype = torch.float32, **options: object) -> nn.Module:
    fake = quantized_model("llama", scheme)  # type: ignore[arg-type]
    return load_model(fake.source, device=CPU, dtype=dtype, **options)  # type: ignore[arg-type]


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


# -- copies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["W4A16:g32", "W8A8", "FP8_BLOCK", {}])
@pytest.mark.parametrize("clone", [copy.deepcopy, pickled])
def test_copies_run_on_their_own(scheme: object, clone: Callable[[nn.Module], nn.Module]) -> None:
    model = load(scheme)
    expected = logits(model)
    twin = clone(model)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.zero_()
    assert torch.equal(logits(twin), expected)
    assert not torch.equal(logits(model), expected)


@pytest.mark.parametrize("clone", [copy.deepcopy, pickled])
def test_copies_are_moved_and_refuse_on_their_own(
    clone: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    model = load("W4A16:g32")
    twin = clone(model)
    assert twin.to("meta") is twin
    assert {tensor.device.type for tensor in twin.state_dict().values()} == {"meta"}
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}
    with pytest.raises(ModelError):
        twin.half()
    with pytest.raises(ModelError):
        twin.save_pretrained(tmp_path)


def test_a_model_is_freed_without_the_garbage_collector() -> None:
    model = load("W4A16:g32")
    alive = weakref.ref(model.lm_head.weight)
    gc.collect()
    gc.disable()
    try:
        del model
        assert alive() is None
    finally:
        gc.enable()


# -- saving ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["W4A16:g32", {}])
@pytest.mark.parametrize("part", ["", "model"])
def test_saving_is_refused(scheme: object, part: str, tmp_path: Path) -> None:
    model = load(scheme).get_submodule(part)
    with pytest.raises(ModelError, match="cannot be saved") as caught:
        model.save_pretrained(tmp_path / "saved")
    assert "quantload convert" in caught.value.hint
    assert not (tmp_path / "saved").exists()


def test_an_untouched_model_is_saved(tmp_path: Path) -> None:
    load({}, fuse=False).save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()


# -- dtype and device ------------------------------------------------------------------------------


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_BLOCK", "W4A16:g32", "W8A8"])
@pytest.mark.parametrize(
    "same", [lambda model: model.to(torch.bfloat16), lambda model: model.bfloat16()]
)
def test_the_same_dtype_changes_no_layer(
    scheme: str, same: Callable[[nn.Module], nn.Module]
) -> None:
    model = load(scheme, torch.bfloat16)
    expected, before = logits(model), dtypes(model)
    assert torch.equal(logits(same(model)), expected)
    assert dtypes(model) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.half(),
        lambda model: model.float(),
        lambda model: model.to(torch.float64),
        lambda model: model.to("meta", torch.float16),
        lambda model: model.type(torch.float16),
        lambda model: model.model.half(),
    ],
)
def test_another_dtype_is_refused_before_anything_is_changed(
    change: Callable[[nn.Module], nn.Module],
) -> None:
    model = load({"down_proj": "FP8_DYNAMIC"}, torch.bfloat16)
    expected, before = logits(model), dtypes(model)
    with pytest.raises(ModelError, match=r"packed for `torch.bfloat16`, found `torch.float") as e:
        change(model)
    assert "dtype=" in e.value.hint
    assert dtypes(model) == before
    assert torch.equal(logits(model), expected)


def test_a_single_layer_refuses_too() -> None:
    model = load("FP8_DYNAMIC", torch.bfloat16)
    with pytest.raises(ModelError, match="packed for"):
        model.model.layers[0].half()


def test_a_dense_model_is_cast() -> None:
    model, expected = load({}).to(torch.bfloat16), load({}, torch.bfloat16)
    assert all(
        torch.equal(t, expected.state_dict()[name]) for name, t in model.state_dict().items()
    )
    assert model.model.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16
    assert logits(model).dtype == torch.bfloat16


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "W4A16:g32", "W8A8"])
def test_moves_keep_dtypes(scheme: str) -> None:
    model = load(scheme, torch.bfloat16)
    before = dtypes(model)
    assert dtypes(model.to("meta", torch.bfloat16)) == before
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}
