"""Runs inside the environment that holds ModelOpt: write the dequantized weights of folders.

Usage: python modelopt_dequantize.py FOLDER...

Writes FOLDER.safetensors: the weight [N, K] of each quantized module in float32, by the classes of
ModelOpt that its export uses. ModelOpt has no reader for its own export: those of int4 are found by
packing: what is written is the weight whose `pack_int4_in_uint8` is the tensor in the file. Also
checks that config.json says what ModelOpt makes of hf_quant_config.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
from modelopt.torch.export.quant_utils import from_quantized_weight, pack_int4_in_uint8
from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor
from safetensors.torch import load_file, save_file

FLOAT = torch.float32


def e4m3(codes, scale, block=None):
    blocks = {-1: block, -2: block} if block else None
    tensor = FP8QTensor(codes.shape, FLOAT, codes)
    return tensor.dequantize(dtype=FLOAT, scale=scale, block_sizes=blocks)


def int4(codes, scale, size):
    low, high = codes & 15, codes >> 4
    fields = torch.stack([low, high], dim=1).flatten(0, 1).to(torch.int16)
    values = torch.where(fields > 7, fields - 16, fields) * scale.repeat_interleave(size, dim=1)
    assert torch.equal(pack_int4_in_uint8(values, scale, size), codes)
    return values


def dequantized(parts, facts):
    codes, scale = parts["weight"], parts["weight_scale"]
    match facts["quant_algo"]:
        case "FP8":
            return e4m3(codes, scale)
        case "FP8_PER_CHANNEL_PER_TOKEN":
            return e4m3(codes, scale[:, None])
        case "FP8_PB_WO":
            rows, columns = codes.shape
            return e4m3(codes, scale.reshape(-(-rows // 128), -(-columns // 128)), 128)
        case "MXFP8":
            return MXFP8QTensor(codes.shape, FLOAT, codes).dequantize(dtype=FLOAT, scale=scale)
        case "NVFP4" | "W4A16_NVFP4":
            tensor = NVFP4QTensor((codes.shape[0], 2 * codes.shape[1]), FLOAT, codes)
            return tensor.dequantize(
                dtype=FLOAT,
                scale=scale,
                double_scale=parts["weight_scale_2"],
                block_sizes={-1: facts["group_size"]},
            )
        case "W4A16_AWQ":
            return int4(codes, scale, facts.get("group_size") or codes.shape[1])
        case "W8A16":
            return from_quantized_weight(codes, scale, "int8_wo", FLOAT)
    raise AssertionError(facts)


def weights(folder):
    nested = json.loads((folder / "hf_quant_config.json").read_text())
    flat = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert convert_hf_quant_config_format(nested) == flat
    facts = nested["quantization"]
    tensors = load_file(folder / "model.safetensors")
    found = {}
    for module in [n.removesuffix(".weight_scale") for n in tensors if n.endswith(".weight_scale")]:
        prefix = f"{module}."
        parts = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        of_layer = facts.get("quantized_layers", {}).get(module, facts)
        found[module] = dequantized(parts, of_layer).to(FLOAT).contiguous()
    return found


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        save_file(weights(Path(argument)), f"{argument}.safetensors")
