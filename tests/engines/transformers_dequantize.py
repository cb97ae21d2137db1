"""Runs where transformers and accelerate are: load folders, write the weights that it dequantizes.

Usage: python transformers_dequantize.py FOLDER...

Writes FOLDER.safetensors: the weight [N, K] of each linear layer as transformers loads it without a
GPU, in the dtype of its model.
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


def weights(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return {
        name: module.weight.detach().contiguous()
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        save_file(weights(argument), f"{argument}.safetensors")
