"""One row of a plan: the decision for one module."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quantload.loader.output_files import OutputTensor
from quantload.loader.stats import InputAbsmax, InputMeanSquare
from quantload.quant.scheme import Scheme


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRegion:
    """Where a full-precision weight [N, K] lies in a tensor of the source, row by row.

    Args:
        tensor: Name of the tensor.
        first: Element of the tensor at which the weight begins.
        rows: N.
        columns: K.
        row_stride: Elements from one row to the next; more than K where rows of two weights take
            turns.
    """

    tensor: str
    first: int
    rows: int
    columns: int
    row_stride: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRow:
    """The decision for one module.

    Args:
        module: Checkpoint name of the module.
        shape: Shape of its weight.
        source: What the headers say it is.
        scheme: What it becomes; None keeps or makes it full precision.
        reason: Which rule, default or limit decided.
        dtype: dtype of scales, or of the full-precision weight.
        read_from: Module whose weight is read; differs from `module` for a head that was tied.
        keeps_values: True if the quantized weight of the source is written with the same values.
        is_same: True if its rule asks for what the source has.
        outputs: The tensors that are written.
        source_bytes: Bytes of its tensors in the source.
        region: Where the weight lies, if it can be read in rows as it is stored.
        input_absmax: Largest |x| that the number for its input covers; None if there is none.
        mean_square: E[x^2] of its input features, by which the search for its scales weighs errors;
            None if all columns count alike, or nothing is searched.
    """

    module: str
    shape: tuple[int, ...]
    source: str
    scheme: Scheme | None
    reason: str
    dtype: torch.dtype
    read_from: str
    keeps_values: bool = False
    is_same: bool = False
    outputs: tuple[OutputTensor, ...]
    source_bytes: int
    region: SourceRegion | None = None
    input_absmax: InputAbsmax | None = None
    mean_square: InputMeanSquare | None = None

    @property
    def shares_range(self) -> bool:
        """True if a scale is computed from the range of the whole weight."""
        if self.scheme is None or self.scheme.weight is None or self.keeps_values:
            return False
        return self.scheme.weight.shares_range

    @property
    def output_bytes(self) -> int:
        """Bytes of tensor data that are written."""
        return sum(tensor.num_bytes for tensor in self.outputs)
