"""Read the header of one safetensors file, trusting nothing.

The safetensors library checks the file first (sizes, overlaps, gaps, truncation); then the header
is read once more for the byte offsets, which the library does not hand out.

Source: the format section of the safetensors README (8 bytes little endian length, JSON, data).
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open

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
_INFO = {"dtype", "shape", "data_offsets"}
_Info: TypeAlias = tuple[str, tuple[int, ...], int, int]  # dtype, shape, first byte, bytes


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a safetensors file by name; see `read_file`."""
    return read_file(file)[0]


def read_file(file: Path) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Return the tensors of a safetensors file by name, and its metadata: texts by key.

    Raises:
        HeaderError: The file is damaged, truncated, or its header lies.
        UnsupportedVariant: A tensor has a dtype that torch does not know.
    """
    _check(file)
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length), object_pairs_hook=_Entries(file).build)
    metadata = header.pop("__metadata__", None) or {}
    for name, info in header.items():
        header[name] = _entry(name, info, file, 8 + length)
    return header, metadata


def _check(file: Path) -> None:
    try:
        with safe_open(file, framework="pt") as opened:
            opened.keys()
    except (SafetensorError, OSError) as error:
        raise HeaderError(
            f"not a sound safetensors file: {error}, in `{file}`",
            hint="the file is damaged or truncated; download it again",
        ) from error


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
            HeaderError: A name stands twice in one object.
        """
        found = dict(pairs)
        if len(found) < len(pairs):
            doubled = [name for name, count in Counter(n for n, _ in pairs).items() if count > 1]
            raise HeaderError(f"{listed(doubled)} stands twice in the header of `{self._file}`")
        if found.keys() != _INFO:
            return found
        shape, (start, stop) = tuple(found["shape"]), found["data_offsets"]
        size = stop - start
        return (
            found["dtype"],
            self._shapes.setdefault(shape, shape),
            start,
            self._sizes.setdefault(size, size),
        )


def _entry(name: str, info: _Info, file: Path, data_start: int) -> TensorEntry:
    dtype_name, shape, start, size = info
    dtype = DTYPES.get(dtype_name)
    if dtype is None:
        raise UnsupportedVariant(
            f"tensor `{name}` has dtype `{dtype_name}`, expected one of "
            f"{', '.join(DTYPES)}, in `{file}`"
        )
    return TensorEntry(
        name=name, dtype=dtype, shape=shape, file=file, start=data_start + start, num_bytes=size
    )
