"""Rules of names: every stage, the order of stages, what chains, what drops, what is told."""

from __future__ import annotations

import pytest

from quantload.errors import ConfigError
from quantload.mappers.name_rules import NameRules, Renaming

# The order and the effect of each stage, as vLLM's `WeightsMapper` documents and does it
# (vllm/model_executor/models/utils.py): stage, rules, name, result.
STAGES = [
    (
        "renaming",
        {"renamings": [Renaming("r", lambda n: n.replace("old", "new"))]},
        "old.old.w",
        "new.new.w",
    ),
    ("regex anywhere", {"regex": {r"l(\d+)_": r"layers.\1."}}, "m.l3_q.w", "m.layers.3.q.w"),
    ("regex every time", {"regex": {"a": "b"}}, "a.a.w", "b.b.w"),
    ("regex drops", {"regex": {r"\.inv_freq$": None}}, "rope.inv_freq", None),
    ("substring once", {"substring": {".a.": ".b."}}, "x.a.a.w", "x.b.a.w"),
    ("substring drops", {"substring": {"mtp": None}}, "model.mtp.w", None),
    ("stacked", {"stacked": {"qkv": ("q", "k", "v")}}, "x.k.weight", "x.qkv.weight"),
    ("prefix", {"prefix": {"transformer.": "model."}}, "transformer.h.w", "model.h.w"),
    ("prefix only", {"prefix": {"h.": "layers."}}, "model.h.w", "model.h.w"),
    ("prefix drops", {"prefix": {"vision.": None}}, "vision.a.w", None),
    ("suffix", {"suffix": {".gamma": ".weight"}}, "norm.gamma", "norm.weight"),
    ("suffix is the last", {"suffix": {".a": ".b"}}, "x.a.a", "x.a.b"),
    ("suffix drops", {"suffix": {".bias": None}}, "x.bias", None),
]


@pytest.mark.parametrize(
    ("rules", "name", "expected"), [row[1:] for row in STAGES], ids=[row[0] for row in STAGES]
)
def test_stage(rules: dict, name: str, expected: str | None) -> None:
    assert NameRules(**rules).apply(name).name == expected


# Each stage sees only what the stages before it made: the name starts as "0.", and every stage
# turns its predecessor's number into its own. In any other order the chain breaks off.
CHAIN = NameRules(
    suffix={"5.s": "6.s"},
    prefix={"4.": "5."},
    stacked={"4.qkv": ("3.q", "3.k")},
    substring={"2.": "3."},
    regex={r"^1\.": "2."},
    renamings=[Renaming("first", lambda name: name.replace("0.", "1."))],
)


def test_stages_run_in_the_documented_order() -> None:
    done = CHAIN.apply("0.k.5.s")
    assert done.name == "5.qkv.6.s"
    assert done.slot == 1
    assert [step.partition(" ")[0] for step in done.steps] == [
        *("first", "regex", "substring", "stacked", "prefix", "suffix")
    ]
    assert [step.rpartition("-> ")[2] for step in done.steps] == [
        *("1.k.5.s", "2.k.5.s", "3.k.5.s", "4.qkv.5.s", "5.qkv.5.s", "5.qkv.6.s")
    ]


def test_rules_of_one_stage_chain_in_the_order_in_which_they_are_written() -> None:
    assert NameRules(prefix={"a.": "b.", "b.": "c."}).apply("a.w").name == "c.w"
    assert NameRules(prefix={"b.": "c.", "a.": "b."}).apply("a.w").name == "b.w"
    assert NameRules(substring={"a": "b", "b": "c"}).apply("a.w").name == "c.w"


def test_nothing_happens_after_a_drop() -> None:
    rules = NameRules(regex={"x": None}, prefix={"x": "y"})
    done = rules.apply("x.w")
    assert done.name is None
    assert done.steps == ("regex `x` -> dropped",)


LEAVES = [
    *("weight", "bias", "qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale"),
    *("weight_scale_inv", "weight_scale_2", "weight_zero_point", "weight_global_scale"),
    *("weight_shape", "weight_g_idx", "input_scale", "input_zero_point", "input_global_scale"),
    *("activation_scale", "scale", "qscale_weight", "pre_quant_scale", "W_q", "SCB"),
    *("weight_format", "weight.absmax", "weight.quant_map", "weight.nested_absmax"),
    *("weight.nested_quant_map", "weight.quant_state.bitsandbytes__nf4", "_weight_qdata"),
]
QKV = NameRules(
    prefix={"transformer.": "model."},
    stacked={
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        "shared.gate_up": ("shared.mlp.gate_proj", "shared.mlp.up_proj"),
    },
)


@pytest.mark.parametrize("leaf", LEAVES)
def test_leaves_travel_unchanged(leaf: str) -> None:
    done = QKV.apply(f"transformer.layers.0.self_attn.v_proj.{leaf}")
    assert (done.name, done.slot) == (f"model.layers.0.self_attn.qkv_proj.{leaf}", 2)


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.mlp.gate_proj_2.weight",  # not the same component
        "layers.0.my_mlp.gate_proj.weight",
        "layers.0.mlp.gate_proj",  # no leaf behind it
        "layers.0.mlp.gate.proj.weight",
        "layers.0.self_attn.k_proj.k_scale",  # the attention's, not the linear layer's
        "layers.0.self_attn.v_proj.output_scale",
    ],
)
def test_stacked_means_whole_module_paths(name: str) -> None:
    done = QKV.apply(name)
    assert (done.name, done.slot, done.steps) == (name, None, ())


def test_the_longest_member_path_counts() -> None:
    done = QKV.apply("layers.0.shared.mlp.up_proj.weight")
    assert (done.name, done.slot) == ("layers.0.shared.gate_up.weight", 1)


def test_merging() -> None:
    one = NameRules(prefix={"a.": "b.", "c.": "d."}, regex={"x": "y"})
    two = NameRules(prefix={"a.": "z."}, suffix={".g": ".w"}, stacked={"pq": ("p", "q")})
    both = one | two
    assert both.prefix == {"a.": "z.", "c.": "d."}
    assert both.apply("a.x.g").name == "z.y.w"
    assert both.apply("m.q.x.w").slot == 1
    assert (two | one).prefix == {"a.": "b.", "c.": "d."}


def test_rules_for_lists_of_modules() -> None:
    rules = QKV | NameRules(prefix={"vision.": None}, regex={"drop": None, r"^h\.": "layers."})
    lists = rules.for_modules()
    assert (
        lists.apply("transformer.layers.0.self_attn.q_proj").name
        == "model.layers.0.self_attn.q_proj"
    )
    assert lists.apply("transformer.x.self_attn.q_proj.weight").slot is None
    assert lists.apply("vision.drop").name == "vision.drop"
    assert lists.apply("h.0").name == "layers.0"


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"regex": {"(": "x"}}, "regex rule `\\(` is no pattern"),
        ({"prefix": {"": "model."}}, "prefix rule with an empty text"),
        ({"stacked": {"qkv": "q"}}, "`stacked\\['qkv'\\]` is `q` of type `str`, expected a list"),
        (
            {"stacked": {"a": ("x.q",), "b": ("x.q",)}},
            "`x.q` is a member of two stacks, `a` and `b`",
        ),
    ],
)
def test_rules_that_make_no_sense(rules: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NameRules(**rules)
