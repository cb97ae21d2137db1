"""The rotary embedding that the metadata of a GGUF file and its tables of factors describe.

Letters: D size of the rotated part of a head.

Source: llama.cpp, its `load_hparams` for defaults and its converters, at
https://github.com/ggml-org/llama.cpp/tree/a458664fc83b6513baea7adafcb0ef0626b006f8
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantload.errors import UnsupportedVariant
from quantload.loader.checkpoint import TensorEntry, read_entry
from quantload.loader.gguf_header import GgufTensor
from quantload.loader.gguf_metadata import OTHER_SOURCE, Metadata

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
TABLES = frozenset({ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS})


def rotated_size(metadata: Metadata, head: int, *, part: bool) -> int:
    """Return D, which is the whole head unless the architecture may rotate a `part`."""
    size = metadata.count("rope.dimension_count", head)
    if (size != head and not part) or size > head or size % 2:
        raise UnsupportedVariant(
            f"metadata key `{metadata.full('rope.dimension_count')}` is `{size}`: rotation of a "
            f"part of `{head}` is not read, in `{metadata.path}`",
            hint=OTHER_SOURCE,
        )
    return size


def rope_parameters(
    metadata: Metadata, tensors: Mapping[str, GgufTensor], size: int, context: int
) -> dict[str, Any]:
    """Return `rope_parameters` of a config.

    Args:
        metadata: Of the file.
        tensors: Of the file; the tables of factors are read.
        size: D.
        context: Positions the model is made for.
    """
    theta = metadata.number("rope.freq_base", 10000.0)
    kind = metadata.value("rope.scaling.type", "linear")  # llama.cpp's default, with factor 1
    factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", 1.0))
    original = metadata.count("rope.scaling.original_context_length", context)
    scaled = kind != "none" and factor not in (0.0, 1.0)
    if LONG_FACTORS in tensors or SHORT_FACTORS in tensors:
        return _longrope(metadata, tensors, size, theta) | {
            "original_max_position_embeddings": original
        }
    table = tensors.get(ROPE_FACTORS)
    if table is not None:
        found = _llama3_scaling(read_factors(table), theta, size)
        if found is None or scaled:
            raise UnsupportedVariant(
                f"tensor `{ROPE_FACTORS}` is not the rotary scaling of Llama 3.1 to 3.3, "
                f"in `{table.file}`",
                hint=OTHER_SOURCE,
            )
        return {"rope_theta": theta} | found
    if not scaled:
        return {"rope_type": "default", "rope_theta": theta}
    rope = {"rope_type": kind, "rope_theta": theta, "factor": factor}
    if kind == "linear":
        return rope
    if kind != "yarn":
        raise UnsupportedVariant(
            f"metadata key `{metadata.full('rope.scaling.type')}` is `{kind}`, expected "
            f"`none`, `linear` or `yarn`, in `{metadata.path}`"
        )
    return rope | _yarn(metadata) | {"original_max_position_embeddings": original}


def _yarn(metadata: Metadata) -> dict[str, float]:
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
        metadata.refuse_unless(key, 1.0, "a factor on attention")
    metadata.refuse_unless("rope.scaling.yarn_ext_factor", 1.0, "a share of extrapolation")
    betas = {
        name: metadata.number(f"rope.scaling.yarn_{name}")
        for name in ("beta_fast", "beta_slow")
        if metadata.has(f"rope.scaling.yarn_{name}")
    }
    return betas


def _longrope(
    metadata: Metadata, tensors: Mapping[str, GgufTensor], size: int, theta: float
) -> dict[str, Any]:
    """Return the scaling by two tables [D / 2], for short and for long texts."""
    metadata.ignore("rope.scaling.type")
    missing = {LONG_FACTORS, SHORT_FACTORS} - tensors.keys()
    if missing:
        raise UnsupportedVariant(
            f"of two tables of rotary factors `{missing.pop()}` is missing, in `{metadata.path}`"
        )
    tables = [read_factors(tensors[name]) for name in (LONG_FACTORS, SHORT_FACTORS)]
    if any(table.shape != (size // 2,) for table in tables):
        raise UnsupportedVariant(
            f"tables of rotary factors have `{tables[0].numel()}` and `{tables[1].numel()}` "
            f"entries, expected `{size // 2}`, in `{metadata.path}`"
        )
    rope = {
        "rope_type": "longrope",
        "rope_theta": theta,
        "long_factor": _decimals(tables[0]),
        "short_factor": _decimals(tables[1]),
    }
    if metadata.has("rope.scaling.attn_factor"):
        rope["attention_factor"] = metadata.number("rope.scaling.attn_factor")
    return rope


def _decimals(values: Tensor) -> list[float]:
    return [float(str(value)) for value in values.numpy()]


def read_factors(table: GgufTensor) -> Tensor:
    """Read a table of rotary factors, float32."""
    entry = TensorEntry(
        table.name, torch.float32, table.shape, table.file, table.start, table.num_bytes
    )
    if table.type_name != "F32":
        raise UnsupportedVariant(
            f"tensor `{table.name}` has type `{table.type_name}`, expected `F32`, in `{table.file}`"
        )
    return read_entry(entry)


def _llama3_scaling(factors: Tensor, theta: float, size: int) -> dict[str, Any] | None:
    """Recognise the factors [D / 2] float32 that wavelengths are stretched by.

    Waves longer than the original context are stretched by `factor`, those shorter than a quarter
    of it not at all, and those between by a smooth mixture. Only these limits (1 and 4) and this
    context (8192) are in use; None if the factors do not come from them.
    """
    if factors.shape != (size // 2,):
        return None
    if bool((factors == 1).all()):
        return {"rope_type": "default"}
    factor, low, high, context = factors.max().item(), 1.0, 4.0, 8192
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    turns = context * theta**-exponents / (2 * math.pi)  # within the original context
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    if not torch.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4, atol=0):
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }
