"""ModelOpt (NVIDIA), as its unified Hugging Face export writes it.

N output features, K input features, g columns of a group, s = weight_scale, s2 = weight_scale_2.

layout       weight            weight_scale              value
e4m3         e4m3 [N, K]       float [], [N] or [N, 1]   q * s
e4m3 blocks  e4m3 [N, K]       float [N/128, K/128], or  q * s; a weight of one block may have []
                               [N/128, 1, K/128, 1]
mxfp8        e4m3 [N, K]       uint8 [N, K/32]           q * 2^(s - 127)
int8         int8 [N, K]       float [] or [N]           q * s
int4         uint8 [N/2, K]    float [N, K/g]            q * s; byte [i, k] holds row 2i in its low
                                                         and row 2i + 1 in its high nibble, two's
                                                         complement
nvfp4        uint8 [N, K/2]    e4m3 [N, K/16]            q * (s * s2); byte [n, i] holds column 2i
                                                         in its low nibble, codes are e2m1
mxfp4        uint8 [N, K/2]    uint8 [N, K/32]           q * 2^(s - 127), codes as above

All is evaluated in float32. `weight_scale_2` is a float32 scalar, and a multiplier; `W4A8_AWQ`
stores one for its FP8 kernel that is no part of the weight. `input_scale` is a float32 scalar
multiplier. Blocks may be partial on the lower and right edge of `e4m3 blocks` only.

int4 with K no multiple of g: ModelOpt quantizes with groups of K / (columns of the scale) if that
is a whole number, and so is it read.

`pre_quant_scale` float [K] multiplies the layer's input (AWQ, SmoothQuant). `NVFP4_SVD` adds a
low-rank product: y = (W + B A) (x * pre_quant_scale) with A [r, K] and B [N, r] in bfloat16. The
sum has no codes, so that it is read as a float32 weight.

Experts in one parameter P [E, ., .] of the module above (Llama 4, gpt-oss) have the leaves
`P_weight_scale`, `P_weight_scale_2`, `P_input_scale`: see `modelopt_experts.py`.

Scales of the key-value cache lie on `k_proj` and `v_proj`; see `cache_scales.py`.

Source: `export/quant_utils.py`, `export/unified_export_hf.py` and `quantization/qtensor` of
ModelOpt 0.47.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from quantload.errors import FormatMismatch, MissingTensor, UnsupportedVariant, listed
from quantload.loader.checkpoint import Checkpoint
from quantload.loader.formats.agreement import (
    ConfigSays,
    about_unused_entries,
    check_agreement,
    count_entries,
)
from quantload.loader.formats.cache_scales import with_usual_cache_names
from quantload.loader.formats.dense import dense_weight
from quantload.loader.formats.finite import refuse_nonfinite
from quantload.loader.formats.modelopt_config import (
    Algorithm,
    matches_any_name,
    needs_side_file,
    parse_config,
)
from quantload.loader.formats.modelopt_experts import (
    blocks_of_experts,
    describe_experts,
    expert_leaves,
    read_experts,
)
from quantload.loader.formats.modelopt_factors import check_factors
from quantload.loader.formats.modelopt_inputs import with_input_scales
from quantload.loader.formats.modelopt_layouts import describe, quantized_part
from quantload.loader.formats.module_leaves import (
    ModuleLeaves,
    by_module,
    refuse_leftovers,
    refuse_unknown_parts,
)
from quantload.loader.formats.stored_blocks import stored_blocks
from quantload.loader.open import read_json
from quantload.loader.source import FLOAT_DTYPES, Block, Reader, SourceWeight
from quantload.quant.qtensor import QuantTensor

Describe = Callable[[ModuleLeaves, Algorithm, str], SourceWeight]

_SIDE_FILE = "hf_quant_config.json"
_LOW_RANK = {"a": "svdquant_lora_a", "b": "svdquant_lora_b"}
_RENAMED = {f"weight_quantizer._{leaf}": leaf for leaf in _LOW_RANK.values()}
_LEAVES = (
    "weight",
    "weight_scale",
    "weight_scale_2",
    "input_scale",
    "pre_quant_scale",
    *_LOW_RANK.values(),
    *_RENAMED,
)


class ModelOptReader(Reader):
    """Reader of one ModelOpt checkpoint."""

    has_experts_apart = True
    decodes_leaves = True

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(with_usual_cache_names(checkpoint))
        assert checkpoint.quantization_config is not None, "detected by its config"
        config, side_file = checkpoint.quantization_config, checkpoint.folder / _SIDE_FILE
        beside = None
        if needs_side_file(config) and side_file.is_file():
            beside = read_json(side_file, needed_for="the quantization config")
        self._config = parse_config(config, beside)
        self.cache_scheme = self._config.cache_scheme

    def weights(self) -> Mapping[str, SourceWeight]:
        """Describe every weight, by module; config and headers must agree."""
        found: dict[str, SourceWeight] = {}
        said: dict[str, ConfigSays] = {}
        for module, leaves in by_module(self.checkpoint, _LEAVES).items():
            self._check_lone(leaves)
            entry = leaves["weight"]
            is_stored = len(leaves.entries) > 1 or entry.dtype not in FLOAT_DTYPES
            weight = self._describe(leaves, said) if is_stored else dense_weight(entry)
            if weight is not None:
                found[module] = weight
                if not is_stored:
                    said[module] = self._config.of_module(module)[0]
        for leaves in expert_leaves(self.checkpoint):
            said[leaves.module], algorithm = self._config.of_module(leaves.module)
            algorithm = algorithm or self._fitting(leaves, describe_experts)
            decided_by = said[leaves.module].entry
            found[leaves.module] = describe_experts(leaves, algorithm, decided_by)
        stored = {module: weight.is_quantized for module, weight in found.items()}
        self.warnings += check_agreement(said, stored, self.checkpoint.name)
        self.entries = count_entries(said, stored)
        self.warnings += about_unused_entries(
            self._config.entries(), self.entries, self.checkpoint, matches_any_name
        )
        refuse_leftovers(
            self.checkpoint, (name for w in found.values() for name in w.leaves.values())
        )
        refuse_unknown_parts(self.checkpoint, found)
        self.warnings += check_factors(self.checkpoint, found)
        filled, warnings = with_input_scales(self.checkpoint, found)
        self.warnings += warnings
        return filled

    def _check_lone(self, leaves: ModuleLeaves) -> None:
        if "weight" not in leaves:
            raise MissingTensor(
                f"tensor `{leaves.module}.weight` is missing in `{self.checkpoint.name}`; the "
                f"module has {listed(leaves.entries)}"
            )

    def _describe(self, leaves: ModuleLeaves, said: dict[str, ConfigSays]) -> SourceWeight:
        said[leaves.module], algorithm = self._config.of_module(leaves.module)
        entries = {_RENAMED.get(leaf, leaf): entry for leaf, entry in leaves.entries.items()}
        if len(entries) < len(leaves.entries):
            raise FormatMismatch(
                f"module `{leaves.module}` has its low-rank factors twice: "
                f"{listed(leaves.entries)}, in `{self.checkpoint.name}`"
            )
        renamed = ModuleLeaves(leaves.module, entries, leaves.checkpoint_name)
        if algorithm is None:
            algorithm = self._fitting(renamed, describe)
        return describe(renamed, algorithm, said[leaves.module].entry)

    def _fitting(self, leaves: ModuleLeaves, describe: Describe) -> Algorithm:
        """Return the only algorithm of the config whose tensors these can be."""
        fitting = []
        for algorithm in dict.fromkeys(self._config.layers.values()):
            try:
                describe(leaves, algorithm, "")
            except (FormatMismatch, MissingTensor, UnsupportedVariant):
                continue
            fitting.append(algorithm)
        if len(fitting) != 1:
            raise FormatMismatch(
                f"module `{leaves.module}` is quantized in the files, with {listed(leaves.entries)}"
                f", but the quantization config does not say how, in `{self.checkpoint.name}`",
                hint="the config leaves the module out; these files are not the ones that it was "
                "written for",
            )
        return fitting[0]

    def blocks_of(self, weight: SourceWeight) -> Mapping[str, Block] | None:
        """Return what elements of its tensors stand for; see `Reader.blocks_of`."""
        if weight.experts:
            return blocks_of_experts(self.checkpoint, weight)
        return stored_blocks(
            weight,
            self.checkpoint.tensors,
            codes="weight",
            scales={"weight_scale"},
            whole={"weight_scale_2", "input_scale", "pre_quant_scale"},
            has_columns="pre_quant_scale" not in weight.leaves,
        )

    def decode(self, weight: SourceWeight) -> QuantTensor | Tensor:
        """Read a weight [N, K]: canonical, or float where it is the sum of two products."""
        if weight.scheme is None:
            return self.checkpoint.read(weight.leaves["weight"])
        if weight.experts:
            return read_experts(self.checkpoint, weight)
        part = self.quantized_part(weight)
        if _LOW_RANK["a"] not in weight.leaves:
            return part
        return self._with_low_rank(part, weight)

    def quantized_part(self, weight: SourceWeight) -> QuantTensor:
        """Read the codes of a quantized weight [N, K], without the low-rank product beside them."""
        return quantized_part(self.checkpoint, weight)

    def _with_low_rank(self, part: QuantTensor, weight: SourceWeight) -> Tensor:
        """Return (W + B A) * pre_quant_scale, float32 [N, K]."""
        factors = {}
        for side, leaf in _LOW_RANK.items():
            stored = self.checkpoint.read(weight.leaves[leaf])
            refuse_nonfinite(stored, weight.leaves[leaf], self.checkpoint.name)
            factors[side] = stored.to(torch.float32)
        inner = part.inner
        total = replace(part, inner=None).dequantize() + factors["b"] @ factors["a"]
        return total if inner is None else total * inner.to(torch.float32)
