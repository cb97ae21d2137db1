"""AWQ: config and headers of a checkpoint, made into weights. Read.

The tensors and their arithmetic are described in `awq_layout.py`.

    bits or w_bit, group_size or q_group_size (-1: whole rows)
    zero_point                whether zero points are stored (true); else the opposite of `sym`
    version, or format        gemm (also exllama, exllamav2, ipex), gemv, gemv_fast, llm-awq; marlin
                              is refused. Without one, and for `backend: llm-awq`, headers decide
    modules_to_not_convert    parts of names, without regard to components; headers decide in the
                              end: `model.layers.1` is in `model.layers.10` too
    dynamic                   see `dynamic_rules.py`

A scaled activation, of models whose activation lies between two linear layers and cannot absorb
factors (Falcon, MPT, GPT-J, GPT-NeoX, BLOOM, StarCoder), is a tensor `<activation>.scales` [K] that
divides what the activation returns. It becomes the divisor of the inputs (`inner`) of the quantized
linear layer in the same block that takes K features; two such layers are refused.

Quark's AWQ mode renames every `weight` to `qweight`, of norms and embeddings too: a float `qweight`
without scales is read as the `weight` that it is.

Source: AutoAWQ 0.2.9, `models/_config.py`, `quantize/scale.py` and `modules/act.py`; GPTQModel
7.7.0; llm-awq; AMD Quark 0.13, `custom_mode="awq"`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantload.errors import FormatMismatch, UnsupportedVariant, listed
from quantload.loader.checkpoint import Checkpoint
from quantload.loader.formats.agreement import (
    ConfigSays,
    about_unused_entries,
    check_agreement,
    count_entries,
)
from quantload.loader.formats.awq_layout import (
    AWQ_LEAVES,
    AwqKind,
    AwqLayout,
    awq_weight,
    decode_awq,
)
from quantload.loader.formats.config_values import (
    WHERE,
    read_bool,
    read_group_size,
    read_int,
    wrong_value,
)
from quantload.loader.formats.dense import dense_weight
from quantload.loader.formats.dynamic_rules import Rule, first_rule, parse_rules
from quantload.loader.formats.finite import refuse_nonfinite
from quantload.loader.formats.matching import matches_substring, names_of
from quantload.loader.formats.module_leaves import ModuleLeaves, by_module, refuse_leftovers
from quantload.loader.source import FLOAT_DTYPES, Block, Reader, SourceWeight
from quantload.quant.qtensor import QuantTensor

_KINDS: dict[str, AwqKind | None] = {
    "gemm": "gemm",
    "exllama": "gemm",
    "exllamav2": "gemm",
    "exllama_v2": "gemm",
    "ipex": "gemm",
    "gemv": "gemv",
    "gemv_fast": "gemv_fast",
    "llm-awq": None,
    "llm_awq": None,
}
_BITS = (2, 3, 4, 5, 6, 7, 8)
_BLOCK = re.compile(r"\.\d+\.")  # of a decoder block: model.layers.3.
_INNER = "input_divisors"  # leaf under which a weight consumes the scales of an activation


class AwqReader(Reader):
    """Reader of one AWQ checkpoint."""

    decodes_leaves = True

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(_with_usual_names(checkpoint))
        assert checkpoint.quantization_config is not None, "detected by its config"
        config, name = checkpoint.quantization_config, checkpoint.name
        self._kind = _stated_kind(config, name)
        self._values = _values_of(config, name)
        self._left_out = _left_out(config.get("modules_to_not_convert"), name)
        self._rules = parse_rules(config.get("dynamic"), name)
        for rule in self._rules:  # find wrong values now, not at the first module that matches
            _values_of({**config, **(rule.overrides or {})}, name)
        self._layouts: dict[str, AwqLayout] = {}

    def weights(self) -> Mapping[str, SourceWeight]:
        """Describe every weight, by module; config and headers must agree."""
        found: dict[str, SourceWeight] = {}
        activations: list[ModuleLeaves] = []
        said, stored = {}, {}
        for module, leaves in by_module(self.checkpoint, AWQ_LEAVES).items():
            if _is_activation(leaves):
                activations.append(leaves)
                continue
            names = names_of(module)
            rule = first_rule(self._rules, names)
            is_packed = any(leaf in leaves for leaf in AWQ_LEAVES if leaf != "weight")
            if is_packed:
                said[module] = self._says_of(module, names, rule)
                self._layouts[module] = self._layout_of(leaves, rule)
                found[module] = awq_weight(
                    leaves, self._layouts[module], decided_by=said[module].entry
                )
            elif (weight := dense_weight(leaves["weight"])) is not None:
                said[module] = self._says_of(module, names, rule)
                found[module] = weight
            if module in found:
                stored[module] = is_packed
        self.warnings += check_agreement(said, stored, self.checkpoint.name)
        self.entries = count_entries(said, stored)
        self.warnings += about_unused_entries(
            (f"modules_to_not_convert: {entry}" for entry in self._left_out),
            self.entries,
            self.checkpoint,
            lambda entry: lambda module: any(entry in name for name in names_of(module)),
        )
        self._attach(activations, found)
        refuse_leftovers(
            self.checkpoint, (name for weight in found.values() for name in weight.leaves.values())
        )
        return found

    def blocks_of(self, weight: SourceWeight) -> Mapping[str, Block] | None:
        """Return what elements of its tensors stand for; see `Reader.blocks_of`."""
        layout = self._layouts.get(weight.module)
        if layout is None or layout.kind != "gemm" or 32 % layout.bits:
            return None
        fields, columns = 32 // layout.bits, weight.shape[1]
        group = 0 if layout.group_size in (-1, columns) else layout.group_size
        found = {
            "qweight": Block(fields, 1, has_inputs_first=True),
            "qzeros": Block(fields, group, has_inputs_first=True),
            "scales": Block(1, group, has_inputs_first=True),
            _INNER: Block(0, 1, has_inputs_first=True),
        }
        return {leaf: found[leaf] for leaf in weight.leaves}

    def decode(self, weight: SourceWeight) -> QuantTensor | Tensor:
        """Read a weight [N, K]: canonical if it is quantized, else float."""
        if not weight.is_quantized:
            return self.checkpoint.read(weight.leaves["weight"])
        parts = {leaf: self.checkpoint.read(name) for leaf, name in weight.leaves.items()}
        inner = parts.pop(_INNER, None)
        if inner is not None:
            name = weight.leaves[_INNER]
            refuse_nonfinite(inner, name, self.checkpoint.name)
            if not bool(inner.all()):
                raise FormatMismatch(
                    f"tensor `{name}` holds zeros, expected divisors, in `{self.checkpoint.name}`"
                )
        return decode_awq(
            parts,
            weight,
            self._layouts[weight.module],
            checkpoint_name=self.checkpoint.name,
            inner=inner,
        )

    def _says_of(self, module: str, names: tuple[str, ...], rule: Rule | None) -> ConfigSays:
        if rule is not None:
            return rule.says_of(names)
        joined = "\n".join(names)  # no entry has a line break in it
        for entry in self._left_out:
            if matches_substring(entry, joined):
                return ConfigSays(False, f"modules_to_not_convert: {entry}")
        return ConfigSays(_BLOCK.search(module) is not None, "all linear layers in blocks")

    def _layout_of(self, leaves: ModuleLeaves, rule: Rule | None) -> AwqLayout:
        values = self._values
        if rule is not None and rule.overrides:
            merged = {**(self.checkpoint.quantization_config or {}), **rule.overrides}
            values = _values_of(merged, self.checkpoint.name)
        bits, group_size, symmetric = values
        return AwqLayout(
            bits=bits,
            group_size=group_size,
            symmetric=symmetric,
            kind=self._kind or _kind_of(leaves),
        )

    def _attach(self, activations: list[ModuleLeaves], found: dict[str, SourceWeight]) -> None:
        """Give the scales of each activation to the linear layer that takes what it returns."""
        if not activations:
            return
        by_parent: dict[str, list[str]] = {}
        for module in found:
            by_parent.setdefault(module.rpartition(".")[0], []).append(module)
        for leaves in activations:
            entry = leaves["scales"]
            beside = by_parent.get(leaves.module.rpartition(".")[0], [])
            takers = [module for module in beside if found[module].shape[1] == entry.shape[0]]
            free = [m for m in takers if found[m].is_quantized and _INNER not in found[m].leaves]
            if len(takers) != 1 or len(free) != 1:
                raise UnsupportedVariant(
                    f"tensor `{entry.name}` of shape `{entry.shape}` scales an activation, and the "
                    f"layer that takes it is not clear: expected one quantized linear layer beside "
                    f"`{leaves.module}` with {entry.shape[0]} input features, found "
                    f"{listed(takers) or 'none'}, in `{self.checkpoint.name}`"
                )
            taker = found[free[0]]
            found[free[0]] = replace(
                taker,
                leaves={**taker.leaves, _INNER: entry.name},
                obstacle="its input channels have factors of their own",
            )


def _with_usual_names(checkpoint: Checkpoint) -> Checkpoint:
    """Call a float `qweight` without scales `weight`, as Quark's AWQ mode does not."""
    names = {}
    for name, entry in checkpoint.tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "qweight" and entry.dtype in FLOAT_DTYPES:
            others = (f"{module}.{other}" for other in ("scales", "qzeros"))
            if not any(other in checkpoint.tensors for other in others):
                names[name] = f"{module}.weight"
    return checkpoint.renamed(names) if names else checkpoint


