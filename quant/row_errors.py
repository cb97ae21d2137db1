"""Errors of a matrix row by row: a row of a weight is one output feature of its layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quantload.quant import compiled
from quantload.quant.measure import EXACT, array_of_floats
from quantload.quant.metrics import ErrorSums, error_sums


@dataclass(frozen=True, kw_only=True, eq=False)
class RowErrors:
    """Errors of some rows.

    Args:
        noise: [N] float64, sum of squared differences of each row.
        signal: [N] float64, sum of squared reference values of each row.
        sums: The sums over all rows.
    """

    noise: Tensor
    signal: Tensor
    sums: ErrorSums

    def worst(self) -> tuple[int, float]:
        """Return the row with the largest relative error, and that error; rows of zeros last.

        A row that is not finite, or is zero in the reference and not in the candidate, has an
        infinite one.
        """
        relative = torch.where(self.noise == 0, 0.0, (self.noise / self.signal).sqrt())
        relative = relative.nan_to_num(nan=torch.inf, posinf=torch.inf)
        row = int(relative.argmax())
        return row, float(relative[row])


def row_errors(candidate: Tensor, reference: Tensor) -> RowErrors:
    """Compare two matrices [N, K] of any float dtypes, in float64."""
    found = _compiled(candidate, reference)
    if found is not None and bool(found[:, 0].isfinite().all()):
        noise, signal, largest = found.unbind(dim=1)
        sums = ErrorSums(
            noise=float(noise.sum()),
            signal=float(signal.sum()),
            max_abs=float(largest.max()),
            count=candidate.numel(),
        )
        return RowErrors(noise=noise, signal=signal, sums=sums)
    wanted = reference.to(torch.float64)
    difference = candidate.to(torch.float64) - wanted
    return RowErrors(
        noise=difference.square().sum(dim=1).cpu(),
        signal=wanted.square().sum(dim=1).cpu(),
        sums=error_sums(candidate, reference),
    )


def _compiled(candidate: Tensor, reference: Tensor) -> Tensor | None:
    on_cpu = {candidate.device.type, reference.device.type} == {"cpu"}
    is_read = {candidate.dtype, reference.dtype} <= set(EXACT)
    is_worth_it = on_cpu and is_read and candidate.numel() > 0
    if not is_worth_it or not compiled.is_ready(candidate.numel()):
        return None
    from quantload.quant.compiled_row_sums import sum_rows  # numba: a second

    sums = np.empty((candidate.shape[0], 3))
    sum_rows(array_of_floats(candidate), array_of_floats(reference), sums)
    return torch.from_numpy(sums)


__all__ = ["RowErrors", "row_errors"]
