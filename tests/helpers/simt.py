"""Gluon kernels of one register a tensor, run on the CPU: their own source, and their own PTX.

Triton's interpreter knows no Gluon. Here `gl` is replaced by a class over torch, a tensor being
what all threads of a program hold, and the text of inline assembly is carried out: loads, the few
integer instructions, and `mma.m16n8k16` with its fragments as the PTX ISA draws them. Memory is one
flat piece, so addresses are checked.

    kernel, machine = load("nibble_direct", "direct_kernel")
    x = machine.put(torch.randn(256).bfloat16())
    machine.run(kernel, programs, x, ..., num_warps=4)
    machine.get(x, 256)
"""

from __future__ import annotations
import __future__

import importlib.util
import math
import re
from pathlib import Path
from types import SimpleNamespace

import torch

KERNELS = Path(importlib.util.find_spec("quantload").origin).parent / "runtime" / "kernels"
FLOAT = {"bf16": torch.bfloat16, "f16": torch.float16}
START = 4096


class Register(torch.Tensor):
    """What all threads hold."""

    def to(self, dtype, bitcast=False):
        return self.view(dtype) if bitcast else super().to(dtype)


def register(tensor):
    return tensor.as_subclass(Register)


def plain(tensor):
    return torch.as_tensor(tensor).as_subclass(torch.Tensor)


def number(value):
    """Registers of what may be a Python number."""
    return value if isinstance(value, torch.Tensor) else register(torch.as_tensor(value))


class Pointer:
    """An address, or one for each element."""

    def __init__(self, at, dtype):
        self.at, self.dtype = at, dtype

    def __add__(self, count):
        return Pointer(self.at + count * self.dtype.itemsize, self.dtype)

    def to(self, dtype):
        return register(self.at.to(dtype))


class Shared:
    """A tensor in shared memory, NaN until it is written."""

    def __init__(self, values):
        self.values = values

    def slice(self, start, length, dim=0):
        return Shared(self.values.narrow(dim, start, length))

    def store(self, value):
        assert value.dtype == self.values.dtype
        self.values.copy_(plain(value))

    def load(self, layout):
        return register(self.values.clone())


