"""Names of tensors find their place, or say why not."""

from __future__ import annotations

import pytest

from quantload.errors import UnexpectedTensor
from quantload.mappers.mapper import (
    Conversion,
    Converted,
    Cut,
    Join,
    Piece,
    Target,
    WeightMapper,
)
from quantload.mappers.name_rules import NameRules

ATTENTION = "model.layers.0.self_attn"
MODULES = {
    "": frozenset[str](),
    "model": frozenset[str](),
    "model.embed_tokens": frozenset({"weight"}),
    "model.layers": frozenset[str](),
    "model.layers.0": frozenset[str](),
    ATTENTION: frozenset[str](),
    f"{ATTENTION}.q_proj": frozenset({"weight", "bias"}),
    f"{ATTENTION}.k_proj": frozenset({"weight"}),
    "model.layers.0.mlp": frozenset[str](),
    "model.layers.0.mlp.gate_proj": frozenset({"weight"}),
    "model.layers.0.mlp.gate_proj_2": frozenset({"weight"}),
    "model.layers.0.mlp.experts": frozenset({"gate_up_proj", "down_proj"}),
    "model.norm": frozenset({"weight"}),
    "lm_head": frozenset({"weight"}),
}


@pytest.fixture
def mapper() -> WeightMapper:
    return WeightMapper(MODULES, base_prefix="model")


@pytest.mark.parametrize(
    ("name", "module", "leaf"),
    [
        ("model.norm.weight", "model.norm", "weight"),
        ("norm.weight", "model.norm", "weight"),
        ("model.lm_head.weight", "lm_head", "weight"),
        ("language_model.lm_head.weight", "lm_head", "weight"),
        ("model.norm.gamma", "model.norm", "weight"),
        (f"{ATTENTION}.q_proj.bias", f"{ATTENTION}.q_proj", "bias"),
        (f"{ATTENTION}.k_proj.weight_packed", f"{ATTENTION}.k_proj", "weight_packed"),
        (
            f"{ATTENTION}.k_proj.weight.quant_state.bitsandbytes__nf4",
            f"{ATTENTION}.k_proj",
            "weight.quant_state.bitsandbytes__nf4",
        ),
        ("model.layers.0.mlp.gate_proj_2.weight", "model.layers.0.mlp.gate_proj_2", "weight"),
        ("layers.0.mlp.experts.down_proj", "model.layers.0.mlp.experts", "down_proj"),
    ],
)
def test_places(mapper: WeightMapper, name: str, module: str, leaf: str) -> None:
    assert mapper.target(name) == Target(module, leaf)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.extra.weight",
        "model.layers.1.mlp.gate_proj.weight",
        f"{ATTENTION}.k_proj.bias",
        f"{ATTENTION}.k_proj.lora.weight",
        "something",
    ],
)
def test_no_place(mapper: WeightMapper, name: str) -> None:
    assert mapper.find(name) is None
    with pytest.raises(UnexpectedTensor, match="no place in the model"):
        mapper.target(name)


def test_stacks_take_any_leaf(mapper: WeightMapper) -> None:
    stack = f"{ATTENTION}.stack"
    stacked = mapper.with_stacks({f"{ATTENTION}.k_proj": (stack, 1)})
    assert stacked.target(f"{ATTENTION}.k_proj.weight_scale") == Target(stack, "weight_scale", 1)
    assert stacked.target(f"{ATTENTION}.q_proj.weight") == Target(f"{ATTENTION}.q_proj", "weight")
    assert mapper.target(f"{ATTENTION}.k_proj.weight").slot == 0


def test_scales_of_a_cache_are_no_leaves_of_linear_layers(mapper: WeightMapper) -> None:
    stacked = mapper.with_stacks({f"{ATTENTION}.k_proj": ("stack", 1)})
    for leaf in ("k_proj.k_scale", "k_proj.output_scale", "k_scale"):
        route = stacked.route(f"{ATTENTION}.{leaf}")
        assert (route.targets, route.is_dropped) == ((), True)
        assert route.reason == "scale of a quantized key-value cache"
    own = {**MODULES, ATTENTION: frozenset({"k_scale"})}  # a model that has the scale itself
    assert WeightMapper(own).target(f"{ATTENTION}.k_scale") == Target(ATTENTION, "k_scale")


