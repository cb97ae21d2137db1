"""Full precision: `<module>.weight` is float [N, K]; anything else is passed on as it is."""

from __future__ import annotations

import re
from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from functools import lru_cache

import torch
from torch import Tensor

from quantload.loader.checkpoint import TensorEntry
from quantload.loader.safetensors_header import NAMES
from quantload.loader.source import FLOAT_DTYPES, Reader, SourceWeight
from quantload.quant.qtensor import QuantTensor

# Leaves that only quantized modules have, whatever their dtype.
_QUANTIZED_LEAF = re.compile(
    r"\.(\w+_packed|weight_scale(_inv)?|weight_zero_point|weight_global_scale|weight_g_idx|qweight|"
    r"qzeros|scales|g_idx|SCB|W_q|_\w+_qdata|(nested_)?absmax|(nested_)?quant_map|quant_state\.\w+|weight_format|"
    r"weight\.(_data(\._data)?|_scale|_shift)|\w+_blocks|\w+_scales)$"
)
# Last components of those of them that have several.
_OF_SEVERAL = ("_data", "_scale", "_shift")
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)


class OnlyWeight(Mapping[str, str]):
    """The leaves of a weight in full precision, {"weight": name}; a dict takes four times as much.

    Args:
        name: Tensor name.
    """

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __getitem__(self, leaf: str) -> str:
        if leaf != "weight":
            raise KeyError(leaf)
        return self._name

    def __iter__(self) -> Iterator[str]:
        return iter(("weight",))

    def __len__(self) -> int:
        return 1

    def values(self) -> ValuesView[str]:
        """Return the name; what Mapping makes of it takes several times as long."""
        return {"weight": self._name}.values()

    def items(self) -> ItemsView[str, str]:
        """Return the leaf and the name."""
        return {"weight": self._name}.items()

    def __repr__(self) -> str:
        return repr(dict(self))


def dense_weight(entry: TensorEntry) -> SourceWeight | None:
    """Describe a tensor if it is the float weight [N, K] of a module."""
    module, _, leaf = entry.name.rpartition(".")
    if leaf != "weight" or not module or len(entry.shape) != 2 or entry.dtype not in FLOAT_DTYPES:
        return None
    return SourceWeight(
        module=module,
        shape=entry.shape,
        scheme=None,
        encoding=NAMES[entry.dtype],
        dtype=entry.dtype,
        leaves=OnlyWeight(entry.name),
        parameter=entry.name,  # the same as without it, but not made anew each time
    )


def quantized_names(entries: Iterable[TensorEntry]) -> list[str]:
    """Return tensors that cannot be full precision: by name, FP8, or a weight that is no float."""
    return [
        entry.name
        for entry in entries
        if _is_of_quantized(entry.name)
        or entry.dtype in _FLOAT8
        or (
            entry.name.endswith(".weight")
            and len(entry.shape) >= 2
            and entry.dtype not in FLOAT_DTYPES
        )
    ]


def _is_of_quantized(name: str) -> bool:
    parent, dot, last = name.rpartition(".")
    if last in _OF_SEVERAL or parent.endswith("quant_state"):
        return _QUANTIZED_LEAF.search(name) is not None
    return bool(dot) and _is_quantized_leaf(last)


@lru_cache(maxsize=4096)  # a checkpoint has few leaves and up to hundreds of thousands of tensors
def _is_quantized_leaf(leaf: str) -> bool:
    return _QUANTIZED_LEAF.search(f".{leaf}") is not None


class DenseReader(Reader):
    """Reader of full-precision checkpoints."""

    decodes_leaves = True

    def weights(self) -> Mapping[str, SourceWeight]:
        """Describe every float `<module>.weight` of two dimensions, by module."""
        found = (dense_weight(entry) for entry in self.checkpoint.tensors.values())
        return {weight.module: weight for weight in found if weight is not None}

    def decode(self, weight: SourceWeight) -> QuantTensor | Tensor:
        """Read the float weight [N, K]."""
        return self.checkpoint.read(weight.leaves["weight"])
