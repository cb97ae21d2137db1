"""A checkpoint as its format reads it: weights of modules, and all other tensors.

Behind this object nobody asks for the format: a weight is a `QuantTensor` or a float tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quantload.loader.checkpoint import Checkpoint, TensorEntry
from quantload.quant.qtensor import QuantTensor
from quantload.quant.scheme import Scheme

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class SourceWeight:
    """The weight of one module, described from headers alone.

    Args:
        module: Dotted checkpoint name of the module.
        shape: (N, K): output and input features.
        scheme: How it is quantized; None if it is in full precision.
        encoding: What the headers say, for people: "BF16", "Q4_1", "pack-quantized int4 g128".
        dtype: dtype that it dequantizes to.
        leaves: Tensor names it consumes, by leaf ("weight", "weight_packed", "weight_scale", ...).
        decided_by: The entry of the quantization config that decided, if any.
    """

    module: str
    shape: tuple[int, int]
    scheme: Scheme | None
    encoding: str
    dtype: torch.dtype
    leaves: Mapping[str, str]
    decided_by: str = ""

    @property
    def is_quantized(self) -> bool:
        """True if the weight is stored as codes."""
        return self.scheme is not None


class Reader(Protocol):
    """What a format makes of one checkpoint; see `loader/formats`.

    Args:
        widens_floats: True if the container stores float tensors wider than the model had them, so
            that they go back to the dtype of the config when they are copied.
    """

    widens_floats: bool

    def weights(self) -> Mapping[str, SourceWeight]:
        """Describe every 2-D weight, by module."""

    def decode(self, weight: SourceWeight) -> QuantTensor | Tensor:
        """Read a weight: canonical if it is quantized, else a float tensor [N, K]."""


@dataclass(frozen=True)
class Source:
    """An open checkpoint with its format.

    Args:
        checkpoint: Files and headers.
        format_name: Name of the format, for people.
        reader: Decodes weights.
        weights: Every 2-D weight, by module.
        plain: All tensors that belong to no 2-D weight (norms, biases, ...), by tensor name.
    """

    checkpoint: Checkpoint
    format_name: str
    reader: Reader
    weights: Mapping[str, SourceWeight]
    plain: Mapping[str, TensorEntry]

    @property
    def is_quantized(self) -> bool:
        """True if any weight is stored as codes."""
        return any(weight.is_quantized for weight in self.weights.values())

    def read_weight(self, module: str) -> QuantTensor | Tensor:
        """Read the weight of a module: [N, K], canonical or float."""
        return self.reader.decode(self.weights[module])

    def read_dense(self, module: str, dtype: torch.dtype | None = None) -> Tensor:
        """Read the weight of a module as a float tensor [N, K], in its own dtype or in `dtype`."""
        weight = self.read_weight(module)
        if isinstance(weight, QuantTensor):
            return weight.dequantize(dtype)
        return weight if dtype is None else weight.to(dtype)

    def read_plain(self, tensor_name: str) -> Tensor:
        """Read a tensor that belongs to no 2-D weight, as stored."""
        return self.checkpoint.read(tensor_name)
