"""Embeddings and output heads whose weights stay in the file.

    embedding    rows of the tokens that occur are read, once; a subclass that scales its rows, or
                 the like, keeps its forward
    head         logits are computed some rows of the vocabulary at a time, which are read, decoded
                 and let go; the forward of the model goes on with the logits of all of them

A vocabulary of 128 thousand tokens times 4096 features, 2 GiB in float32 on each of two sides, then
costs what the tokens in question need. What cannot be read so (rows that a model looks up or
multiplies in its own way, weights that are put together from several tensors) is loaded whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quantload.accuracy.stored_rows import StoredRows, Value, dense
from quantload.errors import ConfigError, ModelError
from quantload.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from quantload.layers.embedding_like import embedding_like
from quantload.layers.lazy_weight import lazy_weight
from quantload.layers.linear import QuantLinear
from quantload.layers.meta_model import TransformersModel
from quantload.layers.replacement import put
from quantload.layers.siblings import is_plain_linear
from quantload.layers.vocabulary_table import ReadTable
from quantload.loader.formats.finite import refuse_nonfinite
from quantload.loader.places import Job
from quantload.loader.row_reader import RowReader
from quantload.loader.source import Source, SourceWeight
from quantload.quant.qtensor import QuantTensor
from quantload.quant.scheme import DENSE, Scheme

CHUNK_ELEMENTS = 1 << 22  # of a head that are in memory at a time: 16 MiB in float32
_CPU = torch.device("cpu")
_LARGE = 1 << 22  # elements of an embedding beside that of the tokens that is worth it


@dataclass(frozen=True)
class VocabularyInFile:
    """What stays in the file.

    Args:
        paths: Modules of the model that read their weights themselves.
        is_tied: True if embedding and head are among them, with one weight.
    """

    paths: tuple[str, ...] = ()
    is_tied: bool = False


class StoredWeight:
    """A matrix [N, K] of a checkpoint, of which rows are read.

    Args:
        source: An open checkpoint.
        weight: What it says of the matrix.
    """

    def __init__(self, source: Source, weight: SourceWeight) -> None:
        self.source, self.weight = source, weight
        self._is_finite = False  # all of it, as far as is known

    def read(self, spans: Sequence[tuple[int, int]]) -> Iterator[Value]:
        """Yield rows start..stop of each span, on the CPU; valid until the next are asked for.

        Raises:
            NonFiniteWeight: They hold NaN or infinity.
        """
        with closing(RowReader(_CPU)) as reader:
            stored = StoredRows(self.source, self.weight.module, reader)
            for start, stop in spans:
                yield self._checked(stored.rows(start, stop))

    def chunks(self) -> Iterator[tuple[int, Value]]:
        """Yield (first row, rows) of all of it; valid until the next are asked for.

        Raises:
            NonFiniteWeight: They hold NaN or infinity.
        """
        count, columns = self.weight.shape
        with closing(RowReader(_CPU)) as reader:
            stored = StoredRows(self.source, self.weight.module, reader)
            many = max(1, CHUNK_ELEMENTS // columns // stored.step) * stored.step
            for start in range(0, count, many):
                yield start, self._checked(stored.rows(start, min(count, start + many)))
        self._is_finite = True

    def _checked(self, rows: Value) -> Value:
        """Return rows; formats look at what they decode themselves."""
        if isinstance(rows, Tensor) and not self._is_finite:
            name = self.weight.parameter_name
            refuse_nonfinite(rows, name, self.source.checkpoint.name)
        return rows

    def equals(self, other: StoredWeight) -> bool:
        """True if both hold the same values in one dtype."""
        pairs = zip(self.chunks(), other.chunks(), strict=False)
        return self.weight.shape == other.weight.shape and all(
            one[0] == two[0] and torch.equal(dense(one[1]), dense(two[1])) for one, two in pairs
        )


class HeadInFile(QuantLinear):
    """y = x' @ W^T + bias, W [N, K] read some rows at a time.

    Args:
        stored: W.
        bias: [N] or None.
        scheme: How weight and input are quantized.
        dtype: dtype of x, bias and result.
        device: Where x is.
        prefix: Dotted path in the model.
    """

    def __init__(
        self,
        stored: StoredWeight,
        *,
        bias: Tensor | None,
        scheme: Scheme,
        dtype: torch.dtype,
        device: torch.device,
        prefix: str,
    ) -> None:
        rows, columns = stored.weight.shape
        has_bias = bias is not None
        super().__init__(columns, rows, bias=has_bias, scheme=scheme, dtype=dtype, prefix=prefix)
        self.stored, self.device = stored, device
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., K] to [..., N].

        Raises:
            ModelError: x needs a gradient and is rounded, for which there is none.
        """
        if not (torch.is_grad_enabled() and x.requires_grad):
            return self.logits(x)
        if self.scheme.input is not None:
            raise ModelError(f"`{self.prefix}` rounds its input: there is no gradient of it")
        y: Tensor = _Read.apply(x, self)  # type: ignore[no-untyped-call]
        return y

    def logits(self, x: Tensor) -> Tensor:
        """Map x [..., K] to [..., N], without a graph."""
        y = x.new_empty(*x.shape[:-1], self.out_features)
        for start, rows in self.stored.chunks():
            part = slice(start, start + rows.shape[0])
            bias = None if self.bias is None else self.bias[part]
            y[..., part] = self._product(x, rows, bias)
        return y

    def _product(self, x: Tensor, rows: Value, bias: Tensor | None) -> Tensor:
        if isinstance(rows, QuantTensor) and self.scheme.input is not None:
            return self._packed([rows.to(x.device)], x.device, self.scheme)(x, bias)  # type: ignore[no-any-return]
        return nn.functional.linear(x, dense(rows).to(x.device, x.dtype), bias)

    @property
    def weight(self) -> Tensor:
        """W [N, K] in `dtype`, read whole when somebody computes with it."""
        shape = self.out_features, self.in_features

        def whole() -> Tensor:
            (rows,) = (dense(value).clone() for value in self.stored.read([(0, shape[0])]))
            return rows.to(self.device, self.dtype)

        return lazy_weight(whole, shape, dtype=self.dtype, device=self.device)


