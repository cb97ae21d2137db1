"""Open a checkpoint: find out which files count, read their headers.

SOURCE is a folder with safetensors files (or pickled ones, where there are no others), a GGUF file
(or a folder with just one), or a hub id. Which of a folder's files are its weights is decided in
`loader/weight_files.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quantload.arguments import check_source
from quantload.errors import CheckpointError, SourceNotFound, UnknownFormat, listed
from quantload.loader.adapters import about_adapter, adapter_alone
from quantload.loader.checkpoint import Checkpoint
from quantload.loader.gguf_file import open_gguf
from quantload.loader.gguf_split import first_parts
from quantload.loader.hub import fetch_snapshot, is_hub_id
from quantload.loader.weight_files import (
    INDEX,
    has_pickles,
    has_safetensors,
    natural_order,
    read_json,
    read_weights,
)
from quantload.loader.wrapper_names import names_in_config, without_wrappers

# Files that hold a quantization config beside config.json, by producer.
QUANTIZATION_SIDE_FILES = (
    "quantize_config.json",  # AutoGPTQ, GPTQModel, older AutoAWQ
    "quant_config.json",  # AutoAWQ, llm-awq
    "hf_quant_config.json",  # ModelOpt
    "quantization_config.json",  # AutoRound, Intel Neural Compressor
    "quanto_qmap.json",  # optimum-quanto
)


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Open a folder, a GGUF file or a hub id; reads headers only.

    Args:
        source: A path, or OWNER/NAME, or OWNER/NAME@REVISION.

    Raises:
        WrongType: It is no text and no path.
        SourceNotFound: There is nothing of this name.
        CheckpointError: The files are damaged, incomplete or ambiguous.
        UnknownFormat: The weights are in files that quantload does not read.
    """
    check_source("source", source)
    if not str(source).strip():
        raise SourceNotFound(
            "no source: the name is empty", hint="give a folder, a GGUF file or a hub id"
        )
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
        return _open_hub(str(source))
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


def _open_hub(hub_id: str) -> Checkpoint:
    folder = fetch_snapshot(hub_id)
    if not has_safetensors(folder):
        folder = fetch_snapshot(hub_id, pickled=True)
    return _open_folder(folder, hub_id)


def _open_folder(folder: Path, name: str) -> Checkpoint:
    dangling = _dangling_links(folder)
    gguf_files = [] if has_safetensors(folder) else first_parts(sorted(folder.glob("*.gguf")))
    if gguf_files:
        return _open_only_gguf(folder, gguf_files)
    weights = read_weights(folder)
    if weights is None:
        raise adapter_alone(folder) or _nothing_in(folder)
    config = read_json(folder / "config.json", needed_for=name)
    weights, wrappers = without_wrappers(weights, str(folder))
    quantization_config, where = _quantization_config(folder, config)
    if quantization_config is not None:
        quantization_config = names_in_config(quantization_config, wrappers.taken_off)
    tensors, order = weights.tensors, sorted(weights.tensors, key=natural_order)
    return Checkpoint(
        name=name,
        folder=folder,
        config=config,
        tensors={name: tensors[name] for name in order},
        quantization_config=quantization_config,
        quantization_config_file=where,
        warnings=(
            *dangling,
            *weights.warnings,
            *about_adapter(folder),
            *_about_side_files(folder, quantization_config or {}, where),
        ),
        texts=weights.texts,
        wrappers=wrappers.shown,
    )


def _dangling_links(folder: Path) -> list[str]:
    """Return a warning for links of a snapshot to files that are not there.

    Raises:
        CheckpointError: One of them is a file that has to be read.
    """
    found = [f for f in sorted(folder.glob("*")) if f.is_symlink() and not _is(f.exists)]
    needed = [
        file.name
        for file in found
        if file.suffix in (".safetensors", ".gguf")
        or file.name.endswith(".index.json")
        or file.name in ("config.json", *QUANTIZATION_SIDE_FILES)
    ]
    if needed:
        raise CheckpointError(
            f"{listed(needed)} links to a missing blob, in `{folder}`",
            hint="the download is incomplete, or the cache was cleaned; fetch it again",
        )
    return [f"{listed(f.name for f in found)} links to a missing blob"] if found else []


def _open_only_gguf(folder: Path, gguf_files: list[Path]) -> Checkpoint:
    if has_pickles(folder):
        raise CheckpointError(
            f"both GGUF and pickled weights in `{folder}`: {listed(f.name for f in gguf_files)}",
            hint="give the path of a GGUF file, or a folder without one",
        )
    if len(gguf_files) > 1:
        raise CheckpointError(
            f"{len(gguf_files)} GGUF files in `{folder}`: {listed(f.name for f in gguf_files)}",
            hint="give the path of one of them",
        )
    return open_gguf(gguf_files[0])


def _nothing_in(folder: Path) -> SourceNotFound:
    others = [
        f.name for kind in ("safetensors", "bin", "pt", "pth") for f in folder.glob(f"*.{kind}")
    ]
    return SourceNotFound(
        f"no safetensors or GGUF file with the model's weights in folder `{folder}`"
        + (f", only {listed(others)}" if others else ""),
        hint="give the folder that holds `config.json` and the weights",
    )


def _quantization_config(
    folder: Path, config: Mapping[str, Any]
) -> tuple[Mapping[str, Any] | None, str]:
    text_config = config.get("text_config") or {}
    for holder, key in (
        (config, "quantization_config"),
        (text_config, "quantization_config"),
        (config, "compression_config"),
    ):
        found = holder.get(key) if isinstance(holder, Mapping) else None
        if found is not None and not isinstance(found, Mapping):
            raise CheckpointError(f"`{key}` in `{folder / 'config.json'}` is not an object")
        if found:
            return found, "config.json"
    for side_file in QUANTIZATION_SIDE_FILES:
        if (folder / side_file).is_file():
            return read_json(folder / side_file, needed_for="the quantization config"), side_file
    return None, "config.json"


def _about_side_files(folder: Path, chosen: Mapping[str, Any], where: str) -> list[str]:
    """Return a warning for each side file that says something else than the config that counts."""
    warnings = []
    for side_file in QUANTIZATION_SIDE_FILES:
        try:
            beside = read_json(folder / side_file, needed_for="a comparison")
        except CheckpointError:  # missing, or damaged: it is not needed
            continue
        if differing := [k for k, v in beside.items() if k in chosen and chosen[k] != v]:
            warnings.append(
                f"`{side_file}` and `{where}` disagree on {listed(differing)}; `{where}` counts"
            )
    return warnings


__all__ = ["INDEX", "QUANTIZATION_SIDE_FILES", "natural_order", "open_checkpoint", "read_json"]
