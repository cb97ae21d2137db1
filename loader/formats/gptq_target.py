"""GPTQ as a format that is written, with columns in the order of their groups.

The bytes are described in `gptq_layout.py`, the config in `gptq_config.py`. Written are

    weights    symmetric or with zero points, 2, 3, 4 or 8 bits, groups or whole rows (-1); inputs
               in full precision
    scales     float16, as every tool writes them; codes are rounded against them
    zeros      of a symmetric model z - 1 by version 1, `checkpoint_format: gptq`, that every tool
               reads; with zero points z by version 2, `gptq_v2`: tools disagree on z = 0 in version
               1, and GPTQModel refuses asymmetric files of version 1 that it did not write
    config     the most frequent bits, group_size and sym; `dynamic` for all that differs, and for
               linear layers in full precision
    head       `lm_head: true` if it is quantized

Engines call the layers that they fuse by names of their own, `qkv_proj`, and match those: where
`dynamic` names all parts of such a layer in the same way, it names the fused one too.

Both features of a layer must be multiples of 32, which AutoGPTQ and its kernels ask for.

Source: GPTQModel 7.7.0, `quantization/config.py`; `get_dynamic_override` of vLLM 0.33.0.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantload.errors import ConfigError, listed
from quantload.loader.formats.exclusions import fused_name
from quantload.loader.formats.gptq_layout import GptqLayout, encode_gptq
from quantload.loader.formats.int_fields import group_count
from quantload.loader.formats.target import Target, WrittenConfig, WrittenModules
from quantload.loader.output_files import Leaf
from quantload.quant.packing import words_dense
from quantload.quant.qtensor import Evaluation, QuantTensor
from quantload.quant.scheme import Scheme, WeightScheme
from quantload.quant.stored_scales import quantize_on_stored_scales

_BITS = (2, 3, 4, 8)
_MULTIPLE = 32
_SCALES = torch.float16
_KEYS = ("bits", "group_size", "sym")

_Facts = tuple[int, int, bool]  # bits, group_size, sym


class GptqTarget(Target):
    """What GPTQModel, AutoGPTQ, ExLlama, vLLM and SGLang load."""

    name = "gptq"
    title = "W2A16, W3A16, W4A16(_ASYM), W8A16 for GPTQModel, vLLM and SGLang"

    def obstacle(self, scheme: Scheme, shape: tuple[int, int]) -> str:
        """See `Target.obstacle`."""
        weight = scheme.weight
        if weight is None:
            return ""
        if scheme.input is not None:
            return "its inputs are quantized too"
        if not weight.grid.name.startswith("int") or weight.scale != "float":
            return f"its codes are {weight.grid.name}, expected integers"
        if weight.grid.bits not in _BITS:
            return f"it has {weight.grid.bits} bits, expected one of {listed(_BITS)}"
        if weight.granularity not in ("group", "channel") or weight.zero != "int":
            return f"{weight.sharing}, expected groups of columns or one scale a row"
        if shape[0] % _MULTIPLE or shape[1] % _MULTIPLE:
            return f"its features are {shape[0]} x {shape[1]}, expected multiples of {_MULTIPLE}"
        return ""

    def layout(
        self, scheme: Scheme, shape: tuple[int, int], scale_dtype: torch.dtype
    ) -> dict[str, Leaf]:
        """See `Target.layout`; scales are float16, whatever the model is."""
        bits, group_size, _ = _facts(scheme)
        rows, columns = shape
        groups = group_count(group_size, columns)
        return {
            "qweight": Leaf(torch.int32, (words_dense(columns, bits), rows)),
            "qzeros": Leaf(torch.int32, (groups, words_dense(rows, bits))),
            "scales": Leaf(_SCALES, (groups, rows)),
            "g_idx": Leaf(torch.int32, (columns,)),
        }

    def quantize(
        self, weight: Tensor, scheme: WeightScheme, *, shared: Tensor | None = None
    ) -> QuantTensor:
        """See `Target.quantize`; rounded against float16 scales, see `quant/stored_scales.py`."""
        evaluation = Evaluation(_SCALES)
        return quantize_on_stored_scales(weight, scheme, scale_dtype=_SCALES, evaluation=evaluation)

    def encode(
        self, tensor: QuantTensor, scheme: Scheme, shape: tuple[int, int]
    ) -> dict[str, Tensor]:
        """See `Target.encode`."""
        bits, group_size, symmetric = _facts(scheme)
        layout = GptqLayout(
            bits=bits,
            group_size=group_size,
            symmetric=symmetric,
            zero_offset=1 if symmetric else 0,
        )
        return encode_gptq(tensor, layout)

    def row_step(self, scheme: Scheme) -> int | None:
        """Rows of the weight are columns of every tensor."""
        return None

    def config(self, modules: WrittenModules) -> WrittenConfig:
        """See `Target.config`.

        Raises:
            ConfigError: An embedding or the cache is quantized, or only some layers have zero
                points.
        """
        others = [m for m in modules.named if m.rpartition(".")[2] != "lm_head"]
        if others:
            raise ConfigError(
                f"GPTQ has no form for quantized embeddings, found {listed(others)}",
                hint=f"add a rule, for example `{others[0]} = keep`",
            )
        if modules.cache_scheme is not None:
            raise ConfigError(
                "GPTQ has no form for a quantized key-value cache, whose scales the source has",
                hint="write compressed-tensors",
            )
        facts = {module: _facts(scheme) for module, scheme in modules.schemes.items()}
        versions = {symmetric: module for module, (_, _, symmetric) in facts.items()}
        if len(versions) > 1:
            raise ConfigError(
                f"`{versions[False]}` has zero points and `{versions[True]}` has none, which GPTQ "
                "stores by two conventions, but a model has one",
                hint="quantize all layers with zero points, or none; or write compressed-tensors",
            )
        usual = Counter(facts.values()).most_common(1)[0][0]
        said: dict[str, _Facts | None] = {
            **{module: found for module, found in facts.items() if found != usual},
            **dict.fromkeys(m for m in modules.kept if m.rpartition(".")[2] != "lm_head"),
        }
        config: dict[str, Any] = {
            **dict(zip(_KEYS, usual, strict=True)),
            "desc_act": False,
            "lm_head": any(m.rpartition(".")[2] == "lm_head" for m in facts),
            "quant_method": "gptq",
            "checkpoint_format": "gptq" if usual[2] else "gptq_v2",
            "pack_dtype": "int32",
        }
        if said:
            config["dynamic"] = _dynamic(_with_fused(said, facts), usual)
        return WrittenConfig(config, {"quantize_config.json": config})


def _facts(scheme: Scheme) -> _Facts:
    weight = scheme.weight
    assert weight is not None, "full precision is not encoded"
    size = weight.group_size if weight.granularity == "group" else -1
    assert size is not None, "a group scheme has a group size"
    return weight.grid.bits, size, weight.symmetric


def _with_fused(
    said: Mapping[str, _Facts | None], facts: Mapping[str, _Facts]
) -> dict[str, _Facts | None]:
    """Add the layers that engines fuse, where all their parts are said to be the same."""
    usual: dict[str, set[object]] = {}
    for module, found in (*said.items(), *((m, f) for m, f in facts.items() if m not in said)):
        if name := fused_name(module):
            usual.setdefault(name, set()).add(found)
    fused = {
        name: said[module]
        for module in said
        if (name := fused_name(module)) and len(usual[name]) == 1
    }
    return {**said, **fused}


def _dynamic(said: Mapping[str, _Facts | None], usual: _Facts) -> dict[str, dict[str, Any]]:
    """Return a rule for each module: whole names, since rules match at the start of a name."""
    rules: dict[str, dict[str, Any]] = {}
    for module, found in said.items():
        pattern = f"^{re.escape(module)}$"
        if found is None:
            rules[f"-:{pattern}"] = {}
        else:
            pairs = zip(_KEYS, found, usual, strict=True)
            rules[f"+:{pattern}"] = {key: value for key, value, base in pairs if value != base}
    return rules
