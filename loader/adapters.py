"""Adapters beside a model, as peft writes them: they are told of, and never applied.

`adapter_config.json` says what is adapted and of which base; `adapter_model.safetensors` (or
`.bin`) holds its tensors. With peft installed, transformers 5.24 loads the model of such a folder
with the adapter on top.
"""

from __future__ import annotations

from pathlib import Path

from quantload.errors import CheckpointError, UnknownFormat, listed, printable
from quantload.loader.weight_files import ADAPTER_WEIGHTS, read_json

ADAPTER_CONFIG = "adapter_config.json"
_WEIGHTS = (".safetensors", ".bin")
_KINDS = (*_WEIGHTS, ".pt", ".pth")
_MERGE = (
    "merge it into the weights (`merge_and_unload` of peft, then `save_pretrained`) for a model "
    "that has it"
)


def about_adapter(folder: Path) -> list[str]:
    """Return a warning if a folder has an adapter beside its model."""
    if not (files := _files(folder)):
        return []
    return [
        f"{_described(folder, files)} is left out, weights are those of the base alone; {_MERGE}"
    ]


def adapter_alone(folder: Path) -> UnknownFormat | None:
    """Return the error of a folder that has an adapter and no model; None if it has none."""
    if not (files := _files(folder)):
        return None
    others = sorted(
        file.name
        for file in folder.iterdir()
        if file.suffix in _KINDS and file.name not in files and file.is_file()
    )
    also = f", beside {listed(others)}, which no model is read from," if others else ""
    return UnknownFormat(
        f"{_described(folder, files)}{also} is all there is in `{folder}`, expected a whole model",
        hint=_MERGE,
    )


def _files(folder: Path) -> list[str]:
    weights = [
        file.name
        for file in folder.glob(f"{ADAPTER_WEIGHTS}*")
        if file.name.removesuffix(".index.json").endswith(_WEIGHTS) and file.is_file()
    ]
    return [*([ADAPTER_CONFIG] if (folder / ADAPTER_CONFIG).is_file() else []), *sorted(weights)]


def _described(folder: Path, files: list[str]) -> str:
    """Return what an adapter is, as far as its config can be read."""
    try:
        config = read_json(folder / ADAPTER_CONFIG, needed_for="the adapter")
    except CheckpointError:
        config = {}
    kind, base = config.get("peft_type"), config.get("base_model_name_or_path")
    words = ["an adapter", *([f"`{printable(str(kind))}`"] if kind else [])]
    words += [f"of `{printable(str(base))}`"] if base else []
    return f"{' '.join(words)} ({listed(files)})"


__all__ = ["ADAPTER_CONFIG", "about_adapter", "adapter_alone"]
