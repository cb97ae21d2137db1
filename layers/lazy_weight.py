"""A tensor that is computed when somebody computes with it.

Code of models reads `self.weight.dtype` or `.device` of a layer on every call; decoding a whole
quantized weight for that would take longer than the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class LazyWeight(Tensor):
    """Has shape, dtype and device; any operation on it works on the tensor that it stands for."""

    _compute: Callable[[], Tensor]

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self._compute())

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,  # noqa: ANN401 - the protocol of torch
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Compute what is lazy, then do what was asked for."""
        args, kwargs = tree_map_only(cls, lambda lazy: lazy._compute(), (args, kwargs or {}))
        return func(*args, **kwargs)


def lazy_weight(
    compute: Callable[[], Tensor],
    shape: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> LazyWeight:
    """Return a tensor that is computed when somebody computes with it.

    Args:
        compute: Returns the tensor.
        shape: Its shape.
        dtype: Its dtype.
        device: Its device.
    """
    made: LazyWeight = Tensor._make_wrapper_subclass(
        LazyWeight, tuple(shape), dtype=dtype, device=device
    )
    made._compute = compute
    return made


__all__ = ["LazyWeight", "lazy_weight"]
