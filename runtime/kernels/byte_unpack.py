"""How words of two codes of one byte become values, in registers: see `byte_layout` for the layout.

Nothing moves between threads, and every value is exact:

* an integer q becomes 128 + (q & 127) with the bits of q as mantissa, and 128 or 256 is taken off,
  which bit 7 of q says (in float16: 1024 + 128 + q, from which 1152 is taken off), as in Kim et
  al., "Who Says Elephants Can't Run", 2022;
* an FP8 number is shifted to where the wider type has its mantissa, and a power of two sets the
  bias of the exponent right; tensor cores and products of bfloat16 know subnormal numbers.

Letters: BN rows of a tile, C columns of a slice.
"""

import triton
import triton.language as tl

__all__ = ["INTERPRETED", "scale_values", "unpack2"]

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

# NOTE: sm_80 has no add or multiply of two bfloat16, only their fused multiply-add; it is as fast.


@triton.jit
def scale_values(stored):
    """Return loaded scales in float32; uint8 are e8m0."""
    if stored.dtype == tl.uint8:
        bits = stored.to(tl.int32) << 23
        bits = tl.where(bits == 0, 0x00400000, bits)  # 2^-127 is subnormal
        bits = tl.where(bits == 0x7F800000, 0x7FC00000, bits)
        return bits.to(tl.float32, bitcast=True)
    else:
        return stored.to(tl.float32)


