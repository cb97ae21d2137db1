"""What a format must say to be written: the other half of a `Reader`.

The plan asks for the tensors of every module before anything is computed, the conversion for their
values, the end for the config that engines read. A target never sees where a weight comes from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quantload.loader.output_files import Leaf
from quantload.quant.qtensor import QuantTensor
from quantload.quant.rtn import quantize_rtn
from quantload.quant.scheme import Scheme, WeightScheme


@dataclass(frozen=True, kw_only=True)
class WrittenModules:
    """The modules of an output, as a config has to name them.

    Args:
        schemes: Scheme of each quantized module, under every name that a reader may look for.
        kept: Linear modules in full precision.
        named: Quantized modules that engines find by name only: embeddings are not of class
            `Linear`, and serving engines have a class of their own for the head.
        cache_scheme: How keys and values are cached, as compressed-tensors writes it down.
    """

    schemes: Mapping[str, Scheme]
    kept: Collection[str]
    named: Collection[str] = ()
    cache_scheme: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class WrittenConfig:
    """What describes the quantization of an output.

    Args:
        quantization_config: Goes into config.json.
        files: JSON files beside it, by name (`hf_quant_config.json`, `quantize_config.json`).
    """

    quantization_config: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class Target(ABC):
    """A format that is written.

    Attributes:
        name: What `--format` calls it.
        title: Which schemes it holds, and who reads it.
        keeps_values: True if `same` can re-express a quantized weight in it.
        has_rows_apart: True if rows of what it writes can be decoded without the others.
    """

    name: str
    title: str
    keeps_values = False
    has_rows_apart = False

    def prepare(self) -> None:  # noqa: B027 - most have nothing to prepare
        """Import what `check` needs, if that takes long; called while there is time for it."""

    @abstractmethod
    def obstacle(self, scheme: Scheme, shape: tuple[int, int]) -> str:
        """Say why a weight [N, K] cannot be written in a scheme; "" if it can.

        Args:
            scheme: How it is quantized.
            shape: (N, K).
        """

    @abstractmethod
    def layout(
        self, scheme: Scheme, shape: tuple[int, int], scale_dtype: torch.dtype
    ) -> dict[str, Leaf]:
        """Return the tensors that a quantized weight becomes, by leaf.

        Args:
            scheme: How it is quantized; nothing stands against it, see `obstacle`.
            shape: (N, K).
            scale_dtype: dtype of float scales; scales of another kind have their own.
        """

    def quantize(
        self, weight: Tensor, scheme: WeightScheme, *, shared: Tensor | None = None
    ) -> QuantTensor:
        """Quantize a weight, or some rows of it, on scales as this format stores them.

        The same weight always becomes the same codes. Unless a format says otherwise, they are
        those of compressed-tensors, see `quant/rtn.py`.

        Args:
            weight: [N, K] bfloat16, float16 or float32, in the dtype that the model has.
            scheme: How it is quantized; nothing stands against it, see `obstacle`.
            shared: [2] range of what shares one scale for the tensor, as in `quantize_rtn`.

        Raises:
            NonFiniteWeight: The weight is not finite, or a scale overflows what is stored.
        """
        return quantize_rtn(weight, scheme, shared=shared)

    @abstractmethod
    def encode(
        self, tensor: QuantTensor, scheme: Scheme, shape: tuple[int, int]
    ) -> dict[str, Tensor]:
        """Turn a canonical weight, or some rows of it, into the tensors of `layout`.

        Args:
            tensor: On the scheme's grid and in its blocks: the whole weight, or rows from a
                multiple of `row_step` on.
            scheme: How it is quantized.
            shape: (N, K) of the whole weight.
        """

    @abstractmethod
    def row_step(self, scheme: Scheme) -> int | None:
        """Return the number of rows at whose multiples a weight may be cut to be encoded in parts.

        Of each part every leaf is a range of rows of the whole leaf, or the same for all parts.
        None if a leaf runs along N, so that a weight is encoded as a whole.
        """

    def check(self, quantization_config: Mapping[str, Any]) -> None:  # noqa: B027
        """Have the format's own library, if it has one, check what `config` describes.

        Raises:
            FormatMismatch: The library refuses it.
        """

    @abstractmethod
    def config(self, modules: WrittenModules) -> WrittenConfig:
        """Describe what was written.

        Args:
            modules: Every module of the output that is or could be quantized.
        """
