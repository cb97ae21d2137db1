"""Answers on the meta device are those of torch: shape, dtype and strides."""

from __future__ import annotations

import itertools

import pytest
import torch

from quantload.layers.quick_meta import QuickMeta, _answer

_aten = torch.ops.aten
DTYPES = (torch.bfloat16, torch.float32, torch.int64, torch.bool)


def tensors():
    for dtype in DTYPES:
        x = torch.empty(2, 3, 4, 8, dtype=dtype, device="meta")
        yield from (x, x.transpose(1, 2), x[..., ::2], x[:, :1], x[0, 0, 0], x[0, 0, 0, 0])
        yield x[:, :, :, :1].expand(2, 3, 4, 8)
        yield x.transpose(1, 2)[:, :, :1]


def described(value):
    return tuple(value.shape), value.dtype, value.stride(), value.device.type


def outcome(function, *args):
    try:
        return described(function(*args))
    except Exception as error:  # noqa: BLE001 - whatever torch raises
        return type(error).__name__


PAIRS = [*itertools.product(list(tensors()), [*tensors(), 2, 0.5, True])]


@pytest.mark.parametrize("operation", ["mul", "add", "sub", "div"])
def test_two(operation):
    function, known = getattr(torch, operation), 0
    for one, two in PAIRS:
        expected = outcome(function, one, two)
        with QuickMeta():
            assert outcome(function, one, two) == expected, (described(one), two)
        known += _answer(getattr(_aten, operation).Tensor, (one, two)) is not None
    assert known >= 40


@pytest.mark.parametrize(
    "function",
    [
        *(torch.neg, torch.rsqrt, torch.nn.functional.silu, torch.sigmoid, torch.cos, torch.sin),
        *(torch.exp, torch.tanh, torch.relu, lambda x: x.pow(2), lambda x: x.pow(0.5)),
    ],
)
def test_one(function):
    for x in tensors():
        expected = outcome(function, x)
        with QuickMeta():
            assert outcome(function, x) == expected, described(x)


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dims", [-1, (0,), (1, -1), (0, 1, 2, 3), ()])
def test_mean(dims, keepdim):
    for x in tensors():
        expected = outcome(lambda x: x.mean(dims, keepdim=keepdim), x)
        with QuickMeta():
            found = outcome(lambda x: x.mean(dims, keepdim=keepdim), x)
        assert found == expected, described(x)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_cat(dim):
    for one, two in itertools.product(list(tensors()), list(tensors())):
        expected = outcome(torch.cat, (one, two), dim)
        with QuickMeta():
            assert outcome(torch.cat, (one, two), dim) == expected, (one.shape, two.shape)


def test_values_stay_values():
    x = torch.arange(4.0)
    with QuickMeta():
        assert torch.equal(x * 2 + x, torch.arange(4.0) * 3)