class _Read(torch.autograd.Function):
    """The product with a weight that is read again for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, head: HeadInFile) -> Tensor:  # noqa: ANN401 - torch's context
        ctx.head = head
        return head.logits(x.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        found = gradient.new_zeros(*gradient.shape[:-1], ctx.head.in_features)
        for start, rows in ctx.head.stored.chunks():
            part = gradient[..., start : start + rows.shape[0]]
            found += part @ dense(rows).to(gradient.device, gradient.dtype)
        return found, None


# -- what can stay in the file ---------------------------------------------------------------------


def leave_in_file(  # noqa: PLR0913 - a keyword for each fact about the model
    model: TransformersModel,
    source: Source,
    jobs: Sequence[Job],
    tied: Mapping[str, str],
    *,
    embedding: str,
    head: str,
    layers: str,
    device: torch.device,
) -> VocabularyInFile:
    """Put modules that read their weights themselves in the places of embeddings and the head.

    Args:
        model: On the meta device, with our layers in it; changed in place.
        source: The checkpoint.
        jobs: Where each of its tensors goes.
        tied: Parameters that are another one.
        embedding: Path of the embedding of the tokens.
        head: Path of the output head; "" if there is none that is known.
        layers: Path of the list of layers: what lies in them is not looked at.
        device: Where the model runs.
    """
    known = _Known(model, source, jobs, device)
    found: dict[str, nn.Module] = {}
    pair = {embedding, head}
    partners = {frozenset(name.rpartition(".")[0] for name in names) for names in tied.items()}
    is_tied = pair in partners
    if all(partner == pair or not partner & pair for partner in partners):
        found = known.ends(embedding, head, is_tied=is_tied)
    elsewhere = {path for partner in partners for path in partner} | pair
    for path, module in model.named_modules():
        is_other = isinstance(module, nn.Embedding) and path not in elsewhere
        if is_other and not path.startswith(f"{layers}.") and _size(module) >= _LARGE:
            ours = known.embedding(path, known.weight(path))
            found |= {} if ours is None else {path: ours}
    for path, module in found.items():
        put(model, path, module)
    return VocabularyInFile(tuple(found), is_tied and embedding in found and head in found)


def _size(module: nn.Module) -> int:
    return _number(module, "num_embeddings") * _number(module, "embedding_dim")


def _number(module: nn.Module, name: str) -> int:
    return int(getattr(module, name, 0))


class _Known:
    """What is known of the weights of a model's modules."""

    def __init__(
        self,
        model: TransformersModel,
        source: Source,
        jobs: Sequence[Job],
        device: torch.device,
    ) -> None:
        self._model, self._source, self._device = model, source, device
        self._jobs: dict[str, list[Job]] = {}
        self._modules: dict[str, set[str]] = {}  # that each tensor goes to
        for job in jobs:
            self._jobs.setdefault(job.target.module, []).append(job)
            self._modules.setdefault(job.name, set()).add(job.target.module)

    def ends(self, embedding: str, head: str, *, is_tied: bool) -> dict[str, nn.Module]:
        """Return what stands for embedding and head; neither if they are one and one cannot be."""
        weights = {path: self.weight(path) for path in (embedding, head) if path}
        one, two = weights[embedding], weights.get(head)
        if is_tied and (one is None or two is None):
            only = one or two
            alone = head if one is not None else embedding
            if only is None or self._jobs.get(alone):
                return {}
            one = two = only
        elif is_tied and one is not None and two is not None and not one.equals(two):
            return {}  # the checkpoint unties them: that is told where they are loaded
        found = {embedding: self.embedding(embedding, one)}
        if head:
            found[head] = self.head(head, two, is_tied=is_tied)
        if is_tied and None in found.values():
            return {}
        return {path: module for path, module in found.items() if module is not None}

    def weight(self, path: str) -> StoredWeight | None:
        """Return the matrix of a module, if it is one weight of the checkpoint as it is."""
        jobs = [job for job in self._jobs.get(path, []) if job.target.leaf == "weight"]
        if len(jobs) != 1 or jobs[0].weight is None or not jobs[0].weight.is_matrix:
            return None
        job, target = jobs[0], jobs[0].target
        is_cut = (target.cut, target.join, target.piece) != (None, None, None)
        if is_cut or job.slots != 1 or self._modules[job.name] != {path}:
            return None
        return StoredWeight(self._source, jobs[0].weight)

    def embedding(self, path: str, stored: StoredWeight | None) -> nn.Module | None:
        """Return an embedding that reads the rows that it is asked for, or None."""
        module = self._model.get_submodule(path)
        if stored is None or not isinstance(module, nn.Embedding):
            return None
        if stored.weight.shape != (module.num_embeddings, module.embedding_dim):
            return None
        ours = module
        if not isinstance(module, VocabParallelEmbedding):
            try:
                ours = embedding_like(module, dtype=module.weight.dtype, prefix=path)
            except ConfigError:  # it looks rows up in its own way
                return None
        assert isinstance(ours, VocabParallelEmbedding), "made by `embedding_like`"
        ours.table = ReadTable(stored.read, stored.weight.shape, self._device)
        return ours

    def head(self, path: str, stored: StoredWeight | None, *, is_tied: bool) -> nn.Module | None:
        """Return a head that reads its rows, or None."""
        module = self._model.get_submodule(path)
        is_ours = isinstance(module, QuantLinear)
        if stored is None or not (is_ours or is_plain_linear(module)):
            return None
        if stored.weight.shape != tuple(
            _number(module, n) for n in ("out_features", "in_features")
        ):
            return None
        others = [job for job in self._jobs.get(path, []) if job.target.leaf != "weight"]
        if any(job.target.leaf != "bias" or job.target.cut or job.weight for job in others):
            return None
        dtype, scheme = _kind_of(module)
        if is_tied and isinstance(module, ParallelLMHead):
            scheme = replace(scheme, input=None)  # rows of an embedding meet inputs as they are
        biases = [self._source.read_plain(job.name).to(self._device, dtype) for job in others]
        if len(biases) != int(getattr(module, "has_bias", _bias_of(module) is not None)):
            return None
        return HeadInFile(
            stored,
            bias=biases[0] if biases else None,
            scheme=scheme,
            dtype=dtype,
            device=self._device,
            prefix=path,
        )


def _bias_of(module: nn.Module) -> object:
    return getattr(module, "bias", None)


def _kind_of(module: nn.Module) -> tuple[torch.dtype, Scheme]:
    if isinstance(module, QuantLinear):
        return module.dtype, module.scheme
    weight = module.weight
    assert isinstance(weight, Tensor), "a linear layer has a weight"
    return weight.dtype, DENSE


__all__ = ["CHUNK_ELEMENTS", "HeadInFile", "StoredWeight", "VocabularyInFile", "leave_in_file"]
