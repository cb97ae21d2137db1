"""Limits of users: how they are read, and what they hold a comparison to."""

from __future__ import annotations

import math

import pytest
import torch

from quantload.accuracy.compare import (
    TIERS,
    BlockComparison,
    LayerComparison,
    ModelComparison,
)
from quantload.accuracy.end_metrics import EndMetrics
from quantload.accuracy.limits import STATISTICS, checked_tier, parse_limit, with_limits
from quantload.accuracy.router_overlap import RouterOverlap
from quantload.accuracy.weight_rounding import Rounding
from quantload.errors import ConfigError
from quantload.quant.metrics import ErrorSums


def sums(relative):
    return ErrorSums(noise=relative**2, signal=1.0, count=1)


def layer(module, weight, output=None, **more):
    return LayerComparison(
        module=module,
        reference="BF16",
        candidate="W4A16",
        weight=sums(weight),
        output=None if output is None else sums(output),
        **more,
    )


@pytest.fixture
def comparison():
    rounding = Rounding(
        beyond=0, max_steps=0.5, block_excess=1.0, row_excess=1.0, bias=-0.02, rail_share=0.1
    )
    return ModelComparison(
        layers=(
            layer("a", 0.1, 0.05, rounding=rounding, output_median=0.04, worst_row_error=0.3),
            layer("b", 0.2, 0.9, output_median=0.8),
            layer("c", 0.6),
        ),
        few=("b",),
        blocks=(
            BlockComparison(
                path="block",
                injected=sums(0.5),
                propagated=sums(0.6),
                injected_median=0.01,
                propagated_median=0.02,
            ),
        ),
        routers={"mlp": RouterOverlap(tokens=4, chosen=8, shared=6)},
        end=EndMetrics(
            kl=torch.arange(5, dtype=torch.float64),
            same_top1=torch.tensor([True, True, True, False, True]),
            loss_change=torch.tensor([0.1, 0.3], dtype=torch.float64),
        ),
        tier="end",
    )


def found(comparison, limit):
    held = with_limits(comparison, [parse_limit(limit)])
    return {one.where: one.value for one in held.exceeded}


def decibel(relative):
    return pytest.approx(-20 * math.log10(relative))


def test_statistics_of_layers(comparison):
    assert found(comparison, "weight.sqnr<15") == {"b": decibel(0.2), "c": decibel(0.6)}
    assert found(comparison, "weight.relative>0.2") == {"c": pytest.approx(0.6)}
    # too few tokens reached b for a number of its output: its weight stands for it
    assert found(comparison, "layer.sqnr<15") == {"b": decibel(0.2), "c": decibel(0.6)}
    assert found(comparison, "layer.sqnr<27") == {
        "a": decibel(0.05),
        "b": decibel(0.2),
        "c": decibel(0.6),
    }
    assert found(comparison, "output.sqnr<27") == {"a": decibel(0.05)}
    assert found(comparison, "output.median>3%") == {"a": 0.04}
    mean = sum(-20 * math.log10(x) for x in (0.1, 0.2, 0.6)) / 3
    assert list(found(comparison, f"weight.sqnr_mean<{mean + 0.01}").values()) == [
        pytest.approx(mean)
    ]
    assert found(comparison, f"weight.sqnr_mean<{mean - 0.01}") == {}
    assert found(comparison, "weight.worst_row>0.25") == {"a": 0.3}
    assert found(comparison, "weight.bias>0.01") == {"a": 0.02}
    assert found(comparison, "weight.rails>5%") == {"a": 0.1}
    assert found(comparison, "weight.steps>0.49") == {"a": 0.5}
    assert found(comparison, "weight.steps>0.5") == {}


def test_statistics_of_blocks_and_of_the_end(comparison):
    assert found(comparison, "block.injected>0.005") == {"block": 0.01}
    assert found(comparison, "block.propagated>0.02") == {}
    assert found(comparison, "router.overlap<80%") == {"mlp": 0.75}
    for name, value in (("mean", 2), ("median", 2), ("p99", 3.96), ("p999", 3.996), ("max", 4)):
        assert found(comparison, f"kl.{name}>{value - 0.001}") == {"": pytest.approx(value)}
        assert found(comparison, f"kl.{name}>{value + 0.001}") == {}
    assert found(comparison, "top1<81%") == {"": pytest.approx(0.8)}
    assert found(comparison, "top1<0.79") == {}
    assert found(comparison, "ln_perplexity>0.1") == {"": pytest.approx(0.2)}