def _is_activation(leaves: ModuleLeaves) -> bool:
    return (
        leaves.entries.keys() == {"scales"}
        and len(leaves["scales"].shape) == 1
        and leaves["scales"].dtype in FLOAT_DTYPES
    )


def _kind_of(leaves: ModuleLeaves) -> AwqKind:
    """Tell from headers how the codes are arranged; wrong shapes are found afterwards."""
    codes, scales = leaves.entries.get("qweight"), leaves.entries.get("scales")
    if codes is None or scales is None:
        return "gemm"
    if codes.dtype == torch.int16:
        return "gemv_fast"
    return "gemv" if codes.shape[:1] == scales.shape[:1] else "gemm"


def _stated_kind(config: Mapping[str, Any], checkpoint_name: str) -> AwqKind | None:
    """Return the arrangement that the config states; None if headers decide."""
    for key in ("checkpoint_format", "format", "version"):
        stated = config.get(key)
        if stated is not None:
            break
    else:
        return None
    if not isinstance(stated, str) or stated.lower() not in _KINDS:
        raise UnsupportedVariant(
            f"AWQ version `{stated}` is not read, expected {listed(_KINDS, limit=10)}, {WHERE} "
            f"`{checkpoint_name}`",
            hint="that is the layout of one kernel; save the model as `gemm`",
        )
    is_llm_awq = str(config.get("backend")).lower().replace("_", "-") == "llm-awq"
    return None if is_llm_awq else _KINDS[stated.lower()]


def _values_of(config: Mapping[str, Any], checkpoint_name: str) -> tuple[int, int, bool]:
    """Return bits, group size, and whether there are no zero points."""
    bits = read_int(config, "bits" if "bits" in config else "w_bit", _BITS, checkpoint_name)
    key = "group_size" if "group_size" in config else "q_group_size"
    group_size = read_group_size(config, key, checkpoint_name)
    if config.get("zero_point") is None:
        return bits, group_size, read_bool(config, "sym", False, checkpoint_name)
    return bits, group_size, not read_bool(config, "zero_point", True, checkpoint_name)


def _left_out(modules: object, checkpoint_name: str) -> tuple[str, ...]:
    if modules is None:
        return ()
    if not isinstance(modules, list) or not all(_is_name(entry) for entry in modules):
        raise wrong_value("modules_to_not_convert", modules, "a list of names", checkpoint_name)
    return tuple(modules)


def _is_name(entry: object) -> bool:
    return isinstance(entry, str) and bool(entry) and "\n" not in entry


__all__ = ["AwqReader"]
