"""Errors of rows, against NumPy."""

import math

import numpy as np
import pytest
import torch

from quantload.quant import compiled
from quantload.quant.metrics import error_sums
from quantload.quant.row_errors import row_errors


@pytest.fixture(params=[False, True], ids=["plain", "compiled"])
def way(request, monkeypatch):
    if request.param:
        compiled.start()
    else:
        monkeypatch.setattr(compiled, "is_ready", lambda elements: False)


def pair(dtype, other):
    generator = torch.Generator().manual_seed(5)
    one = torch.randn(37, 53, generator=generator)
    return one.to(dtype), (one + 0.1 * torch.randn(37, 53, generator=generator)).to(other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("other", [torch.bfloat16, torch.float32])
@pytest.mark.usefixtures("way")
def test_rows_are_those_of_numpy(dtype, other):
    reference, candidate = pair(dtype, other)
    found = row_errors(candidate, reference)
    wanted, got = (np.asarray(t.double()) for t in (reference, candidate))
    noise, signal = ((got - wanted) ** 2).sum(axis=1), (wanted**2).sum(axis=1)
    np.testing.assert_allclose(found.noise, noise, rtol=1e-12)
    np.testing.assert_allclose(found.signal, signal, rtol=1e-12)
    relative = np.sqrt(noise / signal)
    row, error = found.worst()
    assert (row, error) == (int(relative.argmax()), pytest.approx(relative.max(), rel=1e-12))
    sums = error_sums(candidate, reference)
    assert found.sums.sqnr_db == pytest.approx(sums.sqnr_db, abs=1e-9)
    assert found.sums.max_abs == sums.max_abs
    assert (found.sums.count, found.sums.num_nonfinite) == (37 * 53, 0)


@pytest.mark.usefixtures("way")
def test_rows_of_zeros_and_what_is_not_finite():
    reference = torch.ones(4, 8)
    reference[1] = 0
    candidate = reference.clone()
    assert row_errors(candidate, reference).worst()[1] == 0.0
    candidate[2] *= 1.5
    assert row_errors(candidate, reference).worst() == (2, 0.5)
    candidate[1, 3] = 1e-9
    assert row_errors(candidate, reference).worst() == (1, math.inf)
    candidate[0, 0] = math.nan
    found = row_errors(candidate, reference)
    assert found.worst() == (0, math.inf)
    assert found.sums.num_nonfinite == 1
    assert math.isnan(found.sums.relative)
