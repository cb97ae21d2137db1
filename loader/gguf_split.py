"""A GGUF model in one file or in several: `name-00001-of-00003.gguf` and its followers.

The first file has the metadata of the model; each file has a tensor table of its own tensors.

Source: https://github.com/ggml-org/llama.cpp/blob/a458664fc83b6513baea7adafcb0ef0626b006f8/tools/gguf-split
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from quantload.errors import CheckpointError, FormatMismatch, HeaderError
from quantload.loader.gguf_header import GgufHeader, GgufTensor, read_header

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def first_parts(files: Iterable[Path]) -> list[Path]:
    """Return the files without those that continue a split model, in their order."""
    matches = [(file, _PART.fullmatch(file.name)) for file in files]
    return [file for file, match in matches if match is None or int(match[2]) == 1]


def read_headers(path: Path) -> tuple[GgufHeader, Path]:
    """Read the headers of all files of a model.

    Args:
        path: The only file, or any file of a split model.

    Returns:
        The metadata of the first file with the tensors of all, and the first file.

    Raises:
        CheckpointError: A file of a split model is not there.
        FormatMismatch: The files do not belong together.
        HeaderError: A file is damaged.
    """
    parts = _parts(path)
    headers = [read_header(part) for part in parts]
    tensors: dict[str, GgufTensor] = {}
    for part, header in zip(parts, headers, strict=True):
        _check_part(header, part, number=parts.index(part), count=len(parts))
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise HeaderError(
                    f"tensor `{name}` is in two files, `{tensors[name].file.name}` and "
                    f"`{part.name}`, in `{path.parent}`"
                )
            tensors[name] = tensor
    total = headers[0].metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise FormatMismatch(
            f"the first of `{len(parts)}` files says `{total}` tensors, found `{len(tensors)}`, "
            f"in `{parts[0]}`",
            hint="the files belong to different models, or one was made again",
        )
    return GgufHeader(headers[0].metadata, tensors), parts[0]


def _parts(path: Path) -> list[Path]:
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    stem, count = match[1], int(match[3])
    parts = [path.with_name(f"{stem}-{n:05d}-of-{count:05d}.gguf") for n in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing or not parts:
        raise CheckpointError(
            f"`{len(missing)}` of `{count}` files of a split model are missing, the first is "
            f"`{missing[0] if missing else path.name}`, in `{path.parent}`",
            hint="the download is incomplete",
        )
    return parts


def _check_part(header: GgufHeader, part: Path, *, number: int, count: int) -> None:
    found = header.metadata.get("split.count", count)
    if found not in (count, 0 if count == 1 else count):
        raise FormatMismatch(
            f"metadata key `split.count` is `{found}`, expected `{count}` by the name of the file, "
            f"in `{part}`",
            hint="files of a split model are named NAME-00001-of-00002.gguf",
        )
    if header.metadata.get("split.no", number) != number:
        raise FormatMismatch(
            f"metadata key `split.no` is `{header.metadata['split.no']}`, expected `{number}` by "
            f"the name of the file, in `{part}`"
        )
