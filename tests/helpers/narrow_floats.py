"""Values of narrow float formats, bit by bit from their definitions; NumPy, slow.

Source: OCP 8-bit Floating Point 1.0 and Microscaling Formats 1.0.
"""

import numpy as np


def narrow(code, *, exponent_bits, mantissa_bits, bias):
    """The value of one code: sign, exponent, mantissa; no special values."""
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias)
    return sign * (1 + fraction) * 2.0 ** (exponent - bias)


def table(bits, **fields):
    """float32 [2^bits], the value of each code."""
    return np.array([narrow(code, **fields) for code in range(1 << bits)], dtype=np.float32)


E2M1 = table(4, exponent_bits=2, mantissa_bits=1, bias=1)
E2M3 = table(6, exponent_bits=2, mantissa_bits=3, bias=1)
E3M2 = table(6, exponent_bits=3, mantissa_bits=2, bias=3)
E4M3 = table(8, exponent_bits=4, mantissa_bits=3, bias=7)  # 0x7F and 0xFF mean NaN
E5M2 = table(8, exponent_bits=5, mantissa_bits=2, bias=15)  # from 0x7C on infinity and NaN


def e8m0(codes):
    """float32 powers of two of bytes below 255."""
    return np.exp2(codes.astype(np.float64) - 127).astype(np.float32)


def packed(fields, bits):
    """Pack [R, C] fields into uint8 [R, ceil(C * b / 8)], each row from the lowest bits up."""
    rows = []
    for row in fields.tolist():
        string = sum(field << (bits * place) for place, field in enumerate(row))
        rows.append(list(string.to_bytes(-(-len(row) * bits // 8), "little")))
    return np.array(rows, dtype=np.uint8)
