"""GGUF blocks in safetensors, as GPTQModel saves them (`quant_method: gguf`). Read.

    qweight   uint8 [N, bytes]   rows of blocks of the type that the config names, as in a GGUF file
    bias      [N]                not a part of the weight

    bits  format                type   elements and bytes of a block
    4     q_0                   Q4_0   32, 18
    8     q_0                   Q8_0   32, 34
    4     q_k, q_k_s, q_k_m     Q4_K   256, 144
    5     q_k, q_k_s, q_k_m     Q5_K   256, 176
    6     q_k                   Q6_K   256, 210

The blocks and their arithmetic, in float32, are those of `gguf.py`. Names and the order of rows are
those of transformers.

Rows are filled up to whole blocks, and no tensor holds their true length. It follows from the
sizes in config.json for the usual names of layers; others are read only in blocks of 32, of which
layers have whole numbers.

Source: GPTQModel 7.7.0, `nn_modules/qlinear/gguf.py` and `quantization/config.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantload.errors import FormatMismatch, UnsupportedVariant
from quantload.loader.checkpoint import Checkpoint
from quantload.loader.formats.agreement import ConfigSays, check_agreement, count_entries
from quantload.loader.formats.config_values import WHERE, read_bool
from quantload.loader.formats.dense import dense_weight
from quantload.loader.formats.dynamic_rules import Rule, first_rule, parse_rules
from quantload.loader.formats.finite import refuse_nonfinite
from quantload.loader.formats.gguf import block_scheme, decode_rows
from quantload.loader.formats.matching import names_of
from quantload.loader.formats.module_leaves import ModuleLeaves, by_module, refuse_leftovers
from quantload.loader.source import Reader, SourceWeight
from quantload.quant.qtensor import QuantTensor

_LEAVES = ("qweight", "weight")
_TYPES = {
    (4, "q_0"): "Q4_0",
    (8, "q_0"): "Q8_0",
    **dict.fromkeys(((4, "q_k"), (4, "q_k_s"), (4, "q_k_m")), "Q4_K"),
    **dict.fromkeys(((5, "q_k"), (5, "q_k_s"), (5, "q_k_m")), "Q5_K"),
    (6, "q_k"): "Q6_K",
}
_SIZES = {"Q4_0": (32, 18), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q5_K": (256, 176)}
_SIZES |= {"Q6_K": (256, 210)}
_READS_HIDDEN = re.compile(r"\.?(q|k|v|qkv|gate|up|gate_up)_proj$|\.?lm_head$")
_BLOCK = re.compile(r"\.\d+\.")  # of a decoder block: model.layers.3.


class GgufInSafetensorsReader(Reader):
    """Reader of one checkpoint of GGUF blocks in safetensors files."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        config = checkpoint.quantization_config
        assert config is not None, "detected by its config"
        self._type = _type_of(config, checkpoint.name)
        self._has_quantized_head = read_bool(config, "lm_head", False, checkpoint.name)
        self._rules = parse_rules(config.get("dynamic"), checkpoint.name)
        for rule in self._rules:
            _type_of({**config, **(rule.overrides or {})}, checkpoint.name)

    def weights(self) -> Mapping[str, SourceWeight]:
        """Describe every weight, by module; config and headers must agree."""
        found: dict[str, SourceWeight] = {}
        said, stored = {}, {}
        for module, leaves in by_module(self.checkpoint, _LEAVES).items():
            names = names_of(module)
            rule = first_rule(self._rules, names)
            is_packed = "qweight" in leaves
            says = self._says_of(module, names, rule)
            weight = (
                self._describe(leaves, rule, says.entry)
                if is_packed
                else dense_weight(leaves["weight"])
            )
            if weight is not None:
                found[module], said[module], stored[module] = weight, says, is_packed
        self.warnings += check_agreement(said, stored, self.checkpoint.name)
        self.entries = count_entries(said, stored)
        refuse_leftovers(
            self.checkpoint, (name for weight in found.values() for name in weight.leaves.values())
        )
        return found

    def _says_of(self, module: str, names: tuple[str, ...], rule: Rule | None) -> ConfigSays:
        if rule is not None:
            return rule.says_of(names)
        if module.rpartition(".")[2] == "lm_head":
            return ConfigSays(self._has_quantized_head, f"lm_head: {self._has_quantized_head}")
        return ConfigSays(_BLOCK.search(module) is not None, "all linear layers in blocks")

    def _describe(self, leaves: ModuleLeaves, rule: Rule | None, entry: str) -> SourceWeight:
        name = self.checkpoint.name
        config: Mapping[str, Any] = self.checkpoint.quantization_config or {}
        overrides = (rule.overrides or {}) if rule is not None else {}
        kind = _type_of({**config, **overrides}, name) if overrides else self._type
        because = f"the config says {kind} ({entry})"
        blocks = leaves.expect("qweight", dtypes=(torch.uint8,), because=because)
        if "weight" in leaves:
            raise FormatMismatch(
                f"module `{leaves.module}` has both `weight` and `qweight`, expected one of them, "
                f"in `{name}`"
            )
        size, num_bytes = _SIZES[kind]
        if len(blocks.shape) != 2 or min(blocks.shape) < 1 or blocks.shape[1] % num_bytes:
            raise FormatMismatch(
                f"tensor `{blocks.name}` has shape `{blocks.shape}`, expected rows of blocks of "
                f"{num_bytes} bytes, in `{name}`",
                hint=because,
            )
        stored = blocks.shape[1] // num_bytes * size
        columns = _columns(self.checkpoint.config, leaves.module)
        if columns is None and size == 32:
            columns = stored
        if columns is None:
            raise UnsupportedVariant(
                f"module `{leaves.module}` in GGUF type `{kind}` has up to {stored} input "
                f"features; how many is not known for a layer of this name, in `{name}`"
            )
        if not 0 <= stored - columns < size:
            raise FormatMismatch(
                f"tensor `{blocks.name}` has shape `{blocks.shape}`, which holds {stored} columns, "
                f"expected {columns} filled up to whole blocks of {size}, in `{name}`",
                hint=because,
            )
        return SourceWeight(
            module=leaves.module,
            shape=(blocks.shape[0], columns),
            scheme=block_scheme(kind),
            encoding=kind,
            dtype=torch.float32,
            leaves={"qweight": blocks.name},
            decided_by=entry,
        )

    def decode(self, weight: SourceWeight) -> QuantTensor | Tensor:
        """Read a weight [N, K]: canonical where its type is, else float32."""
        if weight.scheme is None:
            return self.checkpoint.read(weight.leaves["weight"])
        name = weight.leaves["qweight"]
        decoded = decode_rows(self.checkpoint.read(name), weight.scheme.name)
        columns = weight.shape[1]
        if isinstance(decoded, QuantTensor):
            refuse_nonfinite(decoded.scale, name, self.checkpoint.name)
            return decoded.columns(0, columns)
        refuse_nonfinite(decoded, name, self.checkpoint.name)
        return decoded[:, :columns].contiguous()


