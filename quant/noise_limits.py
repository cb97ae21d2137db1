"""How much noise a quantized weight may have before it counts as damaged.

noise         sum of squared errors, in units of what rounding makes: a twelfth of a squared
              step for each element; see `measure`
SQNR          see `metrics`
"""

from __future__ import annotations

import sys

from torch import Tensor

from quantload.quant.scheme import Scheme

# Lowest SQNR in dB that passes, by bits of the codes. Round-to-nearest reaches about 6 dB a bit
# less 4 on Gaussian weights (int4 in groups of 128: 19 to 21 dB), fp8 31 dB whatever the range. The
# margin is for rows and groups with large outliers; a damaged layer ends at 3 dB or less.
_FLOOR_DB = {2: 2.0, 3: 5.0, 4: 9.0, 5: 14.0, 6: 18.0, 7: 20.0, 8: 20.0}
_FP8_FLOOR_DB = 24.0
# Where every element is held to its step, the floor only has to catch weights that the scheme or
# the dtype cannot hold. An outlier of 20 times the spread in every group costs int4 12 dB.
_LESS_IF_NEAREST_DB = 6.0
# Noise that passes, in units of the noise of rounding. On real integer checkpoints round-to-nearest
# is below 1.4 and GPTQ below 3.7; zero points off by one give 13, a wrong sign in 1 % of int4 9.
_MOST_ROUNDINGS = 6.0
# The same for a single row: GPTQ reaches 6.6, zero points off by one 13.
_MOST_ROUNDINGS_OF_A_ROW = 10.0


def sqnr_floor_db(scheme: Scheme, *, nearest: bool = False) -> float:
    """Return the lowest SQNR in dB that passes for a weight of this scheme.

    Args:
        scheme: One with codes.
        nearest: Every element is held to its rounding step as well, or to what quantizing again
            gives.
    """
    assert scheme.weight is not None, "full precision has no floor: it must be equal"
    grid = scheme.weight.grid
    floor = _FP8_FLOOR_DB if grid.is_float8 else _FLOOR_DB[grid.bits]
    return floor - _LESS_IF_NEAREST_DB if nearest else floor


def about_noise(noise: Tensor, rounding: Tensor) -> str:
    """Say what is wrong with the noise of a weight or of one of its rows; "" if nothing is.

    Args:
        noise: [N] float64, sum of squared errors of each row.
        rounding: [N] float64, what rounding to the stored scales makes of it.
    """
    excess = float(noise.sum() / rounding.sum().clamp(min=sys.float_info.min))
    if excess > _MOST_ROUNDINGS:
        return (
            f"noise is {excess:.1f} times that of rounding to the stored scales, expected at most "
            f"{_MOST_ROUNDINGS:g} times"
        )
    return about_noisy_rows(noise, rounding)


def about_noisy_rows(noise: Tensor, rounding: Tensor, *, first_row: int = 0) -> str:
    """Say which rows have more noise than one may have; "" if none has.

    Args:
        noise: [N] float64, see `about_noise`.
        rounding: [N] float64.
        first_row: Number of the first of them in the weight.
    """
    of_rows = noise / rounding.clamp(min=sys.float_info.min)
    bad = int((of_rows > _MOST_ROUNDINGS_OF_A_ROW).sum())
    if not bad:
        return ""
    worst = int(of_rows.argmax())
    return (
        f"noise of {bad} row{'s' if bad > 1 else ''} is more than {_MOST_ROUNDINGS_OF_A_ROW:g} "
        "times that of rounding to the stored scales: "
        f"{float(of_rows[worst]):.1f} times in row {first_row + worst}"
    )
