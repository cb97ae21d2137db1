"""Faults put into a sound checkpoint, one tensor and one fault at a time.

A reader must answer each with an error of ours, or still read the right values. Faults that no
header can show are left out: bytes of one 16-bit float read as the other, a square matrix
transposed.
"""

import json
import shutil
from collections.abc import Callable, Container, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from quantload.errors import QuantloadError
from quantload.loader.formats import open_source
from quantload.loader.open import open_checkpoint
from quantload.loader.safetensors_header import NAMES

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)
# dtypes of equal size and other meaning
_RETYPED = {
    torch.float64: (torch.int64,),
    torch.float32: (torch.int32,),
    torch.float16: (torch.int16,),
    torch.bfloat16: (torch.int16,),
    torch.float8_e4m3fn: (torch.uint8, torch.int8, torch.float8_e5m2),
    torch.float8_e5m2: (torch.uint8, torch.int8, torch.float8_e4m3fn),
    torch.float8_e8m0fnu: (torch.int8, torch.float8_e4m3fn),
    torch.int64: (torch.float64,),
    torch.int32: (torch.float32,),
    torch.int16: (torch.float16, torch.bfloat16),
    torch.int8: (torch.uint8, torch.float8_e4m3fn),
    torch.uint8: (torch.int8, torch.float8_e4m3fn),
    torch.bool: (torch.uint8,),
}


def mutations(
    folder: Path,
    tmp_path: Path,
    *,
    only: Container[str] | None = None,
    hidden: bool = False,
    step: int = 1,
) -> Iterator[tuple[str, Path]]:
    """Yield ("KIND TENSOR ...", a copy of the folder with that fault), for each tensor in turn.

    Kinds: delete, rename, duplicate, retype (bytes seen as another dtype), cast (values in another
    dtype), truncate (fewer rows), narrow (fewer columns), transpose, reshape, nan, zero, cut (the
    file ends inside the tensor).

    Args:
        folder: A checkpoint with one `*.safetensors` file of weights; it stays as it is.
        tmp_path: Gets a folder per fault.
        only: Names of the tensors to damage; None is all.
        hidden: Also what no header shows: swap (bytes of one 16-bit float read as the other), turn
            (a square matrix transposed), and widen (the same values in a wider float dtype).
        step: Every so many faults one is put in.
    """
    file = _weights_of(folder)
    metadata, tensors = _read(file)
    chosen = [(n, t) for n, t in tensors.items() if only is None or n in only]
    faults = (fault for n, t in chosen for fault in _faults(n, t, hidden=hidden))
    for number, (description, change) in enumerate(faults):
        if number % step:
            continue
        copy = _copy_around(folder, file, tmp_path / f"fault-{number:05d}")
        if change is None:
            end = _middle_of(file, description.split()[1])
            (copy / file.name).write_bytes(file.read_bytes()[:end])
        else:
            changed = dict(tensors)
            change(changed)
            _write(copy / file.name, changed, metadata)
        yield description, copy


def silent_faults(
    folder: Path, tmp_path: Path, *, without: tuple[str, ...] = ()
) -> dict[str, list[str]]:
    """Return the faults that go unnoticed: {description: modules whose weight is wrong or gone}.

    Only weights that are quantized in the sound checkpoint are looked at.

    Args:
        folder: As in `mutations`.
        tmp_path: As in `mutations`.
        without: Kinds of faults to leave out.
    """
    sound = quantized_values(folder)
    assert sound, f"nothing is quantized in {folder}"
    silent = {}
    for description, copy in mutations(folder, tmp_path):
        if description.split()[0] not in without:
            try:
                found = quantized_values(copy, sound)
            except QuantloadError:
                found = sound
            wrong = [name for name, value in sound.items() if not _equal(value, found.get(name))]
            if wrong:
                silent[description] = wrong
        shutil.rmtree(copy)
    return silent


def quantized_values(folder: Path, names: object = None) -> dict[str, Tensor]:
    """Read the weights of a checkpoint that are quantized, or those of `names`, as floats."""
    source = open_source(open_checkpoint(folder))
    chosen = [m for m, w in source.weights.items() if w.is_quantized]
    if names is not None:
        chosen = [module for module in source.weights if module in names]
    return {module: source.read_dense(module) for module in chosen}


def _equal(one: Tensor, two: Tensor | None) -> bool:
    return two is not None and one.shape == two.shape and torch.equal(one.double(), two.double())


def _weights_of(folder: Path) -> Path:
    files = [f for f in folder.glob("*.safetensors") if not f.name.startswith("expected")]
    assert len(files) == 1, f"{len(files)} safetensors files in {folder}, expected one"
    return files[0]


