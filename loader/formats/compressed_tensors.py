"""compressed-tensors: what vLLM, SGLang and transformers load. Read and written.

N output features, K input features, b bits, G = number of groups, u = unsigned field.

pack-quantized (integers of 2 to 8 bits)
    weight_packed       int32 [N, W]          u = code + 2^(b-1), packed along K, little endian
                                              dense: W = ceil(K * b / 32); before 0.18, for 3, 5, 6
                                              and 7 bits padded: W = ceil(K / (32 // b))
    weight_scale        float [N, G], [N, 1], [1], or [ceil(N/rows), ceil(K/columns)] of blocks
    weight_shape        int64 [2] = (N, K)
    weight_zero_point   group and channel: int32 [ceil(N * b / 32), G], packed as the weight but
                        along N, or int8 [N, G]; tensor and block: int8 in the shape of the scale
    weight_g_idx        int32 [K], the group of each column (act-order "group", until 0.19)
int-quantized, naive-quantized, float-quantized
    weight              int8 (also for fewer bits) or e4m3 [N, K]
    weight_scale, weight_zero_point as above, zero points int8 or e4m3, not packed
nvfp4-pack-quantized
    weight_packed       uint8 [N, K/2]        e2m1 codes, low nibble first
    weight_scale        e4m3 [N, K/16]
    weight_global_scale float32 [1] or [], a divisor
mxfp4-pack-quantized, mxfp6-pack-quantized, mxfp8-quantized
    weight_packed       uint8 [N, K/2] e2m1; uint8 [N, 3K/4] e2m3, 4 codes in 3 bytes little endian;
    or weight           e4m3 [N, K]
    weight_scale        uint8 [N, K/32], 2^(byte - 127)

Evaluation
    integers and e4m3   w = (code - zero_point) * scale in the scale's dtype
    mx                  w = code * scale in bfloat16
    nvfp4               s = scale / global scale, rounded to float32 if that is [1], to bfloat16 if
                        it is []; w = code * s in the dtype of s, rounded to bfloat16
input_scale, input_zero_point and input_global_scale (a divisor) belong to static input
quantization. A `weight_g_idx` of -1 is a placeholder: groups are in order.

What is not quantized although tensors of scales are left (groups of format "dense") is read as it
is. Quantized modules that no target names (model-free exports quantize embeddings under the target
"Linear") belong to the only group that fits their tensors.

Source: compressed-tensors 0.17.0 to 0.20.1, `compressors/` and `quantization/lifecycle/forward.py`;
dense instead of padded from 0.18.0 on; exponents of mxfp4 biased by 127 from 0.14.0 on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from quantload.errors import FormatMismatch, MissingTensor, QuantloadError, listed
from quantload.loader.checkpoint import Checkpoint
from quantload.loader.formats.agreement import (
    ConfigSays,
    about_unused_entries,
    check_agreement,
    count_entries,
)
from quantload.loader.formats.cache_scales import with_usual_cache_names
from quantload.loader.formats.compressed_tensors_arguments import MXFP4, SCALE_KINDS
from quantload.loader.formats.compressed_tensors_config import (
    Group,
    parse_config,
    regex_test,
)
from quantload.loader.formats.compressed_tensors_decode import decode_parts
from quantload.loader.formats.compressed_tensors_encode import encode, layout
from quantload.loader.formats.compressed_tensors_shapes import checked_weight, refuse_mixed_packing
from quantload.loader.formats.dense import dense_weight
from quantload.loader.formats.finite import refuse_nonfinite
from quantload.loader.formats.module_leaves import ModuleLeaves, by_module, refuse_leftovers
from quantload.loader.formats.stored_blocks import stored_blocks
from quantload.loader.source import FLOAT_DTYPES, Block, Reader, SourceWeight
from quantload.quant.qtensor import QuantTensor

_INPUT_LEAVES = ("input_scale", "input_zero_point", "input_global_scale")
_LEAVES = (
    "weight_packed",
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "weight_global_scale",
    *_INPUT_LEAVES,
    "weight",
)
_BY_HEADERS = "the headers (the config leaves it out)"


class CompressedTensorsReader(Reader):
    """Reader of one compressed-tensors checkpoint."""

    decodes_leaves = True

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(with_usual_cache_names(checkpoint))
        config = checkpoint.quantization_config
        assert config is not None, "detected by its config"
        cache_scheme = config.get("kv_cache_scheme")
        if cache_scheme is not None and not isinstance(cache_scheme, Mapping):
            raise FormatMismatch(
                f"`kv_cache_scheme` of the quantization config is `{cache_scheme}`, expected an "
                f"object, in `{checkpoint.name}`"
            )
        self.cache_scheme = cache_scheme
        self._config = parse_config(config)

    def weights(self) -> Mapping[str, SourceWeight]:
        """Describe every weight, by module; config and headers must agree."""
        found = {}
        said = {}
        for module, leaves in by_module(self.checkpoint, _LEAVES).items():
            weight = self._describe(leaves)
            if weight is not None:
                found[module] = weight
                said[module] = self._said(module)
        stored = {module: weight.is_quantized for module, weight in found.items()}
        self.warnings += check_agreement(said, stored, self.checkpoint.name)
        self.entries = count_entries(said, stored)
        self.warnings += about_unused_entries(
            self._config.entries(), self.entries, self.checkpoint, regex_test
        )
        self.warnings += self._about_exponents(found)
        consumed = [name for weight in found.values() for name in weight.leaves.values()]
        refuse_leftovers(self.checkpoint, consumed)
        refuse_mixed_packing(self.checkpoint, found)
        return found

    # -- one module ----------------------------------------------------------------------------

    def _describe(self, leaves: ModuleLeaves) -> SourceWeight | None:
        is_packed = "weight_packed" in leaves
        if not is_packed and "weight_scale" not in leaves:
            return self._described_plain(leaves)
        matched = self._matched(leaves.module)
        if matched is not None and matched[0].is_quantized:
            return self._described(leaves, *matched)
        is_plain = "weight" in leaves and leaves["weight"].dtype in FLOAT_DTYPES
        if matched is not None and is_plain and not is_packed:
            return self._described_plain(leaves)
        return self._described_by_headers(leaves)

    def _described(self, leaves: ModuleLeaves, group: Group, decided_by: str) -> SourceWeight:
        shape, scheme = checked_weight(leaves, group, self._read_shape)
        has_own_scales = group.format in SCALE_KINDS
        return SourceWeight(
            module=leaves.module,
            shape=shape,
            scheme=scheme,
            encoding=f"{group.format} {scheme}",
            dtype=torch.bfloat16 if has_own_scales else leaves["weight_scale"].dtype,
            leaves=leaves.names,
            decided_by=f"{group.name}: {decided_by}",
        )

    def _described_by_headers(self, leaves: ModuleLeaves) -> SourceWeight:
        """Describe a module that the config leaves out: by the only group that fits it."""
        groups = [group for group in self._config.groups if group.is_quantized]
        kinds = {(group.scheme, group.format): group for group in reversed(groups)}
        fitting: list[SourceWeight] = []
        errors: list[QuantloadError] = []
        for group in kinds.values():
            try:
                fitting.append(self._described(leaves, group, _BY_HEADERS))
            except QuantloadError as error:
                errors.append(error)
        if len(fitting) == 1:
            return fitting[0]
        if len(kinds) == 1:
            raise errors[0]
        which = f"{len(fitting)} groups fit it" if fitting else "none fits it"
        raise FormatMismatch(
            f"module `{leaves.module}` is quantized in the files, but no config group names it, "
            f"and {which}, in `{self.checkpoint.name}`"
        )

    def _described_plain(self, leaves: ModuleLeaves) -> SourceWeight | None:
        if "weight" not in leaves:
            return None
        entry = leaves["weight"]
        if len(entry.shape) >= 2 and entry.dtype not in FLOAT_DTYPES:
            raise MissingTensor(
                f"tensor `{leaves.module}.weight_scale` is missing: `{entry.name}` is "
                f"`{entry.dtype}`, in `{self.checkpoint.name}`"
            )
        weight = dense_weight(entry)
        left = {leaf: name for leaf, name in leaves.names.items() if leaf != "weight"}
        if weight is None or not left:
            return weight
        self.warnings.append(
            f"module `{leaves.module}` is in full precision; what is left of its quantization is "
            f"dropped: {listed(left)}"
        )
        return replace(weight, leaves=leaves.names)

    def _read_shape(self, name: str) -> tuple[int, int]:
        rows, columns = self.checkpoint.read(name).tolist()
        return int(rows), int(columns)

    # -- what the config says --------------------------------------------------------------------

    def _matched(self, module: str) -> tuple[Group, str] | None:
        """Return the group of a module and its target.

        Model-free exports count embeddings as `Linear`.
        """
        classes = _class_names(module)
        if self._config.ignored_by(module, classes) is not None:
            return None
        return self._config.match(module, classes) or self._config.match(module, ("Linear",))

    def _said(self, module: str) -> ConfigSays:
        classes = _class_names(module)
        ignored = self._config.ignored_by(module, classes)
        if ignored is not None:
            return ConfigSays(is_quantized=False, entry=f"ignore: {ignored}")
        matched = self._config.match(module, classes)
        if matched is None:
            return ConfigSays(is_quantized=False, entry="no target matches")
        group, target = matched
        return ConfigSays(
            is_quantized=group.is_quantized,
            entry=f"{group.name}: {target}",
            is_exact=target == module,
        )

    def _about_exponents(self, found: Mapping[str, SourceWeight]) -> list[str]:
        version = self._config.version
        is_old = version is not None and version < (0, 14)
        if not is_old or not any(w.encoding.startswith(MXFP4) for w in found.values()):
            return []
        return [
            "compressed-tensors before 0.14 wrote some MXFP4 scales with a bias of 125 instead of "
            "127; they are read with 127. Weights of such a checkpoint would be 4 times too small: "
            "compare it with its source"
        ]

    # -- reading -----------------------------------------------------------------------------------

    def blocks_of(self, weight: SourceWeight) -> Mapping[str, Block] | None:
        """Return what elements of its tensors stand for; see `Reader.blocks_of`."""
        zero = weight.leaves.get("weight_zero_point")
        has_packed_zeros = zero is not None and self.checkpoint.tensors[zero].dtype == torch.int32
        scales = {"weight_scale"} if has_packed_zeros else {"weight_scale", "weight_zero_point"}
        found = stored_blocks(
            weight,
            self.checkpoint.tensors,
            codes="weight" if "weight" in weight.leaves else "weight_packed",
            scales=scales,
            packed_rows={"weight_zero_point"} - scales,
            whole={"weight_shape", "weight_g_idx", "weight_global_scale", *_INPUT_LEAVES},
        )
        if found is None or "weight_g_idx" not in weight.leaves:
            return found
        for leaf in {"weight_scale", "weight_zero_point"} & found.keys():
            found[leaf] = Block(found[leaf].rows, 0)  # columns find their group by number
        return {**found, "weight_g_idx": Block(0, 1, has_inputs_first=True)}

    def decode(self, weight: SourceWeight) -> QuantTensor | Tensor:
        """Read a weight [N, K]: canonical if it is quantized, else float.

        Raises:
            NonFiniteWeight: Codes or scales hold NaN or infinity.
            FormatMismatch: Values contradict the scheme.
        """
        if weight.scheme is None:
            return self.checkpoint.read(weight.leaves["weight"])
        refuse = partial(refuse_nonfinite, checkpoint_name=self.checkpoint.name)
        for leaf in _INPUT_LEAVES:
            if leaf in weight.leaves:
                name = weight.leaves[leaf]
                refuse(self.checkpoint.read(name), name)
        parts = {
            leaf: self.checkpoint.read(name)
            for leaf, name in weight.leaves.items()
            if leaf not in ("weight_shape", *_INPUT_LEAVES)
        }
        return decode_parts(
            parts, weight, version=self._config.version, checkpoint_name=self.checkpoint.name
        )


def _class_names(module: str) -> tuple[str, ...]:
    """Return the class that a name suggests: a quantized weight is a Linear's or an Embedding's."""
    is_embedding = "embed" in module.rpartition(".")[2]
    return ("Embedding",) if is_embedding else ("Linear",)


__all__ = ["CompressedTensorsReader", "encode", "layout"]
