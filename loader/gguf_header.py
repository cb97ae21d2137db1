"""Read the header of a GGUF file, trusting nothing.

Bytes, little endian, versions 2 and 3:

    "GGUF", u32 version, u64 number of tensors, u64 number of metadata keys
    per key      string name, u32 type, value; a string is u64 length and UTF-8 bytes, an array
                 u32 type of its items, u64 count and the items
    per tensor   string name, u32 number of axes, u64 per axis (fastest first), u32 type,
                 u64 offset into the data
    padding to `general.alignment` (32), then the data, tensor after tensor, each padded likewise

Bytes between tensors that are no padding are those of a tensor whose type or shape is wrong in the
table: that is how a wrong type of fewer bits is found. llama.cpp refuses them as well.

Only the types come from the `gguf` package. Its own reader makes one NumPy array per metadata item,
which takes seconds for a vocabulary, and has no bound on a count that a damaged file claims.

Source: https://github.com/ggml-org/ggml/blob/9d325133eed396b7bf005a53a83d9747cbd8bde1/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from quantload.errors import HeaderError, UnsupportedVariant

PLAIN_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_MAX_HEADER_BYTES = 128 << 20  # the largest vocabularies need 15 MiB
_MAX_AXES = 4
_MAX_TAIL = 1 << 16  # zeros so far behind the last tensor are taken for padding
_SCALARS = dict(zip(range(8), "BbHhIif?", strict=True)) | dict(
    zip((10, 11, 12), "Qqd", strict=True)
)
_STRING, _ARRAY = 8, 9
_TRUNCATED = "the file is truncated; download it again"


@dataclass(frozen=True)
class GgufTensor:
    """One row of a GGUF file's tensor table.

    Args:
        name: GGUF name.
        shape: Sizes in Hugging Face order (slowest first), in elements.
        type_name: GGML type, for example "Q4_1".
        start: First byte in the file.
        num_bytes: Length in bytes.
        file: File that holds it.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    start: int
    num_bytes: int
    file: Path


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says about itself.

    Args:
        metadata: Values by key; an array of numbers is a NumPy array, one of strings a list.
        tensors: The tensor table by GGUF name.
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


