"""Name matching against compressed_tensors.utils.match, on many names and patterns."""

import warnings
from functools import cache
from itertools import product

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quantload.loader.formats.compressed_tensors_config import parse_config
from quantload.loader.formats.matching import matches_class, matches_exact, matches_regex


@cache
def _library():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from compressed_tensors.utils import match
    return match


_PARTS = [
    "model",
    "layers",
    "0",
    "1",
    "10",
    "self_attn",
    "q_proj",
    "q_proj_2",
    "mlp",
    "gate",
    "lm_head",
]
NAMES = st.lists(st.sampled_from(_PARTS), min_size=1, max_size=5).map(".".join)
PATTERNS = st.one_of(
    NAMES,
    NAMES.map(lambda name: "re:" + name),
    NAMES.map(lambda name: "re:.*" + name),
    NAMES.map(lambda name: "re:" + name.replace(".", r"\.") + "$"),
    st.sampled_from(
        ["re:.*", "re:", "re:^model", r"re:.*\.(q|k)_proj", "Linear", "Embedding", "linear"]
    ),
    st.sampled_from(["re:.*layers.1.*", r"re:model\.layers\.\d$", "re:lm_head|model", ""]),
)


@settings(max_examples=1000)
@given(name=NAMES, pattern=PATTERNS)
@example(name="model.layers.10", pattern="re:model.layers.1")
@example(name="model", pattern="re:")
def test_names_match_as_in_the_library(name, pattern):
    expected = _library().match_name(name, pattern)
    assert (matches_exact(pattern, name) or matches_regex(pattern, name)) is expected


@settings(max_examples=500)
@given(
    name=NAMES,
    targets=st.lists(PATTERNS, min_size=1, max_size=4),
    ignore=st.lists(PATTERNS, max_size=2),
    is_embedding=st.booleans(),
)
def test_a_config_matches_as_the_library(name, targets, ignore, is_embedding):
    module = torch.nn.Embedding(1, 1) if is_embedding else torch.nn.Linear(1, 1)
    group = {"targets": targets, "weights": {"num_bits": 8}, "format": "int-quantized"}
    config = parse_config({"config_groups": {"g": group}, "ignore": ignore})
    match = _library()
    expected = match.is_match(name, module, targets) and not match.is_match(name, module, ignore)
    found = config.match(name, ("Embedding",) if is_embedding else ("Linear",))
    assert (found is not None) == expected
    if found is not None and expected:
        assert found[1] == match.match_targets(name, module, targets)[0]


def test_many_names_and_patterns():
    names = [".".join(parts) for parts in product(_PARTS[:9], repeat=3)]
    patterns = [
        "re:" + name[: 3 + len(name) * number // 9] for number, name in enumerate(names[:9])
    ]
    patterns += [
        r"re:model\.layers\.\d",
        r"re:.*\.(q_proj|gate)$",
        "re:layers|mlp",
        "model.1.0",
        "re:$",
    ]
    wrong = [
        (name, pattern)
        for name in names
        for pattern in patterns
        if (matches_exact(pattern, name) or matches_regex(pattern, name))
        != _library().match_name(name, pattern)
    ]
    assert len(names) * len(patterns) > 10_000
    assert wrong == []


def test_the_later_group_with_a_target_wins():
    weights = {"num_bits": 8}
    groups = {name: {"targets": ["Linear"], "weights": weights} for name in ("first", "second")}
    config = parse_config({"config_groups": groups, "format": "int-quantized"})
    assert config.match("a", ("Linear",))[0].name == "second"


def test_class_names_are_compared_whole():
    assert matches_class("Linear", ("Linear",))
    assert not matches_class("Linear", ("QKVParallelLinear",))
    assert not matches_class("Lin", ("Linear",))
