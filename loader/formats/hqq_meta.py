"""HQQ: what the config says, and the numbers and names that lie beside each weight."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantload.errors import FormatMismatch, MissingTensor, UnsupportedVariant
from quantload.loader.checkpoint import Checkpoint
from quantload.loader.formats.agreement import ConfigSays
from quantload.loader.formats.matching import names_of
from quantload.loader.formats.module_leaves import ModuleLeaves
from quantload.quant.grid import Grid, uint_grid

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_MAX_SCALAR_BYTES = 256


@dataclass(frozen=True)
class Packing:
    """How codes are packed: rows r, r + R, r + 2 R, ... share the words of row r.

    Args:
        bits: Bits of one field.
        fields: Fields of a word; the first has the highest bits that are used.
        storage: dtype of a word.
    """

    bits: int
    fields: int
    storage: torch.dtype


_PACKINGS = {
    "8bit_u8": Packing(8, 1, torch.uint8),
    "4bit_u8": Packing(4, 2, torch.uint8),
    "3bit_32": Packing(3, 10, torch.int32),
    "2bit_u8": Packing(2, 4, torch.uint8),
    "1bit_u8": Packing(1, 8, torch.uint8),
}
_PACKING_OF: dict[float, str] = {
    **{8: "8bit_u8", 6: "8bit_u8", 5: "8bit_u8", 4: "4bit_u8", 3: "3bit_32"},
    **{2: "2bit_u8", 1.58: "2bit_u8", 1: "1bit_u8"},
}
SCALARS = (
    *("nbits", "group_size", "axis", "shape", "packing", "view_as_float", "channel_wise"),
    *("compute_dtype", "quant_scale", "quant_zero"),
)


@dataclass(frozen=True)
class HqqMeta:
    """How one tensor is quantized: a weight, or the scales or zero points of one.

    Args:
        nbits: Bits of a code; 1.58 for three values.
        group_size: Elements that share a scale; None for one row (or column, or all).
        axis: 1 if a scale covers consecutive elements, 0 if it covers elements at equal distances.
        shape: Shape that the values have.
        packing: How codes are packed.
        view_as_float: True if the packed words are stored as another dtype.
        channel_wise: False if one scale covers the tensor.
        compute_dtype: dtype of evaluation; None is that of the scales.
        quant_scale: True if scales are quantized again.
        quant_zero: True if zero points are quantized again.
    """

    nbits: float
    group_size: int | None
    axis: int
    shape: tuple[int, ...]
    packing: Packing
    view_as_float: bool
    channel_wise: bool
    compute_dtype: torch.dtype | None
    quant_scale: bool
    quant_zero: bool

    @property
    def grid(self) -> Grid:
        """Grid of the codes."""
        return uint_grid(math.ceil(self.nbits))

    @property
    def code_shape(self) -> tuple[int, int]:
        """Shape of the codes as they are packed, without padding."""
        size = self.group_size
        if size is None or not self.channel_wise:
            return self.shape[0], math.prod(self.shape[1:])
        groups = math.prod(self.shape) // size
        return (groups, size) if self.axis == 1 else (size, groups)

    @property
    def packed_shape(self) -> tuple[int, int]:
        """Shape of the packed words."""
        rows, columns = self.code_shape
        return -(-rows // self.packing.fields), columns

    @property
    def scale_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes that scales and zero points may have."""
        if not self.channel_wise:
            return (), (1,), (1, 1)
        rows, columns = self.code_shape
        return ((rows, 1) if self.axis == 1 else (1, columns),)


# -- beside the weights ------------------------------------------------------------------------


def scalars_of(checkpoint: Checkpoint, leaves: ModuleLeaves) -> dict[str, Any]:
    """Read the numbers and names that are stored as small tensors, by leaf.

    Raises:
        FormatMismatch: One of them is no such tensor.
    """
    found: dict[str, Any] = {}
    for leaf in SCALARS:
        if leaf not in leaves:
            continue
        entry = leaves[leaf]
        if entry.num_bytes > _MAX_SCALAR_BYTES or len(entry.shape) > 1:
            raise FormatMismatch(
                f"tensor `{entry.name}` is `{entry.dtype}` of shape `{entry.shape}`, expected a "
                f"number or a short text, in `{checkpoint.name}`"
            )
        found[leaf] = _decoded(leaf, checkpoint.read(entry.name))
    return found


