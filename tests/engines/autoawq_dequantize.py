"""Runs inside the environment that holds AutoAWQ: write the dequantized weights of folders.

Usage: python autoawq_dequantize.py FOLDER...

Writes FOLDER.safetensors: the weight [N, K] of each quantized module, by AutoAWQ's own code, in
float16. Its layers are filled one by one, since its models want older transformers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from awq.modules.linear.gemm import WQLinear_GEMM
from awq.utils.packing_utils import dequantize_gemm
from safetensors.torch import load_file, save_file


def weights(folder):
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    tensors = load_file(folder / "model.safetensors")
    found = {}
    for module in [n.removesuffix(".qweight") for n in tensors if n.endswith(".qweight")]:
        parts = {leaf: tensors[f"{module}.{leaf}"] for leaf in ("qweight", "qzeros", "scales")}
        columns, rows = parts["qweight"].shape[0], parts["scales"].shape[1]
        layer = WQLinear_GEMM(config["bits"], config["group_size"], columns, rows, False, "cpu")
        assert {n: (t.dtype, t.shape) for n, t in layer.state_dict().items()} == {
            n: (t.dtype, t.shape) for n, t in parts.items()
        }, module
        layer.load_state_dict(parts)
        values = dequantize_gemm(
            layer.qweight, layer.qzeros, layer.scales, layer.w_bit, layer.group_size
        )
        found[module] = values.T.to(torch.float16).contiguous()
    return found


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        save_file(weights(Path(argument)), f"{argument}.safetensors")