def test_modules(mapper: WeightMapper) -> None:
    assert mapper.module_of("norm") == "model.norm"
    assert mapper.module_of("model.layers.0") is None
    assert mapper.modules_of("norm.weight") == ("norm", "model.norm")
    assert mapper.modules_of("layers.0.self_attn.k_proj.weight.absmax") == (
        "layers.0.self_attn.k_proj",
        f"{ATTENTION}.k_proj",
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", "rotary table"),
        ("h.0.attn.masked_bias", "causal mask"),
        ("h.0.attn.bias", "causal mask"),
        ("embeddings.position_ids", "positions"),
        ("model.layers.0.self_attn.k_scale", "key-value cache"),
        ("model.layers.0.self_attn.k_proj.output_scale", "key-value cache"),
    ],
)
def test_droppable(mapper: WeightMapper, name: str, reason: str) -> None:
    assert reason in (mapper.why_dropped(name) or "")


def test_real_biases_are_not_droppable(mapper: WeightMapper) -> None:
    assert mapper.why_dropped(f"{ATTENTION}.q_proj.bias") is None
    assert mapper.why_dropped("model.layers.0.c_attn.bias") is None
    assert mapper.why_dropped("model.layers.0.weight_scale") is None


def test_conversions() -> None:
    def convert(name: str) -> Conversion:
        if "experts.3.up" in name:
            end = Converted("model.layers.0.mlp.experts.gate_up_proj", piece=Piece(3, 1, 2))
            return Conversion((end,), steps=(f"merged -> {end.name}",))
        if "rope" in name:
            return Conversion((Converted(name),), refused="transformers permutes it")
        return Conversion((Converted(name.replace("transformer.", "model.")),))

    mapper = WeightMapper(MODULES, base_prefix="model", convert=convert)
    experts = "model.layers.0.mlp.experts"
    assert mapper.target(f"{experts}.3.up_proj.weight") == Target(
        experts, "gate_up_proj", piece=Piece(3, 1, 2)
    )
    assert mapper.module_of(f"{experts}.3.up_proj") is None
    assert mapper.target("transformer.norm.weight") == Target("model.norm", "weight")
    assert "transformers permutes it" in mapper.explain("rope.weight")


def test_explain(mapper: WeightMapper) -> None:
    stacked = mapper.with_stacks({f"{ATTENTION}.k_proj": ("stack", 1)})
    assert stacked.explain("model.norm.weight") == "model.norm.weight"
    assert stacked.explain("norm.weight") == (
        "norm.weight: base prefix `model.` added -> model.norm.weight"
    )
    assert stacked.explain("model.norm.gamma") == (
        "model.norm.gamma: legacy name of a norm; -> model.norm.weight"
    )
    assert stacked.explain(f"{ATTENTION}.k_proj.weight") == (
        f"{ATTENTION}.k_proj.weight: {ATTENTION}.k_proj is slot 1 of stack; -> stack.weight[1]"
    )
    assert "dropped: rotary table" in stacked.explain("model.rotary_emb.inv_freq")
    assert "nearest module `model.layers.0.mlp.gate_proj" in stacked.explain(
        "model.layers.0.mlp.gate_prj.weight"
    )


def test_ignored_by_the_model_class() -> None:
    mapper = WeightMapper(MODULES, may_ignore=(r"^mtp\.",))
    assert mapper.why_dropped("mtp.fc.weight") == "left out by the model class"


# -- several places, rules, companions -----------------------------------------------------------


def _fused_on_disk(name: str) -> Conversion:
    """One tensor on disk for q and k, whose rows follow each other; a shard of the norm."""
    if ".qk_proj." in name:
        ends = tuple(
            Converted(name.replace("qk_proj", part), cut=Cut(rows=(range(start, start + 4),)))
            for part, start in (("q_proj", 0), ("k_proj", 4))
        )
        return Conversion(ends, steps=("Chunk",))
    if ".norm_1." in name:
        return Conversion((Converted("model.norm.weight", join=Join(1, 2)),))
    return Conversion.unchanged(name)


