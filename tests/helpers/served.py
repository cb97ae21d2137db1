"""Small llamas in compressed-tensors, written by hand: right shapes and dtypes, random codes.

They are what serving engines load; tests break one thing each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tiny_checkpoints as tiny
import torch
from torch import Tensor

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_INT = {"type": "int", "dynamic": False}
_FLOAT = {"type": "float", "symmetric": True, "dynamic": False}
_TOKENS = {"strategy": "token", "symmetric": True, "dynamic": True, "num_bits": 8}


def _group(layout: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None):
    return {
        "format": layout,
        "targets": ["Linear"],
        "weights": dict(weights),
        "input_activations": None if inputs is None else dict(inputs),
        "output_activations": None,
    }


def _int(bits: int, *, symmetric: bool = True, group_size: int = 32) -> dict[str, Any]:
    return {
        **_INT,
        "num_bits": bits,
        "symmetric": symmetric,
        "strategy": "group",
        "group_size": group_size,
    }


_NVFP4 = {**_FLOAT, "num_bits": 4, "strategy": "tensor_group", "group_size": 16}
GROUPS: dict[str, dict[str, Any]] = {
    "W4A16": _group("pack-quantized", _int(4)),
    "W4A16_ASYM": _group("pack-quantized", _int(4, symmetric=False)),
    "W8A16": _group("pack-quantized", _int(8)),
    "W3A16": _group("pack-quantized", _int(3)),
    "W8A8": _group(
        "int-quantized",
        {**_INT, "num_bits": 8, "symmetric": True, "strategy": "channel"},
        {**_TOKENS, "type": "int"},
    ),
    "FP8_DYNAMIC": _group(
        "float-quantized",
        {**_FLOAT, "num_bits": 8, "strategy": "channel"},
        {**_TOKENS, "type": "float"},
    ),
    "FP8": _group(
        "float-quantized",
        {**_FLOAT, "num_bits": 8, "strategy": "tensor"},
        {**_FLOAT, "num_bits": 8, "strategy": "tensor"},
    ),
    "FP8_BLOCK": _group(
        "float-quantized",
        {**_FLOAT, "num_bits": 8, "strategy": "block", "block_structure": [32, 32]},
        {**_FLOAT, "num_bits": 8, "strategy": "group", "group_size": 32, "dynamic": True},
    ),
    "NVFP4A16": _group("nvfp4-pack-quantized", _NVFP4),
}


def tensors_of(kind: str, rows: int, columns: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Tensors of one layer [rows, columns], by leaf."""

    def integers(*shape: int, dtype: torch.dtype) -> Tensor:
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max, shape, generator=generator, dtype=dtype)

    def scales(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return (torch.rand(shape, generator=generator) * 0.01 + 0.001).to(dtype)

    def floats8(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)

    if kind.endswith(("A16", "A16_ASYM")) and kind[0] == "W":
        bits, groups = int(kind[1]), columns // 32
        made = {
            "weight_packed": integers(rows, math.ceil(columns * bits / 32), dtype=torch.int32),
            "weight_scale": scales(rows, groups),
            "weight_shape": torch.tensor([rows, columns]),
        }
        if kind.endswith("_ASYM"):
            words = math.ceil(rows * bits / 32)
            made["weight_zero_point"] = integers(words, groups, dtype=torch.int32)
        return made
    if kind == "W8A8":
        weight = integers(rows, columns, dtype=torch.int8)
        return {"weight": weight, "weight_scale": scales(rows, 1)}
    if kind == "NVFP4A16":
        return {
            "weight_packed": integers(rows, columns // 2, dtype=torch.uint8),
            "weight_scale": (scales(rows, columns // 16) * 1e4).to(torch.float8_e4m3fn),
            "weight_global_scale": torch.tensor([2.0]),
        }
    shape = {"FP8": (1,), "FP8_DYNAMIC": (rows, 1)}.get(
        kind, (math.ceil(rows / 32), math.ceil(columns / 32))
    )
    made = {"weight": floats8(rows, columns), "weight_scale": scales(*shape)}
    if kind == "FP8":
        made = {**made, "weight_scale": torch.tensor([0.01]), "input_scale": torch.tensor([0.5])}
    return made


Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


def llama(folder: Path, kind: str = "W4A16", *, change: Change | None = None, **sizes: Any) -> Path:
    """Write a llama of two layers whose linear layers are quantized.

    Args:
        folder: New folder.
        kind: A key of `GROUPS`.
        change: Changes config and tensors before they are written.
        sizes: See `tiny_checkpoints.config`; widths are 128 and 256 if left out.
    """
    content = tiny.config(**{"hidden": 128, "intermediate": 256, **sizes})
    made, generator = tiny.tensors(content), torch.Generator().manual_seed(1)
    for name in [n for n in made if n.split(".")[-2] in LAYERS and n.endswith(".weight")]:
        module = name.removesuffix(".weight")
        rows, columns = made.pop(name).shape
        for leaf, tensor in tensors_of(kind, rows, columns, generator).items():
            made[f"{module}.{leaf}"] = tensor
    group = GROUPS[kind]
    content["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": group["format"],
        "config_groups": {"group_0": {**group, "targets": ["Linear"]}},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "version": "0.20.1",
    }
    if change is not None:
        change(content, made)
    tiny.write(folder, content, {n: t.clone().contiguous() for n, t in made.items()})
    (folder / "tokenizer.json").write_text("{}")
    return folder
