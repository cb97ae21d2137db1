"""The `compare` command: its inputs and its three ways to show the result."""

from __future__ import annotations

import json

import pytest
import tiny_checkpoints as tiny
from click.testing import CliRunner
from rich.console import Console
from safetensors.torch import load_file

from quantload import api, cli_compare
from quantload.accuracy.compare import LayerComparison, ModelComparison
from quantload.cli import main
from quantload.cli_compare import comparison_markdown
from quantload.quant.metrics import ErrorSums

WORST = "model.layers."


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("compare")
    source = tiny.llama(base / "source")
    return source, api.convert(source, base / "out", "W4A16:g32").folder


@pytest.fixture
def ids(tmp_path):
    file = tmp_path / "ids.json"
    file.write_text(json.dumps({"ids": [[1, 2, 3, 4], [5, 6]]}))
    return file


def run(*arguments):
    return CliRunner().invoke(main, ["compare", *map(str, arguments)])


def test_weights_only(folders):
    done = run(*folders)
    assert done.exit_code == 0, done.output
    assert "The 10 layers that lose most" in done.stdout
    assert "14 weights differ, 2 are equal" in done.stdout
    assert "KL" not in done.stdout


def test_token_ids(folders, ids):
    done = run(*folders, "--token-ids", ids, "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert "over 6 tokens" in done.stdout
    assert "ln perplexity: " in done.stdout
    assert "`model.layers.0` adds most to the hidden states" in done.stdout


def test_max_tokens(folders, ids):
    done = run(*folders, "--token-ids", ids, "--max-tokens", "5", "--json", "--device", "cpu")
    assert json.loads(done.stdout)["end"]["num_tokens"] == 5


def test_json(folders, ids):
    content = json.loads(run(*folders, "--token-ids", ids, "--json", "--device", "cpu").stdout)
    assert content["quantload_compare"] == 2
    rows = {row["module"]: row for row in content["layers"]}
    embedding = rows["model.embed_tokens"]
    assert embedding["weight"] == {"relative_error": 0.0, "sqnr_db": None, "max_abs": 0.0}
    assert embedding["output"] is None
    assert 0 < rows["model.layers.0.mlp.up_proj"]["output"]["relative_error"] < 1
    assert set(content["end"]) == {
        *("num_tokens", "kl_mean", "kl_standard_error", "kl_median", "kl_p99", "kl_p999"),
        *("top1", "top1_standard_error", "kl_by_confidence"),
        *("ln_perplexity", "ln_perplexity_change", "ln_perplexity_standard_error"),
    }
    assert sum(part["tokens"] for part in content["end"]["kl_by_confidence"]) == 6
    assert [block["block"] for block in content["blocks"]] == ["model.layers.0"]
    assert content["blocks"][0]["injected"] == content["blocks"][0]["propagated"]


def test_markdown(folders):
    """The worst ten are open, the rest is folded; both are sorted by the weight's error."""
    done = run(*folders, "--markdown").stdout
    lines = done.splitlines()
    assert lines[0] == "## quantload compare: passed: every error is within its limit"
    shown, _, rest = done.partition("<details>")
    tables = [[line for line in text.splitlines() if WORST in line] for text in (shown, rest)]
    assert [len(rows) for rows in tables] == [10, 4]
    errors = [float(row.split("|")[3].split("%")[0]) for rows in tables for row in rows]
    assert errors == sorted(errors, reverse=True)
    assert rest.splitlines()[-1] == "</details>"


def test_markdown_escapes_names_of_files(folders):
    sums = ErrorSums(noise=1.0, signal=100.0, count=1)
    name = "a|b<script>&[x](y)*`"
    row = LayerComparison(module=name, reference="", candidate="", weight=sums)
    text = comparison_markdown(ModelComparison(layers=(row,)))
    (line,) = [line for line in text.splitlines() if line.startswith("| a")]
    assert line.split(" | ")[0] == r"| a\|b&lt;script>&amp;\[x](y)\*\`"


@pytest.mark.parametrize(("width", "fits"), [(80, False), (120, True)])
def test_the_table_fits_the_terminal(folders, ids, monkeypatch, width, fits):
    """At 80 columns no row is wrapped, at 120 what the candidate holds is there too."""
    monkeypatch.setattr(cli_compare, "console", lambda: Console(width=width, highlight=False))
    done = run(*folders, "--token-ids", ids, "--device", "cpu").stdout
    table = done[: done.index("ranked by share")].splitlines()
    assert len(table) == 2 + 10
    assert all(len(line) <= width for line in table)
    assert table[1].split()[0] == "layer"
    assert ("W4A16" in table[2]) == fits
    heads = ("output", "SQNR dB", "share", "over type", "z")
    assert all(head in table[1] for head in heads)


def test_other_models_exit_with_3(folders, tmp_path):
    other = tiny.llama(tmp_path / "other", intermediate=64)
    done = run(folders[0], other)
    assert done.exit_code == 3
    assert done.stdout == ""
    assert "has shape `(64, 128)` in the reference, `(64, 64)` in the candidate" in done.stderr


def test_norms_and_what_is_not_finite_are_shown(folders, tmp_path):
    norm, up = "model.norm.weight", "model.layers.0.mlp.up_proj"
    tensors = load_file(folders[0] / "model.safetensors")
    tensors[norm] *= 2
    tensors[f"{up}.weight"][1, 1] = float("nan")
    other = tiny.write(tmp_path / "other", tiny.config(), tensors)
    done = run(folders[0], other)
    assert done.exit_code == 1, done.output
    assert f"PROBLEM `{up}`: 1 values of the candidate are not finite" in done.stdout
    assert "1 weights differ, 15 are equal" in done.stdout
    assert "1 other tensors differ" in done.stdout
    assert "mean SQNR" not in done.stdout
    rows = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("model.")]
    assert rows[:2] == [up, norm]
    content = json.loads(run(folders[0], other, "--json").stdout)
    assert content["problems"] == [f"`{up}`: 1 values of the candidate are not finite"]
    row = {row["module"]: row for row in content["layers"]}[norm]
    assert row["weight"]["relative_error"] == 1.0


def test_other_architectures_exit_with_3(folders, tmp_path):
    tensors = load_file(folders[0] / "model.safetensors")
    content = {**tiny.config(), "model_type": "mistral"}
    done = run(folders[0], tiny.write(tmp_path / "other", content, tensors))
    assert done.exit_code == 3
    assert "`model_type` is `mistral`, expected `llama`" in done.stderr