def _decoded(leaf: str, stored: Tensor) -> object:
    if leaf in ("packing", "compute_dtype"):
        return bytes(stored.numpy()).decode("latin-1") if stored.dtype == torch.uint8 else None
    if leaf == "shape":
        return stored.tolist() if not stored.is_floating_point() else None
    if stored.numel() != 1 or (stored.is_floating_point() and leaf != "nbits"):
        return None
    number = stored.item()
    return round(number, 2) if isinstance(number, float) and math.isfinite(number) else number


def parse_meta(
    content: Mapping[str, Any], where: str, *, channel_wise: bool | None = None
) -> HqqMeta:
    """Make sense of what lies beside a weight.

    Args:
        content: Values by name, of small tensors or of JSON.
        where: "module `...` in `...`", for messages.
        channel_wise: What the scales' own shape says, where `content` does not.

    Raises:
        MissingTensor: Something is not there.
        FormatMismatch: A value makes no sense.
        UnsupportedVariant: Codes that are packed in another way.
    """
    for key in ("nbits", "axis", "shape", "packing"):
        if key not in content:
            raise MissingTensor(f"`{key}` is missing beside the HQQ weight of {where}")
    nbits, shape = content["nbits"], content["shape"]
    packing = content["packing"]
    if not _is_number(nbits) or nbits not in _PACKING_OF:
        raise _wrong("nbits", nbits, "8, 6, 5, 4, 3, 2, 1.58 or 1", where)
    if not isinstance(packing, str) or packing != _PACKING_OF[nbits]:
        raise UnsupportedVariant(
            f"`packing` is `{packing}`, expected `{_PACKING_OF[nbits]}` for {nbits} bits, "
            f"beside the HQQ weight of {where}"
        )
    if not isinstance(shape, list) or len(shape) != 2 or not all(_is_count(s) for s in shape):
        raise _wrong("shape", shape, "two positive numbers", where)
    axis = content["axis"]
    if not _is_number(axis) or axis not in (0, 1):
        raise _wrong("axis", axis, "0 or 1", where)
    meta = HqqMeta(
        nbits=nbits,
        group_size=_group_size(content.get("group_size"), shape, where),
        axis=int(axis),
        shape=tuple(shape),
        packing=_PACKINGS[packing],
        view_as_float=_flag(content, "view_as_float", where),
        channel_wise=_flag(content, "channel_wise", where, default=channel_wise is not False),
        compute_dtype=_dtype(content.get("compute_dtype"), where),
        quant_scale=_flag(content, "quant_scale", where),
        quant_zero=_flag(content, "quant_zero", where),
    )
    fields = meta.packing.fields
    if meta.packing.storage == torch.uint8 and meta.code_shape[0] % fields:
        raise _wrong("shape", shape, f"one that packs into {fields} equal parts", where)
    return meta


def _group_size(value: object, shape: list[int], where: str) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or not _is_count(value) or math.prod(shape) % value:
        raise _wrong("group_size", value, f"a divisor of the elements of `{tuple(shape)}`", where)
    return value


def _flag(content: Mapping[str, Any], key: str, where: str, *, default: bool = False) -> bool:
    value = content.get(key, default)
    if not isinstance(value, int) or value not in (0, 1):
        raise _wrong(key, value, "true or false", where)
    return bool(value)


def _dtype(value: object, where: str) -> torch.dtype | None:
    if value is None:
        return None
    if isinstance(value, Mapping):  # as a pickled file's dtype is told
        value = value.get("_data")
    name = value.removeprefix("torch.") if isinstance(value, str) else ""
    if name not in _DTYPES:
        raise _wrong("compute_dtype", value, "float32, float16 or bfloat16", where)
    return _DTYPES[name]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 40


def _wrong(key: str, value: object, expected: str, where: str) -> FormatMismatch:
    return FormatMismatch(
        f"`{key}` is `{value!r}`, expected {expected}, beside the HQQ weight of {where}"
    )


def text_beside(checkpoint: Checkpoint, name: str) -> dict[str, Any] | None:
    """Return what a pickled file holds under a name beside tensors, None if there is nothing."""
    for texts in checkpoint.texts.values():
        if name in texts:
            content = json.loads(texts[name])
            return content if isinstance(content, dict) else None
    return None


