"""Whether an attention function computes what the modules of a model compute by themselves.

Every attention module of transformers has an eager function beside its class, which knows what the
architecture does. One forward of four tokens, with an attention that only takes notes, tells what
each module passes; on random tensors of those shapes both functions have to agree.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import eager_mask

from quantload.layers.meta_model import TransformersModel, dummy_inputs

Attention = Callable[..., tuple[Tensor, Tensor | None]]

_RECORDING = "quantload_recording"
_LIMIT = 1e-5  # relative, float32


@dataclass(frozen=True)
class _Call:
    """One call of attention.

    Args:
        module: The attention module.
        tensors: Query, key and value.
        kwargs: What else it passed, without mask and parameters.
        parameters: Names of its parameters that it passed, by argument.
    """

    module: nn.Module
    tensors: tuple[Tensor, Tensor, Tensor]
    kwargs: dict[str, Any]
    parameters: dict[str, str]


@dataclass
class _Record:
    """Calls of attention in one forward."""

    calls: list[_Call] = field(default_factory=list)

    def forward(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: object,
        **kwargs: object,
    ) -> tuple[Tensor, None]:
        """Take note and return zeros [B, T, H, V]."""
        own = {id(p): name for name, p in module._parameters.items() if p is not None}
        passed = {key: own[id(value)] for key, value in kwargs.items() if id(value) in own}
        left_out = {"attention_mask", "indices", "output_attentions", *passed}
        kwargs = {key: value for key, value in kwargs.items() if key not in left_out}
        self.calls.append(_Call(module, (query, key, value), kwargs, passed))
        shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
        return query.new_zeros(shape), None


def compare_with_eager(
    model: TransformersModel, configs: Iterable[PreTrainedConfig], attention: Attention
) -> tuple[dict[int, str], str]:
    """Hold an attention function against the eager functions of a model's modules.

    Args:
        model: On the meta device or loaded.
        configs: Those of its modules.
        attention: As transformers' AttentionInterface calls it.

    Returns:
        By id of config the reason why it must not be switched, "" if it may; and why the forward
        could not be run, "" if it could.
    """
    try:
        calls = _record(model, list(configs))
    except Exception as error:  # noqa: BLE001 - model code raises anything
        return {}, f"its attention could not be probed: {type(error).__name__}: {error}"
    found: dict[int, str] = {}
    for call in calls:
        key = id(getattr(call.module, "config", None))
        if not found.get(key):
            found[key] = _difference(call, attention)
    return found, ""


def _record(model: TransformersModel, configs: list[PreTrainedConfig]) -> list[_Call]:
    record = _Record()
    AttentionInterface.register(_RECORDING, record.forward)
    AttentionMaskInterface.register(_RECORDING, eager_mask)  # model code may read the mask
    before = [config._attn_implementation_internal for config in configs]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        for config in configs:
            config._attn_implementation_internal = _RECORDING
        with torch.no_grad():
            _run(model, device)
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name
    return record.calls


def _run(model: TransformersModel, device: torch.device) -> None:
    """Run four tokens through the model; on the meta device without memory."""
    ids = {name: torch.ones_like(x, device=device) for name, x in dummy_inputs(model).items()}
    if device.type != "meta":
        model(**ids, use_cache=False)
        return
    named = (*model.named_parameters(), *model.named_buffers())
    meta = {
        name: torch.empty_like(
            tensor,
            device="meta",
            # grouped matrix products on the meta device want bfloat16
            dtype=torch.bfloat16 if tensor.is_floating_point() else tensor.dtype,
        )
        for name, tensor in named
    }
    torch.func.functional_call(model, meta, kwargs={**ids, "use_cache": False})


def _difference(call: _Call, attention: Attention) -> str:
    """Return how our attention differs from the module's own eager one; "" if it does not."""
    name = type(call.module).__name__
    eager = getattr(sys.modules.get(type(call.module).__module__), "eager_attention_forward", None)
    if eager is None:
        return f"`{name}` has no eager function to compare with"
    seed = torch.Generator().manual_seed(0)
    module = copy.copy(call.module)
    module._parameters = {key: _sample(p, seed) for key, p in module._parameters.items()}
    given = {key: _sample(value, seed) for key, value in call.kwargs.items()}
    given |= {key: module._parameters[parameter] for key, parameter in call.parameters.items()}
    query, key, value = (_sample(tensor, seed) for tensor in call.tensors)
    rows, columns = query.shape[2], key.shape[2]
    order = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
    mask = torch.where(order, 0.0, torch.finfo(torch.float32).min)[None, None]
    try:
        expected = eager(module, query, key, value, mask, **given)[0]
        found = attention(module, query, key, value, mask, **given)[0]
    except Exception as error:  # noqa: BLE001 - model code raises anything
        return f"`{name}` cannot be compared: {type(error).__name__}: {error}"
    difference = float((found - expected).norm() / expected.norm())
    if difference <= _LIMIT:
        return ""
    return (
        f"the eager attention of `{name}` differs by {difference:.1e} relative, expected at most "
        f"{_LIMIT:.0e}"
    )


def _sample(value: Any, seed: torch.Generator) -> Any:  # noqa: ANN401 - of any argument
    """Return random numbers in the shape of a float tensor; anything else as it is."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return torch.randn(value.shape, generator=seed)


__all__ = ["compare_with_eager"]
