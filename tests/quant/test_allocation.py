"""The knapsack against trying everything."""

import itertools
import random

import pytest

from quantload.errors import ConfigError
from quantload.quant.allocation import Option, allocate, budget_curve


def random_groups(seed, count=6):
    rng = random.Random(seed)
    return {
        f"g{number}": [
            Option(scheme="a", bits=4 * size, cost=rng.uniform(1, 9)),
            Option(scheme="b", bits=6 * size, cost=rng.uniform(0.3, 5)),
            Option(scheme="c", bits=8 * size, cost=rng.uniform(0, 1)),
        ]
        for number, size in enumerate(rng.choices([1, 2, 5], k=count))
    }


def best(groups, budget):
    found = [
        combination
        for combination in itertools.product(*groups.values())
        if sum(option.bits for option in combination) <= budget
    ]
    return min(sum(option.cost for option in combination) for combination in found)


@pytest.mark.parametrize("seed", range(30))
def test_the_best_within_the_budget(seed):
    groups = random_groups(seed)
    smallest = sum(options[0].bits for options in groups.values())
    largest = sum(options[-1].bits for options in groups.values())
    for part in (0.0, 0.2, 0.5, 0.8, 1.0):
        budget = smallest + part * (largest - smallest)
        chosen = allocate(groups, budget)
        assert set(chosen) == set(groups)
        assert sum(option.bits for option in chosen.values()) <= budget
        cost = sum(option.cost for option in chosen.values())
        assert cost == pytest.approx(best(groups, budget), rel=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_sizes_without_a_common_divisor(seed):
    """They are rounded up by at most a 65,536th of what is shared out."""
    rng = random.Random(seed)
    groups = {
        name: [
            Option(scheme=o.scheme, bits=o.bits * 1e7 + rng.randrange(10**5), cost=o.cost)
            for o in options
        ]
        for name, options in random_groups(seed).items()
    }
    budget = sum(options[1].bits for options in groups.values())
    chosen = allocate(groups, budget)
    assert sum(option.bits for option in chosen.values()) <= budget
    cost = sum(option.cost for option in chosen.values())
    assert best(groups, budget) <= cost <= best(groups, budget * (1 - 1e-3))


def test_all_of_the_budget_takes_the_best_of_each():
    groups = random_groups(3)
    chosen = allocate(groups, 1e9)
    for name, options in groups.items():
        assert chosen[name].cost == min(option.cost for option in options)


def test_an_option_that_costs_more_bits_for_less_is_never_taken():
    groups = {
        "x": [
            Option(scheme="small", bits=4, cost=1.0),
            Option(scheme="worse", bits=8, cost=2.0),
        ]
    }
    assert allocate(groups, 100)["x"].scheme == "small"


def test_too_small_a_budget():
    with pytest.raises(ConfigError, match="smallest schemes take 24"):
        allocate({"x": [Option(scheme="a", bits=24, cost=1.0)]}, 23)


def test_equal_inputs_give_equal_results_in_any_order():
    groups = {
        f"g{n}": [Option(scheme="a", bits=4, cost=2.0), Option(scheme="b", bits=8, cost=1.0)]
        for n in range(5)
    }
    chosen = allocate(groups, 5 * 4 + 8)
    turned = allocate(dict(reversed(groups.items())), 5 * 4 + 8)
    assert chosen == turned
    assert [name for name in sorted(chosen) if chosen[name].scheme == "b"] == ["g0", "g1"]


@pytest.mark.parametrize("seed", range(5))
def test_the_curve_is_what_each_of_its_budgets_gives(seed):
    groups = random_groups(seed)
    curve = budget_curve(groups)
    assert [bits for bits, _ in curve] == sorted({bits for bits, _ in curve})
    slopes = [(c - d) / (e - b) for (b, c), (e, d) in itertools.pairwise(curve)]
    assert slopes == sorted(slopes, reverse=True)  # convex: what gains most for a bit comes first
    for bits, cost in curve:
        chosen = allocate(groups, bits + 1e-9)
        assert sum(option.cost for option in chosen.values()) == pytest.approx(cost)
        assert best(groups, bits + 1e-9) == pytest.approx(cost)  # optimal where spent exactly
