"""FP8: `quant_method` `fp8`, `fbgemm_fp8` and `mxfp8`, one scale tensor beside each weight.

    weight              e4m3 or e5m2 [N, K]
    weight_scale_inv,   scale of the tensor, of rows, or of blocks: dtypes, shapes and formula in
    weight_scale,       `float8.py`. DeepSeek-V4 calls it `scale`, Mistral `qscale_weight`
    scale, ...
    input_scale,        [] or [1], float multiplier: x = code * s; needed if `activation_scheme` is
    activation_scale    "static"
    k_scale, v_scale    of the key-value cache, see `cache_scales.py`

    weight              int8 or uint8 [N, K/2], e2m1, low nibble = even column
    scale               e8m0 or uint8 [N, ceil(K/32)]: weights of DeepSeek-V4's experts

    producer (by config)            value                               rounded to
    transformers, DeepSeek, Quark,  q * s in float32                    dtype of the model's config
    AutoRound: `fp8`, `mxfp8`
    FBGEMM: `fbgemm_fp8`            q * s in float32                    not at all
    GPTQModel: `fp8` with           q / s in float32; s is cast to the  not at all
    `weight_scale_method`           dtype of the model's config first

Experts in one parameter [E, N, K] are described in `fp8_experts.py`, config keys in
`fp8_config.py`. Files are believed where config and files differ in which modules are quantized.

Source: `Fp8Dequantize` and `FP8Linear` of transformers 5.24.0, `FbgemmFp8Linear` of the same,
`TorchFP8Linear` of GPTQModel 7.7.0, `fp8.py` and `mxfp8.py` of vLLM 0.33.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from quantload.errors import FormatMismatch, MissingTensor, listed
from quantload.loader.checkpoint import Checkpoint, TensorEntry
from quantload.loader.formats.agreement import (
    ConfigSays,
    about_unused_entries,
    check_agreement,
    count_entries,
)
from quantload.loader.formats.cache_scales import with_usual_cache_names
from quantload.loader.formats.dense import dense_weight
from quantload.loader.formats.exclusions import matches_excluded
from quantload.loader.formats.float8 import (
    EXPONENT_DTYPES,
    FLOAT8_GRIDS,
    INPUT_SCALE_LEAVES,
    SCALE_LEAVES,
    float8_scheme,
    float8_weight,
    read_float8,
    scale_leaf_of,
)
from quantload.loader.formats.fp8_config import DEFAULT_BLOCK, Fp8Config, parse_config
from quantload.loader.formats.fp8_experts import (
    ExpertsFacts,
    blocks_of_experts,
    expert_weights,
    read_experts,
)
from quantload.loader.formats.module_leaves import (
    ModuleLeaves,
    by_module,
    refuse_leftovers,
    refuse_unknown_parts,
)
from quantload.loader.formats.packed_fp4 import fp4_weight, is_packed_fp4, read_fp4
from quantload.loader.formats.stored_blocks import stored_blocks
from quantload.loader.model_dtype import config_dtype
from quantload.loader.source import FLOAT_DTYPES, Block, Reader, SourceWeight
from quantload.quant.qtensor import Evaluation, QuantTensor

_BOUND_LEAVES = ("input_scale_ub", "activation_scale_ub")
_LEAVES = ("weight", *SCALE_LEAVES, *INPUT_SCALE_LEAVES, *_BOUND_LEAVES)
_USUAL_LEAVES = {"qscale_act": "input_scale"}
# What one scale is for, by `weight_scale_method`.
_GRANULARITIES = {"tensor": ("tensor",), "row": ("channel",), "block": ("block", "group")}
_CACHE_SCALES = (".k_scale", ".v_scale", ".kv_scale")
_CACHE_SCHEME = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "dynamic": False,
    "symmetric": True,
}


class Fp8Reader(Reader):
    """Reader of one FP8 checkpoint."""

    has_experts_apart = True
    decodes_leaves = True

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(with_usual_cache_names(checkpoint))
        self._config = parse_config(checkpoint)
        self._model_dtype = config_dtype(checkpoint.config)
        self._evaluation = _evaluation(self._config, self._model_dtype)
        self._dtype = self._evaluation.result or self._evaluation.dtype
        self._is_scale_a_scale = True
        if any(name.endswith(_CACHE_SCALES) for name in self.checkpoint.tensors):
            self.cache_scheme = _CACHE_SCHEME
        if self._config.divides:
            self.warnings.append(
                "scales are divisors, as GPTQModel means them; other engines multiply with them"
            )

    def weights(self) -> Mapping[str, SourceWeight]:
        """Describe every weight, by module; config and headers must agree."""
        modules = by_module(self.checkpoint, _LEAVES)
        self._is_scale_a_scale = any(_scales_something(leaves) for leaves in modules.values())
        described = (self._describe(leaves) for leaves in modules.values())
        found = {weight.module: weight for weight in described if weight is not None}
        found |= {w.module: w for w in expert_weights(self.checkpoint, self._experts_facts())}
        self._check_agreement(found)
        consumed = (name for weight in found.values() for name in weight.leaves.values())
        refuse_leftovers(self.checkpoint, consumed)
        refuse_unknown_parts(self.checkpoint, found)
        return found

    def _experts_facts(self) -> ExpertsFacts:
        return ExpertsFacts(
            grid=self._config.grid,
            block=self._config.block,
            input=self._config.input_of(self._config.block),
            decided_by=f"quant_method: {self._config.method}",
            dtype=self._dtype,
        )

    def _check_agreement(self, found: Mapping[str, SourceWeight]) -> None:
        stored = {module: weight.is_quantized for module, weight in found.items()}
        said = {module: self._says(module) for module in stored}
        self.warnings += check_agreement(said, stored, self.checkpoint.name)
        self.entries = count_entries(said, stored)
        self.warnings += about_unused_entries(
            self._config.entries(), self.entries, self.checkpoint, matches_excluded
        )

    def _says(self, module: str) -> ConfigSays:
        if module in self._config.converted:
            return ConfigSays(True, f"modules_to_convert: {module}", is_exact=True)
        entry = self._config.excluded_by(module)
        return ConfigSays(not entry, entry or f"quant_method: {self._config.method}")

    # -- one module --------------------------------------------------------------------------------

    def _describe(self, leaves: ModuleLeaves) -> SourceWeight | None:
        scale_leaf = scale_leaf_of(self._only_scales(leaves))
        if "weight" not in leaves:
            if scale_leaf is not None:
                leaves.require(["weight"], because=f"`{scale_leaf}` is a scale of it")
            return None
        entry = leaves["weight"]
        if entry.dtype in FLOAT_DTYPES:
            self._refuse_plain_with_scale(leaves, scale_leaf)
            return dense_weight(entry)
        if scale_leaf is None:
            self._refuse_without_scale(leaves)
            return None
        if is_packed_fp4(entry, leaves[scale_leaf]):
            return fp4_weight(
                leaves,
                scale_leaf,
                input=self._config.input_of(self._config.block),
                decided_by=f"quant_method: {self._config.method}",
            )
        return self._float8(leaves, scale_leaf)

    def _only_scales(self, leaves: ModuleLeaves) -> ModuleLeaves:
        """Leave out leaves named like a scale that scale no weight of this checkpoint."""
        if "scale" not in leaves or self._is_scale_a_scale:
            return leaves
        return replace(leaves, entries={k: e for k, e in leaves.entries.items() if k != "scale"})

    def _refuse_plain_with_scale(self, leaves: ModuleLeaves, scale_leaf: str | None) -> None:
        if scale_leaf is None or (scale_leaf == "scale" and len(leaves["weight"].shape) < 2):
            return
        raise FormatMismatch(
            f"tensor `{leaves['weight'].name}` is `{leaves['weight'].dtype}`, expected FP8 beside "
            f"its scale `{leaves[scale_leaf].name}`, in `{self.checkpoint.name}`",
            hint="codes were cast to floats, or the scale is left over from another export",
        )

    def _refuse_without_scale(self, leaves: ModuleLeaves) -> None:
        entry = leaves["weight"]
        if entry.dtype not in FLOAT8_GRIDS:
            return
        raise MissingTensor(
            f"no scale for tensor `{entry.name}` in `{self.checkpoint.name}`: expected "
            f"`{leaves.module}.weight_scale_inv` or {listed(SCALE_LEAVES)}, the module has "
            f"{listed(leaves.entries)}"
        )

    def _float8(self, leaves: ModuleLeaves, scale_leaf: str) -> SourceWeight:
        scale = leaves[scale_leaf]
        if self._config.exponents_only:
            leaves.expect(scale_leaf, dtypes=EXPONENT_DTYPES, because="the config says MXFP8")
        self._check_input_scale(leaves)
        block = self._block_of(leaves["weight"], scale)
        weight = float8_weight(
            leaves,
            scale_leaf,
            block=block,
            input=self._config.input_of(block),
            decided_by=f"quant_method: {self._config.method}",
            grid=self._config.grid,
            dtype=self._dtype,
        )
        self._check_method(weight, scale)
        if self._config.divides:
            weight = replace(weight, obstacle="its scales are divisors")
        if not _USUAL_LEAVES.keys() & leaves.entries.keys():
            return weight
        named = {_USUAL_LEAVES.get(leaf, leaf): name for leaf, name in weight.leaves.items()}
        return replace(weight, leaves=named)

    def _block_of(self, weight: TensorEntry, scale: TensorEntry) -> tuple[int, int] | None:
        if self._config.is_block_stated or len(weight.shape) != 2:
            return self._config.block
        shape = weight.shape[0], weight.shape[1]
        has_blocks = not float8_scheme(shape, scale.shape, None)
        fits = float8_scheme(shape, scale.shape, DEFAULT_BLOCK) is not None
        return DEFAULT_BLOCK if has_blocks and fits else None

    def _check_method(self, weight: SourceWeight, scale: TensorEntry) -> None:
        assert weight.scheme is not None, "an FP8 weight has a scheme"
        assert weight.scheme.weight is not None, "an FP8 weight has a scheme"
        method, found = self._config.method_of_scale, weight.scheme.weight.granularity
        if method and found not in _GRANULARITIES[method]:
            raise FormatMismatch(
                f"tensor `{scale.name}` of shape `{scale.shape}` has one scale a `{found}`, but "
                f"`weight_scale_method` is `{method}`, in `{self.checkpoint.name}`"
            )

    def _check_input_scale(self, leaves: ModuleLeaves) -> None:
        found = [leaf for leaf in INPUT_SCALE_LEAVES if leaf in leaves]
        because = "the config says `activation_scheme` is `static`"
        if self._config.is_static and not found:
            leaves.require(INPUT_SCALE_LEAVES[:1], because=because)
        if len(found) > 1:
            raise FormatMismatch(
                f"module `{leaves.module}` has both {listed(found)}, expected one scale of its "
                f"input, in `{self.checkpoint.name}`"
            )
        for leaf in found:
            one = ((), (1,), (1, 1))
            leaves.expect(leaf, dtypes=FLOAT_DTYPES, shapes=one, because="one scale an input")

    # -- reading -----------------------------------------------------------------------------------

    def blocks_of(self, weight: SourceWeight) -> Mapping[str, Block] | None:
        """Return what elements of its tensors stand for; see `Reader.blocks_of`."""
        if weight.experts:
            return blocks_of_experts(self.checkpoint, weight)
        return stored_blocks(
            weight,
            self.checkpoint.tensors,
            codes="weight",
            scales=SCALE_LEAVES,
            whole=(*INPUT_SCALE_LEAVES, *_BOUND_LEAVES),
        )

    def decode(self, weight: SourceWeight) -> QuantTensor | Tensor:
        """Read a weight [N, K], of experts [E * N, K]: canonical if quantized, else float."""
        if weight.scheme is None:
            return self.checkpoint.read(weight.leaves["weight"])
        assert weight.scheme.weight is not None, "a quantized weight has a weight scheme"
        if weight.experts:
            return read_experts(self.checkpoint, weight, self._evaluation)
        if weight.scheme.weight.grid.storage not in FLOAT8_GRIDS:
            return read_fp4(self.checkpoint, weight)
        found = read_float8(self.checkpoint, weight, self._evaluation)
        return self._with_narrow_divisors(found) if self._config.divides else found

    def _with_narrow_divisors(self, tensor: QuantTensor) -> QuantTensor:
        """GPTQModel's loader casts scales to the dtype of the model."""
        if self._model_dtype is None:
            return tensor
        narrow = tensor.scale.to(self._model_dtype)
        # Large divisors overflow float16; a model of infinities is nobody's truth.
        return replace(tensor, scale=narrow) if bool(narrow.isfinite().all()) else tensor


def _evaluation(config: Fp8Config, model_dtype: torch.dtype | None) -> Evaluation:
    if config.divides:
        return Evaluation(torch.float32, values="/")
    if config.method == "fbgemm_fp8" or model_dtype == torch.float32:
        return Evaluation(torch.float32)
    return Evaluation(torch.float32, result=model_dtype)


def _scales_something(leaves: ModuleLeaves) -> bool:
    """True if the leaf `scale` of a module is the scale of its codes."""
    if not {"weight", "scale"} <= leaves.entries.keys():
        return False
    return leaves["weight"].dtype not in FLOAT_DTYPES and len(leaves["weight"].shape) == 2
