"""Rules: each sentence about matching, and the texts of all refusals."""

import pytest

from quantload.errors import ConfigError, UnknownScheme, UnusedRule
from quantload.quant.rules import Decision, QuantConfig, Rule, parse_rule, resolve
from quantload.quant.scheme import PRESETS, parse_scheme

NAMES = [
    "model.embed_tokens",
    *(
        f"model.layers.{layer}.{part}"
        for layer in (0, 1, 10)
        for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.gate")
    ),
    "lm_head",
]


def schemes(rules, names=NAMES, *, default="keep"):
    """What each module gets, as text; modules without aliases."""
    config = QuantConfig.from_options(default, rules)
    decisions = resolve(config, {name: (name,) for name in names}).decisions
    return {name: "keep" if d.scheme is None else str(d.scheme) for name, d in decisions.items()}


def covered(pattern, name):
    return parse_rule(pattern, "keep").covered(name)


# -- patterns ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "name", "count"),
    [
        # a prefix, in whole components; the trailing dot is optional
        ("model.layers.1.", "model.layers.1.mlp.up_proj", 3),
        ("model.layers.1", "model.layers.1.mlp.up_proj", 3),
        ("model.layers.1.", "model.layers.10.mlp.up_proj", None),
        ("model.layers.1", "model.layers.10.mlp.up_proj", None),
        ("model.lay", "model.layers.1", None),
        ("model.layers.1.", "model.layers.1", 3),
        ("model.layers.1.mlp", "model.layers.1", None),
        ("layers", "model.layers.1", None),
        ("lm_head", "lm_head", 1),
        ("lm_head.", "lm_head", 1),
        ("lm_head", "lm_head2", None),
        # dots are dots, not "any character"
        ("model.layers", "model_layers.0", None),
        # a leading * is any start, also an empty one, and the longest
        ("*.self_attn.", "model.layers.0.self_attn.q_proj", 4),
        ("*.self_attn", "self_attn.q_proj", 1),
        ("*.gate", "model.layers.0.mlp.gate", 5),
        ("*.gate", "model.layers.0.mlp.gate_proj", None),
        ("*.experts.", "model.experts.0.experts.w1", 4),
        ("*.mlp.gate", "model.layers.0.mlp.gate", 5),
        ("*.mlp.gate", "model.mlp.layers.gate", None),
        # an inner * is exactly one component
        ("model.layers.*.mlp.", "model.layers.0.mlp.gate", 4),
        ("model.layers.*.mlp", "model.layers.mlp", None),
        ("model.*.mlp", "model.layers.0.mlp", None),
        ("model.layers.*", "model.layers.0.mlp.gate", 3),
        ("*.layers.*.mlp", "a.b.layers.7.mlp.up_proj", 5),
        ("*.*", "model.layers.0", 3),
        # * alone is everything, but covers nothing
        ("*", "model.layers.0", 0),
        ("*.", "model.layers.0", 0),
        # a regular expression must match the whole name
        (r"re:.*experts\..*down_proj", "model.experts.3.down_proj", 4),
        (r"re:.*experts\..*down_proj", "model.experts.3.down_proj.extra", None),
        (r"re:experts", "model.experts", None),
        (r"re:model\.layers\.\d+\.mlp\.(gate|up)_proj", "model.layers.12.mlp.up_proj", 5),
        # spaces around a pattern do not matter
        ("  model.layers.  ", "model.layers.0", 2),
    ],
)
def test_how_many_components_a_pattern_covers(pattern, name, count):
    assert covered(pattern, name) == count


# -- which rule decides ------------------------------------------------------------------------


