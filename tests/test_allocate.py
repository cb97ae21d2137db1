"""`allocate`: scores by gradients, the budget, and the file that convert takes."""

from __future__ import annotations

import json
import math
import tomllib

import pytest
import tiny_checkpoints as tiny
import torch
from click.testing import CliRunner
from tiny_moe import tiny_moe

from quantload import api, api_allocate
from quantload.accuracy.score_table import ScoreTable
from quantload.api_allocate import allocate_schemes
from quantload.cli import main
from quantload.errors import ConfigError

SEQUENCES = [[1, 5, 9, 2, 33, 8], [7, 7, 3, 20], [4, 90, 11, 17], [6, 2, 2, 8]]
SCHEMES = ("W4A16:g32", "W8A16:g32")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny.llama(tmp_path_factory.mktemp("allocate") / "source", dtype=torch.float32)


def test_a_budget_between_two_schemes(source):
    found = allocate_schemes(source, bits=6.5, schemes=SCHEMES, sequences=SEQUENCES, device="cpu")
    mix = found.mixes[0]
    assert mix.name == "by gradients"
    assert 5.5 < mix.bits_per_weight <= 6.5
    assert set(mix.schemes.values()) == set(SCHEMES)
    for layer in range(2):
        attention = f"model.layers.{layer}.self_attn"
        assert len({mix.schemes[f"{attention}.{name}_proj"] for name in "qkv"}) == 1
    assert found.mixes[1].bits_per_weight <= 6.5
    assert found.best.kl_mean == min(mix.kl_mean for mix in found.mixes)
    assert found.mixes[2].bits_per_weight < mix.bits_per_weight


def test_everything_fits_or_nothing(source):
    found = allocate_schemes(
        source, bits=99, schemes=("W4A16:g32", "keep"), sequences=SEQUENCES, device="cpu"
    )
    assert set(found.mixes[0].schemes.values()) == {"keep"}
    assert found.mixes[0].kl_mean == 0.0
    with pytest.raises(ConfigError, match="smallest schemes take"):
        allocate_schemes(source, bits=3, schemes=SCHEMES, sequences=SEQUENCES, device="cpu")
    with pytest.raises(ConfigError, match="expected two"):
        allocate_schemes(source, bits=6, schemes=SCHEMES[:1], sequences=SEQUENCES, device="cpu")


