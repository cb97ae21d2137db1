"""The tensors of torchao's subclasses as files hold them: parts by name, and a description.

In safetensors files the subclass `m.weight` is flattened to tensors `m._weight_qdata`,
`m._weight_scale`, ...; the header's metadata has under its name the JSON

    {"_type": "Int8Tensor", "_data": {attribute: value}, "_tensor_data_names": ["qdata", ...]}

and {"_type": "Tensor"} under that of an ordinary tensor. Objects, enumerations and dtypes among the
attributes are {"_type": ..., "_data": ...} again. The parts of one tensor may be in different
shards, and every shard has the descriptions of all. `loader/pickled.py` makes the same of pickled
subclasses; of a subclass within another, the part is called `outer.inner`.

Source: torchao 0.18.0 `prototype/safetensors/`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quantload.errors import FormatMismatch, MissingTensor, UnsupportedVariant, listed
from quantload.loader.checkpoint import Checkpoint, TensorEntry

_PART = re.compile(
    r"(?P<start>.*\.)?_(?P<leaf>\w+?)_(?P<part>qdata|scale|zero_point|scale_and_zero|act_pre_scale|"
    r"act_quant_scale|act_quant_zero_point|per_tensor_scale|group_scale|group_zero|row_scale|meta|"
    r"packed_weights)"
)
PLAIN = "Tensor"


@dataclass(frozen=True)
class Stored:
    """One tensor subclass.

    Args:
        name: Name of the parameter: "model.layers.0.mlp.up_proj.weight".
        kind: Name of its class: "Int8Tensor".
        data: Its attributes.
        parts: Headers of its parts by name: "qdata", "scale", ...
        checkpoint_name: For messages.
    """

    name: str
    kind: str
    data: Mapping[str, Any]
    parts: Mapping[str, TensorEntry]
    checkpoint_name: str

    def __contains__(self, part: str) -> bool:
        return part in self.parts

    def part(self, name: str, dtypes: tuple[torch.dtype, ...]) -> TensorEntry:
        """Return the header of a part.

        Raises:
            MissingTensor: There is none.
            FormatMismatch: It has another dtype.
        """
        entry = self.parts.get(name)
        if entry is None:
            raise MissingTensor(
                f"`{self.name}` has no part `{name}`, found {listed(self.parts)} of a "
                f"`{self.kind}`, in `{self.checkpoint_name}`"
            )
        if entry.dtype not in dtypes:
            raise self.wrong(entry, f"dtype `{entry.dtype}`", listed(map(str, dtypes)))
        return entry

    def attribute(self, name: str) -> Any:  # noqa: ANN401 - JSON
        """Return an attribute; of {"_type", "_data"} what is inside. None if it is missing."""
        value = self.data.get(name)
        if isinstance(value, Mapping) and "_type" in value:
            return value.get("_data")
        return value

    def dtype(self, name: str, *, default: torch.dtype | None = None) -> torch.dtype:
        """Return an attribute that is a dtype.

        Raises:
            FormatMismatch: It is something else.
        """
        value = self.attribute(name)
        if value is None and default is not None:
            return default
        found = getattr(torch, value, None) if isinstance(value, str) else None
        if not isinstance(found, torch.dtype):
            raise self.wrong_attribute(name, "a dtype")
        return found

    def sizes(self, name: str, count: int) -> tuple[int, ...]:
        """Return an attribute that is one size for each of `count` dimensions.

        Raises:
            FormatMismatch: It is something else.
        """
        value = self.attribute(name)
        if (
            not isinstance(value, list)
            or len(value) != count
            or any(isinstance(size, bool) or not isinstance(size, int) for size in value)
        ):
            raise self.wrong_attribute(name, f"{count} integers")
        return tuple(value)

    def wrong(self, entry: TensorEntry, found: str, expected: str) -> FormatMismatch:
        """Return the error for a part that does not fit the others."""
        return FormatMismatch(
            f"tensor `{entry.name}` has {found}, expected {expected}, in `{self.checkpoint_name}`",
            hint=f"`{self.name}` is a `{self.kind}`",
        )

    def wrong_attribute(self, name: str, expected: str) -> FormatMismatch:
        """Return the error for an attribute that makes no sense, or is missing."""
        value = self.data.get(name)
        found = "is missing" if value is None else f"is `{value!r}`"
        return FormatMismatch(
            f"attribute `{name}` of `{self.name}` {found}, expected {expected} for a "
            f"`{self.kind}`, in the metadata of `{self.checkpoint_name}`"
        )

    def refused(self, what: str) -> UnsupportedVariant:
        """Return the error for a variant that is not read."""
        return UnsupportedVariant(
            f"{what} is not read: `{self.name}`, in `{self.checkpoint_name}`",
            hint="dequantize it with torchao first, or start from the full-precision model",
        )


def read_stored(checkpoint: Checkpoint) -> dict[str, Stored]:
    """Return the tensor subclasses of a checkpoint by parameter name.

    Raises:
        FormatMismatch: Descriptions contradict each other, the tensors, or are no descriptions.
        MissingTensor: A part is missing.
    """
    described = _descriptions(checkpoint)
    parts = _parts_by_name(checkpoint)
    found = {}
    for name, description in described.items():
        if description["_type"] != PLAIN:
            found[name] = _stored(name, description, parts.get(name, []), checkpoint)
    taken = {entry.name for stored in found.values() for entry in stored.parts.values()}
    there = (_part_tensor(name, part) for name, some in parts.items() for part in some)
    lost = [name for name in there if name not in taken]
    if lost:
        raise FormatMismatch(
            f"parts of quantized tensors that no metadata describes: {listed(lost)}, in "
            f"`{checkpoint.name}`",
            hint="the file was written anew without the metadata of its header",
        )
    return found


def _parts_by_name(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Return parts by parameter name, of all tensors that are called like a part."""
    parts: dict[str, list[str]] = {}
    for name in checkpoint.tensors:
        match = _PART.fullmatch(name)
        if match is not None:
            parts.setdefault((match["start"] or "") + match["leaf"], []).append(match["part"])
    return parts


