"""Linear layers whose weights lie in several processes, under the field's names.

    ReplicatedLinear              every process holds all
    ColumnParallelLinear          rows of the weight: features of the result
    MergedColumnParallelLinear    the same for several members in one weight (gate and up)
    QKVParallelLinear             the same for q, k and v, by heads
    RowParallelLinear             columns of the weight: features of the input; results are added

Sizes in constructors are those of the whole layer. What a process holds is told in `region`, in
coordinates of the whole tensors, so that a checkpoint is cut exactly, whatever its format: through
blocks, groups and act-order. On one process all of them are what `nn.Linear` is.

Letters: N output features, K input features, T processes, H heads, D size of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from quantload.arguments import check_counts
from quantload.layers.cut import Cut, Schemes, as_parallel, rows_held, scheme_at
from quantload.layers.linear import QuantLinear
from quantload.layers.merged_linear import MergedColumnParallelLinear, QKVParallelLinear
from quantload.quant.activation import fake_quantize_columns
from quantload.quant.region import WHOLE, Region
from quantload.quant.scheme import DENSE, InputScheme
from quantload.runtime.parallel import Parallel


class ReplicatedLinear(QuantLinear):
    """y = x @ W^T + bias, the whole of it in every process.

    Args:
        in_features: K.
        out_features: N.
        bias: True if there is a bias.
        scheme: How weight and input are quantized; or {path: scheme}, looked up by `prefix`.
        dtype: dtype of x, bias and result; None takes torch's default.
        parallel: This process among those that share layers.
        prefix: Dotted path in the model.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        scheme: Schemes = DENSE,
        dtype: torch.dtype | None = None,
        parallel: Parallel | None = None,
        prefix: str = "",
    ) -> None:
        in_features, out_features = check_counts(
            0, in_features=in_features, out_features=out_features
        )
        super().__init__(
            in_features,
            out_features,
            bias=bias,
            scheme=scheme_at(scheme, prefix),
            dtype=dtype or torch.get_default_dtype(),
            prefix=prefix,
        )
        self.parallel = as_parallel(parallel)


class ColumnParallelLinear(QuantLinear):
    """y = x @ W^T + bias, each process a part of the features of y.

    Args:
        in_features: K.
        out_features: N, a multiple of T.
        bias: True if there is a bias; it is cut as the rows of the weight.
        gather_output: Give every process all of y.
        scheme: As in `ReplicatedLinear`.
        dtype: As in `ReplicatedLinear`.
        parallel: As in `ReplicatedLinear`.
        prefix: As in `ReplicatedLinear`.

    Raises:
        ConfigError: N does not divide.
    """

    def __init__(  # noqa: PLR0913 - a keyword for each decision
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        gather_output: bool = False,
        scheme: Schemes = DENSE,
        dtype: torch.dtype | None = None,
        parallel: Parallel | None = None,
        prefix: str = "",
    ) -> None:
        in_features, out_features = check_counts(
            0, in_features=in_features, out_features=out_features
        )
        parallel = as_parallel(parallel)
        rows = parallel.share_of(out_features, f"the {out_features} rows of `{prefix}`")
        super().__init__(
            in_features,
            rows[1] - rows[0],
            bias=bias,
            scheme=scheme_at(scheme, prefix),
            dtype=dtype or torch.get_default_dtype(),
            prefix=prefix,
            cut=Cut(in_features, (out_features,), (rows_held(parallel, rows),)),
        )
        self.parallel, self.gather_output = parallel, gather_output

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., K] to [..., N / T], or to [..., N] if the output is gathered."""
        y = super().forward(x)
        return self.parallel.all_gather(y, -1) if self.gather_output else y


class RowParallelLinear(QuantLinear):
    """y = x @ W^T + bias, each process a part of the features of x; what they find is added.

    The bias is added by the first process. Scales of a rounded input are those of the whole input:
    where one would be of features in several processes, these agree on its largest.

    Args:
        in_features: K, a multiple of T.
        out_features: N.
        bias: True if there is a bias.
        input_is_parallel: True if x is the part of this process, False if it is all of x.
        reduce_results: Add up the results; False leaves that to the caller.
        scheme: As in `ReplicatedLinear`.
        dtype: As in `ReplicatedLinear`.
        parallel: As in `ReplicatedLinear`.
        prefix: As in `ReplicatedLinear`.

    Raises:
        ConfigError: K does not divide.
    """

    def __init__(  # noqa: PLR0913 - a keyword for each decision
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        input_is_parallel: bool = True,
        reduce_results: bool = True,
        scheme: Schemes = DENSE,
        dtype: torch.dtype | None = None,
        parallel: Parallel | None = None,
        prefix: str = "",
    ) -> None:
        in_features, out_features = check_counts(
            0, in_features=in_features, out_features=out_features
        )
        parallel = as_parallel(parallel)
        columns = parallel.share_of(in_features, f"the {in_features} columns of `{prefix}`")
        region = WHOLE if parallel.tp_size == 1 else Region(columns=columns)
        super().__init__(
            columns[1] - columns[0],
            out_features,
            bias=bias,
            scheme=scheme_at(scheme, prefix),
            dtype=dtype or torch.get_default_dtype(),
            prefix=prefix,
            cut=Cut(in_features, (out_features,), (region,)),
        )
        self.parallel, self.columns = parallel, columns
        if parallel.tp_size > 1:
            self.exchange_max = parallel.all_reduce_max
        self.input_is_parallel, self.reduce_results = input_is_parallel, reduce_results

    def region(self, leaf: str, slot: int) -> Region | None:
        """Return what of a tensor this rank holds; the bias is that of the first alone."""
        if leaf == "bias":
            return WHOLE if self.parallel.tp_rank == 0 else None
        return super().region(leaf, slot)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., K / T], or [..., K] if it is not parallel, to [..., N]."""
        if not self.input_is_parallel:
            x = x[..., self.columns[0] : self.columns[1]]
        y = super().forward(x)
        return self.parallel.all_reduce(y) if self.reduce_results else y

    def _shared_rounding(self, input: InputScheme) -> Callable[[Tensor], Tensor] | None:
        if self.exchange_max is None:
            return None
        return partial(
            fake_quantize_columns,
            scheme=input,
            columns=(self.columns[0], self.cut.in_features),
            exchange_max=self.exchange_max,
        )


__all__ = [
    "ColumnParallelLinear",
    "MergedColumnParallelLinear",
    "QKVParallelLinear",
    "ReplicatedLinear",
    "RowParallelLinear",
]
