"""Fused groups get one scheme."""

import itertools

import pytest

from quantload.errors import RuleSplitsStack
from quantload.loader.plan_groups import precision, settle_groups
from quantload.quant.scheme import parse_scheme

GROUP = ("m.q", "m.k", "m.v")


def _settle(names, on_split):
    schemes = {
        member: None if name is None else parse_scheme(name)
        for member, name in zip((*GROUP, "m.o"), names, strict=True)
    }
    outcome = settle_groups(schemes, dict.fromkeys(schemes, "why"), (GROUP,), on_split)
    return [outcome.schemes[member] and str(outcome.schemes[member]) for member in schemes], outcome


@pytest.mark.parametrize("on_split", ["error", "keep", "promote"])
def test_equal_members_are_left_alone(on_split):
    names, outcome = _settle(["W4A16", "W4A16", "W4A16", "W8A8"], on_split)
    assert names == ["W4A16", "W4A16", "W4A16", "W8A8"]
    assert outcome.warnings == ()
    assert set(outcome.reasons.values()) == {"why"}


@pytest.mark.parametrize(
    ("found", "kept", "promoted"),
    [
        (["W4A16", "W8A16", "W4A16", "W4A16"], None, "W8A16"),
        (["W4A16", "W4A16:g32", "W4A16:g64", "W4A16"], None, "W4A16:g32"),
        (["W4A16", None, "W4A16", "W4A16"], None, None),
        (["W8A8", "W8A16:channel", "W8A8", "W4A16"], None, "W8A16:channel"),
    ],
)
def test_split_groups(found, kept, promoted):
    for on_split, expected in (("keep", kept), ("promote", promoted)):
        names, outcome = _settle(found, on_split)
        assert names == [expected] * 3 + found[3:]
        assert len(outcome.warnings) == 1
        for member, before in zip(GROUP, found, strict=False):
            changed = "like the other members of its fused group" in outcome.reasons[member]
            assert changed == (before != expected)
    with pytest.raises(RuleSplitsStack, match=r"`m` \(q, k, v\)"):
        _settle(found, "error")


def test_members_that_are_missing_do_not_count():
    outcome = settle_groups({"m.q": None}, {"m.q": "why"}, (GROUP,), "error")
    assert outcome.schemes == {"m.q": None}


def test_precision_is_a_strict_order():
    ordered = ["W4A16:channel", "W4A16", "W4A16:g64", "W4A16:g32", "W8A16", "W8A16:g32"]
    ranks = [precision(parse_scheme(name)) for name in ordered] + [precision(None)]
    assert all(one < two for one, two in itertools.pairwise(ranks))
    assert precision(parse_scheme("dense")) == precision(None)