def _read(file: Path) -> tuple[dict[str, str] | None, dict[str, Tensor]]:
    with safe_open(file, "pt") as opened:
        return opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def _write(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None) -> None:
    """Write a safetensors file; the library's own function copies every tensor first."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    parts, position = [], 0
    for name, tensor in tensors.items():
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        end = position + raw.nbytes
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        parts.append(raw)
        position = end
    text = json.dumps(header).encode()
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.writelines(parts)


def _copy_around(folder: Path, file: Path, copy: Path) -> Path:
    copy.mkdir(parents=True)
    for other in folder.iterdir():
        if other.is_file() and other != file and not other.name.startswith("expected"):
            (copy / other.name).symlink_to(other.resolve())
    return copy


def _middle_of(file: Path, name: str) -> int:
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    start, stop = json.loads(raw[8 : 8 + length])[name]["data_offsets"]
    return 8 + length + (start + stop) // 2


Change = Callable[[dict[str, Tensor]], object]


def _faults(name: str, tensor: Tensor, *, hidden: bool) -> Iterator[tuple[str, Change | None]]:
    yield from _changes(name, tensor)
    if hidden:
        yield from _hidden(name, tensor)
    yield f"cut {name}", None


def _changes(name: str, tensor: Tensor) -> Iterator[tuple[str, Change]]:
    module, _, leaf = name.rpartition(".")
    yield f"delete {name}", lambda tensors: tensors.pop(name)
    for new in (f"{name}_old", f"old.{name}"):
        yield f"rename {name} to {new}", lambda t, new=new: t.update({new: t.pop(name)})
    for new in (f"{name}_copy", f"{module}.copy.{leaf}", f"copy.{name}"):
        yield f"duplicate {name} as {new}", lambda t, new=new: t.update({new: t[name]})
    for what, changed in _values(tensor):
        yield f"{what.split()[0]} {name} {what}", lambda t, c=changed: t.update({name: c})


def _hidden(name: str, tensor: Tensor) -> Iterator[tuple[str, Change]]:
    sixteen = (torch.float16, torch.bfloat16)
    if tensor.dtype in sixteen and tensor.ndim:
        other = sixteen[tensor.dtype == torch.float16]
        swapped = tensor.contiguous().view(other)
        yield f"swap {name} read as {other}", lambda t: t.update({name: swapped})
    if tensor.ndim > 1 and tensor.shape[-1] == tensor.shape[-2]:
        yield f"turn {name}", lambda t: t.update({name: tensor.transpose(-1, -2)})
    if tensor.dtype in (*sixteen, torch.float32):
        wider = torch.float64 if tensor.dtype == torch.float32 else torch.float32
        yield f"widen {name} to {wider}", lambda t: t.update({name: tensor.to(wider)})


def _values(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield ("KIND details", another tensor)."""
    if tensor.ndim and tensor.numel():
        for dtype in _RETYPED.get(tensor.dtype, ()):
            yield f"retype to {dtype}", tensor.contiguous().view(dtype)
    yield from (((f"cast to {d}"), _as(tensor, d)) for d in _cast_targets(tensor.dtype))
    if tensor.ndim and tensor.shape[0] > 1:
        yield "truncate by one row", tensor[:-1]
        yield "truncate to half", tensor[: tensor.shape[0] // 2]
    if tensor.ndim > 1 and tensor.shape[-1] > 1:
        yield "narrow by one column", tensor[..., :-1]
        yield "narrow to half", tensor[..., : tensor.shape[-1] // 2]
    if tensor.ndim > 1 and tensor.shape[-1] != tensor.shape[-2]:
        yield "transpose", tensor.transpose(-1, -2)
    if tensor.ndim:
        yield "reshape to more dimensions", tensor.unsqueeze(0)
    if tensor.ndim > 1:
        yield "reshape to one dimension", tensor.flatten()
    if tensor.dtype.is_floating_point and tensor.numel():
        yield "nan in the first element", _with_first(tensor, float("nan"))
        if tensor.dtype not in FLOAT8:
            yield "nan or rather infinity in the first element", _with_first(tensor, float("inf"))
            yield "zero everywhere", torch.zeros_like(tensor)


def _cast_targets(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    if dtype in FLOAT8:
        return (torch.bfloat16, torch.float32)
    if dtype.is_floating_point:
        return (torch.int32,)
    return (torch.float32, *(() if dtype in (torch.int64, torch.bool) else (torch.int64,)))


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.float().to(dtype) if tensor.dtype in FLOAT8 else tensor.to(dtype)


def _with_first(tensor: Tensor, value: float) -> Tensor:
    changed = tensor.contiguous().clone()
    first = torch.tensor([value], dtype=torch.float32).to(changed.dtype)
    changed.reshape(-1)[:1] = first
    return changed
