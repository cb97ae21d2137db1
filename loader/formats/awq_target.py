"""AWQ as a format that is written: `gemm`, 4 bits, with zero points.

The bytes are described in `awq_layout.py`. Written are

    weights    4 bits, groups or whole rows (-1); inputs in full precision
    scales     float16, as AutoAWQ writes them; codes are rounded against them
    zeros      as they are; a symmetric weight gets 8, which every reader subtracts, and
               `zero_point: true`: engines differ in what they do without
    config     one group size for all; `modules_to_not_convert`, whole names

AWQ's search for factors of the input channels needs data: what is written here is rounded to
nearest, in AWQ's layout.

Output features must be a multiple of 8, so that a word holds whole columns; 8-bit weights are read
by some tools only.

Source: AutoAWQ 0.2.9, `WQLinear_GEMM`; `AutoAWQConfig` of vLLM 0.33.0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from quantload.errors import ConfigError, listed
from quantload.loader.formats.awq_layout import encode_awq
from quantload.loader.formats.int_fields import group_count
from quantload.loader.formats.target import Target, WrittenConfig, WrittenModules
from quantload.loader.output_files import Leaf
from quantload.quant.packing import words_dense
from quantload.quant.qtensor import Evaluation, QuantTensor
from quantload.quant.scheme import Scheme, WeightScheme
from quantload.quant.stored_scales import quantize_on_stored_scales

_BITS = 4
_RUN = 8  # columns that are shuffled together
_SCALES = torch.float16


class AwqTarget(Target):
    """What AutoAWQ, GPTQModel, transformers, vLLM and SGLang load."""

    name = "awq"
    title = "W4A16(_ASYM) for AutoAWQ, GPTQModel, vLLM and SGLang"

    def obstacle(self, scheme: Scheme, shape: tuple[int, int]) -> str:
        """See `Target.obstacle`."""
        weight = scheme.weight
        if weight is None:
            return ""
        if scheme.input is not None:
            return "its inputs are quantized too"
        if not weight.grid.name.startswith("int") or weight.scale != "float":
            return f"its codes are {weight.grid.name}, expected int4"
        if weight.grid.bits != _BITS:
            return f"it has {weight.grid.bits} bits, expected {_BITS}"
        if weight.granularity not in ("group", "channel") or weight.zero != "int":
            return f"{weight.sharing}, expected groups of columns or one scale a row"
        if weight.act_order:
            return "its columns are not in the order of their groups"
        if shape[0] % _RUN:
            return f"it has {shape[0]} output features, expected a multiple of {_RUN}"
        return ""

    def layout(
        self, scheme: Scheme, shape: tuple[int, int], scale_dtype: torch.dtype
    ) -> dict[str, Leaf]:
        """See `Target.layout`; scales are float16, whatever the model is."""
        rows, columns = shape
        groups = group_count(_group_size(scheme), columns)
        words = words_dense(rows, _BITS)
        return {
            "qweight": Leaf(torch.int32, (columns, words)),
            "qzeros": Leaf(torch.int32, (groups, words)),
            "scales": Leaf(_SCALES, (groups, rows)),
        }

    def quantize(
        self, weight: Tensor, scheme: WeightScheme, *, shared: Tensor | None = None
    ) -> QuantTensor:
        """See `Target.quantize`; rounded against float16 scales, see `quant/stored_scales.py`."""
        evaluation = Evaluation(_SCALES, inner="/")
        return quantize_on_stored_scales(weight, scheme, scale_dtype=_SCALES, evaluation=evaluation)

    def encode(
        self, tensor: QuantTensor, scheme: Scheme, shape: tuple[int, int]
    ) -> dict[str, Tensor]:
        """See `Target.encode`."""
        return encode_awq(tensor)

    def row_step(self, scheme: Scheme) -> int | None:
        """Rows of the weight are columns of every tensor."""
        return None

    def config(self, modules: WrittenModules) -> WrittenConfig:
        """See `Target.config`.

        Raises:
            ConfigError: Group sizes differ, the head, an embedding or the cache is quantized, or
                a name in full precision is a part of one that is quantized.
        """
        if modules.named:
            raise ConfigError(
                "AWQ has no form for quantized embeddings and heads, found "
                f"{listed(modules.named)}",
                hint=f"add a rule, for example `{next(iter(modules.named))} = keep`",
            )
        if modules.cache_scheme is not None:
            raise ConfigError(
                "AWQ has no form for a quantized key-value cache, whose scales the source has",
                hint="write compressed-tensors",
            )
        sizes = {module: _group_size(scheme) for module, scheme in modules.schemes.items()}
        if len(set(sizes.values())) > 1:
            first = {size: module for module, size in reversed(sizes.items())}
            raise ConfigError(
                "AWQ has one group size for the whole model, found "
                + ", ".join(f"{size} (`{module}`)" for size, module in first.items()),
                hint="take the smallest with `--group-size`, or write gptq",
            )
        _refuse_parts(modules.kept, modules.schemes)
        config = {
            "quant_method": "awq",
            "bits": _BITS,
            "group_size": next(iter(sizes.values())),
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": list(modules.kept),
        }
        return WrittenConfig(config, {"quantize_config.json": config})


def _group_size(scheme: Scheme) -> int:
    weight = scheme.weight
    assert weight is not None, "full precision is not encoded"
    size = weight.group_size if weight.granularity == "group" else -1
    assert size is not None, "a group scheme has a group size"
    return size


def _refuse_parts(kept: Iterable[str], quantized: Collection[str]) -> None:
    """Refuse what readers would take for full precision: they look for parts of names."""
    joined = "\n".join(quantized)
    for entry in kept:
        if entry in joined:
            hit = next(name for name in quantized if entry in name)
            raise ConfigError(
                f"`{entry}` stays in full precision and is a part of the name of `{hit}`, which is "
                "quantized: AWQ cannot tell them apart",
                hint=f"add the rule `{hit} = keep`, or write gptq",
            )
