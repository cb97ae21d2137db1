"""Runs inside the environment that holds llm-compressor: read single experts of gpt-oss.

Usage: python llm_compressor_experts.py FOLDER OUTPUT

Builds the model of FOLDER with llm-compressor's linear experts, compresses it as its config says,
loads every tensor of the files into it, and decompresses it. OUTPUT gets its parameters.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import apply_quantization_config
from llmcompressor.modeling.moe.linearize import linearize_moe
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    """Return what its modules hold; a name that does not fit is an error."""
    config = AutoConfig.from_pretrained(folder)
    stated = dict(config.quantization_config)
    del config.quantization_config
    stated.pop("quant_method")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    linearize_moe(model)
    compressor = ModelCompressor.from_compression_config(CompressedTensorsConfig(**stated))
    apply_quantization_config(model, compressor.quantization_config, run_compressed=False)
    compressor.compress_model(model)
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
    compressor.decompress_model(model)
    return {name: tensor.contiguous() for name, tensor in model.state_dict().items()}


if __name__ == "__main__":
    save_file(parameters(Path(sys.argv[1])), sys.argv[2])
