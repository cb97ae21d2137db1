"""How a model is decoded: by a fused step where one is built for it, else by its own forward."""

from __future__ import annotations

from torch import nn

from quantload.errors import ModelError
from quantload.layers.step_model import TransformersStepModel, why_not_decodable
from quantload.runtime.step_model import StepModel


def step_model(model: nn.Module, *, fused: bool | None = None) -> tuple[StepModel, str]:
    """Return what decodes a model, and why that is not a fused step ("" if it is one).

    Args:
        model: A loaded causal model.
        fused: True takes the fused step or fails, False never takes it; None takes it where it is
            built for the model.

    Raises:
        ModelError: The model is no decoder, or `fused` is asked for and is not built for it.
    """
    why = "switched off"
    if fused is not False:
        found = _fused(model)
        if not isinstance(found, str):
            return found, ""
        why = found
        if fused:
            raise ModelError(f"no fused decoding of `{type(model).__name__}`: {why}")
    if reason := why_not_decodable(model):
        raise ModelError(reason, hint="call its own `generate`, if it has one")
    return TransformersStepModel(model), why  # type: ignore[arg-type]  # it is one, see above


def _fused(model: nn.Module) -> StepModel | str:
    try:
        from quantload.layers.fused_decoder import fused_decoder
    except ImportError as error:
        return f"cannot be imported: {error}"
    return fused_decoder(model)


__all__ = ["step_model"]
