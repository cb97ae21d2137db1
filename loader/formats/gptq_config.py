"""GPTQ's config: how each module is quantized, if it is.

    bits, group_size (-1: whole rows), sym, desc_act
    checkpoint_format, or format     gptq (v1, the default), gptq_v2, gptq_p; others are refused
    lm_head                          true if the head is quantized
    dynamic                          rules for modules, see `dynamic_rules.py`; they override bits,
                                     group_size, sym, desc_act
    modules_in_block_to_quantize     parts of names, or lists of them; empty: all in the blocks
    meta.quantizer                   "gptqmodel:7.7.0", or a list of such
    provider                         "auto-round", if AutoRound wrote it
    pack_dtype                       int32

Everything else (desc_act, static_groups, true_sequential, damp_percent, ...) says how the weights
were found, not how they are stored.

Source: GPTQModel 7.7.0, `quantization/config.py`; AutoGPTQ 0.7.1, `quantization/config.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantload.errors import UnsupportedVariant, listed
from quantload.loader.formats.agreement import ConfigSays
from quantload.loader.formats.config_values import (
    WHERE,
    read_bool,
    read_group_size,
    read_int,
    wrong_value,
)
from quantload.loader.formats.dynamic_rules import Rule, first_rule, parse_rules
from quantload.loader.formats.gptq_layout import GPTQ_BITS, GptqLayout
from quantload.loader.formats.matching import matches_substring, names_of

_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0, "gptq_p": 0}
_SPLIT_BITS = (5, 6, 7)  # are planar, but for this tool, which packs all bits densely:
_DENSE_TOOL = "auto-round"
_BLOCK = re.compile(r"\.\d+\.")  # of a decoder block: model.layers.3.
_SWAPPED_BEFORE = (6, 1)  # GPTQModel; see `gptq_layout.py`


@dataclass(frozen=True)
class GptqConfig:
    """A parsed config.

    Args:
        layout: How modules are packed where no rule says otherwise.
        storage: "gptq", "gptq_v2" or "gptq_p".
        rules: Of `dynamic`, in order.
        parts: `modules_in_block_to_quantize`, flattened.
        has_quantized_head: `lm_head`.
        producer: Version of GPTQModel, if it wrote the checkpoint; () for others.
        tool: "gptqmodel", "auto-round", or another tool that writes as AutoGPTQ does.
        checkpoint_name: For messages.
    """

    layout: GptqLayout
    storage: str
    rules: tuple[Rule, ...]
    parts: tuple[str, ...]
    has_quantized_head: bool
    producer: tuple[int, ...]
    tool: str
    checkpoint_name: str

    def rule_of(self, module: str) -> Rule | None:
        """Return the rule of `dynamic` that decides on a module; None if none does."""
        return first_rule(self.rules, names_of(module)) if self.rules else None

    def says_of(self, module: str, rule: Rule | None) -> ConfigSays:
        """Return what the config says of a module, whose rule is `rule_of` it."""
        names = names_of(module)
        if rule is not None:
            return rule.says_of(names)
        if module.rpartition(".")[2] == "lm_head":
            return ConfigSays(self.has_quantized_head, f"lm_head: {self.has_quantized_head}")
        if not self.parts:
            return ConfigSays(_BLOCK.search(module) is not None, "all linear layers in blocks")
        joined = "\n".join(names)
        part = next((part for part in self.parts if matches_substring(part, joined)), None)
        if part is None:
            return ConfigSays(False, "modules_in_block_to_quantize")
        return ConfigSays(True, f"modules_in_block_to_quantize: {part}", part in names)

    def layout_of(self, module: str, rule: Rule | None) -> GptqLayout:
        """Return how a module, whose rule is `rule_of` it, is packed if it is quantized.

        Raises:
            UnsupportedVariant: Zero points that GPTQModel damaged.
        """
        values = {
            "bits": self.layout.bits,
            "group_size": self.layout.group_size,
            "sym": self.layout.symmetric,
            "desc_act": self.layout.desc_act,
        }
        if rule is not None:
            values |= {key: v for key, v in (rule.overrides or {}).items() if key in values}
        made = _layout(values, self.storage, self.tool, self.checkpoint_name)
        if (
            (made.bits, made.symmetric, made.zero_offset) == (3, False, 1)
            and self.producer
            and self.producer < _SWAPPED_BEFORE
        ):
            raise UnsupportedVariant(
                f"module `{module}` has asymmetric 3-bit zero points in format `gptq`, which "
                f"GPTQModel {'.'.join(map(str, self.producer))} wrote with an error, in "
                f"`{self.checkpoint_name}`",
                hint="quantize the model again with GPTQModel 6.2 or later, or as `gptq_v2`",
            )
        return made


def parse_gptq_config(config: Mapping[str, Any], checkpoint_name: str) -> GptqConfig:
    """Read a GPTQ config.

    Args:
        config: The quantization config.
        checkpoint_name: For messages.

    Raises:
        UnsupportedVariant: A storage format, packing or number of bits that is not read.
        FormatMismatch: A value is missing or makes no sense.
    """
    storage = config.get("checkpoint_format") or config.get("format") or "gptq"
    if not isinstance(storage, str) or storage.lower() not in _ZERO_OFFSETS:
        raise UnsupportedVariant(
            f"GPTQ storage format `{storage}` is not read, expected {listed(_ZERO_OFFSETS)}, "
            f"{WHERE} `{checkpoint_name}`",
            hint="that is the layout of one kernel; save the model in format `gptq` or `gptq_v2`",
        )
    pack_dtype = config.get("pack_dtype")
    if pack_dtype is not None and str(pack_dtype).removeprefix("torch.") != "int32":
        raise UnsupportedVariant(
            f"GPTQ words of `pack_dtype` `{pack_dtype}` are not read, expected `int32`, {WHERE} "
            f"`{checkpoint_name}`"
        )
    producer = _producer(config.get("meta"))
    tool = "gptqmodel" if producer else str(config.get("provider")).lower()
    rules = parse_rules(config.get("dynamic"), checkpoint_name)
    for rule in rules:  # find wrong values now, not at the first module that matches
        _layout({**config, **(rule.overrides or {})}, storage.lower(), tool, checkpoint_name)
    return GptqConfig(
        layout=_layout(config, storage.lower(), tool, checkpoint_name),
        storage=storage.lower(),
        rules=rules,
        parts=_parts(config.get("modules_in_block_to_quantize"), checkpoint_name),
        has_quantized_head=read_bool(config, "lm_head", False, checkpoint_name),
        producer=producer,
        tool=tool,
        checkpoint_name=checkpoint_name,
    )


def _layout(values: Mapping[str, Any], storage: str, tool: str, checkpoint_name: str) -> GptqLayout:
    bits = read_int(values, "bits", GPTQ_BITS, checkpoint_name)
    zero_offset = _ZERO_OFFSETS[storage]
    return GptqLayout(
        bits=bits,
        group_size=read_group_size(values, "group_size", checkpoint_name),
        symmetric=read_bool(values, "sym", True, checkpoint_name),
        zero_offset=zero_offset,
        is_planar=storage == "gptq_p" if bits == 3 else bits in _SPLIT_BITS and tool != _DENSE_TOOL,
        desc_act=read_bool(values, "desc_act", False, checkpoint_name),
        needs_groups=tool == "gptqmodel",
        zeros_borrow=tool == "gptqmodel" and zero_offset == 1 and bits in (2, 4, 8),
    )


def _parts(modules: object, checkpoint_name: str) -> tuple[str, ...]:
    if modules is None:
        return ()
    if not isinstance(modules, list):
        raise wrong_value("modules_in_block_to_quantize", modules, "a list", checkpoint_name)
    flat = [part for entry in modules for part in (entry if isinstance(entry, list) else [entry])]
    if not all(isinstance(part, str) and part for part in flat):
        raise wrong_value("modules_in_block_to_quantize", modules, "names", checkpoint_name)
    return tuple(flat)


def _producer(meta: object) -> tuple[int, ...]:
    """Version of GPTQModel, if `meta` names it."""
    quantizer = meta.get("quantizer") if isinstance(meta, Mapping) else None
    for entry in quantizer if isinstance(quantizer, list) else [quantizer]:
        name, _, version = str(entry).partition(":")
        if name.lower() == "gptqmodel":
            return tuple(int(number) for number in re.findall(r"\d+", version)[:3]) or (0,)
    return ()
