"""Name matching against compressed_tensors.utils.match, on many names and patterns."""

import time
import warnings
from functools import cache
from itertools import product
from random import Random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from versions import needs_new_transformers

from quantload.loader.formats.compressed_tensors_config import parse_config
from quantload.loader.formats.matching import (
    matches_glob,
    matches_regex,
    matches_substring,
    matches_suffix,
    matches_transformers,
    names_of,
)


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
    assert (pattern == name or matches_regex(pattern, name)) is expected


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
        if (pattern == name or matches_regex(pattern, name)) != _library().match_name(name, pattern)
    ]
    assert len(names) * len(patterns) > 10_000
    assert wrong == []


def test_the_later_group_with_a_target_wins():
    weights = {"num_bits": 8}
    groups = {name: {"targets": ["Linear"], "weights": weights} for name in ("first", "second")}
    config = parse_config({"config_groups": groups, "format": "int-quantized"})
    assert config.match("a", ("Linear",))[0].name == "second"


@pytest.mark.parametrize(
    "module",
    [
        "layers.0.mlp.up_proj",
        "model.layers.0.mlp.up_proj",
        "language_model.layers.0.mlp.up_proj",
        "model.language_model.layers.0.mlp.up_proj",
        "language_model.model.layers.0.mlp.up_proj",
    ],
)
def test_all_names_of_a_module_are_known_from_each(module):
    names = names_of(module)
    assert names[0] == module
    assert len(names) == len(set(names)) == 5
    assert set(names) == set(names_of("layers.0.mlp.up_proj"))


@pytest.mark.parametrize(
    "module", ["lm_head", "model.visual.blocks.0.attn", "visual.layers.0.fc1", "model.embed_tokens"]
)
def test_modules_outside_of_the_blocks_have_one_name(module):
    assert names_of(module) == (module,)


# -- one table for each function -------------------------------------------------------------------

Q = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("function", "pattern", "name", "expected"),
    [
        (matches_regex, r"re:model\.layers\.1", Q, True),
        (matches_regex, "re:layers", Q, False),
        (matches_regex, "re:.*q_proj$", Q, True),
        (matches_regex, "re:.*q_proj$", Q + "_2", False),
        (matches_regex, "re:", "anything", True),
        (matches_regex, "model.*", Q, False),
        (matches_substring, "layers.1", "model.layers.10.mlp", True),
        (matches_substring, "layers.1", "model.layers.2.mlp", False),
        (matches_substring, "", "x", True),
        (matches_suffix, "q_proj", Q, True),
        (matches_suffix, ".q_proj", Q, True),
        (matches_suffix, "proj", Q, False),
        (matches_suffix, Q, Q, True),
        (matches_glob, "*q_proj", Q, True),
        (matches_glob, "model.layers.?.*", Q, True),
        (matches_glob, "model.layers.[02].*", Q, False),
        (matches_glob, "layers*", Q, False),
        (matches_glob, "*Q_PROJ", Q, False),
        (matches_transformers, "q_proj", Q, True),
        (matches_transformers, "proj", Q, True),
        (matches_transformers, "model.layers.1", Q, True),
        (matches_transformers, "model.layers.1", "model.layers.10.mlp", False),
        (matches_transformers, "model.layers.1.", Q, True),
        (matches_transformers, "model.*.self_attn", Q, True),
        (matches_transformers, "layer.*", "layer.11.attn", True),
        (matches_transformers, "mlp.gate", "mlp.gate_proj", False),
        (matches_transformers, "a|model", Q, True),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)[:40]),
)
def test_each_way_of_matching(function, pattern, name, expected):
    assert function(pattern, name) is expected


# -- against transformers --------------------------------------------------------------------------

_ODD = ["", ".", ".*", "mlp", "gate", r"(model|layers)", "q_proj(_2)?", "^layers", "proj$", "a|"]


def _random_name(random, parts=_PARTS, longest=5):
    return ".".join(random.choices(parts, k=random.randint(1, longest)))


def _random_regex(random):
    name = _random_name(random)
    ways = [
        name,
        name + ".",
        name.replace(".", r"\."),
        name.replace(".0", r"\.\d+").replace("layers", ".*"),
        f"{name}|{_random_name(random)}",
        name[: random.randint(1, len(name))],
        random.choice(_ODD),
    ]
    return random.choice(ways)


