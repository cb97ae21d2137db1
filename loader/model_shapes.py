"""Shapes of a model's parameters, for formats whose files do not tell them.

The transformers model is built without memory. This takes seconds, so that it is asked only where
tensors leave several shapes open.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from quantload.errors import ModelError
from quantload.mappers.dtype_names import check_dtypes, without_prefixes

_EXPERT = re.compile(r"(?P<block>.*\.experts)\.\d+\.(?P<projection>\w+)")
_FUSED = {  # projection of one expert -> parameter of all, and its share of the rows
    "gate_proj": ("gate_up_proj", 2),
    "up_proj": ("gate_up_proj", 2),
    "w1": ("gate_up_proj", 2),
    "w3": ("gate_up_proj", 2),
    "w2": ("down_proj", 1),
}


def parameter_shapes(config: Mapping[str, Any], checkpoint_name: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter of the model that a config describes, by name.

    Args:
        config: Content of config.json; a quantization config in it is ignored.
        checkpoint_name: For messages.

    Raises:
        ModelError: transformers does not know the architecture, or cannot build this config.
    """
    import transformers  # seconds

    check_dtypes(config)
    values = without_prefixes({k: v for k, v in config.items() if k != "quantization_config"})
    try:
        hf_config = transformers.CONFIG_MAPPING[str(config.get("model_type"))].from_dict(values)
        named = (getattr(transformers, str(name), None) for name in config["architectures"])
        model_class: Any = next(found for found in named if found is not None)
        with torch.device("meta"):
            model = model_class._from_config(hf_config)
    except Exception as error:  # transformers raises whatever a config leads to
        raise ModelError(
            f"transformers {transformers.__version__} cannot build the model of "
            f"`{checkpoint_name}`: {type(error).__name__}: {error}"
        ) from error
    parameters = model.named_parameters(remove_duplicate=False)
    return {name: tuple(parameter.shape) for name, parameter in parameters}


def output_features(shapes: Mapping[str, tuple[int, ...]], module: str) -> int | None:
    """Return N of a linear layer, or of one expert's projection; None if the model has none.

    Args:
        shapes: From `parameter_shapes`.
        module: Name of the layer.
    """
    shape = shapes.get(f"{module}.weight")
    if shape is not None:
        return shape[0] if len(shape) == 2 else None
    match = _EXPERT.fullmatch(module)
    if match is None:
        return None
    name, parts = _FUSED.get(match["projection"], (match["projection"], 1))
    shape = shapes.get(f"{match['block']}.{name}", ())
    return shape[1] // parts if len(shape) == 3 else None
