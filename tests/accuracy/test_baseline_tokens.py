"""Tokens that baselines are asked to keep."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantload.accuracy.baseline_tokens import tokens_of
from quantload.accuracy.statistics import ids_digest
from quantload.errors import ConfigError

IDS = ((1, 2, 3), (4, 5, 6))


@pytest.mark.parametrize(
    "given",
    [
        [[1, 2, 3], [], [4, 5, 6]],
        torch.tensor(IDS),
        [torch.tensor(IDS[0]), np.array(IDS[1], dtype=np.int16)],
        np.array(IDS),
        (iter(row) for row in IDS),
    ],
    ids=["lists", "tensor", "mixed", "array", "iterators"],
)
def test_integers_of_whatever_type(given):
    found = tokens_of(given)
    assert found is not None
    assert found.ids == IDS
    assert (found.count, found.sha256) == (6, ids_digest(IDS))
    assert all(type(one) is int for row in found.ids for one in row)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([1, 2, 3], "sequence 0 is `1`, expected a list"),
        (torch.tensor([1, 2]), "sequence 0 is `tensor(1)`, expected a list"),
        ([[3], [1.0, 2.0]], "sequence 1 holds `1.0`, expected token ids"),
        (torch.tensor([[1.5]]), "sequence 0 holds `tensor(1.5000)`, expected"),
        ([[1, -1]], "sequence 0 holds `-1`, expected"),
        ([[True]], "sequence 0 holds `True`, expected"),
        (["text"], "sequence 0 is `'text'`, expected a list"),
        ([["text"]], "sequence 0 holds `'text'`, expected"),
        ([[[1]]], "sequence 0 holds `[1]`, expected"),
        ("text", "tokens are `'text'`, expected a list of lists"),
        ({"ids": [[1]]}, "expected a list of lists"),
        (7, "tokens are `7`, expected a list of lists"),
        ([[], []], "no tokens in what was given"),
    ],
)
def test_what_is_none_is_refused(given, told):
    with pytest.raises(ConfigError) as caught:
        tokens_of(given)
    assert told in str(caught.value)


def test_no_sequences_are_no_tokens():
    assert tokens_of([]) is None
