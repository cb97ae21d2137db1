"""Input embeddings and output heads whose vocabulary lies in several processes.

    VocabParallelEmbedding    rows that are another process's count as zeros; results are added
    ParallelLMHead            each process computes the logits of its rows; these are joined

Of V rows each of T processes holds ceil(V / T), the last ones fewer or none; logits are padded to
equal parts only while they are exchanged, so that no token outside the vocabulary ever has one.

Letters: V tokens of the vocabulary, K features, T processes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from quantload.arguments import check_counts
from quantload.errors import ConfigError, ModelError, ShapeError
from quantload.layers.cut import Cut, Schemes, as_parallel, scheme_at
from quantload.layers.lazy_weight import lazy_weight
from quantload.layers.linear import KernelReport, Key, QuantLinear
from quantload.layers.vocabulary_table import DenseTable, PackedTable, Table, table_of
from quantload.quant.qtensor import QuantTensor
from quantload.quant.region import WHOLE, Region
from quantload.quant.scheme import DENSE, Scheme
from quantload.runtime.parallel import Parallel


class VocabParallelEmbedding(nn.Embedding):
    """Rows of a weight [V, K] by token, each process holding some of them.

    It is an `nn.Embedding` to code that asks, but has no parameter.

    Args:
        num_embeddings: V.
        embedding_dim: K.
        padding_idx: Token whose row gets no gradient in training; kept for code that reads it.
        scheme: How the weight is quantized; or {path: scheme}, looked up by `prefix`.
        dtype: dtype of the result; None takes torch's default.
        parallel: This process among those that share layers.
        prefix: Dotted path in the model.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        padding_idx: int | None = None,
        scheme: Schemes = DENSE,
        dtype: torch.dtype | None = None,
        parallel: Parallel | None = None,
        prefix: str = "",
    ) -> None:
        num_embeddings, embedding_dim = check_counts(
            0, num_embeddings=num_embeddings, embedding_dim=embedding_dim
        )
        nn.Module.__init__(self)  # not that of nn.Embedding, which allocates the weight
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = padding_idx
        self.max_norm, self.norm_type = None, 2.0
        self.scale_grad_by_freq, self.sparse = False, False
        self.dtype, self.prefix = dtype or torch.get_default_dtype(), prefix
        self.parallel = as_parallel(parallel)
        found = scheme_at(scheme, prefix)
        self.scheme = found if isinstance(found, Scheme) else found[0]
        self.first, self.last = rows_of(self.parallel, num_embeddings)
        self.table: Table | None = None
        self._received: QuantTensor | Tensor | None = None

    def extra_repr(self) -> str:
        """Describe the layer in the model's printout."""
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.scheme}"

    # -- loading -------------------------------------------------------------------------------

    def set_schemes(self, scheme: Scheme) -> None:
        """Say how the weight is quantized, before it comes."""
        self.scheme = scheme

    def awaits(self) -> dict[Key, tuple[int, ...]]:
        """Return the shape of the whole weight."""
        return {("weight", 0): (self.num_embeddings, self.embedding_dim)}

    def region(self, leaf: str, slot: int) -> Region | None:
        """Return the rows that this rank holds; None if there are none for it."""
        del leaf, slot
        return _region(self.parallel, self.first, self.last)

    def receive(self, leaf: str, slot: int, value: QuantTensor | Tensor) -> None:
        """Take the rows of this rank; floats are in the dtype of the layer.

        Raises:
            ShapeError: The weight has another shape than the layer waits for.
        """
        expected = (self.last - self.first, self.embedding_dim)
        if tuple(value.shape) != expected:
            raise ShapeError(
                f"`{leaf}` has shape `{tuple(value.shape)}`, expected `{expected}`, module "
                f"`{self.prefix}`"
            )
        self._received = value

    def finish(self, device: torch.device) -> None:
        """Keep what was received on a device."""
        if self._received is not None:
            self.table = table_of(self._received, device)
        self._received = None

    # -- running -------------------------------------------------------------------------------

    def forward(self, input: Tensor) -> Tensor:
        """Map tokens [...] to rows [..., K].

        Raises:
            ModelError: A token is outside the vocabulary; on CUDA an assertion of the device.
        """
        self._check(input)
        if self.parallel.tp_size == 1:
            assert self.table is not None, f"{self.prefix} is loaded"
            return self.table.rows_at(input, self.dtype)
        if self.table is None:  # no row is this rank's
            rows = torch.zeros(
                *input.shape, self.embedding_dim, dtype=self.dtype, device=input.device
            )
        else:
            is_elsewhere = (input < self.first) | (input >= self.last)
            here = (input - self.first).masked_fill(is_elsewhere, 0)
            rows = self.table.rows_at(here, self.dtype)
            rows = rows.masked_fill(is_elsewhere.unsqueeze(-1), 0)
        return self.parallel.all_reduce(rows)

    def _check(self, tokens: Tensor) -> None:
        if torch.compiler.is_compiling() or tokens.device.type == "meta":
            return
        is_inside = ((tokens >= 0) & (tokens < self.num_embeddings)).all()
        if tokens.device.type == "cuda":
            torch._assert_async(is_inside)
        elif not bool(is_inside):
            raise ModelError(
                f"tokens from {int(tokens.min())} to {int(tokens.max())}, expected 0 to "
                f"{self.num_embeddings - 1}, embedding `{self.prefix}`"
            )

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The rows [V / T, K] of this rank; a quantized weight is decoded when it is used."""
        if isinstance(self.table, DenseTable):
            return self.table.weight
        rows = self.last - self.first
        if self.table is None:
            return torch.empty(rows, self.embedding_dim, dtype=self.dtype, device="meta")
        table, dtype = self.table, self.dtype
        if torch.compiler.is_compiling():
            return table.weight_values(dtype)
        return lazy_weight(
            lambda: table.weight_values(dtype),
            (rows, self.embedding_dim),
            dtype=dtype,
            device=table.device,
        )

    def _apply(
        self, fn: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> VocabParallelEmbedding:
        """Move and cast; a quantized weight stays as it is, and is decoded to the new dtype."""
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


class ParallelLMHead(QuantLinear):
    """Logits of V tokens: y = x @ W^T + bias with W [V, K], each process holding some rows.

    Args:
        num_embeddings: V.
        embedding_dim: K.
        bias: True if there is a bias [V].
        gather_output: Give every process all logits; False gives it those of its own rows.
        scheme: How weight and input are quantized; or {path: scheme}, looked up by `prefix`.
        dtype: dtype of x, bias and logits; None takes torch's default.
        parallel: This process among those that share layers.
        prefix: Dotted path in the model.
    """

    tied_to: VocabParallelEmbedding | None

    def __init__(  # noqa: PLR0913 - a keyword for each decision
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        bias: bool = False,
        gather_output: bool = True,
        scheme: Schemes = DENSE,
        dtype: torch.dtype | None = None,
        parallel: Parallel | None = None,
        prefix: str = "",
    ) -> None:
        num_embeddings, embedding_dim = check_counts(
            0, num_embeddings=num_embeddings, embedding_dim=embedding_dim
        )
        parallel = as_parallel(parallel)
        first, last = rows_of(parallel, num_embeddings)
        super().__init__(
            embedding_dim,
            last - first,
            bias=bias,
            scheme=scheme_at(scheme, prefix),
            dtype=dtype or torch.get_default_dtype(),
            prefix=prefix,
            cut=Cut(embedding_dim, (num_embeddings,), (_region(parallel, first, last),)),
        )
        self.parallel, self.gather_output = parallel, gather_output
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.__dict__["tied_to"] = None  # not registered: the model has it

    # -- one weight with the embedding ---------------------------------------------------------

    def tie_weights(self, embedding: VocabParallelEmbedding) -> ParallelLMHead:
        """Say, before loading, that the weight is that of an embedding; returns itself.

        The checkpoint then may have one of the two, or both; see `share_weight`.

        Raises:
            ConfigError: The two do not have the same shape or share of rows.
        """
        mine = self.num_embeddings, self.embedding_dim, self.parallel.tp_rank
        other = embedding.num_embeddings, embedding.embedding_dim, embedding.parallel.tp_rank
        if mine != other or self.parallel.tp_size != embedding.parallel.tp_size:
            raise ConfigError(
                f"head `{self.prefix}` cannot be tied to embedding `{embedding.prefix}`: rows, "
                f"columns and rank are `{mine}` and `{other}`"
            )
        self.__dict__["tied_to"] = embedding
        return self

    @property
    def is_tied(self) -> bool:
        """True if the weight is that of an embedding."""
        return self.tied_to is not None

    def share_weight(self, embedding: VocabParallelEmbedding) -> bool:
        """Make the loaded weight of one that of both, after `tie_weights`.

        Returns:
            False if both were loaded and hold different values: they are not tied then.
        """
        mine = None if isinstance(self.gemm, nn.Identity) else self.gemm
        if mine is not None and embedding.table is not None:
            if not embedding.table.equals(mine):
                return False
            mine = None
        if mine is None and embedding.table is not None:
            self.gemm = embedding.table
            self.kernel = KernelReport("dense" if self._is_dense else _TIED_KERNEL)
        elif isinstance(mine, DenseTable | PackedTable):
            embedding.table = mine
        return True

    def _weights_received(self, slots: list[int]) -> list[QuantTensor | Tensor]:
        is_there = not self.is_tied or ("weight", 0) in self._received
        return super()._weights_received(slots) if is_there else []

    def _pack(self, weights: list[QuantTensor | Tensor], device: torch.device) -> None:
        if not weights:
            return  # no row is this rank's, or the embedding has them
        if not self.is_tied:
            super()._pack(weights, device)
            return
        self.gemm = table_of(weights[0], device)
        self.kernel = KernelReport("dense" if self._is_dense else _TIED_KERNEL)

    # -- running -------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., K] to logits [..., V], or to those of the rows of this process."""
        parallel = self.parallel
        y = super().forward(x) if self.out_features else x.new_zeros(*x.shape[:-1], 0)
        if parallel.tp_size == 1 or not self.gather_output:
            return y
        part = -(-self.num_embeddings // parallel.tp_size)
        y = nn.functional.pad(y, (0, part - y.shape[-1]))
        return parallel.all_gather(y, -1)[..., : self.num_embeddings]


_TIED_KERNEL = "dequantize and multiply, rows of the embedding"


# -- shares of the vocabulary ------------------------------------------------------------------


def rows_of(parallel: Parallel, total: int) -> tuple[int, int]:
    """Return (start, stop) of the rows of a vocabulary that a process holds; may be empty."""
    part = -(-total // parallel.tp_size)
    return min(parallel.tp_rank * part, total), min((parallel.tp_rank + 1) * part, total)


def _region(parallel: Parallel, first: int, last: int) -> Region | None:
    if parallel.tp_size == 1:
        return WHOLE
    return Region(rows=((first, last),)) if first < last else None


__all__ = ["ParallelLMHead", "VocabParallelEmbedding", "rows_of"]
