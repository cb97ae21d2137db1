"""The instructions that turn words into values, carried out here: no card is needed to check them.

Triton's interpreter takes a plain branch instead of them. Here the text that goes to the assembler
is read, and each of its few instructions is done in NumPy, for every code.
"""

import re

import numpy as np
import pytest
import torch
import triton.language as tl

ALL = np.arange(256, dtype=np.uint32)
FLOATS = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: a * b + c,
}
INTEGERS = {
    "mov": lambda a: a,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
    "and": lambda a, b: a & b,
    "mad": lambda a, b, c: a * b + c,
}


def halves(register):
    return register & 0xFFFF, register >> 16


def joined(low, high):
    return low.astype(np.uint32) | (high.astype(np.uint32) << 16)


def floats(bits, kind):
    values = torch.from_numpy(bits.astype(np.uint16).view(np.int16).copy())
    return values.view(torch.bfloat16 if kind == "bf16x2" else torch.float16).double()


def arithmetic(kind, compute, *registers):
    """Compute both halves in float64 and round each once."""
    dtype = torch.bfloat16 if kind == "bf16x2" else torch.float16
    parts = []
    for half in range(2):
        found = compute(*(floats(halves(register)[half], kind) for register in registers))
        parts.append(found.to(dtype).view(torch.int16).numpy().view(np.uint16))
    return joined(*parts)


def lop3(a, b, c, table):
    out = np.zeros_like(a)
    for row in range(8):
        if table >> row & 1:
            picked = [part if row >> bit & 1 else ~part for part, bit in ((a, 2), (b, 1), (c, 0))]
            out |= picked[0] & picked[1] & picked[2]
    return out


def run(text, n_results, words):
    """Carry out the instructions of `text`; $0, $1 are results, $2 is `words`."""
    registers = {f"${n_results}": words}

    def value(name):
        if name in registers:
            return registers[name]
        return np.full_like(words, int(name, 0))

    for line in re.findall(r"[^;{}]+;", text):
        operation, *operands = re.split(r"[\s,]+", line.strip(" \n;"))
        if operation == ".reg":
            continue
        target, values = operands[0], [value(name) for name in operands[1:]]
        name, *kinds = operation.split(".")
        if name == "lop3":
            found = lop3(*values[:3], int(operands[4], 0))
        elif name in FLOATS:
            found = arithmetic(kinds[-1], FLOATS[name], *values)
        else:
            found = INTEGERS[name](*values)
        registers[target] = found
    return [registers[f"${index}"] for index in range(n_results)]


@pytest.fixture
def carried_out(monkeypatch):
    def assembler(text, constraints, args, dtype, **_):
        return run(text, len(dtype), args[0])

    monkeypatch.setattr(tl, "inline_asm_elementwise", assembler)
    monkeypatch.setattr(tl, "static_assert", lambda *_: None)


@pytest.mark.parametrize("dtype", [tl.bfloat16, tl.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("form", ["int", "e4m3", "e5m2"])
def test_every_byte_has_its_value(form, dtype, carried_out, kernel_device):
    from quantload.runtime.kernels import byte_unpack

    storage = {"int": torch.int8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[form]
    values = torch.from_numpy(ALL.astype(np.uint8)).view(storage).double()
    other = ALL[::-1].copy()  # in the other places of the words
    words = ALL | other << 8 | np.roll(ALL, 7) << 16 | np.roll(other, 7) << 24
    if form == "int":
        found = byte_unpack._unpack2_int.fn(words, None, dtype)
    else:
        found = byte_unpack._unpack2_float8.fn(words, form, dtype)
    kind = "bf16x2" if dtype == tl.bfloat16 else "f16x2"
    finite = values.isfinite()  # a row with others is made NaN, or refused
    expected = ((values, values.flip(0)), (values.roll(7), values.flip(0).roll(7)))
    for half, of_slot in enumerate(expected):
        for register, wanted in zip(found, of_slot, strict=True):
            got = floats(halves(register)[half], kind)
            known = wanted.isfinite()
            assert torch.equal(got[known], wanted[known])
            assert torch.equal(got[known].signbit(), wanted[known].signbit())
    assert int(finite.sum()) >= 248


def test_every_fp4_code_becomes_a_bfloat16(kernel_device):
    from quantload.quant.grid import E2M1
    from quantload.runtime.kernels import nibble_folded

    codes = torch.from_numpy(ALL.astype(np.uint8))
    slices = torch.stack([codes % 16, codes // 16, (codes + 5) % 16, (codes * 7) % 16])
    every = torch.zeros(1, 4, 64, 4, dtype=torch.uint8)  # 256 codes in each of the four places
    every[0] = slices.view(4, 64, 4)
    packed = [nibble_folded.pack_codes(every[..., i].reshape(1, 256)) for i in range(4)]
    words = torch.stack(packed, -1).flatten().numpy().view(np.uint16).astype(np.uint32)
    pairs = words | np.roll(words, 9) << 16
    found = run(nibble_folded._SPREAD.value, 4, pairs)
    table = torch.tensor(E2M1.table, dtype=torch.float64)
    for register, of_slice in zip(found, slices, strict=True):
        for half, shift in enumerate((0, 9)):
            wanted = table[of_slice.long()].roll(shift)
            got = floats(halves(register)[half], "bf16x2") * 2.0**126
            assert torch.equal(got, wanted)
            assert torch.equal(got.signbit(), wanted.signbit())


@pytest.mark.parametrize("form", ["int", "float", "e2m1"])
def test_every_nibble_has_its_operand(form, monkeypatch, kernel_device):
    from quantload.runtime.kernels import nibble_rounded_layout

    words = ALL | np.roll(ALL, 3) << 8 | np.roll(ALL, 50) << 16 | ALL[::-1] << 24
    assembled = []

    def assembler(text, constraints, args, dtype, **_):
        assembled.append(text)
        return [_Bytes(register) for register in run(text, len(dtype), args[0])]

    monkeypatch.setattr(tl, "inline_asm_elementwise", assembler)
    monkeypatch.setattr(tl, "static_assert", lambda *_: None)
    low, high = nibble_rounded_layout.unpack_pair.fn(words, form, False)
    assert len(assembled) == 1
    table = nibble_rounded_layout._values_of(form, torch.device("cpu")).double()
    storage = torch.int8 if form == "int" else torch.float8_e4m3fn
    for place in range(4):
        packed = words >> 8 * place & 255
        for found, nibbles in ((low, packed & 15), (high, packed >> 4)):
            got = torch.from_numpy((found.register >> 8 * place & 255).astype(np.uint8))
            wanted = table[torch.from_numpy(nibbles.astype(np.int64))]
            assert torch.equal(got.view(storage).double(), wanted)


class _Bytes:
    """A register of bytes, which is only given another type."""

    def __init__(self, register):
        self.register = register

    def to(self, dtype, bitcast):
        assert bitcast
        return self
