"""Shares, distances from layers of the same type, and experts taken together."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quantload.accuracy.compare import LayerComparison, ModelComparison
from quantload.accuracy.layer_ranking import Place, place_of, ranked_layers, standing_apart
from quantload.quant.metrics import ErrorSums


def sums(relative, *, signal=1.0):
    return ErrorSums(noise=relative**2 * signal, signal=signal, count=4)


def row(module, weight=0.1, output=None, **more):
    return LayerComparison(
        module=module,
        reference="BF16",
        candidate=more.pop("candidate", "W4A16"),
        weight=None if weight is None else sums(weight),
        output=None if output is None else sums(output),
        **more,
    )


def ranked(*rows, **more):
    return ranked_layers(ModelComparison(layers=rows, **more))


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("lm_head", ("lm_head", None, "", None)),
        ("model.layers.12.mlp.down_proj", ("mlp.down_proj", 12, "model.layers", None)),
        ("h.3.attn.c_attn", ("attn.c_attn", 3, "h", None)),
        (
            "encoder.block.1.layer.0.SelfAttention.q",
            ("layer.0.SelfAttention.q", 1, "encoder.block", None),
        ),
        (
            "model.layers.2.mlp.experts.17.up_proj",
            ("mlp.experts.*.up_proj", 2, "model.layers", 17),
        ),
        ("model.layers.2", ("layers", 2, "model.layers", None)),
    ],
)
def test_names_taken_apart(module, expected):
    kind, depth, stack, expert = expected
    assert place_of(module) == Place(kind=kind, depth=depth, stack=stack, expert=expert)


def test_shares_are_of_squared_relative_errors():
    found = ranked(row("a", 0.3), row("b", 0.1, 0.4), row("c", 0.0))
    assert [layer.name for layer in found] == ["b", "a", "c"]
    assert [layer.share for layer in found] == pytest.approx([0.16 / 0.25, 0.09 / 0.25, 0.0])


def test_distances_are_from_the_other_layers_of_the_type():
    """Against numpy; layers of another encoding, and equal ones, are none of the others."""
    errors = [0.1, 0.11, 0.12, 0.09, 0.1, 0.3]
    rows = [row(f"model.layers.{at}.mlp.down_proj", error) for at, error in enumerate(errors)]
    rows.append(row("model.layers.6.mlp.down_proj", 0.01, candidate="W8A16"))
    rows.append(row("model.layers.7.mlp.down_proj", 0.0))
    rows += [row(f"model.layers.{at}.mlp.up_proj", 0.5) for at in range(4)]
    found = {layer.name: layer for layer in ranked(*rows)}
    db = -20 * np.log10(errors)
    for at in range(len(errors)):
        others = np.delete(db, at)
        layer = found[f"model.layers.{at}.mlp.down_proj"]
        assert layer.over_type_db == pytest.approx(others.mean() - db[at])
        assert layer.z == pytest.approx((others.mean() - db[at]) / others.std(ddof=1))
    for name in ("model.layers.6.mlp.down_proj", "model.layers.7.mlp.down_proj"):
        assert math.isnan(found[name].z)
    assert math.isnan(found["model.layers.0.mlp.up_proj"].z)  # only three others
    assert [layer.name for layer in standing_apart(found.values())] == [
        "model.layers.5.mlp.down_proj"
    ]


def test_layers_that_are_all_alike_do_not_stand_out():
    errors = [0.1, 0.1 + 1e-9, 0.1 - 1e-9, 0.1, 0.1, 0.1001]
    rows = [row(f"model.layers.{at}.q_proj", error) for at, error in enumerate(errors)]
    found = ranked(*rows)
    assert found[0].z > 1000
    assert standing_apart(found) == []


def test_experts_are_one_row():
    experts = [
        row(f"model.layers.1.mlp.experts.{at}.up_proj", 0.1, output, tokens=40 + at)
        for at, output in enumerate((0.2, 0.4, 0.3))
    ]
    (layer,) = ranked(*experts)
    assert layer.name == "model.layers.1.mlp.experts.*.up_proj"
    assert layer.is_experts
    assert layer.output.relative == pytest.approx(math.sqrt((0.04 + 0.16 + 0.09) / 3))
    assert layer.worst.module == "model.layers.1.mlp.experts.1.up_proj"
    assert layer.tokens == 40 + 41 + 42
    assert layer.share == 1.0
    apart = ranked_layers(ModelComparison(layers=tuple(experts)), merge_experts=False)
    assert [layer.rows[0].module for layer in apart] == [experts[at].module for at in (1, 2, 0)]


def test_an_expert_that_few_tokens_reached_says_nothing_by_its_output():
    names = [f"model.layers.1.mlp.experts.{at}.up_proj" for at in range(2)]
    rows = (row(names[0], 0.1, 0.9, tokens=3), row(names[1], 0.2, 0.3, tokens=50))
    (layer,) = ranked(*rows, few=(names[0],))
    assert layer.few == 1
    assert layer.output.relative == pytest.approx(0.3)
    assert layer.worst.module == names[1]
    assert layer.worst_error.relative == pytest.approx(0.2)  # by weights, which all have
    (alone,) = ranked(rows[0], few=(names[0],))
    assert alone.output is None
    assert alone.error.relative == pytest.approx(0.1)


def test_what_is_not_finite_comes_first_and_has_no_share():
    bad = LayerComparison(
        module="bad",
        reference="",
        candidate="",
        weight=ErrorSums(noise=math.nan, signal=1.0, count=2, num_nonfinite=1),
    )
    found = ranked(row("fine", 0.2), bad)
    assert [layer.name for layer in found] == ["bad", "fine"]
    assert math.isnan(found[0].share)
    assert found[1].share == 1.0
    assert found[0].failures[0].startswith("`bad`: 1 values of the candidate are not finite")


def test_two_stacks_of_blocks_are_told_apart():
    found = ranked(row("model.layers.0.q_proj"), row("visual.blocks.0.q_proj"))
    assert {layer.kind for layer in found} == {"model.layers.#.q_proj", "visual.blocks.#.q_proj"}