def _type_of(config: Mapping[str, Any], checkpoint_name: str) -> str:
    """Return the GGUF type that a config names."""
    bits = config.get("bits")
    stated = str(config.get("checkpoint_format") or config.get("format")).lower()
    if isinstance(bits, bool) or not isinstance(bits, int) or (bits, stated) not in _TYPES:
        raise UnsupportedVariant(
            f"GGUF blocks of `bits` `{bits}` in format `{stated}` are not read, expected 4 or 8 in "
            f"`q_0`, or 4, 5 or 6 in `q_k`, {WHERE} `{checkpoint_name}`"
        )
    return _TYPES[bits, stated]


def _columns(config: Mapping[str, Any], module: str) -> int | None:
    """Input features of a layer with a usual name, as the model's config says; None if unknown."""
    text = config.get("text_config")
    holder = text if isinstance(text, Mapping) else config

    def size(key: str) -> int | None:
        value = holder.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    last = module.rpartition(".")[2]
    if _READS_HIDDEN.search(module):
        return size("hidden_size")
    if last == "o_proj":
        heads, head, hidden = size("num_attention_heads"), size("head_dim"), size("hidden_size")
        return heads * head if heads and head else hidden
    if last == "down_proj":
        if ".experts." in module:
            return size("moe_intermediate_size") or size("intermediate_size")
        if ".shared_expert" in module:
            return size("shared_expert_intermediate_size") or size("moe_intermediate_size")
        return size("intermediate_size")
    return None


__all__ = ["GgufInSafetensorsReader"]
