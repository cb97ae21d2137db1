"""Embeddings and heads whose vocabulary lies in several ranks, against whole weights."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from thread_ranks import in_ranks
from torch import nn
from torch.nn.functional import linear
from whole_weights import CPU, assert_close, fill, scheme_named, values, whole_weight

from quantload.errors import ConfigError, ModelError, ShapeError
from quantload.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from quantload.layers.embedding_like import embedding_like
from quantload.layers.lazy_weight import lazy_weight
from quantload.quant.region import Region
from quantload.quant.scheme import parse_scheme
from quantload.runtime.parallel import Parallel

RANKS = (1, 2, 4, 8)
SCHEMES = ("dense", "W4A16:g32", "act-order", "W4A16_ASYM:g32", "FP8_BLOCK", "NVFP4", "W8A16:g128")
# 300 is no multiple of 8 or of a block; of 9 rows four ranks of eight hold two, one holds one,
# the others none
VOCABULARIES = (300, 9)


def tokens(total: int) -> torch.Tensor:
    return torch.cat([torch.arange(total), torch.randint(total, (1,))]).reshape(1, -1)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("total", VOCABULARIES)
def test_lookups(total: int, name: str) -> None:
    weight, ids = whole_weight(total, 128, name), tokens(total)
    expected = nn.functional.embedding(ids, values(weight))

    def work(parallel: Parallel) -> torch.Tensor:
        made = VocabParallelEmbedding(
            total, 128, parallel=parallel, dtype=torch.float32, prefix="embed"
        )
        return fill(made, {("weight", 0): weight})(ids)

    for size in RANKS:
        for found in in_ranks(size, work):
            assert torch.equal(found, expected)  # the very values of the whole weight


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("total", VOCABULARIES)
@pytest.mark.parametrize("is_tied", [False, True])
def test_logits(is_tied: bool, total: int, name: str) -> None:
    weight, bias, x = whole_weight(total, 128, name), torch.randn(total), torch.randn(2, 3, 128)
    expected = linear(x, values(weight), bias)
    shared = {"scheme": replace(scheme_named(name), input=None), "dtype": torch.float32}

    def work(parallel: Parallel) -> tuple[torch.Tensor, torch.Tensor]:
        results = []
        for gather in (False, True):
            head = ParallelLMHead(
                total, 128, bias=True, gather_output=gather, parallel=parallel, **shared
            )
            if not is_tied:
                fill(head, {("weight", 0): weight, ("bias", 0): bias})
            else:
                embedding = VocabParallelEmbedding(total, 128, parallel=parallel, **shared)
                head.tie_weights(fill(embedding, {("weight", 0): weight}))
                region = head.region("bias", 0)
                if region is not None:
                    head.receive("bias", 0, region.of(bias))
                    head.finish(CPU)
                assert head.share_weight(embedding)
                assert head.gemm is embedding.table or head.out_features == 0
            results.append(head(x))
        return results[0], results[1]

    for size in RANKS:
        found = in_ranks(size, work)
        assert_close(torch.cat([part for part, _ in found], -1), expected)
        for _, whole in found:
            assert_close(whole, expected)


def test_heads_with_rounded_inputs() -> None:
    scheme, weight, x = parse_scheme("FP8_DYNAMIC"), whole_weight(30, 64, "FP8_DYNAMIC"), None
    x = torch.randn(3, 64)
    alone = fill(
        ParallelLMHead(30, 64, scheme=scheme, dtype=torch.float32), {("weight", 0): weight}
    )(x)
    assert not torch.allclose(alone, linear(x, values(weight)), rtol=1e-4)

    def work(parallel: Parallel) -> torch.Tensor:
        head = ParallelLMHead(30, 64, scheme=scheme, dtype=torch.float32, parallel=parallel)
        return fill(head, {("weight", 0): weight})(x)

    for found in in_ranks(4, work):
        assert_close(found, alone)


# -- one weight for both ---------------------------------------------------------------------------


def pair(*, parallel: Parallel | None = None) -> tuple[VocabParallelEmbedding, ParallelLMHead]:
    shared = {"dtype": torch.float32, "parallel": parallel}
    embedding = VocabParallelEmbedding(10, 32, prefix="embed", **shared)
    return embedding, ParallelLMHead(10, 32, prefix="head", **shared).tie_weights(embedding)


@pytest.mark.parametrize("name", ["dense", "W8A16:g32", "W4A16:g32"])
def test_the_checkpoint_may_have_either_or_both(name: str) -> None:
    weight, other = whole_weight(10, 32, name), whole_weight(10, 32, name, seed=1)
    x, ids = torch.randn(2, 32), torch.arange(10)
    for holders in (("embedding",), ("head",), ("embedding", "head")):
        embedding, head = pair()
        for holder in holders:
            fill(embedding if holder == "embedding" else head, {("weight", 0): weight})
        assert head.share_weight(embedding)
        assert head.gemm is embedding.table
        assert torch.equal(embedding(ids), values(weight))
        assert_close(head(x), linear(x, values(weight)))
        assert head.kernel.name.startswith("dense" if name == "dense" else "dequantize")
    embedding, head = pair()
    fill(embedding, {("weight", 0): weight})
    fill(head, {("weight", 0): other})
    assert not head.share_weight(embedding)
    assert torch.equal(embedding(ids), values(weight))
    assert_close(head(x), linear(x, values(other)))


def test_one_is_quantized_the_other_is_not() -> None:
    embedding, head = pair()
    fill(embedding, {("weight", 0): whole_weight(10, 32, "dense")})
    fill(head, {("weight", 0): whole_weight(10, 32, "W8A16:g32")})
    assert not head.share_weight(embedding)


def test_unlike_shapes_cannot_be_tied() -> None:
    head = ParallelLMHead(10, 32, prefix="head")
    with pytest.raises(ConfigError, match="head `head` cannot be tied to embedding `embed`"):
        head.tie_weights(VocabParallelEmbedding(11, 32, prefix="embed"))


# -- what code of models does with embeddings ------------------------------------------------------


class Scaled(nn.Embedding):
    """As those of Gemma, BART and others: rows times a constant."""

    def __init__(self, total: int, width: int, padding_idx: int, scale: float) -> None:
        super().__init__(total, width, padding_idx)
        self.scale = scale
        self.register_buffer("embed_scale", torch.tensor(scale), persistent=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids) * self.embed_scale.to(self.weight.dtype)


@pytest.mark.parametrize("name", ["dense", "W4A16:g32"])
def test_classes_that_scale_keep_their_forward(name: str) -> None:
    original = Scaled(10, 32, 3, math.sqrt(32)).to("meta")
    original.embed_scale = torch.tensor(math.sqrt(32))
    weight, ids = whole_weight(10, 32, name), tokens(10)
    expected = nn.functional.embedding(ids, values(weight)) * torch.tensor(math.sqrt(32))

    def work(parallel: Parallel) -> torch.Tensor:
        made = embedding_like(original, dtype=torch.float32, parallel=parallel, prefix="embed")
        assert isinstance(made, Scaled)
        assert isinstance(made, VocabParallelEmbedding)
        assert made.padding_idx == 3
        assert made.scale == math.sqrt(32)
        assert dict(made.named_buffers()).keys() == {"embed_scale"}
        assert not made.state_dict()
        return fill(made, {("weight", 0): weight})(ids)

    for size in (1, 4):
        for found in in_ranks(size, work):
            assert torch.equal(found, expected)


def test_plain_embeddings_become_plain() -> None:
    made = embedding_like(nn.Embedding(10, 32, device="meta"), dtype=torch.bfloat16, prefix="e")
    assert type(made) is VocabParallelEmbedding
    assert isinstance(made, nn.Embedding)
    assert not list(made.parameters())


class ReadsItsWeight(nn.Embedding):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(input_ids, self.weight)


class Shifts(nn.Embedding):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids + 1)


class Fails(nn.Embedding):
    def forward(self, input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids) * mask


class HasMore(nn.Embedding):
    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.gain = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (ReadsItsWeight, "does not look its tokens up by `super"),
        (Shifts, "does not look its tokens up by `super"),
        (Fails, "cannot be run on one token: TypeError"),
        (HasMore, "has `gain` beside its weight"),
    ],
)
def test_classes_that_cannot_be_split(kind, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        embedding_like(kind(10, 32), dtype=torch.float32, prefix="embed")
    with pytest.raises(ConfigError, match="renormalises"):
        embedding_like(nn.Embedding(10, 32, max_norm=1.0), dtype=torch.float32, prefix="embed")


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    weight = whole_weight(10, 32, "dense")

    def work(parallel: Parallel) -> None:
        made = VocabParallelEmbedding(10, 32, dtype=torch.float32, parallel=parallel, prefix="e")
        fill(made, {("weight", 0): weight})
        for wrong in (10, -1):
            with pytest.raises(ModelError, match=f"tokens from .*{wrong}.*, expected 0 to 9"):
                made(torch.tensor([wrong]))

    in_ranks(1, work)
    in_ranks(2, work)


def test_weights_of_quantized_tables_are_decoded_when_used() -> None:
    weight = whole_weight(10, 32, "W4A16:g32")
    made = VocabParallelEmbedding(10, 32, dtype=torch.bfloat16)
    assert made.weight.device.type == "meta"
    fill(made, {("weight", 0): weight})
    asked = []
    table = made.table
    assert table is not None
    original = table.weight_values
    table.weight_values = lambda dtype: asked.append(dtype) or original(dtype)
    found = made.weight
    assert (found.dtype, found.shape, found.device) == (torch.bfloat16, (10, 32), CPU)
    assert not asked
    assert torch.equal(found + 0, weight.dequantize(torch.bfloat16))
    assert asked == [torch.bfloat16]
    assert torch.equal(nn.functional.embedding(torch.arange(3), made.weight), (found + 0)[:3])


def test_lazy_weights_print_what_they_stand_for() -> None:
    found = lazy_weight(lambda: torch.ones(2), (2,), dtype=torch.float32, device=CPU)
    assert repr(found) == "tensor([1., 1.])"


def test_models_are_moved_and_cast() -> None:
    weight = whole_weight(10, 32, "FP8_BLOCK")
    for value in (weight, values(weight)):
        made = fill(VocabParallelEmbedding(10, 32, dtype=torch.float32), {("weight", 0): value})
        cast = copy.deepcopy(made).to(torch.bfloat16)
        found = cast(torch.arange(10))
        assert found.dtype == torch.bfloat16
        assert_close(found, values(weight), limit=4e-3)
        assert torch.equal(made(torch.arange(10)), values(weight))


def test_regions_of_the_vocabulary() -> None:
    made = [
        VocabParallelEmbedding(9, 4, parallel=Parallel(tp_rank=rank, tp_size=8)).region("weight", 0)
        for rank in range(8)
    ]
    assert made[0] == Region(rows=((0, 2),))
    assert made[4] == Region(rows=((8, 9),))
    assert made[5:] == [None] * 3
    with pytest.raises(ShapeError, match=r"shape `\(3, 4\)`, expected `\(9, 4\)`, module `e`"):
        VocabParallelEmbedding(9, 4, prefix="e").receive("weight", 0, torch.ones(3, 4))
