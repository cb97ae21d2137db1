"""Files beside the weights: tokenizer, chat template, generation config, code, licences."""

from __future__ import annotations

import shutil
from pathlib import Path

from quantload.errors import CheckpointError
from quantload.loader.adapters import ADAPTER_CONFIG
from quantload.loader.checkpoint import Checkpoint
from quantload.loader.gguf_tokenizer import write_tokenizer
from quantload.loader.manifest import GIT_ATTRIBUTES
from quantload.loader.open import QUANTIZATION_SIDE_FILES

_WEIGHT_SUFFIXES = {
    *(".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt", ".npz"),
    *(".ot", ".tflite", ".mlmodel", ".data", ".lock", ".incomplete"),
}
# Weights in other layouts that repositories carry in folders of their own.
_WEIGHT_FOLDERS = {"original", "metal", "onnx", "openvino", "coreml", "gguf", "runs", "__pycache__"}
_LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")


def copy_side_files(checkpoint: Checkpoint, target: Path) -> list[str]:
    """Copy everything that is not weights, their index, or a config of their encoding.

    A GGUF file has no such files: its tokenizer is made from its metadata, and only licences beside
    it are copied.

    Returns:
        Paths that were written, relative to `target`.
    """
    if checkpoint.gguf_file is not None:
        files = [f for pattern in _LICENCES for f in checkpoint.folder.glob(pattern) if f.is_file()]
        return _copy(sorted(files), checkpoint.folder, target) + write_tokenizer(
            checkpoint.gguf_file, target
        )
    return _copy(side_files(checkpoint.folder), checkpoint.folder, target)


def side_files(folder: Path) -> list[Path]:
    """Return the files of a model folder that describe the model rather than hold its weights.

    Hidden ones are those of tools (.git, .cache), results of the source (.eval_results), or nobody
    else's business (.env): only .gitattributes goes along, which keeps weights out of git's own
    history.
    """
    found = []
    for file in sorted(folder.rglob("*")):
        inside = file.relative_to(folder)
        hidden = any(part.startswith(".") for part in inside.parts)
        hidden &= inside.as_posix() != GIT_ATTRIBUTES
        if hidden or _WEIGHT_FOLDERS.intersection(inside.parts[:-1]) or not file.is_file():
            continue
        replaced = inside.name == "config.json" or inside.name in QUANTIZATION_SIDE_FILES
        if len(inside.parts) == 1 and replaced:
            continue
        if inside.name == ADAPTER_CONFIG:  # the weights that it describes are not copied
            continue
        if file.suffix in _WEIGHT_SUFFIXES or inside.name.endswith(".index.json"):
            continue
        found.append(file)
    return found


def _copy(files: list[Path], folder: Path, target: Path) -> list[str]:
    copied = []
    for file in files:
        inside = file.relative_to(folder)
        try:
            (target / inside).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target / inside)
        except OSError as error:
            raise CheckpointError(f"cannot copy `{file}`: {error.strerror or error}") from error
        copied.append(inside.as_posix())
    return copied