def test_the_example_of_the_design():
    decided = schemes(
        [
            "model.layers.=W4A16",
            "model.layers.0.=W8A16",
            "*.self_attn.=FP8_DYNAMIC",
            r"re:.*10\.mlp\.gate=W8A8",
            "lm_head=keep",
        ],
        default="W4A16:g32",
    )
    assert decided == {
        "model.embed_tokens": "W4A16:g32",
        "model.layers.0.self_attn.q_proj": "FP8_DYNAMIC",
        "model.layers.0.self_attn.o_proj": "FP8_DYNAMIC",
        "model.layers.0.mlp.gate_proj": "W8A16",
        "model.layers.0.mlp.gate": "W8A16",
        "model.layers.1.self_attn.q_proj": "FP8_DYNAMIC",
        "model.layers.1.self_attn.o_proj": "FP8_DYNAMIC",
        "model.layers.1.mlp.gate_proj": "W4A16",
        "model.layers.1.mlp.gate": "W4A16",
        "model.layers.10.self_attn.q_proj": "FP8_DYNAMIC",
        "model.layers.10.self_attn.o_proj": "FP8_DYNAMIC",
        "model.layers.10.mlp.gate_proj": "W4A16",
        "model.layers.10.mlp.gate": "W8A8",
        "lm_head": "keep",
    }


def decided_by(rules, name="model.layers.0.mlp.gate"):
    config = QuantConfig.from_options("keep", rules)
    rule = resolve(config, {name: (name,)}).decisions[name].rule
    return None if rule is None else str(rule)


@pytest.mark.parametrize(
    ("rules", "decides"),
    [
        # the longest prefix, wherever it is written
        (["model.layers.0.=W8A16", "model.layers.=W4A16"], "model.layers.0. = W8A16"),
        (["model.layers.=W4A16", "model.layers.0.=W8A16"], "model.layers.0. = W8A16"),
        # on equal length the later one
        (["model.layers.0=W8A16", "model.*.0.=W4A16"], "model.*.0. = W4A16"),
        (["model.*.0.=W4A16", "model.layers.0=W8A16"], "model.layers.0 = W8A16"),
        (["model.=W4A16", "model.=keep"], "model. = keep"),
        # `re:` covers the whole name
        (["re:.*gate=W8A8", "model.layers.0.mlp.=W4A16"], "re:.*gate = W8A8"),
        (["re:.*gate=W8A8", "*.gate=W4A16"], "*.gate = W4A16"),
        (["*.gate=W4A16", "re:.*gate=W8A8"], "re:.*gate = W8A8"),
        # * loses against everything else
        (["model=W8A8", "*=W4A16"], "model = W8A8"),
        (["*=W4A16"], "* = W4A16"),
        ([], None),
    ],
)
def test_the_rule_that_decides(rules, decides):
    assert decided_by(rules) == decides


def test_no_rule_gives_the_default():
    config = QuantConfig.from_options("W8A8")
    assert resolve(config, {"a": ("a",)}).decisions == {"a": Decision(PRESETS["W8A8"])}
    for scheme in ("keep", " KEEP ", None):
        assert QuantConfig.from_options(scheme).default is None


@pytest.mark.parametrize(
    ("pattern", "whole"),
    [
        ("*.mlp.gate", True),
        ("model.layers.0.mlp.gate.", True),
        ("re:.*gate", True),
        ("*.*", False),
        ("re:.*", False),
        ("re:.*gate.*", True),
        ("*.mlp.*", False),
        ("model.layers.", False),
        ("*.mlp", False),
        ("*", False),
    ],
)
def test_whether_a_rule_covers_the_whole_name(pattern, whole):
    name = "model.layers.0.mlp.gate"
    config = QuantConfig.from_options(None, {pattern: "W8A8"})
    assert resolve(config, {name: (name,)}).decisions[name].covers_whole_name is whole


def test_a_rule_matches_any_alias():
    modules = {"model.layers.0.up": ("model.layers.0.up", "language_model.layers.0.up")}
    config = QuantConfig.from_options(None, ["language_model.=W8A8"])
    assert str(resolve(config, modules).decisions["model.layers.0.up"].scheme) == "W8A8"


@pytest.mark.parametrize("aliases", [("head", "head.linear"), ("head.linear", "head")])
def test_a_whole_alias_is_the_whole_name(aliases):
    config = QuantConfig.from_options(None, ["head=W8A8"])
    decision = resolve(config, {aliases[0]: aliases}).decisions[aliases[0]]
    assert decision.covers_whole_name


def test_the_longest_cover_of_any_alias_counts():
    modules = {"a.b.c": ("a.b.c", "x.c")}
    config = QuantConfig.from_options(None, ["a.b.=W8A8", "x.=W4A16"])
    resolution = resolve(config, modules)
    assert str(resolution.decisions["a.b.c"].rule) == "a.b. = W8A8"
    assert [str(rule) for rule in resolution.undecided] == ["x. = W4A16"]


