"""Sound checkpoints laid out in shards or pickled, and faults put into one file at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator
from pathlib import Path

import faults
import torch
from torch import Tensor

INDEX = "model.safetensors.index.json"


def sharded(folder: Path, to: Path, *, shards: int = 3) -> Path:
    """Copy a checkpoint with one safetensors file into shards with an index."""
    file = faults._weights_of(folder)
    metadata, tensors = faults._read(file)
    faults._copy_around(folder, file, to)
    weight_map = {}
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {n: tensors[n] for n in list(tensors)[number::shards]}
        faults._write(to / name, part, metadata)
        weight_map |= dict.fromkeys(part, name)
    (to / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return to


def pickled(folder: Path, to: Path) -> Path:
    """Copy a checkpoint with one safetensors file into one pickled file."""
    file = faults._weights_of(folder)
    faults._copy_around(folder, file, to)
    torch.save(faults._read(file)[1], to / "pytorch_model.bin")
    return to


def layout_mutations(
    folder: Path, tmp_path: Path, *, only: Container[str], step: int = 1
) -> Iterator[tuple[str, Path]]:
    """Yield ("KIND TENSOR ...", a copy with that fault) as `faults.mutations` does.

    Faults are those of `faults.mutations` in the file that holds the tensor; the index stays as it
    is. With an index also: a shard that is gone, and a tensor that the index puts into another one.
    """
    number = 0
    for file in sorted((*folder.glob("model-*.safetensors"), *folder.glob("*.bin"))):
        metadata, tensors = _read(file)
        found = [
            fault
            for name, tensor in tensors.items()
            if name in only
            for fault in faults._faults(name, tensor, hidden=True)
        ]
        for description, change in found:
            number += 1
            if (number - 1) % step:
                continue
            copy = faults._copy_around(folder, file, tmp_path / f"fault-{number:05d}")
            _write(copy / file.name, file, dict(tensors), metadata, change, description)
            yield description, copy
    if (folder / INDEX).exists():
        yield from _index_faults(folder, tmp_path, only)


def _read(file: Path) -> tuple[dict[str, str] | None, dict[str, Tensor]]:
    if file.suffix == ".bin":
        return None, torch.load(file, weights_only=True)
    return faults._read(file)


def _write(
    target: Path,
    file: Path,
    tensors: dict[str, Tensor],
    metadata: dict[str, str] | None,
    change: Callable[[dict[str, Tensor]], object] | None,
    description: str,
) -> None:
    is_pickled = file.suffix == ".bin"
    if change is None:
        raw = file.read_bytes()
        end = len(raw) // 2 if is_pickled else faults._middle_of(file, description.split()[1])
        target.write_bytes(raw[:end])
        return
    change(tensors)
    if is_pickled:
        torch.save({name: tensor.contiguous() for name, tensor in tensors.items()}, target)
    else:
        faults._write(target, tensors, metadata)


def _index_faults(folder: Path, tmp_path: Path, only: Container[str]) -> Iterator[tuple[str, Path]]:
    content = json.loads((folder / INDEX).read_text())
    shards = sorted(set(content["weight_map"].values()))
    for shard in shards:
        name = next(n for n, place in content["weight_map"].items() if place == shard)
        yield f"lose {name}", faults._copy_around(folder, folder / shard, tmp_path / f"no-{shard}")
    name = next(n for n in content["weight_map"] if n in only)
    other = next((s for s in shards if s != content["weight_map"][name]), "model-more.safetensors")
    changes: dict[str, dict[str, str]] = {
        "move": {**content["weight_map"], name: other},
        "unlist": {n: place for n, place in content["weight_map"].items() if n != name},
        "invent": {**content["weight_map"], f"{name}_more": other},
    }
    for kind, weight_map in changes.items():
        copy = faults._copy_around(folder, folder / INDEX, tmp_path / kind)
        (copy / INDEX).write_text(json.dumps({**content, "weight_map": weight_map}))
        yield f"{kind} {name}", copy
