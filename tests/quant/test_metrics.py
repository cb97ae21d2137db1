"""Metrics against float64 NumPy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantload.quant import metrics
from quantload.quant.metrics import ErrorSums, error_sums, kl_divergence

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
ROUNDING = 1e-13  # float64 sums of a few thousand terms in another order


def as_float64(tensor):
    return np.array(tensor.tolist(), dtype=np.float64)


@pytest.mark.parametrize("candidate_dtype", DTYPES)
@pytest.mark.parametrize("reference_dtype", DTYPES)
def test_sums_equal_numpy(candidate_dtype, reference_dtype):
    reference = torch.randn(30, 40).to(reference_dtype)
    candidate = (reference.to(torch.float32) + torch.randn(30, 40) / 10).to(candidate_dtype)
    sums = error_sums(candidate, reference)
    difference = as_float64(candidate) - as_float64(reference)
    noise, signal = (difference**2).sum(), (as_float64(reference) ** 2).sum()
    assert sums.noise == pytest.approx(noise, rel=ROUNDING)
    assert sums.signal == pytest.approx(signal, rel=ROUNDING)
    assert sums.max_abs == np.abs(difference).max()
    assert (sums.count, sums.num_nonfinite) == (1200, 0)
    relative = np.linalg.norm(difference) / np.linalg.norm(as_float64(reference))
    assert sums.relative == pytest.approx(relative, rel=ROUNDING)
    assert sums.sqnr_db == pytest.approx(10 * np.log10(signal / noise), rel=ROUNDING)


def test_exact_numbers():
    sums = error_sums(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
    assert sums == ErrorSums(noise=0.25, signal=25.0, max_abs=0.5, count=2)
    assert sums.relative == 0.1
    assert sums.sqnr_db == 20.0


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_sums_of_parts_add_up_to_the_sums_of_the_whole(sizes, seed):
    random = np.random.default_rng(seed)
    candidate, reference = (torch.from_numpy(random.standard_normal(sum(sizes))) for _ in range(2))
    candidate[random.integers(len(candidate))] = random.choice([np.nan, np.inf, 0.0, 1.0])
    merged = ErrorSums()
    pairs = zip(candidate.split(sizes), reference.split(sizes), strict=True)
    for part, of_reference in pairs:
        merged = merged + error_sums(part, of_reference)
    whole = error_sums(candidate, reference)
    assert (merged.count, merged.num_nonfinite) == (whole.count, whole.num_nonfinite)
    assert merged.max_abs == pytest.approx(whole.max_abs, rel=0, abs=0, nan_ok=True)
    assert merged.noise == pytest.approx(whole.noise, rel=ROUNDING, nan_ok=True)
    assert merged.signal == pytest.approx(whole.signal, rel=ROUNDING)


def test_the_order_of_merging_does_not_matter_where_there_is_nan():
    clean, broken = ErrorSums(max_abs=1.0), ErrorSums(max_abs=math.nan)
    assert math.isnan((clean + broken).max_abs)
    assert math.isnan((broken + clean).max_abs)


def test_chunks_do_not_show(monkeypatch):
    candidate, reference = torch.randn(2, 103, 7).unbind()
    whole = error_sums(candidate, reference)
    monkeypatch.setattr(metrics, "_CHUNK", 100)
    chunked = error_sums(candidate, reference)
    assert (chunked.count, chunked.max_abs) == (whole.count, whole.max_abs)
    assert chunked.noise == pytest.approx(whole.noise, rel=ROUNDING)
    assert chunked.signal == pytest.approx(whole.signal, rel=ROUNDING)


def test_strides_do_not_matter():
    candidate, reference = torch.randn(2, 6, 8).unbind()
    turned = error_sums(candidate.t(), reference.t().contiguous())
    assert turned.relative == pytest.approx(error_sums(candidate, reference).relative, rel=ROUNDING)


def test_an_exact_match():
    x = torch.randn(5, 5)
    sums = error_sums(x, x.clone())
    assert (sums.noise, sums.max_abs, sums.relative, sums.sqnr_db) == (0.0, 0.0, 0.0, math.inf)


def test_a_zero_reference():
    zero = torch.zeros(4)
    assert error_sums(zero, zero).relative == 0.0
    assert error_sums(-zero, zero).relative == 0.0
    missed = error_sums(torch.ones(4), zero)
    assert (missed.relative, missed.sqnr_db) == (math.inf, -math.inf)


def test_nothing_to_compare():
    assert error_sums(torch.zeros(0, 3), torch.zeros(0, 3)) == ErrorSums()
    assert ErrorSums().relative == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_candidate_that_is_not_finite(dtype, bad):
    candidate = torch.ones(10, dtype=dtype)
    candidate[3], candidate[4] = bad, bad
    sums = error_sums(candidate, torch.ones(10, dtype=dtype))
    assert sums.num_nonfinite == 2
    assert math.isnan(sums.relative)
    assert sums.sqnr_db == -math.inf


def test_what_only_float64_can_hold_is_finite():
    candidate = torch.tensor([1e100], dtype=torch.float64)
    assert error_sums(candidate, candidate).num_nonfinite == 0


def test_a_reference_that_is_not_finite_has_no_relative_error():
    sums = error_sums(torch.ones(2), torch.tensor([1.0, math.nan]))
    assert sums.num_nonfinite == 0
    assert math.isnan(sums.relative)
    assert sums.sqnr_db == -math.inf


def test_shapes_must_agree():
    with pytest.raises(AssertionError, match=r"torch.Size\(\[2\]\) against torch.Size\(\[1, 2\]\)"):
        error_sums(torch.ones(2), torch.ones(1, 2))


# -- KL ----------------------------------------------------------------------------------------


def direct_kl(reference, candidate):
    """sum_v p(v) log(p(v) / q(v)) of one token, with 0 log 0 = 0."""
    p, q = (np.exp(logits - logits.max()) for logits in (reference, candidate))
    p, q = p / p.sum(), q / q.sum()
    return sum(pv * math.log(pv / qv) for pv, qv in zip(p, q, strict=True) if pv > 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kl_equals_the_direct_sum(dtype):
    reference = (torch.randn(2, 3, 50) * 3).to(dtype)
    candidate = (reference.to(torch.float32) + torch.randn(2, 3, 50) / 4).to(dtype)
    divergence = kl_divergence(reference, candidate)
    assert divergence.dtype == torch.float64
    assert divergence.shape == (2, 3)
    tokens = (as_float64(logits).reshape(6, 50) for logits in (reference, candidate))
    expected = [direct_kl(*token) for token in zip(*tokens, strict=True)]
    assert divergence.reshape(-1).tolist() == pytest.approx(expected, rel=1e-11)


def test_kl_is_zero_for_equal_logits_and_does_not_see_a_shift():
    logits = torch.randn(4, 20, dtype=torch.float64)
    assert kl_divergence(logits, logits).tolist() == [0.0] * 4
    assert kl_divergence(logits, logits + 7).tolist() == pytest.approx([0.0] * 4, abs=1e-14)


def test_kl_has_a_direction():
    one = torch.log(torch.tensor([0.75, 0.25], dtype=torch.float64))
    other = torch.log(torch.tensor([0.5, 0.5], dtype=torch.float64))
    forward = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    backward = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(2.0)
    assert kl_divergence(one, other).item() == pytest.approx(forward, rel=ROUNDING)
    assert kl_divergence(other, one).item() == pytest.approx(backward, rel=ROUNDING)


def test_kl_where_the_reference_rules_something_out():
    reference = torch.tensor([0.0, 0.0, -math.inf])
    assert kl_divergence(reference, reference).item() == 0.0
    candidate = torch.tensor([0.0, 0.0, 0.0])
    assert kl_divergence(reference, candidate).item() == pytest.approx(math.log(1.5), rel=ROUNDING)


def test_kl_where_only_the_candidate_does():
    assert kl_divergence(torch.zeros(2), torch.tensor([0.0, -math.inf])).item() == math.inf


def test_kl_of_very_unlikely_tokens():
    reference, candidate = torch.tensor([0.0, -2000.0]), torch.tensor([0.0, -3000.0])
    assert kl_divergence(reference, candidate).item() == 0.0


@pytest.mark.parametrize("which", [0, 1])
def test_kl_shows_nan(which):
    logits = [torch.zeros(1, 3), torch.zeros(1, 3)]
    logits[which][0, 1] = math.nan
    assert kl_divergence(*logits).isnan().all()