def test_the_file_is_what_convert_takes(source, tmp_path):
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(SEQUENCES))
    rules = tmp_path / "rules.toml"
    arguments = [
        "allocate",
        str(source),
        str(rules),
        "--bits",
        "6.5",
        "--schemes",
        ",".join(SCHEMES),
    ]
    done = CliRunner().invoke(
        main, [*arguments, "--token-ids", str(ids), "--device", "cpu", "--json", "--quiet"]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    best = next(mix for mix in found["mixes"] if mix["name"] == found["best"])
    content = tomllib.loads(rules.read_text())
    for module, scheme in best["schemes"].items():
        assert content["rules"].get(module, content["scheme"]) == scheme
    out = tmp_path / "out"
    done = CliRunner().invoke(
        main, ["convert", str(source), str(out), "--config", str(rules), "--quiet"]
    )
    assert done.exit_code == 0, done.output
    assert CliRunner().invoke(main, [*arguments, "--token-ids", str(ids)]).exit_code == 2


def converted(source, folder):
    api.convert(source, folder, SCHEMES[0])
    return api.inspect(folder)


def run(*arguments):
    return CliRunner().invoke(main, ["allocate", *map(str, arguments), "--device", "cpu"])


@pytest.mark.parametrize("bits", [math.nan, math.inf, 0.0, -4.0])
def test_a_budget_that_is_no_size(source, bits):
    with pytest.raises(ConfigError, match="expected a positive number"):
        allocate_schemes(source, bits=bits, schemes=SCHEMES, sequences=SEQUENCES, device="cpu")


def test_scores_are_kept_and_solved_for_other_budgets(source, tmp_path, monkeypatch):
    ids, scores = tmp_path / "ids.json", tmp_path / "scores.json"
    ids.write_text(json.dumps(SEQUENCES))
    common = ["--schemes", ",".join(SCHEMES), "--token-ids", ids, "--scores", scores, "--quiet"]
    done = run(source, tmp_path / "a.toml", "--bits", 6.5, *common, "--json")
    assert done.exit_code == 0, done.output
    first = json.loads(done.stdout)
    table = ScoreTable.from_json(scores.read_text(), "scores")
    assert ScoreTable.from_json(table.to_json(), "again") == table
    assert {m: dict(row.scores) for m, row in table.rows.items()} == first["scores"]

    def refuse(*_, **__):
        raise AssertionError("nothing is scored again")

    monkeypatch.setattr("quantload.api_allocate.score_layers", refuse)
    again = run(source, tmp_path / "b.toml", "--bits", 6.5, *common, "--json")
    assert json.loads(again.stdout) == first
    other = run(source, tmp_path / "c.toml", "--bits", 7.5, *common, "--no-verify", "--json")
    mix = json.loads(other.stdout)["mixes"][0]
    assert mix["kl_mean"] is None
    assert 6.5 < mix["bits_per_weight"] <= 7.5
    assert "KL" not in (tmp_path / "c.toml").read_text()
    shown = run(source, tmp_path / "d.toml", "--bits", 7.5, *common)
    assert shown.exit_code == 0, shown.output
    assert "over the sum of the parts" in shown.output
    assert "Other budgets" in shown.output


def test_scores_of_something_else_are_refused(source, tmp_path):
    scores = tmp_path / "scores.json"
    common = ["--bits", 6.5, "--schemes", ",".join(SCHEMES), "--scores", scores]
    weights = [*common, "--no-data", "--overwrite"]
    assert run(source, tmp_path / "a.toml", *weights).exit_code == 0
    text = scores.read_text()
    wrong = run(source, tmp_path / "a.toml", *common, "--overwrite")
    assert wrong.exit_code == 2
    assert "has scores by `weights`, expected `gradient`" in wrong.output
    other = tiny.llama(tmp_path / "other", dtype=torch.bfloat16)
    wrong = run(other, tmp_path / "a.toml", *weights)
    assert "the scores are of a checkpoint" in wrong.output
    asked = [*weights[:2], "--schemes", "W4A16:g32,W8A8", *weights[4:]]
    wrong = run(source, tmp_path / "a.toml", *asked)
    assert "expected W8A8 too" in wrong.output.replace("`", "")
    for damaged in ("{", text.replace('"quantload_scores": 1', '"quantload_scores": 9'), "[]"):
        scores.write_text(damaged)
        wrong = run(source, tmp_path / "a.toml", *weights)
        assert wrong.exit_code == 2
        assert "scores" in wrong.output


def test_weights_alone_score_without_running_anything(source, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("nothing runs")

    monkeypatch.setattr("quantload.accuracy.streaming.open_streamed", refuse)
    found = allocate_schemes(
        source, bits=6.5, schemes=SCHEMES, score="weights", verify=False, device="cpu"
    )
    assert found.best.kl_mean is None
    stored = api.inspect(source)
    made = converted(source, tmp_path / "w4")
    for module, row in found.table.rows.items():
        error = made.read_dense(module, torch.float32) - stored.read_dense(module, torch.float32)
        expected = float(error.double().square().sum(dim=1).mean())
        assert row.scores[SCHEMES[0]] == pytest.approx(expected, rel=1e-5)


def test_one_group_at_a_time(source):
    """Oracle: a mix of one group alone, judged by itself on the same tokens."""
    ids = SEQUENCES[:2]
    found = allocate_schemes(
        source,
        bits=6.5,
        schemes=SCHEMES,
        sequences=[*ids, *SEQUENCES[2:]],
        score="kl",
        device="cpu",
    )
    assert found.mixes[0].name == "by KL of single groups"
    group = ("model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj")
    assert group in found.table.groups
    reference = api.load(source, device="cpu", dtype=torch.float32)
    rules = dict.fromkeys(group, SCHEMES[0])
    mixed = api.load(source, device="cpu", dtype=torch.float32, rules=rules)
    kl = []
    with torch.no_grad():
        for row in ids:
            p, q = (
                torch.log_softmax(model(torch.tensor([row])).logits[0].double(), -1)
                for model in (reference, mixed)
            )
            kl += (p.exp() * (p - q)).sum(-1).tolist()
    score = sum(found.table.rows[module].scores[SCHEMES[0]] for module in group)
    assert score == pytest.approx(sum(kl) / len(kl), rel=1e-3)


def test_experts_of_a_block_have_one_scheme_and_those_without_tokens_are_named(tmp_path):
    folder = tiny_moe(tmp_path / "moe")
    sequences = [[1, 5], [9, 7], [4, 8, 3]]
    found = allocate_schemes(folder, bits=6.2, schemes=SCHEMES, sequences=sequences, device="cpu")
    estimated = {m: row.estimated for m, row in found.table.rows.items() if row.estimated}
    assert estimated
    assert set(estimated.values()) == {"no token reached it"}
    unseen = next(iter(estimated))
    block, _, rest = unseen.partition(".experts.")
    kind = rest.rpartition(".")[2]
    alike = [
        m
        for m in found.table.rows
        if m.startswith(f"{block}.experts.") and m.endswith(kind) and m not in estimated
    ]
    stored = api.inspect(folder)
    made = converted(folder, tmp_path / "w4")

    def error(module):
        difference = made.read_dense(module, torch.float32) - stored.read_dense(
            module, torch.float32
        )
        return float(difference.double().square().sum())

    known = sum(found.table.rows[m].scores[SCHEMES[0]] for m in alike)
    expected = error(unseen) * known / sum(map(error, alike))
    assert found.table.rows[unseen].scores[SCHEMES[0]] == pytest.approx(expected, rel=1e-4)
    for mix in found.mixes:
        for layer in range(2):
            start = f"model.layers.{layer}.mlp.experts."
            assert len({s for m, s in mix.schemes.items() if m.startswith(start)}) == 1
    rules = tmp_path / "rules.toml"
    rules.write_text(found.rules_text())
    done = CliRunner().invoke(
        main, ["convert", str(folder), str(tmp_path / "out"), "--config", str(rules), "--quiet"]
    )
    assert done.exit_code == 0, done.output
    written = api.inspect(tmp_path / "out")
    for module, scheme in found.best.schemes.items():
        assert str(written.weights[module].scheme).startswith(scheme.partition(":")[0])


def test_active_bits_count_experts_by_the_share_of_tokens(tmp_path):
    folder = tiny_moe(tmp_path / "moe")  # 2 of 4 experts for a token
    stored, active = (
        allocate_schemes(
            folder,
            bits=6.2,
            schemes=SCHEMES,
            score="weights",
            cost=cost,
            verify=False,
            device="cpu",
        )
        for cost in ("stored", "active")
    )
    shares = {m: row.active for m, row in active.table.rows.items()}
    assert {shares[m] for m in shares if ".experts." in m} == {0.5}
    assert {shares[m] for m in shares if ".experts." not in m} == {1.0}
    rows = active.table.rows
    bits = sum(rows[m].bits[s] * rows[m].active for m, s in active.best.schemes.items())
    elements = sum(row.elements * row.active for row in rows.values())
    assert active.best.bits_per_weight == pytest.approx(bits / elements)
    assert active.best.bits_per_weight <= 6.2
    assert stored.table.rows == active.table.rows


def test_active_bits_want_experts(source):
    kwargs = {"bits": 6.5, "schemes": SCHEMES, "score": "weights", "verify": False}
    with pytest.raises(ConfigError, match="no weight is known to meet only some tokens"):
        allocate_schemes(source, **kwargs, cost="active", device="cpu")


def test_where_effects_do_not_add_up_the_mix_is_scored_again(source, monkeypatch):
    kwargs = {"bits": 6.5, "schemes": (*SCHEMES, "keep"), "sequences": SEQUENCES, "device": "cpu"}
    monkeypatch.setattr("quantload.api_allocate.ADDITIVE", (0.0, math.inf))
    plain = allocate_schemes(source, **kwargs)
    monkeypatch.setattr("quantload.api_allocate.ADDITIVE", (0.0, 0.0))
    found = allocate_schemes(source, **kwargs)
    assert found.mixes[:3] == plain.mixes
    *_, last = found.mixes
    assert last.name == "by gradients at the mix"
    assert last.bits_per_weight <= 6.5
    assert found.best.kl_mean == min(mix.kl_mean for mix in found.mixes)
    for group in found.table.groups:
        assert len({last.schemes[module] for module in group}) == 1


def test_nesting_without_end_is_no_file_of_scores():
    with pytest.raises(ConfigError, match="`x` is no file of scores: RecursionError"):
        ScoreTable.from_json("[" * 100_000, "x")


@pytest.mark.parametrize(
    "schemes", [("W4A16:g32", "W8A16:g32"), ("W4A16:channel", "W8A16:channel")]
)
def test_gradients_at_a_mix_in_the_own_dtype(tmp_path, monkeypatch, schemes):
    """In bfloat16 layers of the mix run by kernels of torch, which have no gradient."""
    monkeypatch.setattr(api_allocate, "ADDITIVE", (1e9, 1e9))  # nothing adds up
    folder = tiny.llama(tmp_path / "source", dtype=torch.bfloat16)
    found = allocate_schemes(
        folder, bits=6.5, schemes=schemes, sequences=SEQUENCES, device="cpu", dtype="auto"
    )
    assert found.mixes[-1].name == "by gradients at the mix"
    assert math.isfinite(found.mixes[-1].kl_mean)
