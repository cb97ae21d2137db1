"""How words of four codes become values in a kernel, without anything moving between threads.

A float16 or bfloat16 with a code as its low mantissa bits is 1024 + code or 128 + code (the
magic-number conversion of Kim et al., "Who Says Elephants Can't Run", 2022), so two codes become
values in two instructions or three.

Letters: BN output features, C columns of a slice.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["INTERPRETED", "table_registers", "unpack4"]

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def table_registers(table, FORM: tl.constexpr, INTERPRETED: tl.constexpr):
    """Load what `unpack4` takes as its table; call it once, before a loop.

    Args:
        table: [24] int32 pointer of `lookup_table`; not read in other forms than "table".
        FORM: As in `unpack4`.
        INTERPRETED: As in `unpack4`.
    """
    if FORM != "table":
        return 0
    elif INTERPRETED:
        return table
    else:
        return (
            tl.load(table), tl.load(table + 1), tl.load(table + 2), tl.load(table + 3),
            tl.load(table + 4), tl.load(table + 5), tl.load(table + 6), tl.load(table + 7),
        )  # fmt: skip


@triton.jit
def unpack4(
    words,
    zero,
    table,
    FORM: tl.constexpr,
    dtype: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Turn a tile of words into its four tiles of values, exact but for rounded table entries.

    Args:
        words: [BN, C] int16.
        zero: For the form "zero" a tuple of four [BN, 1] or [BN, C] integers from 0 to 63, one for
            each slice; any number for the others.
        table: What `table_registers` returned.
        FORM: "int" for code - 8, "uint" for code, "zero" for code - zero, "e2m1" for OCP FP4 with
            the sign in bit 3, "table" for 16 values.
        dtype: float16 or bfloat16; float32 in the interpreter.
        INTERPRETED: `INTERPRETED` of this file.
    """
    if INTERPRETED:
        return _unpack4_plain(words, zero, table, FORM, dtype)
    elif FORM == "e2m1":
        return _unpack4_e2m1(words, dtype)
    elif FORM == "table":
        return _unpack4_table(words, table, dtype)
    elif FORM == "zero":
        return _unpack4_zero(words, zero, dtype)
    else:
        tl.static_assert(FORM == "int" or FORM == "uint", "unknown form of codes")
        return _unpack4_less(words, FORM, dtype)


@triton.jit
def _unpack4_plain(words, zero, table, FORM: tl.constexpr, dtype: tl.constexpr):
    bits = words.to(tl.int32)
    z0, z1, z2, z3 = zero if FORM == "zero" else (0, 0, 0, 0)
    return (
        _plain_values(bits & 15, z0, table, FORM, dtype),
        _plain_values((bits >> 4) & 15, z1, table, FORM, dtype),
        _plain_values((bits >> 8) & 15, z2, table, FORM, dtype),
        _plain_values((bits >> 12) & 15, z3, table, FORM, dtype),
    )


@triton.jit
def _plain_values(code, zero, table, FORM: tl.constexpr, dtype: tl.constexpr):
    if FORM == "table":
        values = tl.load(table + 8 + code).to(tl.float32, bitcast=True)
    elif FORM == "e2m1":
        size = code & 7
        mantissa = (size & 1).to(tl.float32)
        power = tl.where(size < 4, 1.0, tl.where(size < 6, 2.0, 4.0))
        values = tl.where(size < 2, 0.5 * mantissa, (1.0 + 0.5 * mantissa) * power)
        values = tl.where(code >= 8, -values, values)
    elif FORM == "zero":
        values = code.to(tl.float32) - zero.to(tl.float32)
    elif FORM == "int":
        values = code.to(tl.float32) - 8.0
    else:
        values = code.to(tl.float32)
    return values.to(dtype)


# NOTE: sm_80 has no add or multiply of two bfloat16, only their fused multiply-add; it is as fast.


@triton.jit
def _unpack4_zero(words, zero, dtype: tl.constexpr):
    # NOTE: added outside of the asm; as its operand, the zero would be given the layout of another
    # tile, and the values would go through shared memory.
    z0, z1, z2, z3 = zero
    m0, m1, m2, m3 = _unpack4_magic(words, dtype)
    if dtype == tl.bfloat16:
        return (
            m0 + _minus_128(z0),
            m1 + _minus_128(z1),
            m2 + _minus_128(z2),
            m3 + _minus_128(z3),
        )
    else:
        return (
            m0 + _minus_1024(z0),
            m1 + _minus_64(z1),
            m2 + _minus_1024(z2),
            m3 + _minus_64(z3),
        )


@triton.jit
def _minus_128(zero):
    """-128 - zero in bfloat16, where seven bits of mantissa are the zero."""
    return (zero.to(tl.int16) | -0x3D00).to(tl.bfloat16, bitcast=True)


