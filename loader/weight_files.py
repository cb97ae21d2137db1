"""Which files of a folder hold its weights, and the tensors in them.

In this order, the first that is there:

    *.safetensors.index.json          the shards it names; an allow-list per tensor
    model.safetensors                 alone
    *.safetensors                     all of them, whatever they are called
    *.bin.index.json                  the same for pickled files, see `loader/pickled.py`
    pytorch_model.bin
    *.bin, *.pt, *.pth

Copies in another layout (`consolidated*`), adapters, optimizer states and the like are no weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from quantload.errors import CheckpointError, MissingTensor, listed
from quantload.loader.checkpoint import TensorEntry
from quantload.loader.pickled import read_pickle
from quantload.loader.safetensors_header import read_file

INDEX = "model.safetensors.index.json"
ADAPTER_WEIGHTS = "adapter_model"  # their names begin so; told of in `loader/adapters.py`
_SAFETENSORS = (".safetensors",)
_PICKLED = (".bin", ".pt", ".pth")
_SINGLE = "model.safetensors"
_ALONE = (_SINGLE, "pytorch_model.bin")
_NUMBER = re.compile(r"\d+")
_LONGEST = 0xD7FF  # the last character below those that are no text
_NOT_WEIGHTS = re.compile(
    r"^(consolidated|adapter_|optimizer|training_args|scheduler|scaler|rng_state|expected)"
)


@dataclass
class Weights:
    """The tensors of a folder.

    Args:
        tensors: Headers by tensor name.
        texts: Texts by key that a file holds beside its tensors, by file name.
        warnings: What was left out.
    """

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    texts: dict[str, Mapping[str, str]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def read_weights(folder: Path) -> Weights | None:
    """Read the headers of a folder's weight files; None if it has no such files.

    Raises:
        CheckpointError: Files are damaged, incomplete or ambiguous.
        UnknownFormat: A pickled file asks for code.
    """
    for kinds in (_SAFETENSORS, _PICKLED):
        index = _index_of(folder, kinds)
        if index is not None:
            return _Reading(folder).indexed(index)
        files = _files_of(folder, kinds)
        if files:
            return _Reading(folder).all(files, kinds)
    return None


def has_safetensors(folder: Path) -> bool:
    """True if the folder has safetensors files with the weights of a model."""
    return _index_of(folder, _SAFETENSORS) is not None or bool(_files_of(folder, _SAFETENSORS))


def has_pickles(folder: Path) -> bool:
    """True if the folder has pickled files with the weights of a model."""
    return _index_of(folder, _PICKLED) is not None or bool(_files_of(folder, _PICKLED))


def read_json(file: Path, *, needed_for: str) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: The file is missing, or is not a JSON object.
    """
    if not file.is_file():
        raise CheckpointError(
            f"`{file.name}` is missing in `{file.parent}` (needed for `{needed_for}`)"
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # ValueError: JSON, UTF-8, very long integers
        raise CheckpointError(f"not a JSON file: {error}, in `{file}`") from error
    except OSError as error:
        raise CheckpointError(f"cannot read `{file}`: {error.strerror or error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"`{file}` holds a JSON {type(content).__name__}, expected an object")
    return content


def natural_order(name: str) -> str:
    """Sort key that puts layer 2 before layer 10: a number counts by its length, then its digits.

    Numbers come before text, as NUL does.
    """
    return ".".join([_ordered(part) for part in name.split(".")])


@lru_cache(maxsize=65536)
def _ordered(part: str) -> str:
    return _NUMBER.sub(_with_length, part)


def _with_length(number: re.Match[str]) -> str:
    digits = number[0].lstrip("0")
    return f"\0{chr(min(len(digits), _LONGEST))}{digits}"


# -- which files -----------------------------------------------------------------------------------


def _index_of(folder: Path, kinds: tuple[str, ...]) -> Path | None:
    usual = folder / INDEX
    if kinds == _SAFETENSORS and usual.exists():
        return usual
    found = [f for kind in kinds for f in folder.glob(f"*{kind}.index.json")]
    found = [file for file in found if not _NOT_WEIGHTS.match(file.name)]
    if len(found) > 1:
        raise CheckpointError(
            f"{len(found)} indexes in `{folder}`: {listed(f.name for f in found)}, expected one",
            hint="move those of other exports elsewhere",
        )
    return found[0] if found else None


def _files_of(folder: Path, kinds: tuple[str, ...]) -> list[Path]:
    found = [file for kind in kinds for file in folder.glob(f"*{kind}") if not file.is_dir()]
    alone = [file for file in found if file.name in _ALONE]
    files = alone or [file for file in found if not _NOT_WEIGHTS.match(file.name)]
    return sorted(files, key=lambda file: natural_order(file.name))


# -- their tensors ---------------------------------------------------------------------------------


class _Reading:
    """Reads the files of one folder and notes what was left out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.weights = Weights()

    def all(self, files: Iterable[Path], kinds: tuple[str, ...]) -> Weights:
        """Take every tensor of every file."""
        chosen = list(files)
        there = [file for kind in kinds for file in self.folder.glob(f"*{kind}")]
        left = [file.name for file in there if file not in chosen]
        if left := [name for name in left if not name.startswith(ADAPTER_WEIGHTS)]:
            self.weights.warnings.append(f"files left out: {listed(left)}")
        tensors = self.weights.tensors
        for file in chosen:
            for name, entry in self._read(file).items():
                if name in tensors:
                    raise CheckpointError(
                        f"tensor `{name}` is in two files, `{tensors[name].file.name}` and "
                        f"`{file.name}`, and there is no `{INDEX}`, in `{self.folder}`"
                    )
                tensors[name] = entry
        return self.weights

    def indexed(self, index: Path) -> Weights:
        """Take the tensors that an index names, each from the file that it names."""
        weight_map = _weight_map(index)
        self._refuse_another_set(index, weight_map)
        headers = {
            file: self._read(self._shard(index, file))
            for file in sorted(set(weight_map.values()), key=natural_order)
        }
        weight_map = _with_parts(weight_map, headers, self.weights.texts)
        missing = [name for name, file in weight_map.items() if name not in headers[file]]
        if missing:
            raise MissingTensor(
                f"{len(missing)} tensors are not in the shards that the index names: "
                f"{listed(missing)}, in `{self.folder}`"
            )
        stale = [n for file, found in headers.items() for n in found if weight_map.get(n) != file]
        if stale:
            self.weights.warnings.append(
                f"{len(stale)} tensors are not listed in the index, left out: {listed(stale)}"
            )
        found = (headers[file][name] for name, file in weight_map.items())
        self.weights.tensors = {entry.name: entry for entry in found}
        return self.weights

    def _refuse_another_set(self, index: Path, weight_map: Mapping[str, str]) -> None:
        """Refuse a single file that holds the same tensors as the shards of an index."""
        single = self.folder / _SINGLE
        if index.name != INDEX or _SINGLE in weight_map.values() or not single.is_file():
            return
        if both := [name for name in read_file(single)[0] if name in weight_map]:
            raise CheckpointError(
                f"`{self.folder}` holds two sets of weights: {listed(both)} are in `{_SINGLE}`, "
                f"and in the shards that `{index.name}` names",
                hint="transformers would take the first, other engines the second: move one of "
                "them elsewhere",
            )

    def _shard(self, index: Path, file_name: str) -> Path:
        if Path(file_name).name != file_name:
            raise CheckpointError(f"`{index}` points outside its folder: `{file_name}`")
        file = self.folder / file_name
        if not file.is_file():
            raise CheckpointError(
                f"shard `{file_name}` is missing in `{self.folder}`; `{index.name}` lists it",
                hint="the download is incomplete",
            )
        return file

    def _read(self, file: Path) -> dict[str, TensorEntry]:
        if file.suffix in _SAFETENSORS:
            tensors, texts = read_file(file)
        else:
            pickled = read_pickle(file)
            tensors, texts = pickled.tensors, pickled.texts
            if pickled.ignored:
                self.weights.warnings.append(
                    f"{len(pickled.ignored)} entries of `{file.name}` are no tensors, left out: "
                    f"{listed(pickled.ignored)}"
                )
        self.weights.texts[file.name] = texts
        return tensors


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index, needed_for="the sharded checkpoint").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"`{index}` has no `weight_map`")
    wrong = [name for name, file in weight_map.items() if not isinstance(file, str)]
    if wrong:
        raise CheckpointError(
            f"`{index}` names no file for {listed(wrong)}, expected the name of a shard"
        )
    return weight_map


def _with_parts(
    weight_map: Mapping[str, str],
    headers: Mapping[str, Mapping[str, TensorEntry]],
    texts: Mapping[str, Mapping[str, str]],
) -> dict[str, str]:
    """Name the parts of a tensor where a pickled index names the tensor."""
    full: dict[str, str] = {}
    for name, file in weight_map.items():
        if name in headers[file] or name not in texts.get(file, {}):
            full[name] = file
            continue
        module, _, leaf = name.rpartition(".")
        starts = (f"{module}._{leaf}_" if module else f"_{leaf}_", f"{name}.")
        full |= {part: file for part in headers[file] if part.startswith(starts)}
    return full
