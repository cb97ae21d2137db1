"""Faults put into a sound GGUF file, one tensor and one fault at a time."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Container, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np

_NAN16 = b"\x00\x7e"
# First byte of a float16 scale in a block; 0 where a type is not named. IQ1_M has it in pieces.
_SCALE_AT = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208, "TQ1_0": 52, "TQ2_0": 64}
_PLAIN = {"F32": np.float32, "F16": np.float16, "F64": np.float64}
# Types whose blocks hold as many values in as many bytes
_TWINS = {"Q4_0": "IQ4_NL", "IQ4_NL": "Q4_0", "F16": "BF16", "BF16": "F16", "F32": "I32"}
_OTHERS = ("F32", "F16", "Q4_0", "Q8_0", "Q4_K", "I8")


@dataclass(frozen=True)
class _Tensor:
    """A tensor; `shape` in ggml order."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    data: bytes


def gguf_mutations(
    file: Path,
    tmp_path: Path,
    choose: Callable[[Collection[str]], Container[str]],
    *,
    step: int = 1,
) -> Iterator[tuple[str, Path]]:
    """Yield ("KIND TENSOR ...", a file with that fault), for each tensor in turn.

    Kinds as in `faults.mutations`; "swap" reads blocks as those of a type of equal size.

    Args:
        file: A GGUF file; it stays as it is.
        tmp_path: Gets a folder per fault.
        choose: Names of the tensors to damage, of all names.
        step: Every so many faults one is put in.
    """
    head, tensors = _read(file)
    for number, (description, changed, cut) in enumerate(_faults(tensors, choose)):
        if number % step == 0:
            copy = tmp_path / f"fault-{number:05d}" / file.name
            copy.parent.mkdir()
            whole = _file(head, changed)
            copy.write_bytes(whole[: len(whole) - cut])
            yield description, copy


def _faults(
    tensors: list[_Tensor], choose: Callable[[Collection[str]], Container[str]]
) -> Iterator[tuple[str, list[_Tensor], int]]:
    """Yield (description, tensors, bytes that the file lacks at its end)."""
    names = choose([tensor.name for tensor in tensors])
    for index, tensor in enumerate(tensors):
        if tensor.name in names:
            before, after = tensors[:index], tensors[index + 1 :]
            for description, parts in _changes(tensor):
                yield description, [*before, *parts, *after], 0
            yield f"cut {tensor.name}", [*before, *after, tensor], len(tensor.data) // 2 + 32


def _read(file: Path) -> tuple[bytes, list[_Tensor]]:
    """Return the bytes of the metadata, and the tensors."""
    raw, reader = file.read_bytes(), gguf.GGUFReader(file)
    tensors = [
        _Tensor(
            t.name,
            tuple(int(n) for n in t.shape),
            t.tensor_type,
            raw[t.data_offset : t.data_offset + int(t.n_bytes)],
        )
        for t in reader.tensors
    ]
    start = min(t.field.offset for t in reader.tensors)
    return raw[:start], tensors


def _file(head: bytes, tensors: list[_Tensor]) -> bytes:
    infos, data = b"", b""
    for t in tensors:
        name = t.name.encode()
        infos += struct.pack("<Q", len(name)) + name
        infos += struct.pack(f"<I{len(t.shape)}Q", len(t.shape), *t.shape)
        infos += struct.pack("<IQ", int(t.kind), len(data))
        data += t.data + bytes(-len(t.data) % 32)
    start = head[:8] + struct.pack("<Q", len(tensors)) + head[16:] + infos
    return start + bytes(-len(start) % 32) + data


def _changes(tensor: _Tensor) -> Iterator[tuple[str, list[_Tensor]]]:
    name, kind = tensor.name, tensor.kind
    yield f"delete {name}", []
    for new in (f"{name}_old", f"old.{name}"):
        yield f"rename {name} to {new}", [replace(tensor, name=new)]
    for new in (f"{name}_copy", f"copy.{name}", name):
        yield f"duplicate {name} as {new}", [tensor, replace(tensor, name=new)]
    for other in _OTHERS:
        if other not in (kind.name, _TWINS.get(kind.name)):
            retyped = replace(tensor, kind=gguf.GGMLQuantizationType[other])
            word = "swap" if _density(retyped) == _density(tensor) else "retype"
            yield f"{word} {name} to {other}", [retyped]
    if kind.name in _TWINS:
        twin = _TWINS[kind.name]
        word = "retype" if twin == "I32" else "swap"
        yield (
            f"{word} {name} read as {twin}",
            [replace(tensor, kind=gguf.GGMLQuantizationType[twin])],
        )
    yield from ((f"{what} {name}", [changed]) for what, changed in _shapes(tensor))
    yield from ((f"nan {name} {what}", [changed]) for what, changed in _not_finite(tensor))


def _density(tensor: _Tensor) -> float:
    size, num_bytes = gguf.GGML_QUANT_SIZES[tensor.kind]
    return num_bytes / size


def _not_finite(tensor: _Tensor) -> Iterator[tuple[str, _Tensor]]:
    kind = tensor.kind.name
    if kind in _PLAIN:
        values = np.frombuffer(tensor.data, _PLAIN[kind]).copy()
        for value in (np.nan, np.inf):
            values[0] = value
            yield f"or rather {value}", replace(tensor, data=values.tobytes())
    elif kind == "BF16":
        yield "first", replace(tensor, data=b"\xc0\x7f" + tensor.data[2:])
    elif kind != "IQ1_M":
        at = _SCALE_AT.get(kind, 0)
        for bits in (_NAN16, b"\x00\x7c"):
            data = tensor.data[:at] + bits + tensor.data[at + 2 :]
            yield "in a scale", replace(tensor, data=data)


def _shapes(tensor: _Tensor) -> Iterator[tuple[str, _Tensor]]:
    *rest, rows = tensor.shape
    row = len(tensor.data) // rows
    if rows > 1 and (len(tensor.shape) > 1 or tensor.kind.name in _PLAIN):
        yield "truncate", replace(tensor, shape=(*rest, rows - 1), data=tensor.data[:-row])
        half = rows // 2
        yield "truncate", replace(tensor, shape=(*rest, half), data=tensor.data[: half * row])
    if len(tensor.shape) > 1:
        turned = (tensor.shape[1], tensor.shape[0], *tensor.shape[2:])
        if turned != tensor.shape:
            yield "transpose", replace(tensor, shape=turned)
        flat = int(np.prod(tensor.shape))
        yield "reshape", replace(tensor, shape=(flat,))
        size, _ = gguf.GGML_QUANT_SIZES[tensor.kind]
        if tensor.shape[0] // 2 % size == 0:
            yield "narrow", replace(tensor, shape=(tensor.shape[0] // 2, tensor.shape[1] * 2))
    elif rows % 2 == 0:
        yield "reshape", replace(tensor, shape=(rows // 2, 2))
