"""`FusedExperts`: the experts of a block, each with weights of its own scheme, called as before.

    token t, choice j:  y[t] += weights[t, j] * down(activation(up(x[t])))      expert index[t, j]

It takes the place of the model's own experts from outside: the router and the rest of the block
stay as they are, and so do activation, clamps and norms, which are the own module's. Tokens are
sorted by expert, so that an expert multiplies once; the sum over the choices of a token is taken in
their order, never by atomic additions. The host waits for the device once a call, where experts
multiply one by one, and never where one kernel serves all.

    tensor parallel    every rank holds rows of gate and up and the columns of down that meet them
    expert parallel    every rank holds whole experts; the others' tokens give zeros

Both end in one sum over the ranks.

Letters: E experts, H width of the model, I width inside an expert, T tokens, k experts of a token,
S rows: T * k.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from quantload.errors import ConfigError, ModelError, ShapeError
from quantload.layers.expert_linear import ExpertLinear, Groups, Rounding, Shelf, round_once
from quantload.layers.experts_activation import recognised_activation
from quantload.layers.experts_grouped import GroupedChoice, GroupedExperts, choose_grouped
from quantload.layers.experts_layout import ExpertsLayout, Projection
from quantload.quant.activation import fake_quantize_columns
from quantload.quant.qtensor import QuantTensor
from quantload.quant.region import WHOLE, Region
from quantload.quant.scheme import DENSE, Scheme
from quantload.runtime.parallel import Parallel

if TYPE_CHECKING:
    from quantload.runtime.kernels.grouped_layout import Rows
    from quantload.runtime.kernels.grouped_product import GatedActivation

Key = tuple[str, int]
Mode = Literal["tensor", "expert"]
Activation = Callable[[Tensor], Tensor]


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of [..., 2I], gate first: the usual activation."""
    gate, up = gate_up.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


