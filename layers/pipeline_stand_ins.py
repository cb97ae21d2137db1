"""What stands in the places of modules that other stages of a pipeline hold: no weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quantload.errors import ModelError
from quantload.runtime.parallel import Parallel


class Passed(nn.Module):
    """Stands for a layer of another stage: lets hidden states through.

    A cache counts its tokens by its first layer, and masks are made for it: so an entry without
    content is made for each layer.

    Args:
        layer: The layer; only what model code asks it before it calls it is kept: its attributes,
            and names of what is in it, such as the languages that adapters are for.
        index: Its number among the layers; None if it has no place in a cache.
        returned: How many parts the tuple has that it returns; 0 if it returns no tuple.
    """

    def __init__(self, layer: nn.Module, *, index: int | None, returned: int = 0) -> None:
        super().__init__()
        _keep_numbers(self, layer)
        self.__dict__["parts"] = _without_weights(layer)  # not registered: none of it is here
        own = {getattr(part, "layer_idx", None) for part in layer.modules() if part is not layer}
        numbers = sorted(number for number in own if isinstance(number, int))
        # several, if the layer has more than one attention
        self.indices = () if index is None else tuple(numbers) or (index,)
        self.returned = returned

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as that of a module
        """Return an attribute, or the empty stand-in of a module of the layer."""
        parts = self.__dict__.get("parts")
        if parts is not None and name in parts._modules:
            return parts._modules[name]
        return super().__getattr__(name)

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: Any) -> Any:  # noqa: ANN401
        """Return the hidden states as they are.

        Raises:
            ModelError: The model keeps what it computed of earlier tokens in something unknown.
        """
        caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
        if caches:
            for index in self.indices:
                _fill(caches[0], index, hidden_states)
        elif kwargs.get("use_cache") and self.indices:
            raise ModelError(
                f"layer {self.indices[0]} is given no cache of transformers, which stages need",
                hint="pass `use_cache=False`",
            )
        rest = (None,) * (self.returned - 1)
        return (hidden_states, *rest) if self.returned else hidden_states


def _keep_numbers(stand_in: nn.Module, module: nn.Module) -> None:
    for name, value in vars(module).items():
        if isinstance(value, str | int | float) and not name.startswith("_"):
            setattr(stand_in, name, value)


def _without_weights(module: nn.Module) -> nn.Module:
    """Return modules of the same names that hold and compute nothing."""
    parts = {name: _without_weights(part) for name, part in module.named_children()}
    if isinstance(module, nn.ModuleDict):
        return nn.ModuleDict(parts)
    if isinstance(module, nn.ModuleList):
        return nn.ModuleList(parts.values())
    found = nn.Module()
    _keep_numbers(found, module)
    for name, part in parts.items():
        found.add_module(name, part)
    return found


def _is_cache(value: object) -> bool:
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def _fill(cache: Any, index: int, x: Tensor) -> None:  # noqa: ANN401 - of transformers
    """Make an entry without content for the tokens of x [B, T, H] in a layer of a cache."""
    batch, tokens = x.shape[:2]
    layer = cache.layers[index] if index < len(cache.layers) else None
    if layer is None or hasattr(layer, "get_seq_length"):  # not what has no cache at all
        empty = x.new_zeros(batch, 1, tokens, 1)
        cache.update(empty, empty, index)
    for state in getattr(layer, "has_previous_state", ()):
        cache.update_conv_state(x.new_zeros(batch, 1, tokens), index, state)


def _keep_weight(module: nn.Module, of: nn.Module) -> None:
    """Give a module an empty weight of another's dtype and width, which model code may ask for."""
    weight = of.weight
    assert isinstance(weight, Tensor), "it has a weight"
    empty = torch.empty(0, weight.shape[-1], dtype=weight.dtype)
    module.register_buffer("weight", empty, persistent=False)


class NoEmbedding(nn.Module):
    """Stands for the embedding of the first stage: zeros of its shape, which nobody reads.

    Args:
        embedding: The embedding.
    """

    weight: Tensor

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        _keep_weight(self, embedding)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map [B, T] to zeros [B, T, H]."""
        return self.weight.new_zeros(*input_ids.shape, self.weight.shape[-1])


class Awaited(nn.Module):
    """Stands for the head of the last stage: returns what that computes.

    Args:
        parallel: Which stage this is.
        head: The head.
    """

    weight: Tensor

    def __init__(self, parallel: Parallel, head: nn.Module) -> None:
        super().__init__()
        self.parallel = parallel
        if hasattr(head, "weight"):
            _keep_weight(self, head)
        self.width = head.out_features if isinstance(head, nn.Linear) else None

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        """Map [..., H] to the last stage's result for it."""
        shape = (*hidden_states.shape[:-1], self.width or hidden_states.shape[-1])
        return self.parallel.broadcast(hidden_states.new_empty(shape), -1)


__all__ = ["Awaited", "NoEmbedding", "Passed"]
