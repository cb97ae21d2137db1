"""An open checkpoint: its config, the headers of its tensors, and lazy reads of single tensors.

Opening reads headers only. Which files count (a folder's index, a hub repository, a GGUF file) is
decided in `loader/open.py`; a checkpoint only knows the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantload.errors import CheckpointError, HeaderError, MissingTensor, ShapeError, listed

_KEPT: ContextVar[dict[Path, FileIO] | None] = ContextVar("files that are kept open", default=None)
_MOST_KEPT = 16


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies, as its file's header says.

    Args:
        name: Name in the checkpoint (for GGUF: the Hugging Face name).
        dtype: dtype of the stored elements; uint8 for blocks of a GGUF type.
        shape: Shape of the stored elements.
        file: File that holds it.
        start: First byte in the file.
        num_bytes: Length in bytes.
        block_type: GGUF type such as "Q4_1" if the bytes are its blocks, else "".
        interleaved_heads: Heads whose rows GGUF stores rotated pair by pair; 0 if stored in order.
        loaded: The tensor itself, if it came out of a pickled file (mapped into memory, not read).
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    start: int
    num_bytes: int
    block_type: str = ""
    interleaved_heads: int = 0
    loaded: Tensor | None = field(default=None, repr=False, compare=False)

    @property
    def num_elements(self) -> int:
        """Number of stored elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def is_contiguous(self) -> bool:
        """True if the file holds the elements themselves, one after the other."""
        return self.loaded is None and not self.block_type and not self.interleaved_heads


@dataclass(frozen=True, slots=True)
class MadeEntry(TensorEntry):
    """A tensor that lies in the files in pieces, or as a piece of others.

    Args:
        parts: The tensors that it is made from; `file` and `start` are those of the first.
        make: Returns its elements from those of the parts, in their order.
    """

    parts: tuple[TensorEntry, ...] = ()
    make: Callable[[Sequence[Tensor]], Tensor] = field(
        default=lambda parts: parts[0], repr=False, compare=False
    )

    @property
    def is_contiguous(self) -> bool:
        """False: the elements do not lie one after the other."""
        return False


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint.

    Args:
        name: What the user called it, for messages.
        folder: Folder whose side files (tokenizer, licence, ...) belong to it.
        config: config.json, or what stands for it.
        tensors: Headers by tensor name, in natural order of names.
        gguf_file: The GGUF file, if it is one.
        quantization_config: The quantization config, wherever it was found; None if there is none.
        quantization_config_file: Name of the file it was found in.
        warnings: What was left out when it was opened.
        texts: Texts by key that a file holds beside its tensors (metadata of a safetensors header),
            by file name.
        wrappers: What was taken off names of tensors, see `loader/wrapper_names.py`.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]
    gguf_file: Path | None = None
    quantization_config: Mapping[str, Any] | None = None
    quantization_config_file: str = "config.json"
    warnings: tuple[str, ...] = field(default=())
    texts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    wrappers: str = ""

    def read(self, tensor_name: str) -> Tensor:
        """Read one tensor into new memory, as stored (GGUF blocks as [rows, bytes] uint8).

        Raises:
            MissingTensor: There is no tensor of this name.
            HeaderError: The file is shorter than its header says.
        """
        entry = self.tensors.get(tensor_name)
        if entry is None:
            raise MissingTensor(f"tensor `{tensor_name}` is not in `{self.name}`")
        return unpermute_rows(read_entry(entry), entry.interleaved_heads)

    def renamed(self, names: Mapping[str, str]) -> Checkpoint:
        """Return the checkpoint with tensors under other names: {stored name: name}."""
        tensors = {
            names.get(name, name): replace(entry, name=names.get(name, name))
            for name, entry in self.tensors.items()
        }
        if len(tensors) < len(self.tensors):
            lost = [name for name in names if names[name] in self.tensors]
            raise CheckpointError(f"two tensors have one name: {listed(lost)}, in `{self.name}`")
        return replace(self, tensors=tensors)


def read_entry(entry: TensorEntry) -> Tensor:
    """Read the bytes of one tensor; see `Checkpoint.read`."""
    if isinstance(entry, MadeEntry):
        return entry.make([read_entry(part) for part in entry.parts]).reshape(entry.shape)
    if entry.loaded is not None:
        return entry.loaded.clone(memory_format=torch.contiguous_format)
    raw = torch.empty(entry.num_bytes, dtype=torch.uint8)
    try:
        _read_into(entry, raw.numpy().data)
    except OSError as error:
        raise CheckpointError(f"cannot read `{entry.file}`: {error.strerror or error}") from error
    return raw.view(entry.dtype).reshape(entry.shape)


@contextmanager
def files_kept_open() -> Iterator[None]:
    """Keep files open from one read to the next while this is open; also a decorator.

    On a network disk each opening costs a round trip or more, and a file has hundreds of tensors.
    """
    files: dict[Path, FileIO] = {}
    token = _KEPT.set(files)
    try:
        yield
    finally:
        _KEPT.reset(token)
        for file in files.values():
            file.close()


@contextmanager
def _opened(path: Path) -> Iterator[FileIO]:
    kept = _KEPT.get()
    if kept is None:
        with path.open("rb", buffering=0) as file:
            yield file
        return
    if path not in kept:
        while len(kept) >= _MOST_KEPT:
            kept.pop(next(iter(kept))).close()  # the one that was opened first
        kept[path] = path.open("rb", buffering=0)
    yield kept[path]


def _read_into(entry: TensorEntry, buffer: memoryview) -> None:
    done = 0
    with _opened(entry.file) as file:
        file.seek(entry.start)
        while done < entry.num_bytes:
            got = file.readinto(buffer[done:])
            if not got:
                raise file_ends(entry, done)
            done += got


def file_ends(entry: TensorEntry, done: int) -> HeaderError:
    """Return the error of a file that ends inside a tensor, `done` bytes after its start."""
    return HeaderError(
        f"file ends inside tensor `{entry.name}`: {done} of {entry.num_bytes} bytes are there, in "
        f"`{entry.file}`",
        hint="the file is truncated; download it again",
    )


def unpermute_rows(tensor: Tensor, heads: int) -> Tensor:
    """Put rows that GGUF stores interleaved head by head into the Hugging Face order.

    Args:
        tensor: [heads * D, ...] any dtype; rows are moved as a whole.
        heads: `TensorEntry.interleaved_heads`; 0 returns the tensor as it is.

    Returns:
        [heads * D, ...], of each head its rows 0, 2, 4, ..., then its rows 1, 3, 5, ...

    Raises:
        ShapeError: The rows are not `heads` heads of an even number of rows.
    """
    if heads == 0:
        return tensor
    if tensor.shape[0] % (2 * heads):
        raise ShapeError(
            f"`{tensor.shape[0]}` rows, expected `{heads}` heads of an even number of rows"
        )
    pairs = tensor.reshape(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
