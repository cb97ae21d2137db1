"""A checkpoint as its format reads it: weights of modules, and all other tensors.

Behind this object nobody asks for the format: a weight is a `QuantTensor` or a float tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantload.loader.checkpoint import Checkpoint, TensorEntry
from quantload.quant.grid import E4M3
from quantload.quant.qtensor import QuantTensor
from quantload.quant.scheme import Scheme

# Leaves of a module that hold the fixed scale and zero point of its input: multipliers, but for the
# global scale of NVFP4 in compressed-tensors, a divisor.
_INPUT_LEAVES = {
    "input_scale": "input_scale",
    "activation_scale": "input_scale",
    "input_global_scale": "input_scale",
    "input_zero_point": "input_zero",
}
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class SourceWeight:
    """The weight of one module, described from headers alone.

    Args:
        module: Dotted checkpoint name of the module.
        shape: (N, K): output and input features; of one expert, if there are `experts`.
        scheme: How it is quantized; None if it is in full precision.
        encoding: What the headers say, for people: "BF16", "Q4_1", "pack-quantized int4 g128".
        dtype: dtype that it dequantizes to.
        leaves: Tensor names it consumes, by leaf ("weight", "weight_packed", "weight_scale", ...).
        decided_by: The entry of the quantization config that decided, if any.
        parameter: Name of the parameter in full precision; "" is `<module>.weight`.
        experts: E, if the parameter holds the weights of E experts; 0 for an ordinary weight.
        is_transposed: True if the parameter has input features first: [K, N], [E, K, N].
        obstacle: What keeps its values from being (code - zero) * scale, computed in that order; ""
            if headers show nothing.
        sharers: How many weights its tensors hold.
    """

    module: str
    shape: tuple[int, int]
    scheme: Scheme | None
    encoding: str
    dtype: torch.dtype
    leaves: Mapping[str, str]
    decided_by: str = ""
    parameter: str = ""
    experts: int = 0
    is_transposed: bool = False
    obstacle: str = ""
    sharers: int = 1

    @property
    def parameter_name(self) -> str:
        """Name of the parameter in full precision."""
        return self.parameter or f"{self.module}.weight"

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        """Shape of the parameter in full precision."""
        matrix = self.shape[::-1] if self.is_transposed else self.shape
        return (self.experts, *matrix) if self.experts else matrix

    @property
    def is_matrix(self) -> bool:
        """True if the parameter is the weight [N, K] of one layer, output features first."""
        return not self.experts and not self.is_transposed

    @property
    def is_quantized(self) -> bool:
        """True if the weight is stored as codes."""
        return self.scheme is not None


class Block(NamedTuple):
    """The rows and columns of a weight [N, K] that an element of a stored tensor stands for.

    Args:
        rows: How many; 0 if every part of the weight needs the whole tensor along this axis.
        columns: The same for columns.
        has_inputs_first: True if the first axis of the tensor is that of the columns.
    """

    rows: int
    columns: int
    has_inputs_first: bool = False


class Reader(ABC):
    """What a format makes of one checkpoint; see `loader/formats`.

    Args:
        checkpoint: The checkpoint as the format reads it: tensors that it only stores under another
            name have their usual one.

    Attributes:
        widens_floats: True if the container stores float tensors wider than the model had them, so
            that they go back to the dtype of the config when they are copied.
        cache_scheme: How keys and values are cached, as compressed-tensors writes it down.
        warnings: What the user should know about this checkpoint.
        entries: Entries of the quantization config, and on how many modules each decides.
        has_experts_apart: True if each expert of a weight of E experts is decoded from slices e of
            those of its tensors that have E as their first size.
        decodes_leaves: True if `decode` needs nothing but the leaves of the weight, from
            `checkpoint.read`, and works on whatever device these are.
    """

    widens_floats = False
    has_experts_apart = False
    decodes_leaves = False

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.cache_scheme: Mapping[str, Any] | None = None
        self.warnings: list[str] = []
        self.entries: dict[str, int] = {}

    @abstractmethod
    def weights(self) -> Mapping[str, SourceWeight]:
        """Describe every weight that the format may quantize, by module."""

    @abstractmethod
    def decode(self, weight: SourceWeight) -> QuantTensor | Tensor:
        """Read a weight: canonical if it is quantized, else a float tensor.

        Returns:
            [N, K]; with experts [E * N, K], the rows of expert e from e * N.
        """

    def blocks_of(self, weight: SourceWeight) -> Mapping[str, Block] | None:
        """Return the part of a weight [N, K] that an element of each leaf stands for.

        Parts of the leaves that stand for the same rows and columns can be decoded as a weight.
        None: only the whole can be decoded. Of a weight of E experts that is said of each expert,
        whose leaves are told without their first axis, and the axes behind the next as one.
        """
        del weight
        return None


@dataclass(frozen=True)
class Source:
    """An open checkpoint with its format.

    Args:
        checkpoint: Files and headers.
        format_name: Name of the format, for people.
        reader: Decodes weights.
        weights: Every weight that the format may quantize, by module.
        plain: All tensors that belong to none of them (norms, biases, ...), by tensor name.
        dropped: Bytes of the files that it leaves out on purpose, by reason.
        layers: The layers that it was reduced to, as the user wrote them; "" for all.
    """

    checkpoint: Checkpoint
    format_name: str
    reader: Reader
    weights: Mapping[str, SourceWeight]
    plain: Mapping[str, TensorEntry]
    dropped: Mapping[str, int] = field(default_factory=dict)
    layers: str = ""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know: of the files, and of what the format makes of them."""
        return (*self.checkpoint.warnings, *self.reader.warnings)

    @property
    def is_quantized(self) -> bool:
        """True if any weight is stored as codes."""
        return any(weight.is_quantized for weight in self.weights.values())

    @property
    def stored_dtype(self) -> torch.dtype | None:
        """The dtype of most floats in full precision, for configs that name none."""
        entries = [e for e in self.checkpoint.tensors.values() if e.dtype in FLOAT_DTYPES]
        counts: Counter[torch.dtype] = Counter()
        for entry in entries:
            counts[entry.dtype] += entry.num_elements
        return max(counts, key=lambda dtype: counts[dtype]) if counts else None

    def read_weight(self, module: str) -> QuantTensor | Tensor:
        """Read the weight of a module: [N, K] or [E * N, K], canonical or float.

        Fixed input scales of the module come with a canonical weight.
        """
        weight = self.weights[module]
        value = self.reader.decode(weight)
        if not isinstance(value, QuantTensor):
            return value
        parts: dict[str, Any] = {
            part: self.checkpoint.read(weight.leaves[leaf]).reshape(-1)
            for leaf, part in _INPUT_LEAVES.items()
            if leaf in weight.leaves
        }
        if "input_global_scale" in weight.leaves:
            parts["evaluation"] = replace(value.evaluation, input="/")
        return replace(value, **parts)

    def read_input_absmax(self, module: str) -> float | None:
        """Return the largest |x| that the fixed scale of a module's input covers; None without."""
        weight = self.weights[module]
        input = weight.scheme.input if weight.scheme is not None else None
        leaf = next((name for name in _INPUT_LEAVES if name in weight.leaves), "input_zero_point")
        if input is None or not input.needs_scale or leaf == "input_zero_point":
            return None
        stored = self.checkpoint.read(weight.leaves[leaf]).to(torch.float64)
        scale = float(1 / stored.min() if leaf == "input_global_scale" else stored.max())
        reach = input.grid.high * (E4M3.high if input.scale == "e4m3" else 1)
        return scale * reach

    def read_dense(self, module: str, dtype: torch.dtype | None = None) -> Tensor:
        """Read the weight of a module as a float tensor [N, K], in its own dtype or in `dtype`."""
        weight = self.read_weight(module)
        if isinstance(weight, QuantTensor):
            return weight.dequantize(dtype)
        return weight if dtype is None else weight.to(dtype)

    def read_parameter(self, module: str, dtype: torch.dtype | None = None) -> Tensor:
        """Read a weight as the parameter of a model in full precision, see `parameter_shape`."""
        return as_parameter(self.read_dense(module, dtype), self.weights[module])

    def read_plain(self, tensor_name: str) -> Tensor:
        """Read a tensor that belongs to no 2-D weight, as stored."""
        return self.checkpoint.read(tensor_name)


@cache
def is_of_input(leaf: str) -> bool:
    """True if a leaf of a module is about the fixed scale of its input."""
    return leaf.endswith(tuple(_INPUT_LEAVES))


def as_parameter(matrix: Tensor, weight: SourceWeight) -> Tensor:
    """Turn a decoded weight [N, K] or [E * N, K] into the shape of its parameter."""
    if weight.experts:
        matrix = matrix.reshape(weight.experts, *weight.shape)
    return matrix.transpose(-1, -2).contiguous() if weight.is_transposed else matrix
