"""Outputs of quantload in the programs that serve them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="session")
def base_model(tmp_path_factory) -> Path:
    """A llama with random weights; its widths are multiples of 128, so every scheme applies."""
    folder = tmp_path_factory.mktemp("base") / "llama"
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=128,
        vocab_size=256,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    torch.manual_seed(1)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return folder
