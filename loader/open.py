"""Open a checkpoint: find out which files count, read their headers.

SOURCE is a folder with safetensors files, a GGUF file (or a folder with just one), or a hub id.
The index of a sharded checkpoint is an allow-list per tensor: files and tensors that it does not
name are stale and are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quantload.errors import (
    CheckpointError,
    MissingTensor,
    SourceNotFound,
    UnknownFormat,
    listed,
)
from quantload.loader.checkpoint import Checkpoint, TensorEntry
from quantload.loader.gguf_file import open_gguf
from quantload.loader.hub import fetch_snapshot, is_hub_id
from quantload.loader.safetensors_header import read_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Files that hold a quantization config beside config.json, by producer.
QUANTIZATION_SIDE_FILES = (
    "quantize_config.json",  # AutoGPTQ, GPTQModel, older AutoAWQ
    "quant_config.json",  # AutoAWQ, llm-awq
    "hf_quant_config.json",  # ModelOpt
    "quantization_config.json",  # AutoRound, Intel Neural Compressor
)
_NOT_WEIGHTS = re.compile(r"^(consolidated|adapter_|optimizer|training_args|expected)")


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Open a folder, a GGUF file or a hub id; reads headers only.

    Args:
        source: A path, or OWNER/NAME, or OWNER/NAME@REVISION.

    Raises:
        SourceNotFound: There is nothing of this name.
        CheckpointError: The files are damaged, incomplete or ambiguous.
        UnknownFormat: The weights are in files that quantload does not read.
    """
    if not str(source).strip():
        raise SourceNotFound("no source: the name is empty")
    path = _expanded(source)
    if _is(path.is_file):
        if path.suffix == ".gguf":
            return open_gguf(path)
        raise UnknownFormat(
            f"not a checkpoint: file `{path}`, expected a folder, a `.gguf` file or a hub id",
            hint="give the folder that holds `config.json`",
        )
    if _is(path.is_dir):
        return _open_folder(path, str(source))
    if is_hub_id(str(source)):
        return _open_folder(fetch_snapshot(str(source)), str(source))
    raise SourceNotFound(
        f"no such folder or file: `{source}`",
        hint="a hub id has the form `owner/name` or `owner/name@revision`",
    )


def _is(check: Callable[[], bool]) -> bool:
    try:
        return check()
    except OSError:  # a name that is too long, a folder that may not be read
        return False


def _expanded(source: str | Path) -> Path:
    try:
        return Path(source).expanduser()
    except RuntimeError:  # `~name` of nobody
        return Path(source)


def _open_folder(folder: Path, name: str) -> Checkpoint:
    if not _weight_files(folder) and not (folder / INDEX).exists():
        return _open_other(folder)
    config = read_json(folder / "config.json", needed_for=name)
    warnings: list[str] = []
    tensors = (
        _indexed_tensors(folder, warnings)
        if (folder / INDEX).exists()
        else _all_tensors(folder, warnings)
    )
    quantization_config, where = _quantization_config(folder, config)
    return Checkpoint(
        name=name,
        folder=folder,
        config=config,
        tensors={key: tensors[key] for key in sorted(tensors, key=natural_order)},
        quantization_config=quantization_config,
        quantization_config_file=where,
        warnings=tuple(warnings),
    )


def _open_other(folder: Path) -> Checkpoint:
    gguf_files = sorted(folder.glob("*.gguf"))
    if len(gguf_files) == 1:
        return open_gguf(gguf_files[0])
    if gguf_files:
        raise CheckpointError(
            f"{len(gguf_files)} GGUF files in `{folder}`: {listed(f.name for f in gguf_files)}",
            hint="give the path of one of them",
        )
    pickles = [f.name for f in folder.iterdir() if f.suffix in (".bin", ".pt", ".pth")]
    pickles = [name for name in pickles if not _NOT_WEIGHTS.match(name)]
    if pickles:
        raise UnknownFormat(
            f"weights are pickled files, which quantload does not open: {listed(pickles)}, "
            f"in `{folder}`",
            hint="save the model as safetensors with transformers' `save_pretrained`",
        )
    others = [f.name for f in folder.glob("*.safetensors")]
    raise SourceNotFound(
        f"no safetensors or GGUF file with the model's weights in folder `{folder}`"
        + (f", only {listed(others)}" if others else ""),
        hint="give the folder that holds `config.json` and the weights",
    )


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


