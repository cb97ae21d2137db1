"""Attention on plain tensors, against its definition in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from quantload.errors import ShapeError
from quantload.layers import attend as module
from quantload.layers.attend import Rule, attend, sequence_lengths, weigh


def tensors(
    *, heads: int = 6, kv: int = 2, rows: int = 7, columns: int = 7, value: int = 8, batch: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(batch, heads, rows, 8),
        torch.randn(batch, kv, columns, 8),
        torch.randn(batch, kv, columns, value),
    )


def by_definition(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float | None = None,
    is_causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    batch, heads, rows, width = query.shape
    columns, share = key.shape[2], heads // key.shape[1]
    output = torch.zeros(batch, heads, rows, value.shape[-1], dtype=torch.float64)
    full = None if mask is None else mask.expand(batch, heads, rows, columns)
    for b in range(batch):
        for h in range(heads):
            for t in range(rows):
                place, weights = columns - rows + t, {}
                for s in range(columns):
                    far = sliding_window is not None and abs(place - s) >= sliding_window
                    if far or (is_causal and s > place):
                        continue
                    score = float(query[b, h, t].double() @ key[b, h // share, s].double())
                    score *= width**-0.5 if scaling is None else scaling
                    score = score if softcap is None else softcap * math.tanh(score / softcap)
                    if full is not None and full.dtype == torch.bool:
                        if not full[b, h, t, s]:
                            continue
                    elif full is not None:
                        score += float(full[b, h, t, s])
                    weights[s] = math.exp(score)
                total = sum(weights.values()) + (0 if sinks is None else math.exp(sinks[h]))
                for s, weight in weights.items():
                    output[b, h, t] += weight / total * value[b, h // share, s].double()
    return output


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found.double() - expected).norm() <= 1e-6 * expected.norm())


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0, 3.0, -4.0])
FEATURES = {
    "plain": {},
    "not causal": {"is_causal": False},
    "scaling": {"scaling": 0.7},
    "window": {"sliding_window": 3},
    "window, not causal": {"sliding_window": 3, "is_causal": False},
    "wide window": {"sliding_window": 7},
    "softcap": {"softcap": 0.8},
    "sinks": {"sinks": SINKS},
    "all": {"sinks": SINKS, "softcap": 2.0, "sliding_window": 2, "scaling": 0.3},
}


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("shape", [{}, {"rows": 3}, {"rows": 1}, {"kv": 6}, {"value": 5}], ids=str)
def test_each_feature_is_its_definition(features: dict[str, object], shape: dict[str, int]) -> None:
    query, key, value = tensors(**shape)
    expected = by_definition(query, key, value, **features)  # type: ignore[arg-type]
    assert close(attend(query, key, value, **features), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("heads", [1, 6])
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("rows", [1, 4])
def test_masks_of_both_kinds(softcap: float | None, heads: int, additive: bool, rows: int) -> None:
    query, key, value = tensors(rows=rows)
    mask = torch.rand(2, heads, rows, 7) > 0.3
    mask[..., 0] = True
    given = torch.where(mask, torch.randn(2, heads, rows, 7), -1e30) if additive else mask
    options = {"softcap": softcap, "mask": given, "sliding_window": 9}
    assert close(attend(query, key, value, **options), by_definition(query, key, value, **options))


def test_a_value_may_be_wider_than_the_key() -> None:
    query, key, value = tensors(value=12)
    assert close(attend(query, key, value), by_definition(query, key, value))


@pytest.mark.parametrize("features", [{}, {"sliding_window": 2}, {"softcap": 1.0, "sinks": SINKS}])
def test_flattened_sequences_do_not_see_each_other(features: dict[str, object]) -> None:
    query, key, value = (x[0].transpose(0, 1) for x in tensors(batch=1, rows=9, columns=9))
    lengths, positions = [4, 1, 4], torch.tensor([0, 1, 2, 3, 0, 7, 8, 9, 10])
    expected, start = [], 0
    for length in lengths:
        part = slice(start, start + length)
        one = [x[part].transpose(0, 1)[None] for x in (query, key, value)]
        expected.append(by_definition(*one, **features)[0].transpose(0, 1))  # type: ignore[arg-type]
        start += length
    assert sequence_lengths(positions) == lengths
    by_lengths = attend(query, key, value, lengths=lengths, **features)  # type: ignore[arg-type]
    by_positions = attend(query, key, value, positions=positions, **features)  # type: ignore[arg-type]
    assert close(by_lengths, torch.cat(expected))
    assert torch.equal(by_lengths, by_positions)


def test_flattened_queries_at_the_end_of_their_keys() -> None:
    query, key, value = tensors(batch=1, rows=3, columns=9)
    flat = (x[0].transpose(0, 1) for x in (query, key, value))
    found = attend(*flat, lengths=[1, 2], key_lengths=[4, 5])
    one = by_definition(query[:, :, :1], key[:, :, :4], value[:, :, :4])
    two = by_definition(query[:, :, 1:], key[:, :, 4:], value[:, :, 4:])
    assert close(found, torch.cat([one, two], dim=2)[0].transpose(0, 1))


@pytest.mark.parametrize("sinks", [SINKS, torch.randn(2, 6, 7, 1)], ids=["head", "query"])
def test_slices_of_queries_give_the_same(sinks: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = tensors()
    rule = Rule(sinks=sinks, mask=torch.rand(2, 1, 7, 7) > 0.2, bias=torch.randn(1, 6, 7, 7))
    whole = weigh(query, key, value, rule, with_weights=True)
    monkeypatch.setattr(module, "_SCORES", 2 * 2 * 6 * 7)  # two queries at once
    sliced = weigh(query, key, value, rule, with_weights=True)
    assert torch.allclose(whole[0], sliced[0], atol=1e-6)
    assert torch.allclose(whole[1], sliced[1], atol=1e-6)


def test_weights_sum_to_one_without_sinks() -> None:
    query, key, value = tensors()
    output, weights = weigh(query, key, value, Rule(), with_weights=True)
    assert weights is not None
    assert torch.allclose(weights.sum(-1), torch.ones(2, 6, 7))
    assert close(output, by_definition(query, key, value))


def test_bfloat16_keeps_its_dtype_and_is_near() -> None:
    query, key, value = (x.bfloat16() for x in tensors())
    for options in ({}, {"softcap": 2.0, "sinks": SINKS.bfloat16()}):
        found = attend(query, key, value, **options)  # type: ignore[arg-type]
        expected = by_definition(query, key, value, **options)  # type: ignore[arg-type]
        assert found.dtype == torch.bfloat16
        assert (found.double() - expected).norm() <= 0.01 * expected.norm()


def test_compiles_without_a_break() -> None:
    query, key, value = tensors()
    for options in ({"sliding_window": 3}, {"softcap": 1.0, "sinks": SINKS}):
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        found = compiled(query, key, value, **options)
        assert close(found, by_definition(query, key, value, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.randn(2, 4, 7, 8)}, "KV dividing H"),
        ({"key": torch.randn(2, 2, 7, 9)}, "expected `\\[B, H, T, D\\]`"),
        ({"value": torch.randn(2, 2, 6, 8)}, "expected `\\[B, H, T, D\\]`"),
        ({"sinks": torch.zeros(3)}, "`3` sinks for `6` heads"),
        ({"mask": torch.ones(7, 7, dtype=torch.long)}, "dtype `torch.int64`"),
        ({"lengths": [7, 7]}, "expected them with flattened"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], message: str) -> None:
    query, key, value = tensors()
    given = {"query": query, "key": key, "value": value, **change}
    with pytest.raises(ShapeError, match=message):
        attend(**given)  # type: ignore[arg-type]


def test_lengths_that_do_not_fit_are_refused() -> None:
    query, key, value = (x[0].transpose(0, 1) for x in tensors())
    with pytest.raises(ShapeError, match="with sums `7` and `7`"):
        attend(query, key, value, lengths=[3, 3])
    with pytest.raises(ShapeError, match="without a mask"):
        attend(query, key, value, mask=torch.ones(7, 7, dtype=torch.bool))
