"""Plans of nibble products: entries of tables, what is searched, and rules without a table."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

H200 = {"has_copy_engine": True, "processors": 132}
BF16, INT16 = torch.bfloat16, torch.int16


def test_a_plan_is_an_entry_of_a_table_and_back():
    from quantload.runtime.kernels.nibble_plan import Plan

    for plan in (Plan("dense"), Plan("mid", rows=128, after=False), Plan("decode", tma=True)):
        assert Plan.from_settings(plan.settings()) == plan


@pytest.mark.parametrize("m", [1, 8, 16, 40, 300])
def test_candidates_are_few_and_settings_of_plans(m):
    from quantload.runtime.kernels.nibble_plan import Plan, candidates

    found = list(candidates(m, 6144, 4096))
    assert 5 <= len(found) <= 100
    assert all(Plan.from_settings(settings).settings() == settings for settings in found)
    assert len({tuple(sorted(settings.items())) for settings in found}) == len(found)


def test_few_tiles_get_more_parts_of_k():
    from quantload.runtime.kernels.nibble_plan import Plan, _busy

    plan = Plan("mid", rows=128, tokens=128)
    assert _busy(plan, 128, 4096, 56, 132).splits == 4  # 32 tiles
    assert _busy(plan, 300, 4096, 56, 132).splits == 1  # 96 tiles
    assert _busy(plan, 128, 1024, 4, 132).splits == 1  # no K to cut


# -- hundreds of tokens without a table ------------------------------------------------------------


def weight_of(n, k, **changes):
    """What a plan asks of a weight of int4 in groups of 128 columns."""
    words = torch.empty(-(-k // 256), n, 64, dtype=INT16, device="meta")
    parts = {
        "words": words, "rows": n, "features": k, "columns": None, "offset": None, "form": "int",
        "kind": "bf16", "group": 128, "dtype": BF16, **changes,
    }  # fmt: skip
    return SimpleNamespace(**parts, is_folded=parts["form"].startswith("fp4_"))


@pytest.fixture
def plan(monkeypatch):
    """Plans a product on a card without measured settings."""
    from quantload.runtime.kernels import nibble_plan

    def on_card(weight, tokens, **card):
        monkeypatch.setattr(nibble_plan.launch_settings, "find", lambda *_, **__: None)
        made = nibble_plan.Card(**{**H200, **card})
        monkeypatch.setattr(nibble_plan, "card_of", lambda device: made)
        return nibble_plan.plan_for(weight, tokens, torch.device("cuda"))

    return on_card


@pytest.mark.parametrize(
    ("m", "n", "rows", "tokens"),
    [
        (128, 4096, 128, 64),  # 64 tiles, one round of 12 us; of wider ones there are too few
        (128, 14336, 128, 128),  # 112 tiles, 21 us; (128, 64) takes two rounds
        (300, 4096, 128, 128),  # 96 tiles; (128, 64) takes two rounds of 160
        (256, 16896, 128, 256),  # 132 tiles, 41 us; two rounds of (128, 128) take 42
        (1024, 14336, 128, 128),  # seven rounds of 21 us
    ],
)
def test_tiles_that_need_the_fewest_weighted_rounds(plan, m, n, rows, tokens):
    found = plan(weight_of(n, 4096), m)
    assert (found.path, found.rows, found.tokens) == ("wide", rows, tokens)
    assert found.shared == 0


@pytest.mark.parametrize("form", ["int", "zero", "fp4_16"])
def test_no_tiles_take_less(plan, form):
    from quantload.runtime.kernels import nibble_plan

    costs = nibble_plan._WIDE_INT if form == "int" else nibble_plan._WIDE
    for m, n in itertools.product((100, 128, 200, 300, 512, 1500, 2048), (2048, 6144, 14336)):
        processors = 108 if m == 200 else 132
        found = plan(weight_of(n, 4096, form=form), m, processors=processors)

        def time_of(tile, m=m, n=n, processors=processors):
            tiles = -(-n // tile[0]) * -(-m // tile[1])
            return -(-tiles // processors) * costs[tile], tiles >= 0.4 * processors

        usable = [time_of(tile)[0] for tile in costs if time_of(tile)[1]]
        assert (found.path == "wide") == bool(usable), (m, n)
        if usable:
            tile = (found.rows, found.tokens, found.stages, found.step)
            assert time_of(tile) == (min(usable), True)


def test_cards_without_a_copy_engine_and_few_tiles_keep_their_plans(plan):
    from quantload.runtime.kernels.nibble_plan import Card, by_rule

    for m, n in itertools.product((100, 300, 1000), (1024, 4096, 14336)):
        old = by_rule(m, (16, n, 64), Card(has_copy_engine=False))
        assert plan(weight_of(n, 4096), m, has_copy_engine=False) == old
    found = plan(weight_of(1024, 8192), 128)  # 16 tiles of 128 x 64, of 53 that are wanted
    old = by_rule(128, (32, 1024, 64), Card(**H200))
    assert old.path == "mid"
    assert found == replace(old, splits=found.splits)
    assert found.splits > 1
    assert plan(weight_of(1024, 4096), 256).path == "dense"  # 32 tiles


def test_more_tokens_than_are_unpacked_are_dense(plan):
    weight = weight_of(14336, 4096)
    assert plan(weight, 2048).path == "wide"
    assert {plan(weight, m).path for m in (2049, 4096, 20000)} == {"dense"}
    assert {plan(weight, m).path for m in (16, 64)} <= {"decode"}


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"dtype": torch.float16}, "mid"),
        ({"kind": "fp32"}, "mid"),
        ({"group": 4096}, "mid"),
        ({"group": 64}, "mid"),
        ({"form": "uint"}, "mid"),
        ({"form": "table"}, "mid"),
        ({"offset": torch.empty(16, 4096, dtype=torch.int64, device="meta")}, "decode"),
        ({"features": 4090}, "decode"),
    ],
)
def test_weights_that_the_kernel_does_not_read_keep_their_plans(plan, changes, path):
    assert plan(weight_of(4096, 4096, **changes), 128).path == path


def test_folded_weights_with_few_tiles_load_in_smaller_steps(plan):
    found = plan(weight_of(1024, 4096, form="fp4_16"), 128)
    assert (found.path, found.stages, found.step) == ("mid", 4, 32)