def test_a_tensor_can_go_to_several_layers() -> None:
    mapper = WeightMapper(MODULES, base_prefix="model", convert=_fused_on_disk)
    name = "layers.0.self_attn.qk_proj.weight"
    q = Target(f"{ATTENTION}.q_proj", "weight", cut=Cut(rows=(range(4),)))
    k = Target(f"{ATTENTION}.k_proj", "weight", cut=Cut(rows=(range(4, 8),)))
    assert mapper.targets(name) == (q, k)
    assert mapper.layers_of("layers.0.self_attn.qk_proj") == (q.module, k.module)
    assert mapper.module_of("layers.0.self_attn.qk_proj") is None
    assert mapper.modules_of(name) is None
    stacked = mapper.with_stacks({k.module: ("stack", 1)})
    assert stacked.targets(name)[1] == Target("stack", "weight", 1, cut=k.cut)
    scale = mapper.targets("layers.0.self_attn.qk_proj.weight_scale")
    assert [(target.name, target.cut) for target in scale] == [
        (f"{ATTENTION}.q_proj.weight_scale", q.cut),
        (f"{ATTENTION}.k_proj.weight_scale", k.cut),
    ]
    # k has no bias: a tensor that goes to one of its places only goes nowhere
    assert mapper.targets("layers.0.self_attn.qk_proj.bias") == ()


def test_what_shares_a_parameter_is_no_layer() -> None:
    mapper = WeightMapper(MODULES, base_prefix="model", convert=_fused_on_disk)
    assert mapper.targets("model.norm_1.weight")[0].join == Join(1, 2)
    assert mapper.layers_of("model.norm_1") == ()


def test_what_goes_with_an_expert_takes_its_way() -> None:
    def convert(name: str) -> Conversion:
        if name.endswith("experts.3.up_proj.weight"):
            end = Converted("model.layers.0.mlp.experts.gate_up_proj", piece=Piece(3, 1, 2))
            return Conversion((end,), steps=("merged",))
        return Conversion.unchanged(name)

    mapper = WeightMapper(MODULES, base_prefix="model", convert=convert)
    experts = "model.layers.0.mlp.experts"
    for leaf in ("input_scale", "weight_scale_inv", "weight.absmax"):
        found = mapper.target(f"{experts}.3.up_proj.{leaf}")
        assert found == Target(experts, f"gate_up_proj.{leaf}", piece=Piece(3, 1, 2))
    assert mapper.explain(f"{experts}.3.up_proj.input_scale") == (
        f"{experts}.3.up_proj.input_scale: goes with {experts}.3.up_proj.weight; merged; "
        f"-> {experts}.gate_up_proj.input_scale[expert 3, part 1]"
    )
    assert mapper.find(f"{experts}.4.up_proj.input_scale") is None
    assert mapper.find(f"{experts}.3.up_proj.bias") is None
    assert mapper.target(f"{experts}.down_proj_scale_inv").leaf == "down_proj_scale_inv"


def test_rules_of_the_author_come_first() -> None:
    rules = NameRules(
        regex={r"^skip\.": None},
        stacked={"self_attn.qk_proj": ("self_attn.q_proj", "self_attn.k_proj")},
        prefix={"transformer.h.": "model.layers."},
    )
    modules = {**MODULES, f"{ATTENTION}.qk_proj": frozenset({"weight"})}
    mapper = WeightMapper(modules, rules=rules)
    name = "transformer.h.0.self_attn.k_proj.weight"
    assert mapper.target(name) == Target(f"{ATTENTION}.qk_proj", "weight", 1)
    assert mapper.target(name + "_scale") == Target(f"{ATTENTION}.qk_proj", "weight_scale", 1)
    assert mapper.route(name).steps == rules.apply(name).steps
    assert mapper.why_dropped("skip.norm.weight") == "left out by a rule of the model"
    assert mapper.find("skip.norm.weight") is None
    assert "regex `^skip\\.` -> dropped" in mapper.explain("skip.norm.weight")


def test_names_that_were_right_already_stay() -> None:
    """A rename that leads out of the model is not meant for this name."""
    rules = NameRules(substring={"mlp": "feed_forward"})
    mapper = WeightMapper(MODULES, base_prefix="model", rules=rules)
    assert mapper.target("layers.0.mlp.gate_proj.weight").module == "model.layers.0.mlp.gate_proj"


def test_reasons_to_leave_out() -> None:
    mapper = WeightMapper(MODULES, may_ignore={r"^layers\.1\.": "prediction layer"})
    assert mapper.why_dropped("layers.1.eh_proj.weight") == "prediction layer"
    route = mapper.route("layers.1.eh_proj.weight")
    assert (route.targets, route.reason, route.is_dropped) == ((), "prediction layer", True)
    assert not mapper.route("layers.2.eh_proj.weight").is_dropped
