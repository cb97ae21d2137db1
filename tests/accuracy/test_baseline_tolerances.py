"""Tolerances: those of the file's head, by glob, and those that repeats need."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from quantload.accuracy.baseline import Baseline, LayerBaseline, baseline_text
from quantload.accuracy.baseline_file import read_baseline
from quantload.accuracy.baseline_model_gates import about_blocks, about_end
from quantload.accuracy.baseline_repeats import repeats_of
from quantload.accuracy.baseline_tolerances import (
    Repeats,
    Tolerances,
    overridden,
    tolerances_json,
    tolerances_of,
    widened,
)
from quantload.accuracy.baseline_verdict import judge
from quantload.errors import BaselineError

NAMES = [f"model.layers.{i}.{name}" for i in range(8) for name in ("k_proj", "down_proj")]


def layer(digest, **numbers):
    numbers = {"weight": 0.1, "output": 0.1, "output_median": 0.1} | numbers
    return LayerBaseline(candidate=digest, reference="r", encoding="W4A16", **numbers)


def baseline(layers=None, **more):
    layers = layers or {name: layer("a") for name in NAMES}
    return Baseline(reference="r", candidate="c", bits_per_weight=4.0, layers=layers, **more)


def louder(db, **by_name):
    """All layers of the baseline with errors that are larger by some dB."""
    return {
        name: layer("b", weight=0.1 * 10 ** (by_name.get(name.rpartition(".")[2], db) / 20))
        for name in NAMES
    }


def test_the_last_pattern_that_matches_decides():
    tolerances = Tolerances(
        weight_mean_db=9,
        layers={
            "*": {"weight_db": 1.0, "output_median_db": 3.0},
            "*.k_proj": {"weight_db": 2.0},
            "model.layers.1.*": {"weight_db": 0.5},
        },
    )
    assert tolerances.of_layer("model.layers.0.k_proj").weight_db == 2.0
    assert tolerances.of_layer("model.layers.1.k_proj").weight_db == 0.5
    assert tolerances.of_layer("model.layers.1.k_proj").output_median_db == 3.0
    report = judge(baseline(tolerances=tolerances), louder(1.5))
    failed = {verdict.name for verdict in report.layers if verdict.failure}
    assert failed == {name for name in NAMES if "k_proj" not in name or ".1." in name}
    assert {verdict.tolerance_db for verdict in report.layers} == {0.5, 1.0, 2.0}


def test_patterns_in_a_file_keep_their_order_and_must_match(tmp_path):
    tolerances = Tolerances(layers={"*.k_proj": {"weight_db": 2.0}, "*": {"noise_db": 6.0}})
    file = tmp_path / "baseline.json"
    text = baseline_text(baseline(tolerances=tolerances))
    file.write_text(text)
    assert list(read_baseline(file).tolerances.layers) == ["*.k_proj", "*"]
    assert baseline_text(read_baseline(file)) == text
    file.write_text(text.replace('"*.k_proj"', '"*.q_proj"'))
    with pytest.raises(BaselineError, match=r"for `\*.q_proj`, which matches none of its layers"):
        read_baseline(file)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("wieght_db", 1, "the tolerances have `wieght_db`, expected"),
        ("weight_db", -1, "`weight_db` of the tolerances is `-1`"),
        ("weight_db", "1", "`weight_db` of the tolerances is `1`"),
        ("weight_db", True, "`weight_db` of the tolerances is `True`"),
        ("weight_db", math.inf, "`weight_db` of the tolerances is `inf`"),
        ("layers", [], "`layers` of the tolerances is"),
        ("layers", {"*": 1}, r"the tolerances of `\*` are `1`"),
        ("layers", {"*": {"kl_relative": 1}}, r"tolerances of `\*` have `kl_relative`"),
    ],
)
def test_what_is_no_tolerance_is_refused(key, value, message):
    with pytest.raises(ValueError, match=message):
        tolerances_of(tolerances_json(Tolerances()) | {key: value})


def test_a_check_may_allow_other_things():
    found = overridden(Tolerances(), {"steps_db": 4.0, "*.k_proj": {"weight_db": 1.0}})
    assert (found.steps_db, found.weight_db) == (4.0, 0.02)
    assert found.of_layer("a.k_proj").weight_db == 1.0
    with pytest.raises(BaselineError, match="have `steps`, expected"):
        overridden(Tolerances(), {"steps": 1})


def test_an_older_head_has_the_defaults():
    assert tolerances_of({"weight_db": 0.1}) == Tolerances(weight_db=0.1)


# -- repeats ---------------------------------------------------------------------------------------


def noisy(generator, sigma_db, *, dtype="float32"):
    """A repeat whose errors are off by a normal number of dB each."""
    off = generator.normal(scale=sigma_db, size=len(NAMES))
    return baseline(
        {
            name: layer("b", weight=0.1 * 10 ** (db / 20), output_median=0.1 * 10 ** (db / 40))
            for name, db in zip(NAMES, off, strict=True)
        },
        made_on={"dtype": dtype},
    )


def test_sigma_is_the_root_mean_square_of_the_differences():
    generator = np.random.default_rng(0)
    repeats = [noisy(generator, 0.3) for _ in range(40)]
    found = repeats_of(baseline(), [("made again", repeats)])
    assert found.runs == ("40 x made again",)
    assert found.sigma_db["weight"] == pytest.approx(0.3, rel=0.08)
    assert found.sigma_db["output_median"] == pytest.approx(0.15, rel=0.08)
    assert found.sigma_db["output"] == 0.0
    assert found.sigma_db["weight_mean"] == pytest.approx(0.3 / math.sqrt(16), rel=0.35)


def test_tolerances_are_as_wide_as_repeats_need_and_never_tighter():
    generator = np.random.default_rng(1)
    first = baseline()
    found = repeats_of(first, [("made again", [noisy(generator, 0.3) for _ in range(4)])])
    allowed = widened(Tolerances(), found, num_layers=len(NAMES))
    assert allowed.weight_db == pytest.approx(4 * found.sigma_db["weight"], rel=0.01)
    assert allowed.weight_mean_db == pytest.approx(
        2.8 * max(found.sigma_db["weight_mean"], found.sigma_db["weight"] / 4), rel=0.01
    )
    assert allowed.output_mean_db == Tolerances().output_mean_db
    quiet = Repeats(runs=(), sigma_db={"weight": 0.001, "steps": 0.0})
    assert widened(Tolerances(), quiet, num_layers=16) == Tolerances()
    alarms = 0
    held = replace(first, tolerances=allowed)
    for _ in range(200):
        alarms += not judge(held, noisy(generator, 0.3).layers).passed
    assert alarms <= 6  # 1 % for the mean, and 0.05 % for each of 16 layers
    assert not judge(first, noisy(generator, 0.3).layers).passed


def test_the_noisiest_kind_of_repeat_counts():
    generator = np.random.default_rng(2)
    kinds = [
        ("bfloat16 arithmetic", [baseline(made_on={"dtype": "float32"})] * 3),
        ("made again", [noisy(generator, 0.3) for _ in range(3)]),
    ]
    alone = repeats_of(baseline(), kinds[1:])
    assert repeats_of(baseline(), kinds).sigma_db["weight"] == alone.sigma_db["weight"]


def test_a_layer_that_is_noisier_has_a_pattern_of_its_own():
    loud = "model.layers.3.k_proj"
    again = {name: layer("b", weight=0.1 * (1.3 if name == loud else 1.001)) for name in NAMES}
    found = repeats_of(baseline(), [("made again", [baseline(again)])])
    allowed = widened(Tolerances(), found, num_layers=16)
    assert list(allowed.layers) == [loud]
    assert allowed.of_layer(loud).weight_db == pytest.approx(4 * 20 * math.log10(1.3), rel=0.01)
    assert allowed.weight_db < allowed.of_layer(loud).weight_db / 3


def test_what_arithmetic_is_known_to_add_is_no_noise():
    """bfloat16 rounds both outputs: an error of 0.5 % becomes one of sqrt(0.5^2 + 0.39^2) %."""
    small = {name: layer("a", output=0.005, output_median=0.005) for name in NAMES}
    first = baseline(small, blocks={"b.0": 0.01}, end={"kl_mean": (1e-3, 1e-5), "top1": (0.9, 0.1)})
    rounded = math.hypot(0.005, 2.0**-8)
    now = {name: layer("b", output=rounded, output_median=rounded) for name in NAMES}
    run = baseline(
        now,
        blocks={"b.0": 0.018},
        end={"kl_mean": (2e-3, 1e-5), "top1": (0.9, 0.1)},
        made_on={"dtype": "bfloat16"},
    )
    found = repeats_of(first, [("bfloat16 arithmetic", [run])])
    assert max(found.sigma_db.values()) == pytest.approx(0.0, abs=1e-6)
    assert judge(first, now, dtype="bfloat16").passed
    assert not judge(first, now).passed
    for gates in (about_blocks, about_end):
        numbers = run.blocks if gates is about_blocks else run.end
        assert not any(gate.failed for gate in gates(first, numbers, dtype="bfloat16"))
        assert any(gate.failed for gate in gates(first, numbers, dtype="float32"))
    broken = {name: replace(one, output_median=0.02) for name, one in now.items()}
    assert not judge(first, broken, dtype="bfloat16").passed


def test_arithmetic_adds_nothing_to_layers_that_were_not_measured():
    """Their errors are the baseline's: they would hide what the others lost in the mean."""
    small = {name: layer("a", output=0.005, output_median=0.005) for name in NAMES}
    first = baseline(small)
    now = dict(first.layers)
    for name in NAMES[:4]:
        now[name] = layer("b", output=0.01, output_median=0.006)
    (gate,) = [gate for gate in judge(first, now, dtype="bfloat16").gates if "outputs" in gate.what]
    expected = 20 * math.log10(0.01 / math.hypot(0.005, 2.0**-8)) * 4 / 16
    assert gate.change == pytest.approx(expected)
    assert gate.failed


def test_repeats_are_in_the_file(tmp_path):
    repeats = Repeats(
        runs=("1 x bfloat16 arithmetic",),
        sigma_db={"weight": 0.0, "kl": 0.012345678},
        sigma_top1=0.01,
        layers={NAMES[0]: {"weight": 1.0}},
    )
    file = tmp_path / "baseline.json"
    file.write_text(baseline_text(baseline(repeats=repeats)))
    kept = json.loads(file.read_text())["repeats"]
    assert kept == {
        "runs": ["1 x bfloat16 arithmetic"],
        "sigma_db": {"weight": 0.0, "kl": 0.0123457},
        "sigma_top1": 0.01,
    }
    assert baseline_text(read_baseline(file)) == file.read_text()