@triton.jit
def _minus_1024(zero):
    """-1024 - zero in float16."""
    return (zero.to(tl.int16) | -0x1C00).to(tl.float16, bitcast=True)


@triton.jit
def _minus_64(zero):
    """-64 - zero in float16."""
    return ((zero.to(tl.int16) << 4) | -0x2C00).to(tl.float16, bitcast=True)


@triton.jit
def _unpack4_magic(words, dtype: tl.constexpr):
    """Return 128 + code; of float16 1024 + code in slots 0 and 2, 64 + code in 1 and 3."""
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t;
            lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
            shr.u32 t, $4, 4;
            lop3.b32 $1, t, 0x000f000f, 0x43004300, 0xea;
            shr.u32 t, $4, 8;
            lop3.b32 $2, t, 0x000f000f, 0x43004300, 0xea;
            shr.u32 t, $4, 12;
            lop3.b32 $3, t, 0x000f000f, 0x43004300, 0xea;
            }""",
            "=&r,=&r,=&r,=&r,r", args=[words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        # a code in bits 4 to 7 of the mantissa counts 16 times
        tl.static_assert(dtype == tl.float16, "values are float16 or bfloat16")
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, sixteenth;
            mov.b32 sixteenth, 0x2c002c00;
            shr.u32 t, $4, 8;
            lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea;
            lop3.b32 $1, $4, 0x00f000f0, 0x64006400, 0xea;
            lop3.b32 $2, t, 0x000f000f, 0x64006400, 0xea;
            lop3.b32 $3, t, 0x00f000f0, 0x64006400, 0xea;
            mul.rn.f16x2 $1, $1, sixteenth;
            mul.rn.f16x2 $3, $3, sixteenth;
            }""",
            "=&r,=&r,=&r,=&r,r", args=[words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip


def _less(bias: int) -> tuple[str, str]:
    """Return assembly that makes code - bias of words: bfloat16, float16."""
    # whole numbers up to 256 are exact in bfloat16
    bfloat16 = """{
    .reg .b32 t, one, c;
    mov.b32 one, 0x3f803f80;
    mov.b32 c, 0xc3BBc3BB;
    lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
    shr.u32 t, $4, 4;
    lop3.b32 $1, t, 0x000f000f, 0x43004300, 0xea;
    shr.u32 t, $4, 8;
    lop3.b32 $2, t, 0x000f000f, 0x43004300, 0xea;
    shr.u32 t, $4, 12;
    lop3.b32 $3, t, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 $0, $0, one, c;
    fma.rn.bf16x2 $1, $1, one, c;
    fma.rn.bf16x2 $2, $2, one, c;
    fma.rn.bf16x2 $3, $3, one, c;
    }"""
    float16 = """{
    .reg .b32 t, sixteenth, low, high;
    mov.b32 sixteenth, 0x2c002c00;
    mov.b32 low, 0xe4BBe4BB;
    mov.b32 high, 0xd4HHd4HH;
    shr.u32 t, $4, 8;
    lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $1, $4, 0x00f000f0, 0x64006400, 0xea;
    lop3.b32 $2, t, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $3, t, 0x00f000f0, 0x64006400, 0xea;
    add.rn.f16x2 $0, $0, low;
    fma.rn.f16x2 $1, $1, sixteenth, high;
    add.rn.f16x2 $2, $2, low;
    fma.rn.f16x2 $3, $3, sixteenth, high;
    }"""
    numbers = {"BB": f"{bias:02x}", "HH": f"{16 * bias:02x}"}
    for name, number in numbers.items():
        bfloat16, float16 = (
            bfloat16.replace(name, number),
            float16.replace(name, number),
        )
    return bfloat16, float16


_LESS_8_BF16, _LESS_8_F16 = (tl.constexpr(text) for text in _less(8))
_LESS_0_BF16, _LESS_0_F16 = (tl.constexpr(text) for text in _less(0))


@triton.jit
def _unpack4_less(words, FORM: tl.constexpr, dtype: tl.constexpr):
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _LESS_8_BF16 if FORM == "int" else _LESS_0_BF16, "=&r,=&r,=&r,=&r,r", args=[words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        tl.static_assert(dtype == tl.float16, "values are float16 or bfloat16")
        return tl.inline_asm_elementwise(
            _LESS_8_F16 if FORM == "int" else _LESS_0_F16, "=&r,=&r,=&r,=&r,r", args=[words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def _unpack4_e2m1(words, dtype: tl.constexpr):
    # exponent and mantissa go to the low end of the exponent; a power of two sets the bias right,
    # and makes the one subnormal, 0.5, a normal number
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 s, t, c, z;
            mov.b32 c, 0x7e807e80;
            mov.b32 z, 0x80008000;
            shl.b32 s, $4, 12;
            shl.b32 t, $4, 6;
            and.b32 s, s, 0x80008000;
            lop3.b32 $0, t, 0x01c001c0, s, 0xea;
            shl.b32 s, $4, 8;
            shl.b32 t, $4, 2;
            and.b32 s, s, 0x80008000;
            lop3.b32 $1, t, 0x01c001c0, s, 0xea;
            shl.b32 s, $4, 4;
            shr.u32 t, $4, 2;
            and.b32 s, s, 0x80008000;
            lop3.b32 $2, t, 0x01c001c0, s, 0xea;
            shr.u32 t, $4, 6;
            and.b32 s, $4, 0x80008000;
            lop3.b32 $3, t, 0x01c001c0, s, 0xea;
            fma.rn.bf16x2 $0, $0, c, z;
            fma.rn.bf16x2 $1, $1, c, z;
            fma.rn.bf16x2 $2, $2, c, z;
            fma.rn.bf16x2 $3, $3, c, z;
            }""",
            "=&r,=&r,=&r,=&r,r", args=[words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        tl.static_assert(dtype == tl.float16, "values are float16 or bfloat16")
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 s, t, c;
            mov.b32 c, 0x74007400;
            shl.b32 s, $4, 12;
            shl.b32 t, $4, 9;
            and.b32 s, s, 0x80008000;
            lop3.b32 $0, t, 0x0e000e00, s, 0xea;
            shl.b32 s, $4, 8;
            shl.b32 t, $4, 5;
            and.b32 s, s, 0x80008000;
            lop3.b32 $1, t, 0x0e000e00, s, 0xea;
            shl.b32 s, $4, 4;
            shl.b32 t, $4, 1;
            and.b32 s, s, 0x80008000;
            lop3.b32 $2, t, 0x0e000e00, s, 0xea;
            shr.u32 t, $4, 3;
            and.b32 s, $4, 0x80008000;
            lop3.b32 $3, t, 0x0e000e00, s, 0xea;
            mul.rn.f16x2 $0, $0, c;
            mul.rn.f16x2 $1, $1, c;
            mul.rn.f16x2 $2, $2, c;
            mul.rn.f16x2 $3, $3, c;
            }""",
            "=&r,=&r,=&r,=&r,r", args=[words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip


_LOOK_UP = tl.constexpr(
    """{
    .reg .b32 s, u, m, a, b, h0, l0, h1, l1, p, q;
    .reg .b32 c;
    mov.b32 c, 0x80808080;
    and.b32 s, $4, 0x77777777;
    prmt.b32 m, c, c, $4;
    sub.u32 m, m, c;
    add.u32 p, m, m;
    or.b32 m, m, p;
    prmt.b32 a, $5, $7, s;
    prmt.b32 b, $9, $11, s;
    lop3.b32 h0, m, b, a, 0xca;
    prmt.b32 a, $13, $15, s;
    prmt.b32 b, $17, $19, s;
    lop3.b32 l0, m, b, a, 0xca;
    shr.u32 s, s, 16;
    shr.u32 u, $4, 16;
    prmt.b32 m, c, c, u;
    sub.u32 m, m, c;
    add.u32 p, m, m;
    or.b32 m, m, p;
    prmt.b32 a, $5, $7, s;
    prmt.b32 b, $9, $11, s;
    lop3.b32 h1, m, b, a, 0xca;
    prmt.b32 a, $13, $15, s;
    prmt.b32 b, $17, $19, s;
    lop3.b32 l1, m, b, a, 0xca;
    prmt.b32 p, l0, h0, 0x5140;
    prmt.b32 q, l1, h1, 0x5140;
    prmt.b32 $0, p, q, 0x5410;
    prmt.b32 $1, p, q, 0x7632;
    prmt.b32 p, l0, h0, 0x7362;
    prmt.b32 q, l1, h1, 0x7362;
    prmt.b32 $2, p, q, 0x5410;
    prmt.b32 $3, p, q, 0x7632;
    }"""
)
_LOOK_UP_REGISTERS = tl.constexpr("=&r,=&r,=&r,=&r" + ",r" * 17)


@triton.jit
def _unpack4_table(words, table, dtype: tl.constexpr):
    # `prmt` looks four codes up at once among eight bytes. High and low bytes of the values of
    # codes under 8 and from 8 up are looked up apart, chosen by bit 3 of the codes, and zipped.
    # Two elements a call, so each int32 of the table comes in two registers.
    t0, t1, t2, t3, t4, t5, t6, t7 = table
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _LOOK_UP, _LOOK_UP_REGISTERS, args=[words, t0, t1, t2, t3, t4, t5, t6, t7],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        tl.static_assert(dtype == tl.float16, "values are float16 or bfloat16")
        return tl.inline_asm_elementwise(
            _LOOK_UP, _LOOK_UP_REGISTERS, args=[words, t0, t1, t2, t3, t4, t5, t6, t7],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