def test_the_longest_cover_of_one_rule_counts():
    modules = {"a.b.c.d": ("a.b.c.d", "c.d")}
    config = QuantConfig.from_options(None, ["*.c=W8A8", "a.b.=W4A16"])
    assert str(resolve(config, modules).decisions["a.b.c.d"].rule) == "*.c = W8A8"


def test_rules_that_match_but_never_decide():
    config = QuantConfig.from_options(
        None, ["model.=W4A16", "model.layers.=W8A16", "model.layers.=W8A8", "*.q=keep"]
    )
    names = ["model.layers.0.q", "model.layers.0.k"]
    resolution = resolve(config, {name: (name,) for name in names})
    assert [str(rule) for rule in resolution.undecided] == [
        "model. = W4A16",
        "model.layers. = W8A16",
    ]
    assert resolve(QuantConfig.from_options(None, ["*=W8A8"]), {"a": ("a",)}).undecided == ()


# -- rules that match nothing ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            ["model.layer.=W4A16", "lm_haed=keep"],
            "2 rules match nothing: `lm_haed`, `model.layer.`\n\n"
            "hint: did you mean `lm_head`, `model.layers`?",
        ),
        (
            ["model.layers.1.mlp.gateproj=W4A16"],
            "1 rule matches nothing: `model.layers.1.mlp.gateproj`\n\n"
            "hint: did you mean `model.layers.1.mlp.gate_proj`?",
        ),
        (
            ["*.self_atn.=W4A16"],
            "1 rule matches nothing: `*.self_atn.`\n\nhint: did you mean `*.self_attn`?",
        ),
        (
            ["*.mlp.gatep=W4A16", "*.mlp.gateproj=W4A16"],
            "2 rules match nothing: `*.mlp.gatep`, `*.mlp.gateproj`\n\n"
            "hint: did you mean `*.mlp.gate`, `*.mlp.gate_proj`?",
        ),
        (
            ["lm_haed=keep", "lm_headd=keep"],
            "2 rules match nothing: `lm_haed`, `lm_headd`\n\nhint: did you mean `lm_head`?",
        ),
        (
            ["model.layers.2.=W4A16"],
            "1 rule matches nothing: `model.layers.2.`\n\nhint: did you mean `model.layers.1`?",
        ),
        (
            ["zzz=W4A16"],
            "1 rule matches nothing: `zzz`\n\nhint: `quantload inspect` lists the module names",
        ),
        (
            [f"zz{i}=keep" for i in range(7)],
            "7 rules match nothing: `zz0`, `zz1`, `zz2`, `zz3`, `zz4` and 2 more\n\n"
            "hint: `quantload inspect` lists the module names",
        ),
    ],
)
def test_unused_rules_are_errors_with_near_names(rules, message):
    with pytest.raises(UnusedRule) as error:
        schemes(rules)
    assert str(error.value) == message


# -- what a rule may look like -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("", "rule `` has an empty component, expected a dotted module name"),
        (".", "rule `.` has an empty component, expected a dotted module name"),
        ("a..b", "rule `a..b` has an empty component, expected a dotted module name"),
        (".a", "rule `.a` has an empty component, expected a dotted module name"),
        ("a..", "rule `a..` has an empty component, expected a dotted module name"),
    ],
)
def test_empty_components(pattern, message):
    with pytest.raises(ConfigError) as error:
        parse_rule(pattern, "W4A16")
    assert str(error.value) == (
        f"{message}\n\nhint: for example `model.layers.0.` or `*.self_attn.`"
    )


@pytest.mark.parametrize("pattern", ["model.layers.1*", "*gate", "**", "a.b*c.d"])
def test_a_star_inside_a_component(pattern):
    with pytest.raises(ConfigError) as error:
        parse_rule(pattern, "W4A16")
    assert str(error.value) == (
        f"rule `{pattern}` has a `*` inside a component, expected a whole component\n\n"
        "hint: for parts of a component write a regular expression: `re:...`"
    )


