"""Write tensors to a safetensors file that appears under its name only when it is complete.

The layout is that of `loader/safetensors_header.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from quantload.errors import OutputError
from quantload.loader.safetensors_header import NAMES
from quantload.loader.staging import output_error


def check_free(file: Path, *, overwrite: bool) -> None:
    """Check that a file may be written.

    Raises:
        OutputError: Its folder is not there, or its place is taken.
    """
    if not file.parent.is_dir():
        raise OutputError(
            f"folder `{file.parent}` of `{file}` is not there", hint="make the folder first"
        )
    if file.is_symlink() or (file.exists() and not file.is_file()):
        raise OutputError(f"output `{file}` is a folder or a link, expected a new file")
    if file.exists() and not overwrite:
        raise OutputError(
            f"output `{file}` is there already", hint="give a new name, or say `--overwrite`"
        )


def write_tensors(
    file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], *, overwrite: bool
) -> None:
    """Write tensors under a hidden name, and give the file its own when all of it is on the disk.

    Args:
        file: Where it goes.
        tensors: By name, on any device.
        metadata: Texts by key.
        overwrite: Replace what is there.

    Raises:
        OutputError: It cannot be written, or somebody took the place meanwhile.
    """
    growing = file.with_name(f".{file.name}.unfinished")
    # wide dtypes first, so that every tensor starts at a multiple of its element size
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    try:
        with growing.open("wb") as stream:
            stream.write(_header(ordered, metadata))
            for tensor in ordered.values():
                stream.write(_bytes_of(tensor))
            stream.flush()
            os.fsync(stream.fileno())
        check_free(file, overwrite=overwrite)
        growing.replace(file)
    except OSError as error:
        raise output_error(error, file, continues=False) from error
    finally:
        growing.unlink(missing_ok=True)


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    position = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


__all__ = ["check_free", "write_tensors"]
