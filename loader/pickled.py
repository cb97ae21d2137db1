"""Read `.bin`, `.pt` and `.pth` files without running any code that they ask for.

A pickle is a program. `torch.load(weights_only=True)` runs only the part of it that builds tensors,
numbers, strings, lists and dictionaries; whatever else it names is refused here, and the allow-list
of this process (`torch.serialization.add_safe_globals`) does not count. Tensors are mapped into
memory and not read, where the file is a zip archive; files from before torch 1.6 are read whole.

Tensor subclasses of torchao are known by name only: a stand-in takes what was stored of such a
tensor, and its parts are listed as torchao lists them in safetensors files: tensor
`m.weight` becomes `m._weight_qdata`, `m._weight_scale`, ..., and its other attributes become a text
`{"_type": "Int8Tensor", "_data": {...}, "_tensor_data_names": ["qdata", "scale"]}`.

A dictionary of dictionaries of tensors (HQQ's `qmodel.pt`) becomes tensors `outer.inner`; what
else the inner ones hold becomes a text, JSON, under the name of the outer entry.

Source: torch 2.13.0, `serialization.py` and `_weights_only_unpickler.py`; torchao 0.18.0,
`prototype/safetensors/safetensors_support.py` for the names.
"""

from __future__ import annotations

import json
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, ClassVar

import torch
from torch import Tensor

from quantload.errors import CheckpointError, UnknownFormat, UnsupportedVariant, listed
from quantload.loader.checkpoint import TensorEntry
from quantload.loader.safetensors_header import NAMES

_STAND_INS = "torchao."  # classes below this package are data to us
_HOLDERS = ("state_dict", "model_state_dict", "model")
# What the restricted unpickler says when it meets a function or class that it does not know.
_CODE = re.compile(r"GLOBAL|for unrecognized function|Can only (create|build)")
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
_ADVICE = (
    "Weights only load failed",
    "Please file an issue",
    "Check the documentation",
    "(1)",
    "(2)",
)
_HINT = (
    "save the model as safetensors with transformers' `save_pretrained`, or with safetensors' own "
    "`save_file`, where you trust the file"
)


@dataclass
class PickledFile:
    """What a pickled file holds.

    Args:
        tensors: Its tensors by name, mapped into memory.
        texts: JSON by name, for tensors that are more than one array.
        ignored: Names of entries that are no tensors.
    """

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)


def read_pickle(file: Path) -> PickledFile:
    """Return the tensors of a pickled file; code in it is never run.

    Raises:
        UnknownFormat: The file asks for code, or is a TorchScript archive.
        CheckpointError: The file is damaged, truncated, or holds no state dict.
        UnsupportedVariant: A tensor is sparse, complex, or of another kind without plain elements.
    """
    content = _state_dict(_load(file), file)
    found = PickledFile()
    for name, value in content.items():
        if isinstance(value, Mapping) and _has_tensors(value):
            _take_mapping(found, str(name), value, file)
        else:
            _take(found, name, value, file)
    if not found.tensors:
        raise CheckpointError(f"no tensors in the pickled file `{file}`", hint=_HINT)
    _check_records(found, file)
    return found


# -- loading ---------------------------------------------------------------------------------------


def _load(file: Path) -> object:
    try:
        is_zip = zipfile.is_zipfile(file)
        with _no_other_allowed():
            asked = _globals_of(file) if is_zip else []
            refused = [name for name in asked if not name.startswith(_STAND_INS)]
            if refused:
                raise _asks_for_code(file, listed(refused))
            allowed: list[Any] = [(_stand_in(name), name) for name in asked]
            with torch.serialization.safe_globals(allowed), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about pickle protocols
                content = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
    except (CheckpointError, UnknownFormat):
        raise
    except Exception as error:  # torch raises whatever its C++ and a lying file lead to
        if isinstance(error, UnpicklingError) and _CODE.search(str(error)):
            raise _asks_for_code(file, _reason(error)) from error
        raise CheckpointError(
            f"pickled file cannot be read: {type(error).__name__}: {_reason(error)}, in `{file}`",
            hint="the file is damaged or truncated; download it again",
        ) from error
    return content


