"""Runs inside the environment that holds GPTQModel: load folders, write the dequantized weights.

Usage: python gptqmodel_dequantize.py FOLDER...

Writes FOLDER.safetensors: the weight [N, K] of each quantized module, by GPTQModel's own code, in
the dtype of its model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from gptqmodel import BACKEND, GPTQModel
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel


def add_tokenizer(folder):
    """GPTQModel asks for one."""
    tokenizer = Tokenizer(WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>"))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@torch.no_grad()
def weights(folder):
    """What modules of GPTQModel return for unit vectors: every product but one is zero."""
    kind = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    backend = BACKEND.TORCH_AWQ if kind == "awq" else BACKEND.TORCH
    model = GPTQModel.load(str(folder), device="cpu", backend=backend).model
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "qweight"):
            units = torch.eye(module.in_features, dtype=model.dtype)
            found[name] = module(units).T.contiguous()
    return found


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        add_tokenizer(Path(argument))
        save_file(weights(Path(argument)), f"{argument}.safetensors")
