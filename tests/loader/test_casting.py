"""Casts of what stays in full precision."""

import math

import pytest
import torch

from quantload.errors import NonFiniteWeight, NotLossless
from quantload.loader.casting import cast, refuse_rounding

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2]
# Largest finite values, by the definitions of the formats.
LARGEST = {
    torch.float64: math.ldexp(2 - 2**-52, 1023),
    torch.float32: math.ldexp(2 - 2**-23, 127),
    torch.bfloat16: math.ldexp(2 - 2**-7, 127),
    torch.float16: 65504.0,
    torch.float8_e5m2: 57344.0,
}


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_values_that_fit(source, target):
    largest = math.ldexp(1, math.frexp(min(LARGEST[source], LARGEST[target]))[1] - 1)
    tensor = torch.tensor([0.0, -1.5, largest, -largest], dtype=torch.float64).to(source)
    for odd in (math.nan, math.inf, -math.inf):  # no overflow: the source has it
        found = cast(torch.cat([tensor, torch.tensor([odd]).to(source)]), target, "x")
        assert found.dtype == target
        assert found[:4].double().tolist() == tensor.double().tolist()
        assert torch.equal(found[4:].isnan(), torch.tensor([math.isnan(odd)]))


@pytest.mark.parametrize(
    ("source", "target"),
    [(s, t) for s in FLOATS for t in FLOATS if LARGEST[s] > LARGEST[t]],
)
def test_values_that_overflow(source, target):
    tensor = torch.tensor([1.0, -LARGEST[source], math.inf], dtype=torch.float64).to(source)
    with pytest.raises(NonFiniteWeight) as caught:
        cast(tensor, target, "model.norm")
    text = f"1 values of `model.norm` do not fit into `{target}`, the source has `{source}`"
    assert f"{text}, largest `{LARGEST[source]:.4g}`" in str(caught.value)


def test_what_needs_no_cast_is_not_copied():
    tensor = torch.ones(3)
    assert cast(tensor, torch.float32, "x") is tensor
    assert cast(torch.ones(2, dtype=torch.int64), torch.float32, "x").tolist() == [1.0, 1.0]


def test_rounding_is_refused():
    tensor = torch.tensor([1.0, 1.00390625, math.nan, math.inf, -0.0])  # 1 + 2^-8: 9 bits
    rounded = tensor.to(torch.bfloat16)
    with pytest.raises(NotLossless) as caught:
        refuse_rounding(tensor, rounded, "w")
    assert "1 of 5 values of `w` would change" in str(caught.value)
    assert "use `--dtype float32`" in str(caught.value)
    exact = torch.tensor([1.0, 1.5, math.nan, math.inf, -0.0])
    assert refuse_rounding(exact, exact.to(torch.bfloat16), "w") is None