def test_what_is_not_a_number_fails():
    worthless = ModelComparison(layers=(layer("a", math.nan),))
    for limit in ("weight.sqnr<0", "weight.relative>1e9"):
        held = with_limits(worthless, [parse_limit(limit)])
        assert held.exceeded
        assert not held.passed


def test_limits_take_the_place_of_the_built_in_ones(comparison):
    assert not comparison.passed  # c is beyond 0.5
    held = with_limits(comparison, [parse_limit("weight.sqnr<4")])
    assert held.passed
    assert held.limits == ("weight.sqnr<4",)
    strict = with_limits(comparison, [parse_limit("weight.sqnr<5"), parse_limit("kl.mean > 1.5")])
    assert strict.failures == ("`c`: `weight.sqnr<5`: 4.437", "`kl.mean > 1.5`: 2")
    assert not strict.passed
    many = with_limits(comparison, [parse_limit("weight.sqnr<30")])
    assert [one.where for one in many.exceeded] == ["c", "b", "a"]  # the worst first
    assert many.failures == ("`c`: `weight.sqnr<30`: 4.437, and 2 more",)
    assert with_limits(comparison, []) is comparison


def test_damage_fails_whatever_the_limits(comparison):
    damaged = ModelComparison(layers=(layer("a", 0.1, damage="noise of a block is 100 times"),))
    assert not with_limits(damaged, [parse_limit("weight.sqnr<1")]).passed
    lacking = ModelComparison(layers=(), only_in_reference=("x",))
    assert not with_limits(lacking, [parse_limit("weight.sqnr<1")]).passed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a limit: ``, expected a statistic, `<` or `>`, and a number"),
        ("layer.sqnr", "not a limit"),
        ("layer.sqnr<", "not a limit"),
        ("layer.sqnr<1.2.3", "not a limit"),
        ("layer.sqnr<15 dB", "not a limit"),
        ("layer.sqnr<=15", "not a limit"),
        ("layer.sqnr<inf", "not a limit"),
        ("layer.sqnr<15,kl.mean>1", "not a limit"),
        ("kl<0.1", "there is no statistic `kl`, in the limit `kl<0.1`; expected one of `bits`"),
        ("kl.mean<0.05", "would fail what is good, expected `kl.mean>NUMBER`"),
        ("top1>90%", "would fail what is good, expected `top1<NUMBER`"),
    ],
)
def test_bad_limits(text, message):
    with pytest.raises(ConfigError) as error:
        parse_limit(text)
    assert message in str(error.value)


def test_unknown_names_list_all_that_are_known():
    with pytest.raises(ConfigError) as error:
        parse_limit("nothing<1")
    assert all(f"`{name}`" in str(error.value) for name in STATISTICS)


def test_tiers():
    def tier(asked, *limits, has_tokens=False):
        return checked_tier(asked, map(parse_limit, limits), has_tokens=has_tokens)

    assert TIERS == ("structure", "weights", "layers", "end")
    assert tier(None) == "weights"
    assert tier(None, "kl.mean>1", has_tokens=True) == "end"
    assert tier("structure", "bits>5") == "structure"
    assert tier("layers", "output.sqnr<9", has_tokens=True) == "layers"
    with pytest.raises(ConfigError, match="needs tier `end`, only `weights`") as error:
        tier(None, "kl.mean>1")
    assert "--generated" in str(error.value)
    with pytest.raises(ConfigError, match="needs tier `end`, only `layers`"):
        tier("layers", "kl.mean>1", has_tokens=True)
    with pytest.raises(ConfigError, match="there are no tokens"):
        tier("end")
    with pytest.raises(ConfigError, match="there is no tier `all`, expected one of `end`"):
        tier("all")


def test_a_statistic_that_was_not_measured_never_passes():
    bare = ModelComparison(layers=(), tier="end")
    with pytest.raises(ConfigError, match=r"no `kl\.mean` was measured"):
        with_limits(bare, [parse_limit("kl.mean>1")])
