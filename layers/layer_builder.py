"""Which of our layers takes the place of a linear layer, or of several that read one input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from quantload.layers.cut import Cut, rows_held
from quantload.layers.linear import QuantLinear
from quantload.layers.merged_linear import MergedColumnParallelLinear
from quantload.layers.parallel_linear import ColumnParallelLinear, RowParallelLinear
from quantload.layers.sharding import ShardPlan, Style
from quantload.layers.stack import LinearStack
from quantload.quant.scheme import DENSE, Scheme
from quantload.runtime.parallel import Parallel

_WHOLE = Style("replicated")


@dataclass(frozen=True)
class Sharing:
    """How ranks share the layers of a model.

    Args:
        parallel: This process among those that share it.
        plan: How they share its layers; None if there are no others.
    """

    parallel: Parallel = field(default_factory=Parallel)
    plan: ShardPlan | None = None


@dataclass(frozen=True)
class LayerBuilder:
    """Makes the layers of one model.

    Args:
        schemes: Scheme of each quantized module, by model path.
        dtype: dtype of activations.
        sharing: How ranks share them.
    """

    schemes: Mapping[str, Scheme]
    dtype: torch.dtype
    sharing: Sharing = field(default_factory=Sharing)

    @property
    def parallel(self) -> Parallel:
        """This process among those that share the model."""
        return self.sharing.parallel

    def scheme(self, path: str) -> Scheme:
        """Return the scheme of a layer, DENSE if it has none."""
        return self.schemes.get(path, DENSE)

    def style(self, path: str) -> Style:
        """Return how the ranks share a layer."""
        plan = self.sharing.plan
        return _WHOLE if plan is None else plan.styles.get(path, _WHOLE)

    def is_cut(self, path: str) -> bool:
        """True if no rank holds all of a linear layer."""
        return self.style(path).kind not in ("replicated", "vocabulary")

    def alone(self, module: nn.Module, path: str) -> QuantLinear:
        """Return what takes the place of one layer."""
        width, height = _size(module)
        bias = getattr(module, "bias", None) is not None
        style = self.style(path)
        if style.kind == "column":
            return self._rows(width, height, path, bias=bias)
        if style.kind == "column gathered":
            return ColumnParallelLinear(
                width,
                height,
                bias=bias,
                gather_output=True,
                scheme=self.scheme(path),
                dtype=self.dtype,
                parallel=self.parallel,
                prefix=path,
            )
        if style.kind in ("row", "row split"):
            return RowParallelLinear(
                width,
                height,
                bias=bias,
                input_is_parallel=style.kind == "row",
                scheme=self.scheme(path),
                dtype=self.dtype,
                parallel=self.parallel,
                prefix=path,
            )
        return QuantLinear(
            width, height, bias=bias, scheme=self.scheme(path), dtype=self.dtype, prefix=path
        )

    def _rows(self, width: int, height: int, path: str, *, bias: bool) -> QuantLinear:
        """Return a layer of some heads, which other ranks may hold as well."""
        rows = self._share(path, height)
        return QuantLinear(
            width,
            rows[1] - rows[0],
            bias=bias,
            scheme=self.scheme(path),
            dtype=self.dtype,
            prefix=path,
            cut=Cut(width, (height,), (rows_held(self.parallel, rows),)),
        )

    def _share(self, path: str, height: int) -> tuple[int, int]:
        found = self.style(path).rows(height, self.parallel.tp_rank, self.parallel.tp_size)
        return (0, height) if found is None else found

    def stack(self, members: Mapping[str, nn.Linear], *, prefix: str, proven: bool) -> LinearStack:
        """Return what takes the place of layers that read one input, see `alike`.

        Args:
            members: The layers by path, in their order.
            prefix: Path of the result.
            proven: See `LinearStack`.
        """
        paths = list(members)
        first = members[paths[0]]
        heights = [linear.out_features for linear in members.values()]
        if self.style(paths[0]).kind == "column gathered":
            return MergedColumnParallelLinear(
                first.in_features,
                heights,
                bias=first.bias is not None,
                gather_output=True,
                scheme=self.scheme(paths[0]),
                dtype=self.dtype,
                parallel=self.parallel,
                prefix=prefix,
                proven=proven,
            )
        shares = [self._share(path, linear.out_features) for path, linear in members.items()]
        is_cut = self.is_cut(paths[0])
        regions = tuple(rows_held(self.parallel, share) for share in shares)
        return LinearStack(
            first.in_features,
            [stop - start for start, stop in shares],
            bias=first.bias is not None,
            scheme=self.scheme(paths[0]),
            dtype=self.dtype,
            prefix=prefix,
            proven=proven,
            cut=Cut(first.in_features, tuple(heights), regions) if is_cut else None,
        )

    def alike(self, path: str, linear: nn.Linear) -> object:
        """Return what members of one stack have in common; None if it cannot be one."""
        style, scheme = self.style(path), self.scheme(path)
        if style.kind not in ("replicated", "column", "column gathered"):
            return None
        return (
            scheme.weight,
            scheme.input,
            linear.in_features,
            linear.bias is not None,
            style.kind,
        )


def _size(module: nn.Module) -> tuple[int, int]:
    """Return (K, N) of a linear layer."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    weight = module.get_parameter("weight")  # Conv1D of GPT-2 stores it as [K, N]
    return weight.shape[0], weight.shape[1]


__all__ = ["LayerBuilder", "Sharing"]
