"""Errors of a quantized weight in units of its steps, measured in one compiled pass.

`accuracy/weight_check.py` says what is measured and why; this is the same arithmetic, in float64,
without temporaries. All letters and terms are those of that file.
"""

from __future__ import annotations

import math

import numpy as np

from quantload.quant.compiled_jit import Kernel, inlined


@inlined
def _half_ulp(number, eps, smallest):
    """Largest error of rounding to a float dtype, for results of this size."""
    _, exponent = math.frexp(max(abs(number), smallest))
    return math.ldexp(eps / 4, exponent)


@inlined
def _most_steps(code, zero, half, is_end, value, wanted, scale, slack, limits):
    """Largest error in steps that rounding to nearest leaves at one element."""
    eps, smallest, value_eps, value_smallest, steps, has_zeros, was_cast = limits
    of_quotient = _half_ulp(abs(code - zero) + 2 * half, eps, smallest)
    clipped = steps * slack
    if has_zeros != 0:
        of_quotient += _half_ulp(abs(code) + half, eps, smallest)
        clipped = 2 * steps * (slack + eps / 2) + 2 * _half_ulp(2 * steps, eps, smallest)
    most = half + (max(of_quotient, clipped) if is_end else of_quotient)
    most += _half_ulp(value, value_eps, value_smallest) / scale
    if was_cast != 0:
        most += _half_ulp(wanted, eps, smallest) / scale
    return most / (2 * half) * (1 + 1e-12)


def _measure_rows(values, target, codes, scales, block, tables, limits, nearest, sums, counts):
    """Fill `sums` with noise, rounding, signal, largest error, and the same in steps, of each row.

    Args:
        values: [n, K] float32, what the codes stand for.
        target: [n, K] float32, what was quantized.
        codes: [n, K] uint8, the bytes of the codes.
        scales: Three of [R, G] float64: scales without sign, zero points, and by which part of
            itself each scale may have been rounded down.
        block: Rows and columns of a scale.
        tables: [3, 256] float64 by the byte of a code: its value, half its step, 1 at an end.
        limits: eps and smallest normal number of the arithmetic, and of the values; half the grid's
            steps; 1 if there are zero points; 1 if the weight was cast before.
        nearest: True counts elements that are further off than rounding explains.
        sums: [n, 5] float64, is filled.
        counts: [n] int64, is filled.
    """
    height, width = block
    sizes, zeros, slacks = scales
    for n in range(values.shape[0]):
        r = n // height
        noise = rounding = signal = largest = worst = 0.0
        beyond = 0
        for g in range(sizes.shape[1]):
            scale = sizes[r, g]
            part = range(g * width, min(g * width + width, values.shape[1]))
            inside = 0.0
            for k in part:
                wanted = np.float64(target[n, k])
                error = abs(np.float64(values[n, k]) - wanted)
                size = 2 * tables[1, codes[n, k]] * scale
                noise += error * error
                signal += wanted * wanted
                rounding += size * size
                largest = error if error > largest else largest
                steps = error / size
                inside = steps if steps > inside else inside
            worst = inside if inside > worst else worst
            if nearest and inside > 0.5:
                for k in part:
                    value, wanted = np.float64(values[n, k]), np.float64(target[n, k])
                    code = codes[n, k]
                    steps = abs(value - wanted) / (2 * tables[1, code] * scale)
                    if steps > 0.5:
                        most = _most_steps(
                            tables[0, code],
                            zeros[r, g],
                            tables[1, code],
                            tables[2, code] != 0,
                            value,
                            wanted,
                            scale,
                            slacks[r, g],
                            limits,
                        )
                        beyond += steps > most
        sums[n, 0], sums[n, 1], sums[n, 2] = noise, rounding / 12, signal
        sums[n, 3], sums[n, 4] = largest, worst
        counts[n] = beyond


measure_rows = Kernel(_measure_rows)
