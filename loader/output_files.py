"""Where every output tensor goes: files, headers and offsets, fixed before anything is computed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quantload.loader.safetensors_header import NAMES

_LARGEST, _LEAST = 5_000_000_000, 500_000_000  # bytes of a file's data
_FILES = 8  # of an output that is large enough


@dataclass(frozen=True)
class Leaf:
    """dtype and shape of one tensor to be written, whatever its module is called."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor to be written.

    Args:
        name: Name in the output.
        dtype: dtype in the output.
        shape: Shape in the output.
        source: Tensor or module of the source that it is made from.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    source: str

    @property
    def num_bytes(self) -> int:
        """Bytes of data."""
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class OutputFile:
    """One safetensors file of the output.

    Args:
        name: File name.
        header: The first bytes of the file, up to the data.
        offsets: First byte of each tensor in the file.
        tensors: By name.
        num_bytes: Size of the file.
    """

    name: str
    header: bytes
    offsets: dict[str, int]
    tensors: dict[str, OutputTensor]
    num_bytes: int


def usual_shard_bytes(total: int) -> int:
    """Return the largest size of a file's data where nobody chose one.

    A digest goes through its file from start to end, and a system lets one thread at a time write
    to a file: large outputs get some files, so that several threads work on them.

    Args:
        total: Bytes of the whole output.
    """
    return min(_LARGEST, max(_LEAST, -(-total // _FILES)))


def assign_files(
    modules: Sequence[Sequence[OutputTensor]], *, max_bytes: int | None
) -> tuple[OutputFile, ...]:
    """Fill files of at most `max_bytes` of data; the tensors of one module stay together.

    Args:
        modules: Tensors of each module, in the order of the output.
        max_bytes: A module larger than this gets a file of its own; None is `usual_shard_bytes`.
    """
    if max_bytes is None:
        total = sum(tensor.num_bytes for tensors in modules for tensor in tensors)
        max_bytes = usual_shard_bytes(total)
    files: list[list[Sequence[OutputTensor]]] = [[]]
    filled = 0
    for tensors in modules:
        size = sum(tensor.num_bytes for tensor in tensors)
        if files[-1] and filled + size > max_bytes:
            files.append([])
            filled = 0
        files[-1].append(tensors)
        filled += size
    return tuple(
        _file(_file_name(number, len(files)), in_file)
        for number, in_file in enumerate(files, start=1)
    )


def _file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def _file(name: str, modules: Sequence[Sequence[OutputTensor]]) -> OutputFile:
    """Lay out one file: the tensors of a module lie together, and modules in the order of the plan.

    A file is then filled from its start to its end, and read so. Every tensor starts at a multiple
    of its element size; where odd sizes prevent it, wide dtypes come first in the whole file, as
    the safetensors library writes it.
    """
    ordered = [t for m in modules for t in (m if len(m) == 1 else sorted(m, key=_width_first))]
    if not _are_aligned(ordered):
        ordered.sort(key=_width_first)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts = {}
    position = 0
    for tensor in ordered:
        start, position = position, position + tensor.num_bytes
        starts[tensor.name] = start
        header[tensor.name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (start, position),
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = len(text).to_bytes(8, "little") + text
    return OutputFile(
        name=name,
        header=first,
        offsets={tensor_name: len(first) + start for tensor_name, start in starts.items()},
        tensors={tensor.name: tensor for module in modules for tensor in module},
        num_bytes=len(first) + position,
    )


def _width_first(tensor: OutputTensor) -> tuple[int, str]:
    return -tensor.dtype.itemsize, tensor.name


def _are_aligned(tensors: Sequence[OutputTensor]) -> bool:
    position = 0
    for tensor in tensors:
        if position % tensor.dtype.itemsize:
            return False
        position += tensor.num_bytes
    return True
