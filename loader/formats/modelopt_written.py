"""ModelOpt: its quantization config as it is written, in both spellings; see `modelopt_config.py`.

Source: `convert_hf_quant_config_format` of ModelOpt 0.47.0, which writes `config_groups` for three
algorithms and for mixed ones only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantload.errors import ConfigError, listed
from quantload.loader.formats.modelopt_config import MIXED

_CACHES: dict[object, str] = {(8, "float"): "FP8", (8, "int"): "INT8", (4, "float"): "NVFP4"}
_GROUPED = ("FP8", "NVFP4", "W4A16_NVFP4")
# algorithm -> bits and type of weights, bits of inputs (None: in full precision), further facts
_WEIGHTS: dict[str, tuple[int, str, int | None, Mapping[str, Any]]] = {
    "FP8": (8, "float", 8, {}),
    "FP8_PER_CHANNEL_PER_TOKEN": (8, "float", 8, {"strategy": "channel"}),
    "MXFP8": (8, "float", 8, {}),
    "NVFP4": (4, "float", 4, {}),
    "W4A16_NVFP4": (4, "float", None, {}),
    "W4A16_AWQ": (4, "int", None, {}),
    "W8A16": (8, "int", None, {}),
}


def flat_config(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Return the quantization config for config.json.

    Args:
        nested: Content of hf_quant_config.json.
    """
    details = nested["quantization"]
    algorithm, layers = details["quant_algo"], details.get("quantized_layers", {})
    made: dict[str, Any] = {}
    if algorithm in _GROUPED:
        made["config_groups"] = {"group_0": {**_group(details), "targets": ["Linear"]}}
    elif algorithm == MIXED:
        kinds: dict[tuple[tuple[str, Any], ...], list[str]] = {}
        for layer, facts in layers.items():
            kinds.setdefault(tuple(sorted(facts.items())), []).append(layer)
        made["config_groups"] = {
            f"group_{number}": {**_group(dict(kind)), "targets": sorted(names)}
            for number, (kind, names) in enumerate(kinds.items())
        }
        made["quantized_layers"] = layers
    made["ignore"] = details.get("exclude_modules", [])
    if algorithm:
        made["quant_algo"] = algorithm
    cache = details.get("kv_cache_quant_algo")
    if cache == "FP8":
        made["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    elif cache:
        made["kv_cache_scheme"] = cache
    return {**made, "producer": nested["producer"], "quant_method": "modelopt"}


def _group(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a group of `config_groups` says of weights and inputs."""
    algorithm = facts["quant_algo"]
    if algorithm not in _WEIGHTS:
        return {"quant_algo": algorithm}
    bits, kind, input_bits, further = _WEIGHTS[algorithm]
    size = {"group_size": facts["group_size"]} if "group_size" in facts else {}
    made: dict[str, Any] = {}
    if input_bits is not None:
        made["input_activations"] = {
            "dynamic": False,
            "num_bits": input_bits,
            "type": "float",
            **size,
        }
    made["weights"] = {"dynamic": False, "num_bits": bits, "type": kind, **further, **size}
    return made


def cache_algorithm(scheme: Mapping[str, Any] | None) -> str | None:
    """Return ModelOpt's name of how keys and values are cached.

    Args:
        scheme: In compressed-tensors' words; None if they are not quantized.

    Raises:
        ConfigError: ModelOpt has no name for it.
    """
    if scheme is None:
        return None
    bits, kind = scheme.get("num_bits"), scheme.get("type")
    name = _CACHES.get((bits, kind))
    if name is None or scheme.get("strategy", "tensor") == "channel":
        raise ConfigError(
            f"ModelOpt has no name for a key-value cache of {bits}-bit {kind}, expected "
            f"{listed(_CACHES.values())}",
            hint="write compressed-tensors",
        )
    return name