# -- config ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HqqConfig:
    """What a quantization config says.

    Args:
        layers: Parameters by linear tag; under "" those of all layers.
        skipped: Linear tags of layers that stay in full precision.
        is_stated: False if there is no config.
    """

    layers: Mapping[str, Mapping[str, Any]]
    skipped: frozenset[str]
    is_stated: bool = True

    def entries(self) -> list[str]:
        """Return everything that names layers, as "<key>: <linear tag>"."""
        named = [f"quant_config: {tag}" for tag in self.layers if tag]
        return [*(f"skip_modules: {tag}" for tag in sorted(self.skipped)), *named]

    def says_of(self, module: str) -> tuple[ConfigSays, Mapping[str, Any]]:
        """Return the decision for a module, and its parameters."""
        tags = [linear_tag(name) for name in names_of(module)]
        for tag in tags:
            if tag in self.skipped:
                return ConfigSays(False, f"skip_modules: {tag}"), {}
        for tag in (*tags, ""):
            if tag in self.layers:
                return ConfigSays(True, f"quant_config: {tag or 'all'}"), self.layers[tag]
        return ConfigSays(False, "quant_config has no entry"), {}


def matches_tag(tag: str) -> Callable[[str], bool]:
    """Return the test whether a linear tag names a module."""
    return lambda module: any(linear_tag(name) == tag for name in names_of(module))


def linear_tag(module: str) -> str:
    """Return the name of a module without `model`, `layers` and numbers: `self_attn.q_proj`."""
    parts = module.split(".")
    return ".".join(p for p in parts if p not in ("model", "layers") and not p.isnumeric())


def parse_config(config: Mapping[str, Any] | None, checkpoint_name: str) -> HqqConfig:
    """Read a quantization config.

    Raises:
        FormatMismatch: It is not what transformers writes.
    """
    if config is None:
        return HqqConfig({"": {}}, frozenset(), is_stated=False)
    layers = config.get("quant_config")
    skipped = config.get("skip_modules")
    skipped = [] if skipped is None else skipped
    if not isinstance(layers, Mapping) or not layers:
        raise _bad_config("quant_config", layers, "an object with parameters", checkpoint_name)
    if not isinstance(skipped, list) or not all(isinstance(tag, str) for tag in skipped):
        raise _bad_config("skip_modules", skipped, "a list of names", checkpoint_name)
    by_tag = {"": layers} if "weight_quant_params" in layers else layers
    found = {tag: _layer_params(tag, params, checkpoint_name) for tag, params in by_tag.items()}
    return HqqConfig({t: p for t, p in found.items() if p is not None}, frozenset(skipped))


def _layer_params(tag: str, params: object, checkpoint_name: str) -> Mapping[str, Any] | None:
    if params is None:  # such layers stay in full precision
        return None
    inner = params.get("weight_quant_params") if isinstance(params, Mapping) else None
    if not isinstance(inner, Mapping):
        key = f"quant_config.{tag}.weight_quant_params" if tag else "weight_quant_params"
        raise _bad_config(key, inner, "an object with parameters", checkpoint_name)
    for key in ("nbits", "group_size", "axis"):
        value = inner.get(key)
        if value is not None and not _is_number(value):
            raise _bad_config(key, value, "a number", checkpoint_name)
    return inner


def _bad_config(key: str, value: object, expected: str, checkpoint_name: str) -> FormatMismatch:
    return FormatMismatch(
        f"`{key}` of the HQQ config is `{value!r}`, expected {expected}, in `{checkpoint_name}`"
    )


def check_params(params: Mapping[str, Any], meta: HqqMeta, where: str) -> None:
    """Compare the parameters of a config with what lies beside a weight.

    A config without groups (null) means one for each row or column; hqq writes its size beside.

    Raises:
        FormatMismatch: They differ.
    """
    stored = {"nbits": meta.nbits, "group_size": meta.group_size, "axis": meta.axis}
    whole = meta.shape[0] if meta.axis == 0 else math.prod(meta.shape[1:])
    for key, found in stored.items():
        if key == "group_size" and params.get(key) is None and found == whole:
            continue
        if key in params and params[key] != found:
            raise FormatMismatch(
                f"the HQQ config says `{key} = {params[key]}`, but `{found}` lies beside the "
                f"weight of {where}",
                hint="these files are not the ones that the config was written for",
            )