def test_a_bad_regular_expression():
    with pytest.raises(ConfigError) as error:
        parse_rule("re:(a", "W4A16")
    assert str(error.value) == (
        "rule `re:(a` is not a regular expression: missing ), unterminated subpattern at position 0"
    )


def test_an_unknown_scheme():
    with pytest.raises(UnknownScheme, match="no such scheme: `W4A17`\n\nhint: did you mean"):
        parse_rule("model.", "W4A17")


@pytest.mark.parametrize("text", ["model.layers.", "model.layers.=", "=W4A16", " = ", ""])
def test_text_that_is_no_rule(text):
    with pytest.raises(ConfigError) as error:
        QuantConfig.from_options(None, [text])
    assert str(error.value) == (
        f"not a rule: `{text}`, expected `PATTERN=SCHEME`\n\n"
        "hint: for example `model.layers.0.=W8A16` or `lm_head=keep`"
    )


def test_the_last_equals_sign_separates():
    config = QuantConfig.from_options(None, [r"re:model\.(?=layers)(?!x=y).*=W4A16:g64"])
    assert config.rules == (
        Rule(r"re:model\.(?=layers)(?!x=y).*", parse_scheme("W4A16", group_size=64)),
    )
    assert config.rules[0].covered("model.layers.0") == 3
    assert config.rules[0].covered("model.norm") is None


def test_rules_from_a_mapping_keep_their_order():
    config = QuantConfig.from_options(
        "w8a8",
        {
            "model.": "W4A16",
            "lm_head": "Keep",
            "b.": {"scheme": "W4A16", "group_size": 32},
            "c": {"scheme": "W8A8"},
        },
    )
    assert config.default is PRESETS["W8A8"]
    assert [str(rule) for rule in config.rules] == [
        "model. = W4A16",
        "lm_head = keep",
        "b. = W4A16:g32",
        "c = W8A8",
    ]


@pytest.mark.parametrize(
    "value", [4, None, ["W4A16"], {"scheme": 4}, {}, {"scheme": "W4A16", "bits": 4}]
)
def test_values_of_another_form(value):
    with pytest.raises(ConfigError) as error:
        QuantConfig.from_options(None, {"model.": value})
    assert str(error.value) == (
        f"rule `model.` has the value `{value}`, expected a scheme name or "
        "`{ scheme = NAME, group_size = NUMBER }`"
    )


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: QuantConfig.from_options("W4A16:g64", group_size=32),
            "two group sizes for one scheme: `W4A16:g64` and `group_size = 32`",
        ),
        (
            lambda: QuantConfig.from_options(
                None, {"a": {"scheme": "W4A16:g64", "group_size": 32}}
            ),
            "two group sizes for one scheme: `W4A16:g64` and `group_size = 32`",
        ),
        (
            lambda: QuantConfig.from_options("keep", group_size=32),
            "a group size needs the name of a scheme: found `group_size = 32` and `keep`",
        ),
        (
            lambda: QuantConfig.from_options(None, group_size=32),
            "a group size needs the name of a scheme: found `group_size = 32` and `keep`",
        ),
        (
            lambda: QuantConfig.from_options(PRESETS["W4A16"], group_size=32),
            "a group size needs the name of a scheme: found `group_size = 32` and `W4A16`",
        ),
        (
            lambda: parse_rule("a", "keep", group_size=32),
            "rule `a = keep` takes no group size, found `32`",
        ),
    ],
)
def test_group_sizes_that_would_be_ignored(build, message):
    with pytest.raises(ConfigError) as error:
        build()
    assert str(error.value) == message


def test_a_group_size_of_the_default():
    config = QuantConfig.from_options("W4A16", group_size=32)
    assert config == QuantConfig(parse_scheme("W4A16:g32"))
    assert QuantConfig.from_options(PRESETS["W8A8"]).default is PRESETS["W8A8"]


@pytest.mark.parametrize(
    ("default", "rules", "expected"),
    [
        ("dense", [], False),
        ("keep", ["lm_head=dense", "model.norm=keep"], False),
        ("W4A16", [], True),
        ("same", [], True),
        ("dense", ["lm_head=W8A16"], True),
    ],
)
def test_whether_codes_are_asked_for(default, rules, expected):
    assert QuantConfig.from_options(default, rules).asks_for_codes is expected