@needs_new_transformers
def test_names_match_as_in_transformers():
    """Random names and patterns, patterns that are made of the name among them."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    random, found = Random(0), []
    for _ in range(20_000):
        name = _random_name(random)
        pattern = random.choice([_random_regex(random), name[: random.randint(0, len(name))]])
        matches = matches_transformers(pattern, name)
        assert matches is not should_convert_module(name, [pattern]), (name, pattern)
        found.append(matches)
    assert 4_000 < sum(found) < 16_000
    for name, pattern in (("mlp.gate_proj", "mlp.gate"), ("model.layers.10", "model.layers.1")):
        assert should_convert_module(name, [pattern])
        assert not matches_transformers(pattern, name)


# -- fused modules and whole models against compressed-tensors -------------------------------------

_FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
_STEMS = ["model", "layers", "0", "self_attn", "mlp"]
_LASTS = ["qkv_proj", "gate_up_proj", "q_proj", "v_proj", "up_proj", "o_proj", "my_qkv_proj"]
_MEMBER_REGEXES = ["re:.*[kv]_proj", "re:.*qkv_proj", r"re:model\..*", "Linear", "re:.*up_proj$"]


def _random_member(random):
    return f"{_random_name(random, _STEMS, 2)}.{random.choice(_LASTS)}"


def _random_patterns(random, most):
    return [
        random.choice([_random_member(random), random.choice(_MEMBER_REGEXES)])
        for _ in range(random.randint(0, most))
    ]


def test_fused_modules_match_as_in_the_library():
    random, found = Random(0), []
    linear, is_match = torch.nn.Linear(1, 1), _library().is_match
    for _ in range(5_000):
        name = _random_member(random)
        targets, ignore = _random_patterns(random, 4), _random_patterns(random, 2)
        fused = random.choice([None, _FUSED])
        group = {"targets": targets, "weights": {"num_bits": 8}, "format": "int-quantized"}
        config = parse_config({"config_groups": {"g": group}, "ignore": ignore})
        matches = config.match(name, ("Linear",), fused) is not None
        assert matches is is_match(name, linear, targets, ignore, fused), (name, targets, ignore)
        found.append(matches)
    assert 1_000 < sum(found) < 4_000


class _Block(torch.nn.Module):
    def __init__(self, names):
        super().__init__()
        for name in names:
            kind = torch.nn.Embedding if "embed" in name else torch.nn.Linear
            self.add_module(name, kind(1, 1))


def _model():
    block = torch.nn.ModuleDict(
        {
            "self_attn": _Block(["q_proj", "k_proj", "v_proj", "o_proj", "q_norm"]),
            "mlp": _Block(["gate", "gate_proj", "up_proj", "down_proj"]),
        }
    )
    inner = torch.nn.ModuleDict({"embed_tokens": torch.nn.Embedding(1, 1)})
    inner["layers"] = torch.nn.ModuleList([block, *(torch.nn.ModuleDict(block) for _ in range(11))])
    return torch.nn.ModuleDict({"model": inner, "lm_head": torch.nn.Linear(1, 1)})


_MODEL = _model()
_CLASSES = {
    name: (type(module).__name__,)
    for name, module in _MODEL.named_modules(remove_duplicate=False)
    if isinstance(module, (torch.nn.Linear, torch.nn.Embedding))
}
_TARGETS = st.one_of(
    st.sampled_from([*_CLASSES][::7]),
    st.sampled_from(["Linear", "Embedding", "ModuleDict", "re:.*gate", "re:.*gate$", "re:lm_head"]),
    st.builds("re:model.layers.{}".format, st.integers(0, 12)),
    st.builds(r"re:model\.layers\.{}\..*(q|k)_proj".format, st.integers(0, 12)),
    st.sampled_from(
        ["model", "model.layers", "re:.*self_attn", r"re:.*\.mlp\.", "re:^(?!lm_head)"]
    ),
)


@settings(max_examples=300)
@given(
    groups=st.lists(st.lists(_TARGETS, min_size=1, max_size=3), min_size=1, max_size=3),
    ignore=st.lists(_TARGETS, max_size=3),
)
def test_groups_of_a_model_are_those_of_the_library(groups, ignore):
    """As `apply_quantization_config` resolves them: 110 modules for each of many configs."""
    match = _library()
    config = parse_config(
        {
            "config_groups": {
                f"group_{number}": {"targets": targets, "weights": {"num_bits": 8}}
                for number, targets in enumerate(groups)
            },
            "ignore": ignore,
            "format": "int-quantized",
        }
    )
    by_target = {t: f"group_{n}" for n, targets in enumerate(groups) for t in targets}
    matched = dict(match.match_named_modules(_MODEL, by_target, ignore))
    for name, module in _MODEL.named_modules():
        if name not in _CLASSES:
            continue
        found = config.match(name, _CLASSES[name])
        assert (found is not None) == (name in matched), name
        if found is not None:
            target = match.match_targets(name, module, by_target)[0]
            assert (found[1], found[0].name) == (target, by_target[target])


def test_many_modules_and_many_targets_take_no_time():
    names = [f"model.layers.{n}.mlp.experts.{e}.up_proj" for n in range(100) for e in range(300)]
    group = {"targets": names[::2], "weights": {"num_bits": 8}, "format": "int-quantized"}
    config = parse_config({"config_groups": {"g": group}, "ignore": names[1::2]})
    start = time.process_time()
    found = [config.match(name, ("Linear",)) for name in names]
    assert time.process_time() - start < 5  # each name against each target takes minutes
    assert sum(group is not None for group in found) == len(names) // 2
