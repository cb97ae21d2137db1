"""What a transformers model does in one forward, as far as a fused decode step must know it.

The model is run on a few tokens with hooks on its decoder's parts and with an attention function
that takes notes. Nothing is read from names: which layers there are, what each is given, in which
order the parts of a layer are called and with what, comes from the calls.

Letters: T tokens, H width of the model, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import eager_mask

from quantload.layers.attention import attention_forward
from quantload.layers.meta_model import TransformersModel

_RECORDING = "quantload_step_recording"


@dataclass
class Call:
    """A call of a module.

    Args:
        module: What was called.
        args: Its arguments.
        kwargs: Its keyword arguments.
        result: What it returned.
    """

    module: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    result: Any = None

    @property
    def x(self) -> Tensor | None:
        """The first tensor it was given."""
        values = (*self.args, *self.kwargs.values())
        return next((value for value in values if isinstance(value, Tensor)), None)

    @property
    def output(self) -> Any:  # noqa: ANN401 - a tensor of most modules
        """What it returned, of a tuple the first."""
        return self.result[0] if isinstance(self.result, tuple) else self.result


@dataclass(frozen=True)
class HeadsCall:
    """A call of attention.

    Args:
        query: Shape [B, heads, T, D].
        key: Shape [B, KV, T, D].
        value: Shape [B, KV, T, V].
        options: Keyword arguments: scaling, window, soft cap, sinks.
    """

    query: torch.Size
    key: torch.Size
    value: torch.Size
    options: Mapping[str, Any]


@dataclass
class Recording:
    """What one forward called.

    Args:
        calls: Of every module that was listened to, in the order in which they began.
        heads: Calls of attention, by id of the attention module.
    """

    calls: list[Call] = field(default_factory=list)
    heads: dict[int, HeadsCall] = field(default_factory=dict)

    def of(self, module: nn.Module) -> Call | None:
        """Return the one call of a module; None if there were none or several."""
        found = [call for call in self.calls if call.module is module]
        return found[0] if len(found) == 1 else None

    def among(self, modules: Sequence[nn.Module]) -> list[Call]:
        """Return the calls of any of these modules, in their order."""
        known = {id(module) for module in modules}
        return [call for call in self.calls if id(call.module) in known]


@contextmanager
def recording(model: nn.Module, listened: Sequence[nn.Module]) -> Iterator[Recording]:
    """Take note of calls of `listened` and of attention, which runs by `attention_forward`.

    Masks are additive and never left out, as `eager` functions take them.
    """
    record = Recording()

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ANN401 - any module's
        record.calls.append(Call(module, args, kwargs))

    def end(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:  # noqa: ANN401
        for call in reversed(record.calls):
            if call.module is module and call.result is None:
                call.result = result
                return

    with ExitStack() as stack:
        stack.enter_context(_attention_noted(model, record))
        for module in listened:
            before = module.register_forward_pre_hook(begin, with_kwargs=True)
            after = module.register_forward_hook(end, with_kwargs=True)
            stack.callback(before.remove)
            stack.callback(after.remove)
        yield record


@contextmanager
def _attention_noted(model: nn.Module, record: Recording) -> Iterator[None]:
    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **options: Any,  # noqa: ANN401 - of any model
    ) -> tuple[Tensor, Tensor | None]:
        record.heads[id(module)] = HeadsCall(query.shape, key.shape, value.shape, options)
        return attention_forward(module, query, key, value, mask, **options)

    AttentionInterface.register(_RECORDING, forward)
    AttentionMaskInterface.register(_RECORDING, eager_mask)
    configs = _configs(model)
    before = [config._attn_implementation_internal for config in configs]
    try:
        for config in configs:
            config._attn_implementation_internal = _RECORDING
        yield
    finally:
        AttentionInterface.register(_RECORDING, attention_forward)  # lets go of the record
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name


def _configs(model: nn.Module) -> list[PreTrainedConfig]:
    found = (getattr(module, "config", None) for module in model.modules())
    return list({id(c): c for c in found if isinstance(c, PreTrainedConfig)}.values())


def decoder_layers(model: TransformersModel) -> tuple[nn.Module, nn.ModuleList] | str:
    """Return the module that holds the decoder's layers, and these; or why there are none.

    They are the outermost list of modules that are called with hidden states, each of which has
    attention inside.
    """
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) and _have_attention(module):
            return model.get_submodule(path.rpartition(".")[0]), module
    return "it has no list of layers with attention inside"


def _have_attention(layers: nn.ModuleList) -> bool:
    return all(any(is_attention(child) for child in layer.modules()) for layer in layers)


def is_attention(module: nn.Module) -> bool:
    """True for modules that say whether they are causal: attention, by transformers' rules."""
    return isinstance(getattr(module, "is_causal", None), bool) and hasattr(module, "layer_idx")


__all__ = ["Call", "HeadsCall", "Recording", "decoder_layers", "is_attention", "recording"]
