"""Standard errors of the end metrics, against repeating the measurement."""

from __future__ import annotations

import math

import pytest
import torch

from quantload.accuracy.end_metrics import EndMetrics


def metrics(kl, confidence=None):
    return EndMetrics(kl=kl, same_top1=torch.ones(len(kl), dtype=torch.bool), confidence=confidence)


@pytest.mark.parametrize(("fraction", "count"), [(0.5, 500), (0.99, 2000), (0.999, 8000)])
def test_standard_error_of_a_quantile_is_its_spread_over_repeats(fraction, count):
    """Oracle: the quantiles of 400 fresh samples of the same distribution."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(400, count, generator=generator, dtype=torch.float64).exp()
    spread = float(torch.quantile(samples, fraction, dim=1).std())
    errors = [metrics(sample).kl_quantile_standard_error(fraction) for sample in samples]
    assert sum(errors) / len(errors) == pytest.approx(spread, rel=0.2)


def test_too_few_positions_say_nothing_of_a_high_quantile():
    assert math.isnan(metrics(torch.rand(100).double()).kl_quantile_standard_error(0.99))
    assert math.isnan(metrics(torch.rand(3).double()).kl_quantile_standard_error(0.5))


def test_means_by_confidence_have_standard_errors():
    kl = torch.tensor([1.0, 2.0, 4.0, 5.0]).double()
    parts = metrics(kl, torch.tensor([0.1, 0.1, 0.1, 0.95]).double()).by_confidence()
    assert [part.positions for part in parts] == [3, 0, 0, 0, 1]
    assert parts[0].mean == pytest.approx(7 / 3)
    assert parts[0].standard_error == pytest.approx(math.sqrt(7 / 3 / 3))  # variance of n - 1
    assert math.isnan(parts[1].mean)
    assert math.isnan(parts[4].standard_error)