def _part_tensor(name: str, part: str) -> str:
    """Return the name of the tensor that holds a part."""
    module, dot, leaf = name.rpartition(".")
    return f"{module}{dot}_{leaf}_{part}"


def _descriptions(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    described: dict[str, dict[str, Any]] = {}
    seen: dict[str, str] = {}
    for texts in checkpoint.texts.values():
        for name, text in texts.items():
            if seen.get(name) == text:
                continue  # every shard has the descriptions of all
            seen[name] = text
            description = _description(text)
            if description is None:
                continue
            if described.setdefault(name, description) != description:
                raise FormatMismatch(
                    f"files describe `{name}` differently, in `{checkpoint.name}`",
                    hint="they are of different exports",
                )
    return described


def _description(text: str) -> dict[str, Any] | None:
    """Parse the JSON of one tensor; None if the text is something else ("format": "pt")."""
    if not text.startswith("{"):
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_one = isinstance(content, dict) and isinstance(content.get("_type"), str)
    return content if is_one else None


def _stored(
    name: str, description: Mapping[str, Any], there: list[str], checkpoint: Checkpoint
) -> Stored:
    kind, data = description["_type"], description.get("_data")
    names = description.get("_tensor_data_names", there)  # not written before torchao 0.14
    if (
        not isinstance(data, Mapping)
        or not isinstance(names, list)
        or not all(isinstance(part, str) for part in names)
    ):
        raise FormatMismatch(
            f"the metadata of `{name}` describes no tensor, expected `_data` and "
            f"`_tensor_data_names`, in `{checkpoint.name}`"
        )
    if name in checkpoint.tensors:
        raise FormatMismatch(
            f"`{name}` is both an ordinary tensor and the parts of a `{kind}`, in "
            f"`{checkpoint.name}`",
            hint="one of the two is left over from another export",
        )
    tensors = {part: _part_tensor(name, part) for part in (*names, *_inner_names(data))}
    missing = [tensor for tensor in tensors.values() if tensor not in checkpoint.tensors]
    if missing:
        raise MissingTensor(
            f"parts of `{name}` are missing: {listed(missing)}, in `{checkpoint.name}`",
            hint=f"its metadata says `{kind}` of {listed(tensors)}",
        )
    parts = {part: checkpoint.tensors[tensor] for part, tensor in tensors.items()}
    return Stored(name, kind, data, parts, checkpoint.name)


def _inner_names(data: Mapping[str, Any], start: str = "") -> list[str]:
    """Return the parts of tensor subclasses within this one."""
    found = []
    for key, value in data.items():
        if isinstance(value, Mapping) and isinstance(value.get("_tensor_data_names"), list):
            place = f"{start}{key}."
            found += [f"{place}{part}" for part in value["_tensor_data_names"]]
            inner = value.get("_data")
            found += _inner_names(inner, place) if isinstance(inner, Mapping) else []
    return found
