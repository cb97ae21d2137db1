"""Read the header of one safetensors file, trusting nothing.

The safetensors library checks the file first (sizes, overlaps, gaps, truncation); then the header
is read once more for the byte offsets, which the library does not hand out.

Source: the format section of the safetensors README (8 bytes little endian length, JSON, data).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
        header = json.loads(stream.read(length), object_pairs_hook=_unique(file))
    metadata = header.pop("__metadata__", None) or {}
    return {name: _entry(name, info, file, 8 + length) for name, info in header.items()}, metadata


def _check(file: Path) -> None:
    try:
        with safe_open(file, framework="pt") as opened:
            opened.keys()
    except (SafetensorError, OSError) as error:
        raise HeaderError(
            f"not a sound safetensors file: {error}, in `{file}`",
            hint="the file is damaged or truncated; download it again",
        ) from error


def _unique(file: Path) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """Return a hook of `json.loads` that refuses a name which stands twice in one object."""

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            doubled = [name for name, count in Counter(n for n, _ in pairs).items() if count > 1]
            raise HeaderError(f"{listed(doubled)} stands twice in the header of `{file}`")
        return entries

    return build


def _entry(name: str, info: dict[str, Any], file: Path, data_start: int) -> TensorEntry:
    dtype = DTYPES.get(info["dtype"])
    if dtype is None:
        raise UnsupportedVariant(
            f"tensor `{name}` has dtype `{info['dtype']}`, expected one of "
            f"{', '.join(DTYPES)}, in `{file}`"
        )
    start, stop = info["data_offsets"]
    return TensorEntry(
        name=name,
        dtype=dtype,
        shape=tuple(info["shape"]),
        file=file,
        start=data_start + start,
        num_bytes=stop - start,
    )
