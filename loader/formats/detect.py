"""Which format a checkpoint is in: `quant_method` of its config, or what stands for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantload.loader.checkpoint import Checkpoint

# Formats that are known and not read: method -> (title, way out).
_DEQUANTIZE = "load it with transformers and its own package, dequantize it, and save it"
_FULL = "start from the full-precision model"
REFUSED: dict[str, tuple[str, str]] = {
    "aqlm": ("AQLM, additive codebooks", _FULL),
    "bitnet": ("BitNet, ternary weights", _DEQUANTIZE),
    "eetq": ("EETQ int8 in a kernel's layout", _FULL),
    "fouroversix": ("Four Over Six FP4", _FULL),
    "fp_quant": ("FP-Quant, Hadamard-rotated FP4", _DEQUANTIZE),
    "gemma": ("Gemma's mixed 2, 4 and 8 bits", _DEQUANTIZE),
    "higgs": ("HIGGS, Hadamard-rotated lattices", _DEQUANTIZE),
    "metal": ("MLX affine", "convert it with `mlx_lm.convert --dequantize`"),
    "nvfp4": ("transformers' online NVFP4", _FULL),
    "qqq": ("QQQ, W4A8 in a kernel's layout", _FULL),
    "sinq": ("SINQ, two scale axes", _DEQUANTIZE),
    "spqr": ("SpQR, sparse outliers", _FULL),
    "vptq": ("VPTQ, vector codebooks", _FULL),
}


def method_of(checkpoint: Checkpoint) -> str | None:
    """Return the quantization method that the config states or implies; None if it is unknown.

    Args:
        checkpoint: One that has a quantization config.
    """
    config = checkpoint.quantization_config
    assert config is not None, "only checkpoints with a quantization config have a method"
    stated = config.get("quant_method")
    if stated is not None:
        return str(stated).lower()
    return _implied_method(config, checkpoint.quantization_config_file)


def _implied_method(config: Mapping[str, Any], file_name: str) -> str | None:
    """Recognize configs from before `quant_method`, or of files of their own."""
    producer = config.get("producer")
    if isinstance(producer, Mapping) and producer.get("name") == "modelopt":
        return "modelopt"
    if file_name == "hf_quant_config.json" and "quantization" in config:
        return "modelopt"
    if config.get("load_in_4bit") or config.get("load_in_8bit"):
        return "bitsandbytes"
    if "config_groups" in config:
        return "compressed-tensors"
    if {"w_bit", "q_group_size"} & config.keys() or "zero_point" in config:
        return "awq"
    if "bits" in config and file_name in ("quantize_config.json", "config.json"):
        return "gptq"
    if file_name == "quanto_qmap.json":
        return "quanto"
    if file_name == "quantization_config.json" and "bits" in config:
        return "auto-round"
    return None