class FusedExperts(nn.Module):
    """The experts of a block.

    Args:
        layout: Names and shapes.
        schemes: Scheme of each weight, by leaf and slot; the others are in full precision.
        dtype: dtype of activations, biases and result.
        prefix: Dotted path in the model.
        activation: Maps the product of `up` [S, 2I or I] to [S, I].
        original: The module that it stands for: its submodules and other attributes stay there.
        parallel: This process among those that share the block.
        mode: What each of them holds: a part of every expert, or whole experts; None is as
            `parallel` says.

    Raises:
        ConfigError: There is not one column or expert for each process.
    """

    def __init__(  # noqa: PLR0913 - a keyword for each choice of a model's author
        self,
        layout: ExpertsLayout,
        *,
        schemes: Mapping[Key, Scheme] | None = None,
        dtype: torch.dtype,
        prefix: str,
        activation: Activation = silu_and_mul,
        original: nn.Module | None = None,
        parallel: Parallel | None = None,
        mode: Mode | None = None,
    ) -> None:
        super().__init__()
        self.layout, self.dtype, self.prefix = layout, dtype, prefix
        self.schemes = dict(schemes or {})
        self.activation = activation
        self.parallel = parallel or Parallel()
        self.mode: Mode = mode or ("expert" if self.parallel.expert_parallel else "tensor")
        self.choices: dict[str, GroupedChoice] = {}
        self.round_down: Activation | None = None
        self.__dict__["original"] = original  # not registered: its parameters are ours
        for name, child in () if original is None else original.named_children():
            self.add_module(name, child)
        self._received: dict[Key, QuantTensor | Tensor] = {}
        self._packed: dict[Key, ExpertLinear] = {}
        self._shelves: dict[str, Shelf] = {}
        self._inside: GatedActivation | None = None  # what our kernel computes for `activation`
        what, length = (
            ("experts", layout.experts) if self.mode == "expert" else ("columns", self._inner)
        )
        if length < self.parallel.tp_size:
            raise ConfigError(
                f"{length} {what} of `{prefix}` cannot be shared by {self.parallel.tp_size} "
                "processes",
                hint="take fewer processes for tensor parallelism",
            )

    def extra_repr(self) -> str:
        """Describe the experts in the model's printout."""
        schemes = sorted({str(scheme) for scheme in self.schemes.values()}) or ["dense"]
        return f"{self.layout.experts} experts, {self.layout.up.columns} -> {', '.join(schemes)}"

    # -- what this rank holds ------------------------------------------------------------------

    @property
    def _inner(self) -> int:
        return self.layout.down.columns

    def _range(self, length: int) -> tuple[int, int]:
        rank, size = self.parallel.tp_rank, self.parallel.tp_size
        return rank * length // size, (rank + 1) * length // size

    @property
    def experts(self) -> range:
        """Experts of which this rank holds something."""
        experts = self.layout.experts
        return range(*self._range(experts)) if self.mode == "expert" else range(experts)

    def awaits(self) -> dict[Key, tuple[int, ...]]:
        """Return the shape of each tensor of the whole layer, by leaf and slot."""
        shapes: dict[Key, tuple[int, ...]] = {}
        for projection in self.layout.projections:
            for slot in range(self.layout.experts * projection.parts):
                shapes[projection.leaf, slot] = (projection.rows, projection.columns)
                if projection.has_bias:
                    shapes[projection.bias_leaf, slot] = (projection.rows,)
        return shapes

    def has_input_first(self, leaf: str) -> bool:
        """Say whether the model's own parameter is [E, K, N] instead of [E, N, K]."""
        return self.layout.projection(leaf).has_input_first

    def region(self, leaf: str, slot: int) -> Region | None:
        """Return what of a tensor this rank holds; None if all of it is another rank's."""
        projection = self.layout.projection(leaf)
        if slot // projection.parts not in self.experts:
            return None
        if self.mode == "expert" or self.parallel.tp_size == 1:
            return WHOLE
        start, stop = self._range(self._inner)
        if projection is self.layout.up:
            each = projection.rows // self._inner  # rows of gate and up may alternate
            return Region(rows=((start * each, stop * each),))
        if self.layout.is_bias(leaf):  # added once, not by every rank
            return WHOLE if self.parallel.tp_rank == 0 else None
        return Region(columns=(start, stop))

    def elsewhere(self) -> set[Key]:
        """Return what other ranks hold alone."""
        return {key for key in self.awaits() if self.region(*key) is None}

    @property
    def _rounding(self) -> Rounding | None:
        """What rounds the inputs of `down`, of which every rank holds some columns."""
        if self.mode == "expert" or self.parallel.tp_size == 1:
            return None
        start, _ = self._range(self._inner)
        return partial(
            fake_quantize_columns,
            columns=(start, self._inner),
            exchange_max=self.parallel.all_reduce_max,
        )

    # -- loading -------------------------------------------------------------------------------

    def receive(self, leaf: str, slot: int, value: QuantTensor | Tensor) -> None:
        """Take one tensor, cut to its region; an expert that is complete is packed at once.

        Raises:
            ShapeError: The tensor has another shape than the layer waits for.
        """
        region = self.region(leaf, slot)
        full = self.awaited_shape(leaf)
        expected = full if region is None else region.shape_of(full)
        if region is None or tuple(value.shape) != expected:
            raise ShapeError(
                f"`{leaf}` of slot {slot} has shape `{tuple(value.shape)}`, expected "
                f"`{'nothing' if region is None else expected}`, module `{self.prefix}`"
            )
        projection = self.layout.projection(leaf)
        self._received[leaf, slot] = value
        self._pack(projection, slot // projection.parts)

    def awaited_shape(self, leaf: str) -> tuple[int, ...]:
        """Return the whole shape of a slot."""
        projection = self.layout.projection(leaf)
        rows, columns = projection.rows, projection.columns
        return (rows,) if self.layout.is_bias(leaf) else (rows, columns)

    def _pack(self, projection: Projection, expert: int) -> None:
        """Pack an expert's weight, if all of its tensors are there."""
        slots = range(expert * projection.parts, (expert + 1) * projection.parts)
        leaves = {projection.leaf: "weight"}
        if projection.has_bias and self.region(projection.bias_leaf, slots[0]) is not None:
            leaves[projection.bias_leaf] = "bias"
        if any((leaf, slot) not in self._received for leaf in leaves for slot in slots):
            return
        values = {
            (name, part): self._received.pop((leaf, slot))
            for leaf, name in leaves.items()
            for part, slot in enumerate(slots)
        }
        weights = [values["weight", part] for part in range(len(slots))]
        linear = ExpertLinear(
            [weight.shape[0] for weight in weights],
            weights[0].shape[1],
            bias=len(leaves) > 1,
            schemes=[self.schemes.get((projection.leaf, slot), DENSE) for slot in slots],
            dtype=self.dtype,
            prefix=f"{self.prefix}.{expert}.{projection.leaf}",
            rounding=self._rounding if projection is self.layout.down else None,
            shelf=self._shelf(projection),
            place=expert - self.experts.start,
        )
        linear.fill(values)
        self._packed[projection.leaf, expert] = linear

    def _shelf(self, projection: Projection) -> Shelf:
        if projection.leaf not in self._shelves:
            is_gated = projection is self.layout.up and self.layout.is_gated
            rows: Rows = "plain"
            if is_gated:
                rows = "halves" if projection.parts == 2 else "alternate"
            self._shelves[projection.leaf] = Shelf(len(self.experts), rows, self.dtype)
        return self._shelves[projection.leaf]

    def finish(self, device: torch.device) -> None:
        """Put the experts together; all of them are packed."""
        del device  # each expert was packed where its tensors are
        for projection in self.layout.projections:
            experts = [self._packed.pop((projection.leaf, expert)) for expert in self.experts]
            choice = choose_grouped(experts)
            if projection is self.layout.down:
                self.round_down = round_once(experts)
            self.choices[projection.leaf] = choice
            self.add_module(f"{projection.leaf}_experts", choice.gemm)
        self._shelves = {}
        if all(isinstance(p, GroupedExperts) for p in map(self._product, self.layout.projections)):
            original = self.__dict__["original"]
            self._inside = recognised_activation(self.activation, self.layout, original)

    # -- running -------------------------------------------------------------------------------

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts.

        Args:
            args: x [T, H], index [T, k] (integers; what is no expert gives zeros) and weights
                [T, k]; or, as the model's own module is called, tokens sorted by expert alone.
            kwargs: The same by the names that the model's own module has for them.

        Returns:
            [T, H] in the dtype of x.
        """
        names = self.layout.arguments
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        x, *routing = (values[name] for name in names)
        if x.device.type == "meta":
            return torch.empty_like(x)
        tokens = x.reshape(-1, self.layout.up.columns)
        result = self._routed(tokens, *routing) if routing else self._sorted(tokens)
        result = result.to(x.dtype)
        if not self._sums_before_norm:
            result = self.parallel.all_reduce(result)
        return result.reshape(x.shape)

    def _routed(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """[T, H] from tokens [T, H], index [T, k] and weights [T, k]."""
        if self._inside is not None and not self.layout.post_norm and not self._is_watched:
            return self._in_few_launches(tokens, index, weights, self._inside)
        first, count = self.experts.start, len(self.experts)
        choices = index.shape[-1]
        local = index.reshape(-1) - first
        local = torch.where((local >= 0) & (local < count), local, count)
        ids, order = torch.sort(local, stable=True)
        groups = Groups(ids, count)
        rows = self._experts(tokens[order // choices], groups)
        rows = rows * weights.reshape(-1)[order, None]
        rows = rows.masked_fill((ids == count)[:, None], 0)
        back = torch.empty_like(rows).index_copy_(0, order, rows)
        return back.view(-1, choices, rows.shape[-1]).sum(dim=1)

    def _in_few_launches(
        self, tokens: Tensor, index: Tensor, weights: Tensor, activation: GatedActivation
    ) -> Tensor:
        """The same, where our kernels do all of it."""
        up, down = (self._product(projection) for projection in self.layout.projections)
        assert isinstance(up, GroupedExperts), "looked at when all experts were there"
        assert isinstance(down, GroupedExperts), "as the other"
        up.check_gradient(tokens)
        routing, choices = up.gemm.route(index, first=self.experts.start), index.shape[-1]
        rows = up.gemm.product(tokens, routing, choices=choices, activation=activation)
        return down.gemm.summed(rows, routing, weights, dtype=tokens.dtype)

    def kernels_for(self, tokens: int, choices: int) -> tuple[str, ...]:
        """Return the device functions that a call launches, where our kernels do all of it.

        Args:
            tokens: T.
            choices: k.
        """
        up, down = (self._product(projection) for projection in self.layout.projections)
        if self._inside is None or self.layout.post_norm:
            return ()
        assert isinstance(up, GroupedExperts), "looked at when all experts were there"
        assert isinstance(down, GroupedExperts), "as the other"
        pairs = tokens * choices
        return (
            *up.gemm.kernels_for(pairs),
            *down.gemm.kernels_for(pairs, choices=choices),
        )

    @property
    def _is_watched(self) -> bool:
        """True if somebody looks at the inputs or results of single products."""
        products = [self._product(projection) for projection in self.layout.projections]
        return any(p._forward_pre_hooks or p._forward_hooks for p in products)

    def _sorted(self, tokens: Tensor) -> Tensor:
        """[E * T, H] from as many tokens for each expert, one expert after the other."""
        each = tokens.shape[0] // self.layout.experts
        here = self.experts
        ids = torch.arange(len(here), device=tokens.device).repeat_interleave(each)
        part = slice(here.start * each, here.stop * each)
        rows = self._experts(tokens[part], Groups(ids, len(here), [each] * len(here)))
        if len(here) == self.layout.experts:
            return rows
        result = rows.new_zeros(tokens.shape[0], rows.shape[1])
        result[part] = rows
        return result

    def _experts(self, rows: Tensor, groups: Groups) -> Tensor:
        """[S, H] result of each row's expert, before its weight."""
        rows = self._product(self.layout.up)(rows, groups)
        rows = self.activation(rows)
        if self.round_down is not None:
            rows = self.round_down(rows)
        rows = self._product(self.layout.down)(rows, groups)
        post_norm = self.layout.post_norm
        if self._sums_before_norm:
            rows = self.parallel.all_reduce(rows)
        return self.get_submodule(post_norm)(rows) if post_norm else rows

    @property
    def _sums_before_norm(self) -> bool:
        """True if ranks add their parts of each expert's result, which a norm needs whole."""
        return bool(self.layout.post_norm) and self.mode == "tensor" and self.parallel.tp_size > 1

    def _product(self, projection: Projection) -> nn.Module:
        name = f"{projection.leaf}_experts"
        if name not in self._modules:
            raise ModelError(f"the experts of `{self.prefix}` were never loaded")
        return self.get_submodule(name)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the original has
        """Return a parameter of the original, computed on each access, or its other attributes."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            layout = self.__dict__.get("layout")
            if layout is not None and name in (layout.up.leaf, layout.down.leaf):
                return self._parameter(layout.projection(name))
            original = self.__dict__.get("original")
            if original is None or name not in original.__dict__:
                raise
            return original.__dict__[name]

    def _parameter(self, projection: Projection) -> Tensor:
        """[E, N, K] or [E, K, N]: what this rank holds, in `dtype`."""
        values: Tensor = self._product(projection).weight_values(self.dtype)  # type: ignore[operator]
        return values.transpose(1, 2) if projection.has_input_first else values


__all__ = ["FusedExperts", "silu_and_mul"]
