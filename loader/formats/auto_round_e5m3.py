"""AutoRound's NVFP4 with scales in unsigned e5m3, and no global scale. Read.

    weight_packed   uint8 [N, K/2]    e2m1 codes, low nibble first
    weight_scale    uint8 [N, K/16]   5 bits of exponent, 3 of mantissa, no sign:
                                      (1 + m/8) * 2^(e - 15); m/8 * 2^-14 for e = 0; 255 is NaN
    value           e2m1(code) * scale in float32

Source: AutoRound 0.16.1, `data_type/nvfp.py` and `experimental/qmodules/nvfp4_e5m3.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantload.errors import FormatMismatch
from quantload.loader.formats.dense import dense_weight
from quantload.loader.formats.finite import refuse_nonfinite
from quantload.loader.formats.module_leaves import ModuleLeaves, by_module, refuse_leftovers
from quantload.loader.source import Reader, SourceWeight
from quantload.quant.grid import E2M1
from quantload.quant.packing import unpack_bytes
from quantload.quant.qtensor import Evaluation, QuantTensor
from quantload.quant.scheme import InputScheme, WeightScheme, scheme_of

_GROUP = 16
_LEAVES = ("weight_packed", "weight_scale", "weight")
_NAN = 0xFF
_BECAUSE = "the config says NVFP4 with e5m3 scales"


class E5m3Reader(Reader):
    """Reader of one checkpoint with e5m3 scales."""

    def weights(self) -> Mapping[str, SourceWeight]:
        """Describe every weight, by module."""
        found: dict[str, SourceWeight] = {}
        for module, leaves in by_module(self.checkpoint, _LEAVES).items():
            if "weight_packed" in leaves or "weight_scale" in leaves:
                found[module] = self._describe(leaves)
            elif (plain := dense_weight(leaves["weight"])) is not None:
                found[module] = plain
        consumed = (name for weight in found.values() for name in weight.leaves.values())
        refuse_leftovers(self.checkpoint, consumed)
        return found

    def _describe(self, leaves: ModuleLeaves) -> SourceWeight:
        leaves.require(("weight_packed", "weight_scale"), because=_BECAUSE)
        if "weight" in leaves:
            raise FormatMismatch(
                f"module `{leaves.module}` has both `weight` and `weight_packed`, expected one of "
                f"them, in `{self.checkpoint.name}`"
            )
        packed = leaves.expect("weight_packed", dtypes=(torch.uint8,), because=_BECAUSE)
        if len(packed.shape) != 2:
            raise FormatMismatch(
                f"tensor `{packed.name}` has shape `{packed.shape}`, expected two dimensions, in "
                f"`{self.checkpoint.name}`"
            )
        shape = packed.shape[0], 2 * packed.shape[1]
        scales = (shape[0], -(-shape[1] // _GROUP))
        leaves.expect("weight_scale", dtypes=(torch.uint8,), shapes=(scales,), because=_BECAUSE)
        grid = WeightScheme(grid=E2M1, granularity="group", group_size=_GROUP)
        inputs = InputScheme(grid=E2M1, granularity="group", group_size=_GROUP)
        return SourceWeight(
            module=leaves.module,
            shape=shape,
            scheme=scheme_of(grid, inputs, name="NVFP4_E5M3"),
            encoding=f"e2m1, groups of {_GROUP}, scales e5m3",
            dtype=torch.float32,
            leaves=leaves.names,
            decided_by="data_type: nvfp4_v2",
        )

    def decode(self, weight: SourceWeight) -> QuantTensor | Tensor:
        """Read a weight [N, K]: canonical if it is quantized, else float."""
        if not weight.is_quantized:
            return self.checkpoint.read(weight.leaves["weight"])
        scale = _as_float(self.checkpoint.read(weight.leaves["weight_scale"]))
        refuse_nonfinite(scale, weight.leaves["weight_scale"], self.checkpoint.name)
        packed = self.checkpoint.read(weight.leaves["weight_packed"])
        return QuantTensor(
            grid=E2M1,
            codes=unpack_bytes(packed, E2M1.bits, weight.shape[1]),
            scale=scale,
            block=(1, _GROUP),
            evaluation=Evaluation(torch.float32),
        )


def _as_float(codes: Tensor) -> Tensor:
    """[...] uint8 e5m3 to [...] float32."""
    exponent, mantissa = (codes >> 3).to(torch.float32), (codes & 7).to(torch.float32)
    normal = torch.ldexp(1 + mantissa / 8, exponent - 15)
    values = torch.where(exponent == 0, torch.ldexp(mantissa / 8, torch.tensor(-14.0)), normal)
    return torch.where(codes == _NAN, torch.nan, values)


__all__ = ["E5m3Reader"]
