"""Lists of names and globs: the first entry that matches, whatever the order of names."""

import pytest

from quantload.errors import FormatMismatch
from quantload.loader.formats.patterns import Patterns

DOWN = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("entries", "name", "found"),
    [
        (("lm_head",), "lm_head", "lm_head"),
        (("head",), "lm_head", None),
        (("model.layers.1",), "model.layers.1.mlp", None),
        (("*.mlp.*", "model.layers.0.mlp.down_proj"), DOWN, "*.mlp.*"),
        (("model.layers.0.mlp.down_proj", "*.mlp.*"), DOWN, "model.layers.0.mlp.down_proj"),
        (("*.attn.*", "*down_proj", "*.mlp.*"), DOWN, "*down_proj"),
        ((r"re:model\.layers", "*"), DOWN, r"re:model\.layers"),
        (("re:layers",), "model.x.layers", None),
        (("layers.0.mlp.down_proj",), DOWN, "layers.0.mlp.down_proj"),
        ((), DOWN, None),
    ],
)
def test_patterns(entries, name, found):
    config_names = (name, name.removeprefix("model."))
    assert Patterns(entries, with_regexes=True).first(config_names) == found


def test_a_pattern_is_no_regex_where_only_globs_are():
    assert Patterns(("re:x",)).first(("x",)) is None


@pytest.mark.parametrize("entry", ["*", "?odel*", "[m]*", "*[.]mlp[.]*", "*.0.*.down_*", "m*j"])
def test_globs(entry):
    assert Patterns((entry,)).first((DOWN,)) == entry


def test_no_regular_expression():
    with pytest.raises(FormatMismatch, match="not a regular expression"):
        Patterns(("re:(",), with_regexes=True)