def _globals_of(file: Path) -> list[str]:
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
    if any(record.filename.endswith("/constants.pkl") for record in records):
        raise UnknownFormat(f"`{file}` is a TorchScript archive, expected weights", hint=_HINT)
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise CheckpointError(f"pickled file is compressed, expected plain records, in `{file}`")
    return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))


def _check_records(found: PickledFile, file: Path) -> None:
    """Compare the mapped pieces of the file with its records: a pickle may ask for more than one.

    Raises:
        CheckpointError: A tensor reaches beyond its record.
    """
    if not zipfile.is_zipfile(file):
        return
    with zipfile.ZipFile(file) as archive:
        data = (r for r in archive.infolist() if "/data/" in r.filename and r.file_size)
        records = [r.file_size for r in sorted(data, key=lambda record: record.header_offset)]
    tensors = (e.loaded for e in found.tensors.values() if e.loaded is not None)
    storages = {(s.data_ptr(), s.nbytes()) for s in (t.untyped_storage() for t in tensors)}
    sizes = [size for _, size in sorted(storages) if size]
    # Storages lie as their records do; where some are not used, only the sizes can be compared.
    fits = sizes == records if len(sizes) == len(records) else set(sizes) <= set(records)
    if not fits:
        raise CheckpointError(
            f"tensors are not as long as the records that hold them, in `{file}`",
            hint="the file is damaged; download it again",
        )


def _asks_for_code(file: Path, what: str) -> UnknownFormat:
    return UnknownFormat(
        f"the weights are in a pickled file that asks for code, which is never run: {what}, in "
        f"`{file}`",
        hint=_HINT,
    )


def _reason(error: BaseException) -> str:
    """Return what torch found, without its advice to load the file unsafely."""
    found = _GLOBAL.search(str(error))
    if found is not None:
        return f"`{found[1]}`"
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.startswith(_ADVICE)]
    return said[0].rstrip(".") if said else "no message"


