"""Rules for modules, as GPTQModel matches them."""

import pytest

from quantload.errors import FormatMismatch
from quantload.loader.formats.dynamic_rules import first_rule, parse_rules


@pytest.mark.parametrize("nothing", [None, {}, [], ""])
def test_no_rules(nothing):
    assert parse_rules(nothing, "memory") == ()


def test_the_first_rule_that_matches_at_the_start_decides():
    rules = parse_rules({"b": {"bits": 2}, "+:a.*": {"bits": 3}, "-:a": None}, "memory")
    assert first_rule(rules, ("ab",)).overrides == {"bits": 3}
    assert first_rule(rules, ("x.b",)) is None
    assert first_rule(rules, ("x.b", "b.x")).overrides == {"bits": 2}


def test_a_sign_of_minus_leaves_out():
    (rule,) = parse_rules({"-:a": {"bits": 4}}, "memory")
    said = rule.says_of(("a",))
    assert (said.is_quantized, said.entry, said.is_exact) == (False, "dynamic: -:a", True)
    assert not rule.says_of(("ab",)).is_exact


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        ("a", "`dynamic` is `'a'`, expected an object"),
        ({"[": {}}, r"`dynamic` has `\[`, which is no regular expression"),
        ({"a": None}, "`dynamic: a` is missing, expected an object"),
        ({"+:a": True}, r"`dynamic: \+:a` is `True`, expected an object"),
    ],
)
def test_rules_that_make_no_sense(dynamic, message):
    with pytest.raises(FormatMismatch, match=message):
        parse_rules(dynamic, "memory")