class Machine:
    """Stands for `gl`, and has the memory."""

    int32, int64, float32, bfloat16 = torch.int32, torch.int64, torch.float32, torch.bfloat16
    assembly = None
    constexpr = staticmethod(lambda value: value)
    static_range = range

    def __init__(self, size=1 << 24):
        self.memory, self.top = torch.zeros(size, dtype=torch.uint8), START
        self.pid, self.programs = 0, 1

    def put(self, tensor):
        size = tensor.nbytes
        self.memory[self.top : self.top + size] = tensor.contiguous().view(torch.uint8).flatten()
        found = Pointer(torch.tensor(self.top), tensor.dtype)
        self.top += -(-size // 1024) * 1024
        assert self.top < len(self.memory)
        return found

    def get(self, pointer, count):
        """The elements that lie there."""
        at = int(pointer.at)
        return self.memory[at : at + count * pointer.dtype.itemsize].view(pointer.dtype).clone()

    def run(self, kernel, programs, *args, **constants):
        self.programs = programs
        for pid in range(programs):
            self.pid = register(torch.tensor(pid, dtype=torch.int32))
            kernel(*args, **constants)
            self.finish()

    def finish(self):
        """What a program must have left behind."""

    def bytes_at(self, at, size):
        at = plain(at).long()
        assert bool(((at == 0) | (at >= START)).all()), "an address before the memory"
        return self.memory[at[..., None] + torch.arange(size)]

    # -- what kernels call ---------------------------------------------------------------------

    def program_id(self, axis):
        return self.pid

    def num_programs(self, axis):
        return register(torch.tensor(self.programs, dtype=torch.int32))

    def BlockedLayout(self, *parts):
        return None

    SliceLayout = SwizzledSharedLayout = BlockedLayout

    def allocate_shared_memory(self, dtype, shape, layout):
        return Shared(torch.full(shape, float("nan"), dtype=dtype))

    def arange(self, start, stop, layout=None):
        return register(torch.arange(start, stop, dtype=torch.int32))

    def full(self, shape, value, dtype, layout=None):
        return register(torch.full(shape, value, dtype=dtype))

    def minimum(self, one, two):
        return torch.minimum(*self._alike(one, two))

    def maximum(self, one, two):
        return torch.maximum(*self._alike(one, two))

    @staticmethod
    def _alike(one, two):
        """Two operands of one dtype, which is that of whichever is a tensor."""
        tensors = [x for x in (one, two) if isinstance(x, torch.Tensor)]
        dtype = tensors[0].dtype if tensors else None
        return (register(torch.as_tensor(x, dtype=dtype)) for x in (one, two))

    def abs(self, value):
        return torch.abs(value)

    def exp(self, value):
        return torch.exp(value)

    def thread_barrier(self):
        """All threads run at once."""

    def atomic_add(self, pointer, value, sem=None):
        before = self.load(pointer)
        self.store(pointer, before + value)
        return before

    def join(self, one, two):
        return torch.stack((one, two), -1)

    def reshape(self, value, shape):
        return value.reshape(shape)

    def convert_layout(self, value, layout):
        return value

    def expand_dims(self, value, axis):
        return value.unsqueeze(axis)

    def where(self, condition, one, two):
        return register(torch.where(condition, *self._alike(one, two)))

    def div_rn(self, one, two):
        return one / two

    def rsqrt(self, value):
        return torch.rsqrt(torch.as_tensor(value))

    def reduce(self, value, axis, combine):
        one, two = register(torch.tensor(1.0)), register(torch.tensor(2.0))
        return value.sum(axis) if float(combine(one, two)) == 3.0 else value.amax(axis)

    def load(self, pointer, mask=None, other=None, cache_modifier=None):
        at, dtype = pointer.at, pointer.dtype
        if mask is None:
            return register(self.bytes_at(at, dtype.itemsize).view(dtype)[..., 0])
        at, mask = torch.broadcast_tensors(plain(at), plain(mask))
        found = self.bytes_at(torch.where(mask, at, 0), dtype.itemsize).view(dtype)[..., 0]
        return register(torch.where(mask, found, torch.tensor(other, dtype=dtype)))

    def store(self, pointer, value, mask=None):
        if not isinstance(value, torch.Tensor):
            value = torch.tensor(value, dtype=pointer.dtype)
        at, value, mask = torch.broadcast_tensors(
            plain(pointer.at), plain(value), plain(True if mask is None else mask)
        )
        assert value.dtype == pointer.dtype, (value.dtype, pointer.dtype)
        at, value = at[mask], value[mask].contiguous()
        size = pointer.dtype.itemsize
        assert bool((at >= START).all())
        self.memory[at[..., None] + torch.arange(size)] = value[..., None].view(torch.uint8)

    def inline_asm_elementwise(self, asm, constraints, args, dtype, is_pure, pack):
        """Carry assembly out, on `pack` neighbours of each operand at a time."""
        kinds = dtype if isinstance(dtype, tuple) else (dtype,)
        results = sum(part.startswith("=") for part in constraints.split(","))
        shape = torch.broadcast_shapes(*(plain(arg).shape for arg in args))
        given = [part for arg in args for part in _registers(plain(arg).expand(shape), pack)]
        halves = kinds[0] == torch.bfloat16  # two to a register
        each = pack // 2 if halves else pack
        assert (results, len(constraints.split(","))) == (len(kinds) * each, results + len(given))
        asked = [torch.int32 if halves else kind for kind in kinds for _ in range(each)]
        found = self.assembly(self, asm, given, asked).results()
        parts = [torch.stack(found[i : i + each], -1) for i in range(0, results, each)]
        whole = [
            register((part.view(torch.bfloat16) if halves else part).reshape(shape))
            for part in parts
        ]
        return tuple(whole) if isinstance(dtype, tuple) else whole[0]


def _registers(value, pack):
    """The 32-bit registers, or wider ones, of `pack` neighbours."""
    value = value.contiguous().reshape(-1, pack)
    value = value.view(torch.int32) if value.dtype == torch.bfloat16 else value
    return [value[:, i].contiguous() for i in range(value.shape[1])]


class Assembly:
    """One text of assembly, carried out for all threads."""

    def __init__(self, machine, asm, args, dtypes):
        self.machine, self.threads = machine, max(arg.numel() for arg in args)
        self.dtypes, self.written = dtypes, set()
        self.registers = {
            f"${len(dtypes) + i}": plain(arg).expand(self.threads) for i, arg in enumerate(args)
        }
        for i, kind in enumerate(dtypes):  # what was never written must show
            self.registers[f"${i}"] = torch.full((self.threads,), 7 << 20).to(kind)
        for statement in re.sub(r"^{|}$", "", asm.strip()).split(";"):
            self._do(statement.strip())

    def results(self):
        assert len(self.written) == len(self.dtypes), "a result is not written"
        return tuple(register(self.registers[f"${i}"]) for i in range(len(self.dtypes)))

    def _do(self, statement):
        condition = torch.ones(self.threads, dtype=torch.bool)
        if found := re.match(r"@(\w+) (.*)", statement):
            condition, statement = self.registers[found[1]], found[2]
        op, _, rest = statement.partition(" ")
        if op in ("", ".reg"):
            return
        if op == "mov.b32" and "{" in rest:
            self._move_halves(*(part.strip() for part in re.split(r",(?![^{]*})", rest)))
            return
        if op.startswith("ld.global"):
            self._load(rest, condition)
        elif op.startswith("mma"):
            self._multiply(op, rest)
        else:
            to, *operands = (part.strip() for part in rest.split(","))
            self._put(to, _PLAIN[op](*(self._value(operand) for operand in operands)))

    def _value(self, text):
        if text.startswith("0x"):
            return torch.tensor([int(text, 16)]).to(torch.int32)
        if text.isdigit():
            return torch.tensor([int(text)], dtype=torch.int32)
        return self.registers[text]

    def _bits(self, text):
        value = self._value(text)
        return value.contiguous().view(torch.int32) if value.is_floating_point() else value

    def _put(self, name, value):
        if name.startswith("$") and value.dtype == torch.int32 != self.dtypes[int(name[1:])]:
            value = value.expand(self.threads).contiguous().view(self.dtypes[int(name[1:])])
        if name.startswith("$"):
            assert int(name[1:]) < len(self.dtypes), "an input is written"
            assert value.dtype == self.dtypes[int(name[1:])], name
            self.written.add(name)
        self.registers[name] = value.expand(self.threads).clone()

    def _move_halves(self, to, source):
        if to.startswith("{"):
            whole = self._bits(source)
            names = [name.strip() for name in to.strip("{}").split(",")]
            self._put(names[0], whole & 0xFFFF)
            self._put(names[1], (whole >> 16) & 0xFFFF)
        else:
            low, high = (self._value(name.strip()) for name in source.strip("{}").split(","))
            self._put(to, low | high << 16)

    def _load(self, text, condition):
        found = re.match(r"\{?([^\[}]*)\}?, \[(\$\d+)(?: \+ (\d+))?\]", text)
        names = [name.strip() for name in found[1].split(",")]
        at = self.registers[found[2]] + int(found[3] or 0)
        assert bool((at[condition] % (4 * len(names)) == 0).all()), "an address is not aligned"
        words = self.machine.bytes_at(torch.where(condition, at, 0), 4 * len(names))
        for i, name in enumerate(names):
            word = words.view(torch.int32)[:, i]
            self._put(name, torch.where(condition, word, self.registers.get(name, word)))

    def _multiply(self, op, text):
        kind = FLOAT[op.split(".")[-2]]
        assert op.startswith("mma.sync.aligned.m16n8k16.row.col.f32."), op
        to, left, right, before = (
            [name.strip() for name in group.split(",")] for group in re.findall(r"\{(.*?)\}", text)
        )
        warps, lane = self.threads // 32, torch.arange(32)
        g, q = lane // 4, lane % 4

        def pairs(name):
            bits = self._bits(name).expand(self.threads).contiguous()
            return bits.view(kind).reshape(warps, 32, 2).float()

        a, b = torch.zeros(warps, 16, 16), torch.zeros(warps, 16, 8)
        c = torch.zeros(warps, 16, 8)
        for part, name in enumerate(left):  # rows g, g + 8, then the same 8 columns on
            for e in range(2):
                a[:, g + part % 2 * 8, part // 2 * 8 + 2 * q + e] = pairs(name)[..., e]
        for part, name in enumerate(right):
            for e in range(2):
                b[:, part * 8 + 2 * q + e, g] = pairs(name)[..., e]
        places = [(g + part // 2 * 8, 2 * q + part % 2) for part in range(4)]
        for (row, column), name in zip(places, before, strict=True):
            sums = self._bits(name).expand(self.threads).contiguous().view(torch.float32)
            c[:, row, column] = sums.reshape(warps, 32)
        product = c + a @ b
        for (row, column), name in zip(places, to, strict=True):
            self._put(name, product[:, row, column].reshape(-1))


def _chosen_bytes(a, b, choice):
    given = [(plain(part) >> 8 * i) & 255 for part in (a, b) for i in range(4)]
    parts = [given[(int(choice) >> 4 * i) & 15].long() << 8 * i for i in range(4)]
    return torch.stack(torch.broadcast_tensors(*parts)).sum(0).to(torch.int32)


def _halves_of_codes(a):
    """Two e4m3 codes as float16."""
    codes = torch.stack((a & 255, (a >> 8) & 255), -1).to(torch.uint8)
    return codes.view(torch.float8_e4m3fn).half().contiguous().view(torch.int32)[..., 0]


def _codes_of_two(high, low):
    pair = torch.stack((low, high), -1).clamp(-448, 448).to(torch.float8_e4m3fn)
    return pair.contiguous().view(torch.int16)[..., 0].to(torch.int32) & 0xFFFF


def _any_three(a, b, c, table):
    assert int(table) == 0xEA, "the only one that is known"
    return (a & b) | c


def _of_pairs(function):
    """An operation on registers of two bfloat16."""

    def made(a, b):
        a, b = (x.contiguous().view(torch.bfloat16) for x in (a, b))
        return function(a, b).view(torch.int32)

    return made


_PLAIN = {
    "mul.rn.bf16x2": _of_pairs(torch.mul),
    "add.rn.bf16x2": _of_pairs(torch.add),
    "sub.rn.bf16x2": _of_pairs(torch.sub),
    "mov.b32": lambda a: a,
    "mov.f32": lambda a: a,
    "shr.b32": lambda a, b: (a >> b) & ((1 << (32 - int(b))) - 1),
    "lop3.b32": _any_three,
    "prmt.b32": _chosen_bytes,
    "add.s64": lambda a, b: a + b,
    "cvt.rn.f16x2.e4m3x2": _halves_of_codes,
    "cvt.rn.satfinite.e4m3x2.f32": _codes_of_two,
    "mov.b64": lambda a: a,
    "setp.ne.b32": lambda a, b: a != b,
}


Machine.assembly = Assembly


def load(module, kernel, *more, machine=None):
    """Return a kernel of `runtime/kernels`, with files that it imports from, and its machine."""
    machine = machine or Machine()
    names = {
        "gl": machine,
        "gluon": SimpleNamespace(jit=lambda f=None, **_: f if f is not None else lambda g: g),
        "libdevice": SimpleNamespace(exp=torch.exp),
        "math": math,
    }
    for name in (*more, module):
        text = (KERNELS / f"{name}.py").read_text()
        text = text.split("# -- launching")[0]
        of_others = r"^from (?:triton|quantload|__future__)[^(\n]*(?:\([^)]*\))?$"
        text = re.sub(of_others, "", text, flags=re.M)
        code = compile(text, name, "exec", flags=__future__.annotations.compiler_flag)
        exec(code, names)
    return names[kernel], machine