def natural_order(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key that puts layer 2 before layer 10."""
    parts = [part for part in re.split(r"(\d+)", name) if part]
    return tuple(
        (0, len(part.lstrip("0")), part.lstrip("0")) if part.isdecimal() else (1, 0, part)
        for part in parts
    )


def _indexed_tensors(folder: Path, warnings: list[str]) -> dict[str, TensorEntry]:
    index = read_json(folder / INDEX, needed_for="the sharded checkpoint")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"`{folder / INDEX}` has no `weight_map`")
    wrong = [name for name, file in weight_map.items() if not isinstance(file, str)]
    if wrong:
        raise CheckpointError(
            f"`{folder / INDEX}` names no file for {listed(wrong)}, expected the name of a shard"
        )
    headers: dict[str, dict[str, TensorEntry]] = {}
    for file_name in sorted(set(weight_map.values()), key=natural_order):
        if Path(file_name).name != file_name:
            raise CheckpointError(f"`{folder / INDEX}` points outside its folder: `{file_name}`")
        if not (folder / file_name).is_file():
            raise CheckpointError(
                f"shard `{file_name}` is missing in `{folder}`; `{INDEX}` lists it",
                hint="the download is incomplete",
            )
        headers[file_name] = read_header(folder / file_name)
    missing = [name for name, file in weight_map.items() if name not in headers[file]]
    if missing:
        raise MissingTensor(
            f"{len(missing)} tensors are not in the shards that the index names: "
            f"{listed(missing)}, in `{folder}`"
        )
    stale = [
        name for file, header in headers.items() for name in header if weight_map.get(name) != file
    ]
    if stale:
        warnings.append(
            f"{len(stale)} tensors are not listed in the index, left out: {listed(stale)}"
        )
    return {name: headers[file][name] for name, file in weight_map.items()}


def _all_tensors(folder: Path, warnings: list[str]) -> dict[str, TensorEntry]:
    chosen = _weight_files(folder)
    left = [f.name for f in folder.glob("*.safetensors") if f not in chosen]
    if left:
        warnings.append(f"files left out: {listed(left)}")
    tensors: dict[str, TensorEntry] = {}
    for file in chosen:
        for name, entry in read_header(file).items():
            if name in tensors:
                raise CheckpointError(
                    f"tensor `{name}` is in two files, `{tensors[name].file.name}` and "
                    f"`{file.name}`, and there is no `{INDEX}`, in `{folder}`"
                )
            tensors[name] = entry
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    found = (file for file in folder.glob("*.safetensors") if not file.is_dir())
    files = sorted(found, key=lambda file: natural_order(file.name))
    single = [file for file in files if file.name == SINGLE]
    return single or [file for file in files if not _NOT_WEIGHTS.match(file.name)]


def _quantization_config(
    folder: Path, config: Mapping[str, Any]
) -> tuple[Mapping[str, Any] | None, str]:
    text_config = config.get("text_config") or {}
    for holder, key in (
        (config, "quantization_config"),
        (text_config, "quantization_config"),
        (config, "compression_config"),
    ):
        if isinstance(holder, Mapping) and holder.get(key):
            found = holder[key]
            if not isinstance(found, Mapping):
                raise CheckpointError(f"`{key}` in `{folder / 'config.json'}` is not an object")
            return found, "config.json"
    for side_file in QUANTIZATION_SIDE_FILES:
        if (folder / side_file).is_file():
            return read_json(folder / side_file, needed_for="the quantization config"), side_file
    return None, "config.json"


__all__ = ["INDEX", "QUANTIZATION_SIDE_FILES", "natural_order", "open_checkpoint", "read_json"]
