"""GPTQ: config and headers of a checkpoint, made into weights. Read.

The tensors and their arithmetic are described in `gptq_layout.py`, the config in `gptq_config.py`.

GPTQModel casts the scales to the dtype of its model before it multiplies, so its weights are
evaluated in the dtype of the model's config, if that is float16 or bfloat16; those of other tools
in the dtype of the scales.

A bias of zeros, which exporters add to layers without bias, stays a plain tensor `<module>.bias`.

Source: GPTQModel 7.7.0, `TorchLinear`; AutoGPTQ 0.7.1; AutoRound 0.16.1 (format `auto_gptq`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantload.loader.checkpoint import Checkpoint
from quantload.loader.formats.agreement import (
    about_unused_entries,
    check_agreement,
    count_entries,
)
from quantload.loader.formats.dense import dense_weight
from quantload.loader.formats.dynamic_rules import matches_rule
from quantload.loader.formats.gptq_config import parse_gptq_config
from quantload.loader.formats.gptq_groups import read_groups
from quantload.loader.formats.gptq_layout import (
    GPTQ_LEAVES,
    GptqLayout,
    decode_gptq,
    gptq_weight,
)
from quantload.loader.formats.module_leaves import ModuleLeaves, by_module, refuse_leftovers
from quantload.loader.model_dtype import config_dtype
from quantload.loader.source import Block, Reader, SourceWeight
from quantload.quant.qtensor import QuantTensor


class GptqReader(Reader):
    """Reader of one GPTQ checkpoint."""

    decodes_leaves = True

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        assert checkpoint.quantization_config is not None, "detected by its config"
        self._config = parse_gptq_config(checkpoint.quantization_config, checkpoint.name)
        stated = config_dtype(checkpoint.config) if self._config.producer else None
        self._dtype = stated if stated in (torch.float16, torch.bfloat16) else None
        self._layouts: dict[str, GptqLayout] = {}

    def weights(self) -> Mapping[str, SourceWeight]:
        """Describe every weight, by module; config and headers must agree."""
        found: dict[str, SourceWeight] = {}
        said, stored = {}, {}
        for module, leaves in by_module(self.checkpoint, GPTQ_LEAVES).items():
            is_packed = "qweight" in leaves or "scales" in leaves or "qzeros" in leaves
            weight = None
            rule = self._config.rule_of(module)
            says = self._config.says_of(module, rule)
            if is_packed:
                weight = self._describe(leaves, self._config.layout_of(module, rule), says.entry)
            elif "weight" in leaves:
                weight = dense_weight(leaves["weight"])
            if weight is not None:
                found[module], said[module], stored[module] = weight, says, is_packed
        self.warnings += check_agreement(said, stored, self.checkpoint.name)
        self.entries = count_entries(said, stored)
        self.warnings += about_unused_entries(
            (f"dynamic: {rule.key}" for rule in self._config.rules),
            self.entries,
            self.checkpoint,
            matches_rule,
        )
        refuse_leftovers(
            self.checkpoint, (name for weight in found.values() for name in weight.leaves.values())
        )
        return found

    def _describe(self, leaves: ModuleLeaves, layout: GptqLayout, entry: str) -> SourceWeight:
        self._layouts[leaves.module] = layout
        weight = gptq_weight(leaves, layout, decided_by=entry, dtype=self._dtype)
        if layout.desc_act and leaves["scales"].shape[0] > 1:
            # Groups made in the order of the columns (`static_groups`) need no numbers.
            name = weight.leaves["g_idx"]
            groups = self.checkpoint.read(name)
            if read_groups(groups, layout.group_size, name, self.checkpoint.name) is not None:
                return gptq_weight(
                    leaves, layout, decided_by=entry, dtype=self._dtype, act_order=True
                )
        return weight

    def blocks_of(self, weight: SourceWeight) -> Mapping[str, Block] | None:
        """Return what elements of its tensors stand for; see `Reader.blocks_of`."""
        layout = self._layouts.get(weight.module)
        if layout is None or 32 % layout.bits or layout.is_planar:
            return None
        fields, columns = 32 // layout.bits, weight.shape[1]
        group = 0 if layout.group_size in (-1, columns) else layout.group_size
        found = {"g_idx": Block(0, 0)}  # numbers that nobody needs
        if "g_idx" in weight.leaves:
            name = weight.leaves["g_idx"]
            groups = self.checkpoint.read(name)
            if read_groups(groups, layout.group_size, name, self.checkpoint.name) is not None:
                group, found["g_idx"] = 0, Block(0, 1, has_inputs_first=True)
        found["qweight"] = Block(1, fields, has_inputs_first=True)
        found["scales"] = Block(1, group, has_inputs_first=True)
        found["qzeros"] = Block(fields, group, has_inputs_first=True)
        return {leaf: found[leaf] for leaf in weight.leaves}

    def decode(self, weight: SourceWeight) -> QuantTensor | Tensor:
        """Read a weight [N, K]: canonical if it is quantized, else float."""
        if not weight.is_quantized:
            return self.checkpoint.read(weight.leaves["weight"])
        parts = {leaf: self.checkpoint.read(name) for leaf, name in weight.leaves.items()}
        if "g_idx" in parts and len(parts["g_idx"]) > weight.shape[1]:
            del parts["g_idx"]  # of some columns: `blocks_of` has seen that they are in order
        return decode_gptq(
            parts,
            weight,
            self._layouts[weight.module],
            checkpoint_name=self.checkpoint.name,
            warn=self._warn,
        )

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)


__all__ = ["GptqReader"]
