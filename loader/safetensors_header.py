"""Read the header of one safetensors file, trusting nothing.

    8 bytes   length of the header, little endian; at most 100 MB
    header    JSON, UTF-8: {"__metadata__": {key: text}, name: {"dtype", "shape", "data_offsets"}}
    data      the tensors without gaps or overlaps, to the end of the file

What the safetensors library refuses is refused, and a name that stands twice. The library itself is
not asked: it opens the file another time, maps it, and does not hand out the offsets.

Source: the format section of the safetensors README; `Metadata::validate` of safetensors 0.8.0.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

import torch

from quantload.errors import HeaderError, UnsupportedVariant, listed
from quantload.loader.checkpoint import TensorEntry

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LONGEST_HEADER = 100_000_000
_LARGEST = 2**64  # the format counts in 64 bits
_INFO = {"dtype", "shape", "data_offsets"}
_Info: TypeAlias = tuple[str, tuple[int, ...], int, int]  # dtype, shape, first byte, bytes


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a safetensors file by name; see `read_file`."""
    return read_file(file)[0]


def read_file(file: Path) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Return the tensors of a safetensors file by name, and its metadata: texts by key.

    The file is opened once; nothing is allocated for what its header only claims.

    Raises:
        HeaderError: The file is damaged, truncated, or its header lies.
        UnsupportedVariant: A tensor has a dtype that torch does not know.
    """
    try:
        with file.open("rb") as stream:
            raw, data_bytes = _raw_header(stream, os.fstat(stream.fileno()).st_size, file)
    except OSError as error:
        raise _unsound(file, error.strerror or str(error)) from error
    header = _parsed(raw, file)
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _unsound(file, "`__metadata__` does not hold texts")
    data_start = 8 + len(raw)
    for name, info in header.items():
        header[name] = _entry(name, info, file, data_start)
    _check_offsets(header, data_start, data_bytes, file)
    return header, metadata


def _raw_header(stream: BinaryIO, file_bytes: int, file: Path) -> tuple[bytes, int]:
    """Return the bytes of the header, and how many bytes of data follow."""
    length = int.from_bytes(stream.read(8), "little")
    if file_bytes < 8 or length > min(_LONGEST_HEADER, file_bytes - 8):
        raise _unsound(file, f"a header of {length} bytes in a file of {file_bytes}")
    raw = stream.read(length)
    if len(raw) < length:
        raise _unsound(file, "it ends inside its header")
    return raw, file_bytes - 8 - length


def _parsed(raw: bytes, file: Path) -> dict[str, Any]:
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_Entries(file).build)
    except (ValueError, RecursionError) as error:  # ValueError: JSON, UTF-8, very long integers
        raise _unsound(file, f"its header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise _unsound(file, "its header is no JSON object of tensors")
    return header


def _check_offsets(
    entries: Mapping[str, TensorEntry], start: int, data_bytes: int, file: Path
) -> None:
    """Refuse gaps, overlaps, and data that are missing or left over."""
    position = start
    for entry in sorted(entries.values(), key=lambda e: (e.start, e.num_bytes)):
        if entry.start != position:
            raise _unsound(file, f"tensor `{entry.name}` does not begin where another ends")
        position += entry.num_bytes
    if position != start + data_bytes:
        raise _unsound(file, f"it holds {data_bytes} bytes of data, expected {position - start}")


def _unsound(file: Path, reason: str) -> HeaderError:
    return HeaderError(
        f"not a sound safetensors file: {reason}, in `{file}`",
        hint="the file is damaged or truncated; download it again",
    )


class _Entries:
    """Builds the objects of one header.

    A checkpoint has up to hundreds of thousands of tensors and few shapes: what is equal is kept
    once, and no tensor has a dict of its own.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._sizes: dict[int, int] = {}

    def build(self, pairs: list[tuple[str, Any]]) -> Any:  # noqa: ANN401 - a hook of `json`
        """Turn the pairs of one object into a dict, those of a tensor into `_Info`.

        Raises:
            HeaderError: A name stands twice in one object, or numbers of a tensor are none.
        """
        found = dict(pairs)
        if len(found) < len(pairs):
            doubled = [name for name, count in Counter(n for n, _ in pairs).items() if count > 1]
            raise HeaderError(f"{listed(doubled)} stands twice in the header of `{self._file}`")
        if not found.keys() >= _INFO or not isinstance(found["shape"], list):
            return found  # the header itself, its texts, or what `_entry` refuses
        shape, offsets = found["shape"], found["data_offsets"]
        if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
            raise _unsound(self._file, f"a tensor of shape {shape} at {offsets}")
        start, size = offsets[0], offsets[1] - offsets[0]
        as_tuple = tuple(shape)
        return (
            found["dtype"],
            self._shapes.setdefault(as_tuple, as_tuple),
            start,
            self._sizes.setdefault(size, size),
        )


def _are_counts(value: Any) -> bool:  # noqa: ANN401 - JSON
    if type(value) is not list:
        return False
    for number in value:  # noqa: SIM110 - a generator takes twice the time, 200,000 times
        if type(number) is not int or not 0 <= number < _LARGEST:
            return False
    return True


def _entry(name: str, info: Any, file: Path, data_start: int) -> TensorEntry:  # noqa: ANN401 - JSON
    if not isinstance(info, tuple) or not isinstance(info[0], str) or not _is_text(name):
        raise _unsound(file, f"tensor `{name!a}` has no dtype, shape and offsets")
    dtype_name, shape, start, size = cast("_Info", info)
    dtype = DTYPES.get(dtype_name)
    if dtype is None:
        raise UnsupportedVariant(
            f"tensor `{name}` has dtype `{dtype_name}`, expected one of "
            f"{', '.join(DTYPES)}, in `{file}`"
        )
    expected = dtype.itemsize
    for length in shape:
        expected *= length
    if size != expected:
        raise _unsound(file, f"tensor `{name}` of shape {shape} has {size} bytes, not {expected}")
    return TensorEntry(
        name=name, dtype=dtype, shape=shape, file=file, start=data_start + start, num_bytes=size
    )


def _is_text(name: str) -> bool:
    """False for half of a surrogate pair, which JSON can spell and UTF-8 cannot."""
    return name.isascii() or not any(0xD800 <= ord(character) < 0xE000 for character in name)
