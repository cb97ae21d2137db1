"""What transformers' class of configs for a model type makes of a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING

from quantload.mappers.dtype_names import DTYPE_KEYS, plain_name


def decoded(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Copy a JSON value as classes of transformers take it.

    It writes infinities as {"__float__": "Infinity"}; and of dtypes it takes the name alone, where
    other tools write `str(torch.float16)`.
    """
    if isinstance(value, dict):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {
            key: decoded(plain_name(part) if key in DTYPE_KEYS else part)
            for key, part in value.items()
        }
    return [decoded(part) for part in value] if isinstance(value, list) else value


def config_defaults(model_type: str) -> dict[str, Any]:
    """Return what transformers takes for keys that a config.json lacks; {} for unknown types."""
    return CONFIG_MAPPING[model_type]().to_dict() if model_type in CONFIG_MAPPING else {}


def effective_rope(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return `rope_parameters` of the text model as transformers completes them.

    With `max_position_embeddings` beside them, in each set where layers have their own. None if the
    class has none, does not take the config, or is unknown.
    """
    model_type = config.get("model_type")
    if model_type not in CONFIG_MAPPING:
        return None
    values = decoded({k: v for k, v in config.items() if k != "quantization_config"})
    try:
        text = CONFIG_MAPPING[str(model_type)].from_dict(values).get_text_config()
    except Exception:  # noqa: BLE001 - whatever a class says of values that it does not take
        return None
    rope = getattr(text, "rope_parameters", None)
    if not isinstance(rope, dict):
        return None
    length = {"max_position_embeddings": getattr(text, "max_position_embeddings", None)}
    if any(isinstance(value, dict) for value in rope.values()):
        return {k: {**v, **length} for k, v in rope.items() if isinstance(v, dict)}
    return {**rope, **length}


__all__ = ["config_defaults", "decoded", "effective_rope"]
