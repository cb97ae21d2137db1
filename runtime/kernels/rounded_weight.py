"""A quantized weight as the kernels for rounded inputs read it.

Letters: N output features, K input features, G groups of columns, R blocks of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from quantload.quant.grid import E4M3, INT8
from quantload.quant.qtensor import QuantTensor
from quantload.quant.scheme import InputScheme
from quantload.runtime.kernels import quantize

__all__ = ["PackedRounded", "pack", "why_not", "why_not_on_card", "why_not_scales"]

_INTERPRETED = quantize.INTERPRETED.value


@dataclass(frozen=True, eq=False)
class PackedRounded:
    """A weight as the kernels read it; all tensors are on one device.

    Args:
        codes: [N, K] int8 or e4m3, contiguous.
        scale: [N] float32; with groups [R, G], of 32 columns uint8 if all are powers of two: e8m0.
        sums: [N] int32, sums of the codes of a row, where the input has zero points.
        group: Columns that share a scale; 0 where a row has one.
        block_rows: Rows that share a scale, with groups.
        is_uniform: All rows have one scale.
    """

    codes: Tensor
    scale: Tensor
    sums: Tensor | None
    group: int
    block_rows: int
    is_uniform: bool

    @property
    def layout(self) -> str:
        """How the weight lies in memory, for people."""
        grid = "int8" if self.codes.dtype == torch.int8 else "e4m3"
        if not self.group:
            return f"{grid} codes [N, K], a scale a row"
        return f"{grid} codes [N, K], scales of {self.block_rows} x {self.group} blocks"

    def values(self) -> Tensor:
        """Return the weight [N, K], float32."""
        scale = self.scale[:, None]
        if self.group:
            n, k = self.codes.shape
            scale = self.scale
            if scale.dtype == torch.uint8:
                scale = scale.view(torch.float8_e8m0fnu).float()
            scale = _per_row(scale, self.block_rows, n)
            scale = scale.repeat_interleave(self.group, dim=1)[:, :k]
        return self.codes.float() * scale

    def tensors(self) -> dict[str, Tensor]:
        """Return the parts that are tensors, by field name."""
        return {name: part for name, part in vars(self).items() if isinstance(part, Tensor)}


def why_not(
    weight: QuantTensor, input: InputScheme, *, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Say why the kernels cannot multiply inputs of `dtype` with `weight` on `device`, or None."""
    if 0 in weight.shape:
        return f"the weight is empty: {weight.shape[0]} x {weight.shape[1]}"
    if torch.finfo(weight.rounded_to).eps > torch.finfo(dtype).eps:
        return f"values are rounded to {weight.rounded_to}, which shows in {dtype}"
    refusal = quantize.why_not(input, dtype) or why_not_scales(weight, input)
    if refusal is not None:
        return refusal
    if device.type == "cpu" and _INTERPRETED and triton.knobs.runtime.interpret:
        return None
    if device.type != "cuda":
        return f"the kernel needs a CUDA device, not {device.type}"
    return why_not_on_card(weight, torch.cuda.get_device_capability(device))


def why_not_on_card(weight: QuantTensor, capability: tuple[int, int]) -> str | None:
    """Refuse cards whose tensor cores do not multiply the codes."""
    needed = (8, 9) if weight.grid.is_float8 else (8, 0)
    if capability >= needed:
        return None
    return (
        f"products of {weight.grid.name} need compute capability {needed[0]}.{needed[1]}, "
        f"the device has {capability[0]}.{capability[1]}"
    )


def why_not_scales(weight: QuantTensor, input: InputScheme) -> str | None:
    """Refuse unlike grids, zero points of the weight, and groups that do not fit."""
    if weight.grid not in (E4M3, INT8) or weight.grid != input.grid:
        return (
            f"weight and input are both int8 or both e4m3, found `{weight.grid.name}` and "
            f"`{input.grid.name}`"
        )
    if weight.zero is not None or weight.offset is not None or weight.group_of is not None:
        return "the weight has no zero points and no act-order"
    columns = weight.scale.shape[1]
    if input.granularity != "group":
        return None if columns == 1 else f"a row has one scale, found {columns}"
    size = input.group_size or 0
    if size < 32 or size > 128:
        return f"groups are 32, 64 or 128 columns, found {size}"
    if weight.block[1] != size:
        return f"groups of weight and input are equal, found {weight.block[1]} and {size} columns"
    return None


def pack(weight: QuantTensor, input: InputScheme, *, device: torch.device) -> PackedRounded:
    """Take codes and scales; exact, but for products of a scale with `outer`, which are float32.

    Args:
        weight: What `why_not` does not refuse.
        input: How x is quantized.
        device: Where the result lives.
    """
    weight = weight.to(device)
    scale, block_rows = weight.multiplier.double(), weight.block[0]
    if weight.outer is not None:
        outer = weight.outer.double()
        outer = 1 / outer if weight.evaluation.outer.endswith("/") else outer
        if outer.shape[0] > 1:
            scale, block_rows = _per_row(scale, block_rows, weight.shape[0]), 1
        scale = scale * outer
    scale = scale.float()
    grouped = input.granularity == "group"
    is_uniform = not grouped and bool((scale == scale[:1]).all())
    if not grouped:
        scale = _per_row(scale, block_rows, weight.shape[0]).flatten()
    if grouped and input.group_size == 32:
        scale = _as_powers(scale)
    return PackedRounded(
        codes=weight.codes.contiguous(),
        scale=scale.contiguous(),
        sums=None if input.symmetric else weight.codes.sum(dim=1, dtype=torch.int32),
        group=input.group_size or 0 if grouped else 0,
        block_rows=block_rows,
        is_uniform=is_uniform,
    )


def _per_row(scale: Tensor, block_rows: int, rows: int) -> Tensor:
    return scale.repeat_interleave(block_rows, dim=0)[:rows]


def _as_powers(scale: Tensor) -> Tensor:
    """Return e8m0 bytes of scales that are all powers of two, else the scales."""
    powers = scale.to(torch.float8_e8m0fnu)
    return powers.view(torch.uint8) if torch.equal(powers.float(), scale) else scale
