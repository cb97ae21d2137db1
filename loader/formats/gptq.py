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
from quantload.loader.formats.gptq_layout import (
    GPTQ_LEAVES,
    GptqLayout,
    decode_gptq,
    gptq_weight,
    read_groups,
)
from quantload.loader.formats.module_leaves import ModuleLeaves, by_module, refuse_leftovers
from quantload.loader.model_dtype import config_dtype
from quantload.loader.source import Reader, SourceWeight
from quantload.quant.qtensor import QuantTensor


class GptqReader(Reader):
    """Reader of one GPTQ checkpoint."""

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
            if read_groups(groups, layout, name, self.checkpoint.name) is not None:
                return gptq_weight(
                    leaves, layout, decided_by=entry, dtype=self._dtype, act_order=True
                )
        return weight

    def decode(self, weight: SourceWeight) -> QuantTensor | Tensor:
        """Read a weight [N, K]: canonical if it is quantized, else float."""
        if not weight.is_quantized:
            return self.checkpoint.read(weight.leaves["weight"])
        return decode_gptq(
            {leaf: self.checkpoint.read(name) for leaf, name in weight.leaves.items()},
            weight,
            self._layouts[weight.module],
            checkpoint_name=self.checkpoint.name,
            warn=self._warn,
        )

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)


__all__ = ["GptqReader"]
