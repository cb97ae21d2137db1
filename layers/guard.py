"""What a loaded model refuses as a whole, since its layers are not those of its architecture.

    save_pretrained   would write packed weights under names that nothing reads
    .to(dtype)        would cast codes and scales; refused before the first module is changed

Both are set on instances: the classes are those of transformers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor, nn

from quantload.errors import ModelError
from quantload.layers.linear import QuantLinear
from quantload.layers.meta_model import TransformersModel


def guard(model: TransformersModel) -> None:
    """Let a model, and the models inside it, refuse what their layers cannot do."""
    for part in model.modules():
        if isinstance(part, TransformersModel) and _layers(part):
            part.__dict__["save_pretrained"] = refuse_to_save
            part.__dict__["_apply"] = CheckedApply(part)


def _layers(model: nn.Module) -> list[QuantLinear]:
    return [module for module in model.modules() if isinstance(module, QuantLinear)]


def refuse_to_save(*_: object, **__: object) -> NoReturn:
    """Stand in for `save_pretrained`.

    Raises:
        ModelError: Always.
    """
    raise ModelError(
        "a model with packed or fused layers cannot be saved by `save_pretrained`",
        hint="the folder that it was loaded from already is its checkpoint; `quantload convert` "
        "writes one in another scheme or dtype",
    )


class CheckedApply:
    """Stands in for a model's `_apply`, which `.to`, `.half` and the like call.

    Args:
        model: The model, held weakly: a cycle would keep its memory until the garbage collector
            runs.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle with the model, so that the copy of a model gets one of its own."""
        return CheckedApply, (self._model(),)

    def __call__(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Ask all layers before the first tensor is changed.

        Raises:
            ModelError: A quantized layer cannot change its dtype.
        """
        model = self._model()
        assert model is not None, "called through the model"
        for layer in _layers(model):
            layer.check_dtype(fn)
        return type(model)._apply(model, fn, recurse)  # type: ignore[no-any-return, no-untyped-call]