class _HeaderBytes:
    """Reads the header from front to back; never past its end, whatever a count claims."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file_size = path.stat().st_size
        length = min(self.file_size, _MAX_HEADER_BYTES)
        with path.open("rb") as file:
            self._bytes = (
                mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ) if length else b""
            )
        self.position = 0

    def take(self, count: int, what: str) -> bytes:
        left = len(self._bytes) - self.position
        if count > left:
            cut_here = self.file_size > _MAX_HEADER_BYTES
            raise HeaderError(
                f"GGUF header ends inside {what}: `{count}` bytes needed, `{left}` left, "
                f"in `{self.path}`",
                hint="headers beyond 128 MiB are not read" if cut_here else _TRUNCATED,
            )
        self.position += count
        return self._bytes[self.position - count : self.position]

    def number(self, code: str, what: str) -> Any:  # noqa: ANN401
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))[0]

    def text(self, what: str) -> str:
        raw = self.take(self.number("Q", what), what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise HeaderError(f"{what} is not UTF-8, in `{self.path}`") from error

    def value(self, what: str) -> Any:  # noqa: ANN401
        kind = self.number("I", what)
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], what)
        if kind == _STRING:
            return self.text(what)
        if kind != _ARRAY:
            raise HeaderError(f"{what} has unknown type `{kind}`, in `{self.path}`")
        kind, count = self.number("I", what), self.number("Q", what)
        if kind in _SCALARS:
            dtype = np.dtype(f"<{_SCALARS[kind]}")
            return np.frombuffer(self.take(count * dtype.itemsize, what), dtype)
        if kind == _STRING:
            return [self.text(what) for _ in range(count)]
        raise HeaderError(f"{what} is an array of unknown type `{kind}`, in `{self.path}`")


def read_header(path: Path) -> GgufHeader:
    """Read metadata and tensor table of a GGUF file, trusting nothing.

    Raises:
        HeaderError: The file is damaged, truncated, or no GGUF file.
        UnsupportedVariant: Another version or byte order, or a type the `gguf` package lacks.
    """
    data = _HeaderBytes(path)
    if data.file_size < 4 or data.take(4, "the magic") != b"GGUF":
        raise HeaderError(f"not a GGUF file: it does not begin with `GGUF`, in `{path}`")
    version = data.number("I", "the version")
    if version not in (2, 3):
        found = f"version `{version}`" if version & 0xFFFF else "big-endian byte order"
        raise UnsupportedVariant(
            f"GGUF {found} is not read, expected little-endian version 2 or 3, in `{path}`",
            hint="write the file again with a current llama.cpp",
        )
    num_tensors, num_keys = data.number("Q", "the counts"), data.number("Q", "the counts")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = data.text("a metadata key")
        if key in metadata:
            raise HeaderError(f"metadata key `{key}` is there twice, in `{path}`")
        metadata[key] = data.value(f"metadata key `{key}`")
    rows = [_tensor_row(data) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise HeaderError(
            f"`general.alignment` is `{alignment}`, expected a power of two, in `{path}`"
        )
    data_start = -(-data.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, type_name, offset in rows:
        if name in tensors:
            raise HeaderError(f"tensor `{name}` is there twice, in `{path}`")
        tensors[name] = _locate(name, shape, type_name, data_start + offset, data)
    _check_layout(list(tensors.values()), alignment, data)
    return GgufHeader(metadata, tensors)


def _tensor_row(data: _HeaderBytes) -> tuple[str, tuple[int, ...], str, int]:
    name = data.text("a tensor name")
    what = f"the entry of tensor `{name}`"
    axes = data.number("I", what)
    if not 1 <= axes <= _MAX_AXES:
        raise HeaderError(f"tensor `{name}` has `{axes}` axes, expected 1 to 4, in `{data.path}`")
    shape = tuple(data.number("Q", what) for _ in range(axes))[::-1]
    kind, offset = data.number("I", what), data.number("Q", what)
    try:
        type_name = gguf.GGMLQuantizationType(kind).name
    except ValueError as error:
        raise UnsupportedVariant(
            f"tensor `{name}` has GGML type number `{kind}`, which is not known, in `{data.path}`",
            hint="a newer version of the `gguf` package may know it",
        ) from error
    return name, shape, type_name, offset


def _locate(
    name: str, shape: tuple[int, ...], type_name: str, start: int, data: _HeaderBytes
) -> GgufTensor:
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    if shape[-1] % block_size:
        raise HeaderError(
            f"rows of tensor `{name}` have `{shape[-1]}` elements, expected a multiple of "
            f"{block_size} for type `{type_name}`, in `{data.path}`"
        )
    num_bytes = math.prod(shape) // block_size * block_bytes
    if start + num_bytes > data.file_size:
        raise HeaderError(
            f"file ends inside tensor `{name}`: it reaches to byte `{start + num_bytes}` of "
            f"`{data.file_size}`, in `{data.path}`",
            hint=_TRUNCATED,
        )
    return GgufTensor(name, shape, type_name, start, num_bytes, data.path)


def _check_layout(tensors: list[GgufTensor], alignment: int, data: _HeaderBytes) -> None:
    """Demand that every byte of the data belongs to one tensor, or is padding."""
    ordered = sorted((t for t in tensors if t.num_bytes), key=lambda tensor: tensor.start)
    for tensor, following in pairwise(ordered):
        end = tensor.start + tensor.num_bytes
        if not 0 <= following.start - end < alignment:
            found = "overlap" if following.start < end else "leave a gap"
            raise HeaderError(
                f"tensors `{tensor.name}` and `{following.name}` {found}: one ends at byte "
                f"`{end}`, the other begins at `{following.start}`, in `{data.path}`",
                hint=f"type `{tensor.type_name}` or shape `{tensor.shape}` may be wrong",
            )
    if ordered and (left := _bytes_behind(ordered[-1], alignment, data)):
        last = ordered[-1]
        raise HeaderError(
            f"`{left}` bytes behind the last tensor `{last.name}` belong to none, in `{data.path}`",
            hint=f"type `{last.type_name}` or shape `{last.shape}` may be wrong",
        )


def _bytes_behind(last: GgufTensor, alignment: int, data: _HeaderBytes) -> int:
    """Number of bytes behind the last tensor; 0 if they are padding."""
    end = last.start + last.num_bytes
    left = data.file_size - end
    if left < alignment:
        return 0
    with data.path.open("rb") as file:
        file.seek(end)
        return left if any(file.read(_MAX_TAIL)) else 0
