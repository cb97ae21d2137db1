"""Weights too small for the dtype of their scales: noticed when they are written, not at the end.

A float16 scale below 2^-14 has fewer bits, one below 2^-25 is zero, for which compressed-tensors
stores the eps of the dtype; an e8m0 scale that float16 cannot hold becomes 1. Codes are then
clipped, or zero. The bytes are those of compressed-tensors, but the weight is not: what `verify`
would find damaged at the end is refused at once.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from quantload.errors import ConfigError
from quantload.loader.plan import PlanRow
from quantload.quant.measure import Measured, measure
from quantload.quant.metrics import ErrorSums
from quantload.quant.noise_limits import about_noise, about_noisy_rows, sqnr_floor_db
from quantload.quant.qtensor import QuantTensor
from quantload.quant.rtn import as_blocks

_log = logging.getLogger("quantload")
_ONE = 127  # exponent of a scale of 1


class LostScales:
    """Watches the scales of one weight, some rows at a time.

    Args:
        row: The weight, with its scheme.
        nearest: Codes are the nearest; a search may clip.
        shares: Its scale is that of a larger range, beside which some rows may be small.
    """

    def __init__(self, row: PlanRow, *, nearest: bool, shares: bool) -> None:
        self._row = row
        self._nearest = nearest
        self._shares = shares
        self._lost = self._rows = 0
        self._measured: list[Measured] = []
        self._is_all = True  # every row was measured

    def see(self, weight: Tensor, quantized: QuantTensor) -> None:
        """Look at some rows.

        Args:
            weight: [N, K], what was quantized.
            quantized: What became of it.

        Raises:
            ConfigError: Their values are damaged.
        """
        if not self._shares:
            self._lost += _lost_groups(weight, quantized)
        found = None
        if self._nearest and _are_at_risk(weight, quantized):
            found = measure(quantized, quantized.dequantize(), weight, nearest=False)
        if found is None:
            self._is_all = False
        else:
            self._measured.append(found)
            self._refuse(about_noisy_rows(found.noise, found.rounding, first_row=self._rows))
        self._rows += weight.shape[0]

    def end(self) -> None:
        """Judge all rows together, and tell what is lost.

        Raises:
            ConfigError: The weight is damaged.
        """
        if self._is_all:
            self._judge_all()
        if self._lost:
            _log.warning(
                "%d group%s of `%s` become zeros: their scale is below what `%s` holds",
                self._lost,
                "s" if self._lost > 1 else "",
                self._row.module,
                self._row.dtype,
            )

    def _judge_all(self) -> None:
        assert self._row.scheme is not None, "full precision has no scales"
        noise, rounding = (
            torch.cat([getattr(part, name) for part in self._measured])
            for name in ("noise", "rounding")
        )
        self._refuse(about_noise(noise, rounding))
        sums = sum((part.sums for part in self._measured), ErrorSums())
        floor = sqnr_floor_db(self._row.scheme, nearest=True)
        if sums.sqnr_db < floor:
            self._refuse(f"SQNR is {sums.sqnr_db:.2f} dB, expected at least {floor:.1f} dB")

    def _refuse(self, problem: str) -> None:
        row = self._row
        if problem:
            raise ConfigError(
                f"`{row.module}` cannot be quantized to {row.scheme}: its weights are so small "
                f"that `{row.dtype}` has no exact scales for them; {problem}",
                hint=f"`--dtype bfloat16` or `float32` has such scales; or `{row.module} = keep`",
            )


def _are_at_risk(weight: Tensor, quantized: QuantTensor) -> bool:
    """True if some scales may be far from the range of what they scale."""
    scale = quantized.scale
    if scale.dtype == torch.float8_e8m0fnu:
        return weight.dtype == torch.float16 and bool((scale.view(torch.uint8) == _ONE).any())
    if scale.dtype == torch.float8_e4m3fn and weight.dtype == torch.float16:
        scale = quantized.folded().scale.to(torch.float16)
    if scale.dtype != torch.float16:
        return False
    info = torch.finfo(scale.dtype)
    return bool(((scale.abs() < info.smallest_normal) | (scale == info.eps)).any())


def _lost_groups(weight: Tensor, quantized: QuantTensor) -> int:
    """Count groups that are zeros only because the dtype of the scales has no scale for them."""
    if not quantized.scale.dtype.is_floating_point or quantized.scale.dtype.itemsize < 2:
        return 0
    eps = torch.finfo(quantized.scale.dtype).eps
    is_eps = quantized.scale == eps  # stands in for a scale of zero
    if not is_eps.any():
        return 0
    largest = _blocks_at(weight, quantized.block, is_eps).abs().amax(dim=1)
    return int(((largest > 0) & (largest < eps / 2)).sum())


def _blocks_at(weight: Tensor, block: tuple[int, int], chosen: Tensor) -> Tensor:
    """Return the chosen blocks of a weight [N, K], each flat: [B, E]; `chosen` is [R, G] bool."""
    height, width = block
    if height == 1 and weight.shape[1] % width == 0:  # they lie in one piece, and are copied so
        pieces = weight.reshape(-1, width)
        return pieces.index_select(0, chosen.flatten().nonzero().flatten())
    return as_blocks(weight, block).transpose(1, 2)[chosen].flatten(1)