@contextmanager
def _no_other_allowed() -> Iterator[None]:
    """Set aside what the process allows in pickles; put it back afterwards."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


# -- stand-ins -------------------------------------------------------------------------------------


class StoredTensor(torch.Tensor):
    """Stands for a tensor subclass that is known by name only; it just holds what was stored."""

    stored_class: ClassVar[str] = ""
    stored: Mapping[str, Any]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, *_: object, **__: object) -> object:
        raise UnpicklingError(f"a stored {cls.stored_class} is not computed with")

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, Mapping):
            raise UnpicklingError(f"the state of a {self.stored_class} is a {type(state).__name__}")
        self.stored = state


class StoredObject:
    """Stands for any other object: holds the arguments that it was made of, and its attributes."""

    stored_class: ClassVar[str] = ""
    arguments: tuple[object, ...]

    def __new__(cls, *arguments: object) -> StoredObject:
        """Keep the arguments; nothing is called with them."""
        made = object.__new__(cls)
        made.arguments = arguments
        return made


def _stand_in(name: str) -> type:
    short = name.rpartition(".")[2]
    kind = StoredTensor if short.endswith(("Tensor", "TensorImpl")) else StoredObject
    return type(short, (kind,), {"stored_class": short})


# -- what is in the file ---------------------------------------------------------------------------


def _state_dict(content: object, file: Path) -> Mapping[object, object]:
    if isinstance(content, Mapping) and not _has_tensors(content):
        inner = [content[key] for key in _HOLDERS if key in content]
        if len(inner) == 1 and isinstance(inner[0], Mapping):
            content = inner[0]
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"pickled file holds a `{type(content).__name__}`, expected tensors by name, in "
            f"`{file}`",
            hint=_HINT,
        )
    return content


def _has_tensors(content: Mapping[object, object]) -> bool:
    return any(isinstance(value, Tensor) for value in content.values())


def _take(found: PickledFile, name: object, value: object, file: Path) -> None:
    if not isinstance(value, Tensor):
        found.ignored.append(str(name))
    elif not isinstance(name, str):
        raise CheckpointError(f"a tensor has the name `{name!r}`, expected a text, in `{file}`")
    elif isinstance(value, StoredTensor):
        module, _, leaf = name.rpartition(".")
        start = f"{module}." if module else ""
        parts, found.texts[name] = _parts(value, name, file)
        for part, tensor in parts.items():
            _add(found, f"{start}_{leaf}_{part}", tensor, file)
    else:
        _add(found, name, value, file)


def _take_mapping(
    found: PickledFile, name: str, content: Mapping[object, object], file: Path
) -> None:
    others = {}
    for key, value in content.items():
        if isinstance(value, Tensor):
            _take(found, f"{name}.{key}", value, file)
        elif isinstance(value, Mapping) and _has_tensors(value):
            _take_mapping(found, f"{name}.{key}", value, file)
        else:
            others[str(key)] = _plain(value)
    if others:
        found.texts[name] = json.dumps(others)


def _add(found: PickledFile, name: str, tensor: Tensor, file: Path) -> None:
    if name in found.tensors:
        raise CheckpointError(f"two tensors have the name `{name}`, in `{file}`")
    found.tensors[name] = _entry(name, tensor, file)


def _entry(name: str, tensor: Tensor, file: Path) -> TensorEntry:
    if (
        tensor.layout != torch.strided
        or tensor.is_quantized
        or tensor.device.type != "cpu"
        or tensor.dtype not in NAMES
    ):
        raise UnsupportedVariant(
            f"tensor `{name}` is `{tensor.dtype}`, `{tensor.layout}`, on `{tensor.device}`, "
            f"expected plain elements, in `{file}`"
        )
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes > max(tensor.untyped_storage().nbytes(), file.stat().st_size):
        raise CheckpointError(
            f"tensor `{name}` of shape `{tuple(tensor.shape)}` repeats few elements to more bytes "
            f"than its file has, in `{file}`"
        )
    return TensorEntry(
        name=name,
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        file=file,
        start=0,
        num_bytes=num_bytes,
        loaded=tensor.detach(),
    )


def _parts(tensor: StoredTensor, name: str, file: Path) -> tuple[dict[str, Tensor], str]:
    """Return the arrays of a stored tensor by name, and the rest as JSON."""
    stored = getattr(tensor, "stored", None)
    if stored is None:
        raise CheckpointError(f"tensor `{name}` has no state, in `{file}`")
    parts: dict[str, Tensor] = {}
    text = _described(tensor, parts, start="")
    return parts, json.dumps(text)


def _described(tensor: StoredTensor, parts: dict[str, Tensor], *, start: str) -> dict[str, Any]:
    data: dict[str, Any] = {"dtype": _plain(tensor.dtype), "shape": list(tensor.shape)}
    names = []
    for key, value in getattr(tensor, "stored", {}).items():
        if isinstance(value, StoredTensor):
            data[str(key)] = _described(value, parts, start=f"{start}{key}.")
        elif isinstance(value, Tensor):
            parts[f"{start}{key}"] = value
            names.append(str(key))
        else:
            data[str(key)] = _plain(value)
    return {"_type": tensor.stored_class, "_data": data, "_tensor_data_names": names}


def _plain(value: object) -> Any:  # noqa: ANN401 - JSON
    """Turn a stored value into JSON; objects become {"_type": ..., "_data": ...}."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple | torch.Size):
        return [_plain(part) for part in value]
    if isinstance(value, torch.dtype):
        return {"_type": "torch.dtype", "_data": str(value).removeprefix("torch.")}
    if isinstance(value, StoredObject):
        attributes = {key: _plain(part) for key, part in vars(value).items() if key != "arguments"}
        arguments = [_plain(part) for part in value.arguments]
        content = arguments[0] if len(arguments) == 1 and not attributes else attributes
        return {"_type": value.stored_class, "_data": content}
    name = value.stored_class if isinstance(value, type) else ""  # type: ignore[attr-defined]
    return {"_type": name or type(value).__name__, "_data": None}
