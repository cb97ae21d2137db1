"""A tiny random model of every architecture of the installed transformers.

A config is the default of its class with every size shrunk by the name of its field, and lists of
one value a layer cut to a few layers that show each kind once. What this cannot know stands in
`tiny_overrides.py`, by model type.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from tiny_overrides import OVERRIDES, SIZES
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

CAUSAL = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
IMAGE_TEXT = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks")
_LARGE_LAYERS = 4


def architectures() -> dict[str, type[PreTrainedModel]]:
    """Model class of each model type, each class once: causal ones, then those with images."""
    found: dict[str, type[PreTrainedModel]] = {}
    for mapping in (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    ):
        for model_type in mapping._model_mapping:
            try:
                chosen = mapping[type_of_config(model_type)]
            except (KeyError, ValueError, ImportError):
                continue
            cls = chosen[0] if isinstance(chosen, tuple) else chosen
            own = getattr(cls.config_class, "model_type", "")  # several types can share a class
            if cls not in found.values():
                found[own if own in mapping._model_mapping else model_type] = cls
    return found


def type_of_config(model_type: str) -> type[PreTrainedConfig]:
    return CONFIG_MAPPING[model_type]


def tiny_config(model_type: str, model_class: type[PreTrainedModel]) -> PreTrainedConfig:
    """The config of a model, shrunk."""
    cls = CONFIG_MAPPING[model_type]
    own = model_class.config_class  # a part of the config of its type, for MusicGen
    if own.model_type not in (*CAUSAL, *IMAGE_TEXT) and own.model_type in CONFIG_MAPPING:
        cls = own
    overrides = OVERRIDES.get(model_type, {})
    start = {k: v for k, v in overrides.items() if k.startswith("!")}
    values = cls(**{k[1:]: v for k, v in start.items()}).to_dict()
    values = _shrunk(values)
    for path, value in overrides.items():
        if not path.startswith("!"):
            _set(values, path.split("."), value)
    config = cls.from_dict(values)
    config.dtype = "float32"
    return config


def _set(values: dict[str, Any], path: list[str], value: object) -> None:
    for part in path[:-1]:
        values = values.setdefault(part, {})
    if value is ...:
        values.pop(path[-1], None)
    else:
        values[path[-1]] = value


def _shrunk(values: Mapping[str, Any]) -> dict[str, Any]:
    layers = _layers(values)
    small: dict[str, Any] = {}
    for key, value in values.items():
        if key in ("id2label", "label2id", "transformers_version"):
            continue
        if key == "per_layer_config" and layers:
            new = {old: i for i, old in enumerate(layers[1])}
            found = {int(i): part for i, part in (value or {}).items()}
            small[key] = {new[i]: _shrunk(part) for i, part in found.items() if i in new}
        elif isinstance(value, dict):
            is_config = "model_type" in value or key.endswith("_config")
            small[key] = _shrunk(value) if is_config else copy.deepcopy(value)
        elif isinstance(value, list) and layers and len(value) == layers[0]:
            small[key] = [value[i] for i in layers[1]]
        elif isinstance(value, int) and not isinstance(value, bool):
            small[key] = _small(key, value, layers)
        else:
            small[key] = value
    if values.get("num_attention_heads") == values.get("num_key_value_heads") is not None:
        small["num_key_value_heads"] = small.get("num_attention_heads")
    rope = values.get("qk_rope_head_dim")
    if rope is not None and values.get("head_dim") == rope:
        small["head_dim"] = small["qk_rope_head_dim"]
    _fit_sections(small)
    return {k: v for k, v in small.items() if v is not None or values.get(k) is None}


def _fit_sections(values: dict[str, Any]) -> None:
    """Cut the sections of a rotary embedding in three dimensions to half of its width."""
    heads = values.get("num_attention_heads")
    width = values.get("qk_rope_head_dim") or values.get("head_dim")
    width = width or (values.get("hidden_size", 64) // heads if heads else 16)
    for key in ("rope_parameters", "rope_scaling"):
        rope = values.get(key)
        for part in (rope, *(rope.values() if isinstance(rope, dict) else ())):
            if isinstance(part, dict) and ("mrope_section" in part):
                half = int(width * part.get("partial_rotary_factor", 1.0)) // 2
                part["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]


def _small(key: str, value: int, layers: tuple[int, list[int]] | None) -> int:
    if key in _LAYER_COUNTS and layers:
        return len(layers[1])
    if key.endswith(("_token_id", "_token_index", "_id")):
        return min(value, SIZES["vocab_size"] - 1 - len(key) % 32) if value > 8 else value
    return min(value, SIZES[key]) if key in SIZES else value


def _layers(values: Mapping[str, Any]) -> tuple[int, list[int]] | None:
    """Number of layers and the few that are kept: the first of each kind, at least two."""
    count = next((values[k] for k in _LAYER_COUNTS if isinstance(values.get(k), int)), None)
    if count is None:
        return None
    names = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types", "block_types")
    lists = [values[n] for n in names if isinstance(values.get(n), list)]
    lists = [kinds for kinds in lists if len(kinds) == count]
    kept: list[int] = []
    seen: set[object] = set()
    for i, kinds in enumerate(zip(*lists, strict=True)):
        if not set(enumerate(kinds)) <= seen:
            seen |= set(enumerate(kinds))
            kept.append(i)
    rest = [i for i in range(count) if i not in kept]
    return count, sorted(kept + rest[: max(0, 2 - len(kept))])


def tiny_model(model_type: str, cls: type[PreTrainedModel], seed: int = 0) -> PreTrainedModel:
    """A model with random values in every parameter and stored buffer, in float32."""
    torch.manual_seed(seed)
    model = cls._from_config(tiny_config(model_type, cls), dtype=torch.float32)
    model.eval()
    randomise(model)
    return model


def randomise(model: nn.Module) -> None:
    """Give every float parameter values that show if it is lost: norms about 1, biases not 0."""
    stored = set(model.state_dict())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name not in stored or not tensor.is_floating_point() or not tensor.numel():
            continue
        if tensor.ndim >= 2:
            tensor.data.normal_(0, 0.4 / tensor.shape[-1] ** 0.5 * 1.5)
        elif name.endswith(("A_log", "dt_bias")):
            tensor.data += 0.1 * torch.rand_like(tensor)
        else:
            near = 1.0 if name.endswith("weight") else 0.0
            tensor.data.normal_(near, 0.1)
        if name.endswith("running_var"):
            tensor.data.abs_().add_(0.5)


def inputs_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Two short texts, as the model takes them; an image if it cannot do without."""
    config = model.config
    high = min(58, config.get_text_config().vocab_size - 8)
    rows = config.num_codebooks if config.model_type.startswith("musicgen") else 1
    ids = torch.arange(24).reshape(2, 12) * 7 % (high - 8) + 8
    inputs = {"input_ids": ids.repeat(rows, 1), "attention_mask": torch.ones_like(ids)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    if hasattr(config, "canvas_length"):  # else the model draws it, and ranks of one process differ
        inputs["decoder_input_ids"] = torch.arange(2 * config.canvas_length).reshape(2, -1) % high
    needed = inspect.signature(model.forward).parameters.get("pixel_values")
    if needed is not None and needed.default is inspect.Parameter.empty:
        size = config.vision_config.image_size
        inputs["pixel_values"] = torch.randn(2, 3, size, size)
    return inputs
