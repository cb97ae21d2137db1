"""Models of images and text: both layouts of their names, towers in full precision."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from architecture_sweep import both, relative
from safetensors.torch import load_file, save_file
from tiny_architectures import inputs_of
from torch import Tensor
from transformers import PreTrainedModel

import quantload

TOWERS = {"gemma3": ("vision_tower.", "multi_modal_projector."), "qwen2_vl": ("visual.",)}


def with_image(model_type: str, model: PreTrainedModel) -> dict[str, Tensor]:
    """A text with an image in it, as its processor would make it."""
    config = model.config
    ids = torch.arange(8, 20).reshape(1, 12)
    torch.manual_seed(0)
    if model_type == "gemma3":
        count = config.mm_tokens_per_image
        image = torch.full((1, count), config.image_token_index)
        size = config.vision_config.image_size
        extra = {"pixel_values": torch.randn(1, 3, size, size)}
    else:
        vision = config.vision_config
        image = torch.full((1, 4), config.image_token_id)  # 16 patches, merged by 2 x 2
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        grid = torch.tensor([[1, 4, 4]])
        extra = {"pixel_values": torch.randn(16, width), "image_grid_thw": grid}
    ids = torch.cat([ids[:, :3], image, ids[:, 3:]], 1)
    kinds = torch.zeros_like(ids)
    kinds[:, 3 : 3 + image.shape[1]] = 1
    names = {"gemma3": "token_type_ids", "qwen2_vl": "mm_token_type_ids"}
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        names[model_type]: kinds,
        **extra,
    }


def other_layout(model_type: str, name: str) -> str:
    """A name as the model has it, of one that old checkpoints and `save_pretrained` have."""
    if model_type == "qwen2_vl":
        if name.startswith("visual."):
            return f"model.{name}"
        return name.replace("model.", "model.language_model.", 1)
    if name.startswith("language_model.lm_head"):
        return name.removeprefix("language_model.")
    if name.startswith("language_model.model."):
        return name.replace("language_model.model.", "model.language_model.", 1)
    return f"model.{name}"


@pytest.mark.parametrize("model_type", TOWERS)
@pytest.mark.filterwarnings("ignore")
def test_images_and_text_in_both_layouts(model_type: str, tmp_path: Path) -> None:
    model, plain = both(model_type, tmp_path, "W4A16")
    for inputs in (inputs_of(plain), with_image(model_type, plain)):
        with torch.no_grad():
            assert relative(model(**inputs).logits, plain(**inputs).logits) < 1e-5
    reports = quantload.explain(model)
    towers = [r for r in reports if any(tower in r.module for tower in TOWERS[model_type])]
    text = [r for r in reports if ".language_model." in r.module]
    assert towers
    assert {r.scheme for r in towers} == {"dense"}
    assert all(r.scheme.startswith("W4A16") for r in text)

    folder = tmp_path / "other"
    folder.mkdir()
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    renamed = {other_layout(model_type, name): tensor for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    shutil.copy(tmp_path / "source" / "config.json", folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == model_type
    one, two = (
        quantload.load(path, device="cpu", dtype=torch.float32)
        for path in (folder, tmp_path / "source")
    )
    with torch.no_grad():
        assert torch.equal(one(**inputs).logits, two(**inputs).logits)