@triton.jit
def unpack2(words, zero, FORM: tl.constexpr, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Turn a tile of words into its two tiles of values, exactly.

    Args:
        words: [BN, C] int16.
        zero: [BN] int8 zero points of integers, or None.
        FORM: "int", "e4m3" or "e5m2".
        dtype: float16 or bfloat16; float32 in the interpreter.
        INTERPRETED: `INTERPRETED` of this file.
    """
    if INTERPRETED:
        return (
            _plain_values(words.to(tl.uint8), zero, FORM, dtype),
            _plain_values((words >> 8).to(tl.uint8), zero, FORM, dtype),
        )
    elif FORM == "int":
        return _unpack2_int(words, zero, dtype)
    else:
        tl.static_assert(zero is None, "FP8 has no zero points")
        return _unpack2_float8(words, FORM, dtype)


@triton.jit
def _plain_values(code, zero, FORM: tl.constexpr, dtype: tl.constexpr):
    if FORM == "e4m3":
        values = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif FORM == "e5m2":
        values = code.to(tl.float8e5, bitcast=True).to(tl.float32)
    else:
        values = code.to(tl.int8, bitcast=True).to(tl.float32)
        if zero is not None:
            values -= zero.to(tl.float32)[:, None]
    return values.to(dtype)


@triton.jit
def _unpack2_int(words, zero, dtype: tl.constexpr):
    if dtype == tl.bfloat16 and zero is None:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, a, b, one;
            mov.b32 one, 0x3f803f80;
            shr.u32 t, $2, 8;
            lop3.b32 a, $2, 0x00800080, 0xc300c300, 0xea;
            lop3.b32 b, t, 0x00800080, 0xc300c300, 0xea;
            lop3.b32 $0, $2, 0x007f007f, 0x43004300, 0xea;
            lop3.b32 $1, t, 0x007f007f, 0x43004300, 0xea;
            fma.rn.bf16x2 $0, $0, one, a;
            fma.rn.bf16x2 $1, $1, one, b;
            }""",
            "=&r,=&r,r",
            args=[words],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, a, b, one;
            mov.b32 one, 0x3f803f80;
            shr.u32 t, $2, 8;
            lop3.b32 a, $2, 0x00800080, 0xc300c300, 0xea;
            lop3.b32 b, t, 0x00800080, 0xc300c300, 0xea;
            lop3.b32 $0, $2, 0x007f007f, 0x43004300, 0xea;
            lop3.b32 $1, t, 0x007f007f, 0x43004300, 0xea;
            fma.rn.bf16x2 $0, $0, one, a;
            fma.rn.bf16x2 $1, $1, one, b;
            fma.rn.bf16x2 $0, $0, one, $3;
            fma.rn.bf16x2 $1, $1, one, $3;
            }""",
            "=&r,=&r,r,r",
            args=[words, (-zero.to(tl.float32)).to(dtype)[:, None]],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        tl.static_assert(dtype == tl.float16, "values are float16 or bfloat16")
        if zero is None:
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 t, c;
                mov.b32 c, 0xe480e480;
                shr.u32 t, $2, 8;
                lop3.b32 $0, $2, 0x00ff00ff, 0x64806480, 0x6a;
                lop3.b32 $1, t, 0x00ff00ff, 0x64806480, 0x6a;
                add.rn.f16x2 $0, $0, c;
                add.rn.f16x2 $1, $1, c;
                }""",
                "=&r,=&r,r",
                args=[words],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
        else:
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 t;
                shr.u32 t, $2, 8;
                lop3.b32 $0, $2, 0x00ff00ff, 0x64806480, 0x6a;
                lop3.b32 $1, t, 0x00ff00ff, 0x64806480, 0x6a;
                add.rn.f16x2 $0, $0, $3;
                add.rn.f16x2 $1, $1, $3;
                }""",
                "=&r,=&r,r,r",
                args=[words, (-1152.0 - zero.to(tl.float32)).to(dtype)[:, None]],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )


@triton.jit
def _unpack2_float8(words, FORM: tl.constexpr, dtype: tl.constexpr):
    if FORM == "e5m2" and dtype == tl.float16:  # float16 is e5m2 with a longer mantissa
        return tl.inline_asm_elementwise(
            """{
            shl.b32 $0, $2, 8;
            and.b32 $1, $2, 0xff00ff00;
            and.b32 $0, $0, 0xff00ff00;
            }""",
            "=&r,=&r,r",
            args=[words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif dtype == tl.float16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 s, t, c;
            mov.b32 c, 0x5c005c00;
            shl.b32 s, $2, 8;
            shl.b32 t, $2, 7;
            and.b32 s, s, 0x80008000;
            lop3.b32 $0, t, 0x3f803f80, s, 0xea;
            shr.u32 t, $2, 1;
            and.b32 s, $2, 0x80008000;
            lop3.b32 $1, t, 0x3f803f80, s, 0xea;
            mul.rn.f16x2 $0, $0, c;
            mul.rn.f16x2 $1, $1, c;
            }""",
            "=&r,=&r,r",
            args=[words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif FORM == "e4m3":
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 s, t, c, z;
            mov.b32 c, 0x7b807b80;
            mov.b32 z, 0x80008000;
            shl.b32 s, $2, 8;
            shl.b32 t, $2, 4;
            and.b32 s, s, 0x80008000;
            lop3.b32 $0, t, 0x07f007f0, s, 0xea;
            shr.u32 t, $2, 4;
            and.b32 s, $2, 0x80008000;
            lop3.b32 $1, t, 0x07f007f0, s, 0xea;
            fma.rn.bf16x2 $0, $0, c, z;
            fma.rn.bf16x2 $1, $1, c, z;
            }""",
            "=&r,=&r,r",
            args=[words],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 s, t, c, z;
            mov.b32 c, 0x77807780;
            mov.b32 z, 0x80008000;
            shl.b32 s, $2, 8;
            shl.b32 t, $2, 5;
            and.b32 s, s, 0x80008000;
            lop3.b32 $0, t, 0x0fe00fe0, s, 0xea;
            shr.u32 t, $2, 3;
            and.b32 s, $2, 0x80008000;
            lop3.b32 $1, t, 0x0fe00fe0, s, 0xea;
            fma.rn.bf16x2 $0, $0, c, z;
            fma.rn.bf16x2 $1, $1, c, z;
            }""",
            "=&r,=&r,r",
            args=[words],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
