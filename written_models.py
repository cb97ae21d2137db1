"""Load models that are written by hand: a registered class, filled as any model is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantload.arguments import check_flags, check_progress, check_type
from quantload.layers.model_leaves import mapper_by_hand
from quantload.layers.registry import build, model_class_for, set_schemes, tied_by_hand
from quantload.loader.assign import Assignment, assign
from quantload.loader.formats import open_source
from quantload.loader.model_dtype import own_dtype
from quantload.loader.open import open_checkpoint
from quantload.loader.source import Source
from quantload.progress import Progress
from quantload.runtime.devices import parse_device
from quantload.runtime.parallel import Parallel

_LOAD = "`quantload.load` builds the model of a checkpoint and fills it"


def load_weights(
    model: nn.Module,
    source: str | Path | Source,
    *,
    device: str | torch.device = "cpu",
    quantize_inputs: bool = True,
    exact: bool = True,
    progress: Progress | None = None,
) -> Assignment:
    """Fill a model that is written by hand with the tensors of a checkpoint, of any format.

    Names are those of its modules; the class attribute `name_rules` (`quantload.NameRules`) turns
    checkpoint names into these. Every element of the checkpoint and of the model is accounted for,
    and each process reads what it holds.

    Args:
        model: Its layers are those of `quantload.layers`, or plain ones of torch.
        source: A folder, a GGUF file, a hub id, or what `inspect` returned.
        device: Where the model shall live.
        quantize_inputs: See `load`.
        exact: See `load`.
        progress: Draws progress; silent by default.

    Raises:
        QuantloadError: Names or shapes do not fit, or the checkpoint is not sound.
    """
    check_type("model", model, nn.Module, expected="a model that is written by hand", hint=_LOAD)
    check_flags(quantize_inputs=quantize_inputs, exact=exact)
    check_progress(progress)
    place = parse_device(device)
    opened = source if isinstance(source, Source) else open_source(open_checkpoint(source))
    mapper = mapper_by_hand(model)
    _let_go_of_parameters(model)
    schemes = {name: w.scheme for name, w in opened.weights.items() if w.scheme is not None}
    if not quantize_inputs:
        schemes = {name: replace(scheme, input=None) for name, scheme in schemes.items()}
    set_schemes(model, mapper, schemes)
    done = assign(
        model,
        opened,
        mapper,
        device=place,
        tied=tied_by_hand(model),
        exact=exact,
        progress=progress,
    )
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(place)
    model.requires_grad_(False)
    return done


def _let_go_of_parameters(model: nn.Module) -> None:
    """Move parameters to the meta device: what they were created with is not what they shall be."""
    empty: dict[int, nn.Parameter] = {}  # one object stays one
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
                module._parameters[name] = empty.setdefault(id(parameter), found)


def load_written(
    source: Source,
    *,
    dtype: torch.dtype | None,
    parallel: Parallel | None,
    **options: Any,  # noqa: ANN401 - the keyword arguments of `load_weights`
) -> nn.Module | None:
    """Build and fill the model of a registered class; None if none serves the architecture.

    Args:
        source: An open checkpoint.
        dtype: dtype of the model; None takes the config's.
        parallel: This process among those that share layers; None is one process.
        options: Handed to the model's `load_weights`, or to the function here.
    """
    config = source.checkpoint.config
    model_class = model_class_for(config)
    if model_class is None:
        return None
    dtype = dtype or own_dtype(source)
    model = build(model_class, config, dtype=dtype, parallel=parallel or Parallel())
    own: Callable[..., object] | None = getattr(model, "load_weights", None)
    if own is None:
        load_weights(model, source, **options)
    else:
        own(source, **options)
    return model


__all__ = ["load_weights", "load_written"]
