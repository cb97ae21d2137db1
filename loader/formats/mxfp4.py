"""MXFP4 as gpt-oss has it: the experts of a block in one parameter, `quant_method` `mxfp4`.

E experts, N output features, K input features, P the name of the parameter in full precision.

    P_blocks    uint8 [E, N, K/32, 16]    e2m1 codes of 32 columns; column 2i in the low nibble of
                                          byte i, column 2i + 1 in the high one
    P_scales    uint8 [E, N, K/32]        2^(byte - 127) for these 32; 255 is NaN
    P_bias      float [E, N]              plain

    value       e2m1(code) * scale in bfloat16, which is exact
    P           [E, K, N] in the model: input features first
    names       `...experts.gate_up_proj` and `...experts.down_proj`; the rows of gate_up_proj
                alternate: gate, up, gate, up, ...

Everything else is in full precision. The config lists modules of which that is true in
`modules_to_not_convert`; the files are believed where they differ.

Source: `convert_moe_packed_tensors` and `Mxfp4Config` of transformers 5.24.0.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantload.errors import FormatMismatch, MissingTensor
from quantload.loader.checkpoint import Checkpoint, TensorEntry
from quantload.loader.formats.agreement import (
    ConfigSays,
    about_unused_entries,
    check_agreement,
    count_entries,
)
from quantload.loader.formats.dense import dense_weight
from quantload.loader.formats.exclusions import Exclusions, matches_excluded
from quantload.loader.formats.finite import refuse_nonfinite
from quantload.loader.formats.float8 import EXPONENT_DTYPES, as_scale
from quantload.loader.formats.module_leaves import refuse_leftovers
from quantload.loader.formats.packed_fp4 import BYTE_DTYPES, GROUP_SIZE, MXFP4, decode_fp4
from quantload.loader.source import Block, Reader, SourceWeight
from quantload.quant.qtensor import QuantTensor
from quantload.quant.scheme import scheme_of

_LISTS = "modules_to_not_convert"
_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK_BYTES = GROUP_SIZE // 2


class Mxfp4Reader(Reader):
    """Reader of one MXFP4 checkpoint."""

    has_experts_apart = True
    decodes_leaves = True

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._exclusions = _exclusions(checkpoint)

    def weights(self) -> Mapping[str, SourceWeight]:
        """Describe every weight, by module; that of experts by the name of its parameter."""
        found: dict[str, SourceWeight] = {}
        for name, entry in self.checkpoint.tensors.items():
            if name.endswith((_BLOCKS, _SCALES)):
                parameter = name.removesuffix(_BLOCKS).removesuffix(_SCALES)
                if parameter not in found:
                    found[parameter] = self._describe(parameter)
                continue
            weight = dense_weight(entry)
            if weight is not None:
                found[weight.module] = weight
        stored = {module: weight.is_quantized for module, weight in found.items()}
        said = {module: self._says(module) for module in stored}
        self.warnings += check_agreement(said, stored, self.checkpoint.name)
        self.entries = count_entries(said, stored)
        self.warnings += about_unused_entries(
            (f"{key}: {entry}" for entry, key in self._exclusions.entries.items()),
            self.entries,
            self.checkpoint,
            matches_excluded,
        )
        consumed = (name for weight in found.values() for name in weight.leaves.values())
        refuse_leftovers(self.checkpoint, consumed)
        return found

    def _says(self, module: str) -> ConfigSays:
        entry = self._exclusions.entry_for(module)
        return ConfigSays(not entry, entry or "quant_method: mxfp4")

    def _describe(self, parameter: str) -> SourceWeight:
        blocks = self._entry(parameter, _BLOCKS, BYTE_DTYPES[:1], "[E, N, K/32, 16]", 4)
        scales = self._entry(parameter, _SCALES, EXPONENT_DTYPES, "[E, N, K/32]", 3)
        if blocks.shape != (*scales.shape, _BLOCK_BYTES):
            raise FormatMismatch(
                f"tensor `{blocks.name}` has shape `{blocks.shape}`, expected "
                f"`{(*scales.shape, _BLOCK_BYTES)}` beside `{scales.name}` of `{scales.shape}`, in "
                f"`{self.checkpoint.name}`"
            )
        if parameter in self.checkpoint.tensors:
            raise FormatMismatch(
                f"`{parameter}` is there in full precision and as `{blocks.name}`, expected one of "
                f"them, in `{self.checkpoint.name}`",
                hint="one of the two is left over from another export",
            )
        experts, rows, groups, _ = blocks.shape
        return SourceWeight(
            module=parameter,
            shape=(rows, groups * GROUP_SIZE),
            scheme=scheme_of(MXFP4, None),
            encoding=f"e2m1, groups of {GROUP_SIZE}, scales E8M0",
            dtype=torch.bfloat16,
            leaves={"weight_blocks": blocks.name, "weight_scales": scales.name},
            decided_by="quant_method: mxfp4",
            parameter=parameter,
            experts=experts,
            is_transposed=True,
        )

    def _entry(
        self,
        parameter: str,
        ending: str,
        dtypes: tuple[torch.dtype, ...],
        shape: str,
        dimensions: int,
    ) -> TensorEntry:
        name = parameter + ending
        entry = self.checkpoint.tensors.get(name)
        if entry is None:
            raise MissingTensor(f"tensor `{name}` is missing in `{self.checkpoint.name}`")
        if entry.dtype not in dtypes or len(entry.shape) != dimensions or 0 in entry.shape:
            raise FormatMismatch(
                f"tensor `{name}` is `{entry.dtype}` of shape `{entry.shape}`, expected "
                f"`{dtypes[-1]}` {shape}, in `{self.checkpoint.name}`"
            )
        return entry

    def blocks_of(self, weight: SourceWeight) -> Mapping[str, Block] | None:
        """Return what elements of its tensors stand for; see `Reader.blocks_of`."""
        if weight.scheme is None:
            return None
        return {"weight_blocks": Block(1, 2), "weight_scales": Block(1, GROUP_SIZE)}

    def decode(self, weight: SourceWeight) -> QuantTensor | Tensor:
        """Read a weight: [E * N, K] of experts, canonical; float [N, K] of others."""
        if weight.scheme is None:
            return self.checkpoint.read(weight.leaves["weight"])
        scales = as_scale(self.checkpoint.read(weight.leaves["weight_scales"]))
        refuse_nonfinite(scales, weight.leaves["weight_scales"], self.checkpoint.name)
        rows = weight.experts * weight.shape[0]
        blocks = self.checkpoint.read(weight.leaves["weight_blocks"])
        return decode_fp4(blocks.reshape(rows, -1), scales.reshape(rows, -1))


def _exclusions(checkpoint: Checkpoint) -> Exclusions:
    assert checkpoint.quantization_config is not None, "detected by its config"
    names = checkpoint.quantization_config.get(_LISTS)
    if names is None:
        names = []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FormatMismatch(
            f"`{_LISTS}` is `{names!r}`, expected a list of module names or null, in "
            f"`{checkpoint.quantization_config_file}` of `{checkpoint.name}`"
        )
    return Exclusions(dict.fromkeys(names, _LISTS))
