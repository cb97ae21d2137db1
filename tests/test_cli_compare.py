"""The `compare` command: its inputs and its three ways to show the result."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_checkpoints as tiny
import torch
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
    digest = hashlib.sha256(b"[[1,2,3,4],[5,6]]").hexdigest()
    assert f"6 tokens in 2 sequences, sha256 of the ids {digest}" in done.stdout
    assert "`model.layers.0` adds most to the hidden states" in done.stdout


def test_max_tokens(folders, ids):
    done = run(*folders, "--token-ids", ids, "--max-tokens", "5", "--json", "--device", "cpu")
    assert json.loads(done.stdout)["end"]["num_tokens"] == 5


def test_json(folders, ids):
    content = json.loads(run(*folders, "--token-ids", ids, "--json", "--device", "cpu").stdout)
    assert content["quantload_compare"] == 4
    rows = {row["module"]: row for row in content["layers"]}
    embedding = rows["model.embed_tokens"]
    assert embedding["weight"] == {"relative_error": 0.0, "sqnr_db": None, "max_abs": 0.0}
    assert embedding["output"] is None
    assert 0 < rows["model.layers.0.mlp.up_proj"]["output"]["relative_error"] < 1
    assert set(content["end"]) == {
        *("num_tokens", "kl_mean", "kl_standard_error", "kl_max"),
        *("kl_median", "kl_p99", "kl_p999"),
        *("kl_median_standard_error", "kl_p99_standard_error", "kl_p999_standard_error"),
        *("top1", "top1_standard_error", "kl_by_confidence"),
        *("ln_perplexity", "ln_perplexity_change", "ln_perplexity_standard_error"),
    }
    assert sum(part["tokens"] for part in content["end"]["kl_by_confidence"]) == 6
    names = [block["block"] for block in content["blocks"]]
    assert names == ["model.layers.0", "model.layers.1"]
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
    assert "1 weight differs, 15 are equal" in done.stdout
    assert "1 other tensor differs" in done.stdout
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


def test_tiers(folders, ids):
    def content(*arguments):
        return json.loads(run(*folders, *arguments, "--json", "--device", "cpu").stdout)

    structure = content("--structure")
    assert (structure["tier"], structure["layers"], structure["end"]) == ("structure", [], None)
    assert len(structure["structure"]["layers"]) == 16
    assert structure["structure"]["reference_bits"] == 16
    weights = content("--weights")
    assert weights["tier"] == "weights"
    assert weights["structure"] == structure["structure"]
    assert {row["output"] for row in weights["layers"]} == {None}
    layers = content("--layers", "--token-ids", ids)
    assert (layers["tier"], layers["end"], layers["blocks"]) == ("layers", None, [])
    end = content("--token-ids", ids)
    assert end["tier"] == "end"
    # isolated errors are those of the full run
    assert [row["output"] for row in layers["layers"]] == [row["output"] for row in end["layers"]]
    digest = hashlib.sha256(b"[[1,2,3,4],[5,6]]").hexdigest()
    assert layers["tokens"] == {"sha256": digest, "count": 6, "sequences": 2}
    assert weights["tokens"] is None


def test_layers_without_tokens_run_made_up_ones(folders):
    arguments = ("--layers", "--max-tokens", "8", "--json", "--device", "cpu")
    content = json.loads(run(*folders, *arguments).stdout)
    assert content["tokens"]["count"] == 8
    generated = run(*folders, "--generated", "--max-tokens", "8", "--json", "--device", "cpu")
    assert json.loads(generated.stdout)["tokens"] == content["tokens"]


def test_structure_is_shown(folders):
    done = run(*folders, "--structure")
    assert done.exit_code == 0, done.output
    assert "model.layers.{0-1}.mlp.up_proj" in done.stdout
    assert "16 layers, 14 held in another way" in done.stdout
    assert done.stdout.splitlines()[-1] == "passed"
    every = run(*folders, "--structure", "--all").stdout
    assert "model.layers.1.mlp.up_proj" in every
    lines = run(*folders, "--structure", "--markdown").stdout.splitlines()
    assert lines[0] == "## quantload compare: structure passed"
    assert sum(line.startswith("| model.") for line in lines) > 1


def test_without_tokens_the_way_to_outputs_is_told(folders, ids):
    assert "for outputs and KL give tokens: `--generated`" in run(*folders).stderr
    for arguments in (["--weights"], ["--token-ids", ids, "--device", "cpu"], ["--json"]):
        assert "for outputs" not in run(*folders, *arguments).stderr


def test_limits_and_exit_codes(folders, ids):
    done = run(*folders, "--fail-over", "weight.sqnr<5", "weight.steps>9")
    assert done.exit_code == 0, done.output
    done = run("--fail-over", "weight.sqnr<60", "bits>16", *folders)
    assert done.exit_code == 1
    assert re.search(r"EXCEEDS `model\.\S+`: `weight.sqnr<60`: [0-9.]+, and 13 more", done.stdout)
    content = json.loads(
        run(
            *folders,
            *("--fail-over", "kl.mean>0", "--fail-over=top1<0"),
            *("--token-ids", ids, "--json", "--device", "cpu"),
        ).stdout
    )
    assert content["limits"] == ["kl.mean>0", "top1<0"]
    assert [one["limit"] for one in content["exceeded"]] == ["kl.mean>0"]
    assert content["exceeded"][0]["value"] == content["end"]["kl_mean"]
    assert not content["passed"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fail-over", "kl.mean>0.1"], "needs tier `end`, only `weights` is measured"),
        (["--fail-over", "sqnr<1"], "there is no statistic `sqnr`"),
        (["--structure", "--weights"], "`--structure` and `--weights` are both given"),
        (["--weights", "--generated"], "`--weights` runs nothing, and `--generated` is given"),
        (["--structure", "--html", "x.html"], "`--structure` measures none"),
        (["--json", "--markdown"], "`--json` and `--markdown` are both given"),
    ],
)
def test_bad_choices_exit_with_2(folders, arguments, message):
    done = run(*folders, *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stdout == ""


def test_outputs_that_are_not_finite_exit_with_3(folders, ids, tmp_path):
    tensors = load_file(folders[0] / "model.safetensors")
    tensors["model.norm.weight"][:] = 3e38  # finite, but no product with it is
    other = tiny.write(tmp_path / "other", tiny.config(), tensors)
    done = run(folders[0], other, "--token-ids", ids, "--device", "cpu")
    assert done.exit_code == 3, done.output
    assert "not finite" in done.stderr


def test_another_vocabulary_exits_with_3(folders, tmp_path):
    done = run(folders[0], tiny.llama(tmp_path / "other", vocabulary=128))
    assert done.exit_code == 3
    assert "has shape `(96, 64)` in the reference, `(128, 64)` in the candidate" in done.stderr


# -- what makes a comparison fail in every tier ----------------------------------------------------


def edited(folders, tmp_path, change=lambda tensors: None, **config):
    """The candidate, with other tensors or another config."""
    content = json.loads((folders[1] / "config.json").read_text()) | config
    tensors = load_file(folders[1] / "model.safetensors")
    change(tensors)
    return tiny.write(tmp_path / "edited", content, tensors)


def of_all_tiers(folders, other, ids):
    """What each tier prints; each has to fail with 1."""
    ways = (), ("--structure",), ("--layers", "--token-ids", ids), ("--token-ids", ids)
    runs = [run(folders[0], other, *way) for way in ways]
    assert [done.exit_code for done in runs] == [1] * len(ways), runs[-1].output
    return [done.stdout for done in runs]


@pytest.mark.parametrize("key", [("rms_norm_eps", 0.1), ("hidden_act", "gelu"), ("head_dim", 8)])
def test_a_config_that_changes_the_model_fails(folders, ids, tmp_path, key):
    name, value = key
    other = edited(folders, tmp_path, **{name: value})
    expected = json.loads((folders[0] / "config.json").read_text())[name]
    line = f"config: `{name}` is `{value}`, expected `{expected}`"
    for text in of_all_tiers(folders, other, ids):
        assert f"PROBLEM {line}" in text
    assert json.loads(run(folders[0], other, "--json").stdout)["config_differences"] == [line]
    assert line in run(folders[0], other, "--markdown").stdout
    run(folders[0], other, "--html", tmp_path / "page.html")
    assert f"Fails: {line}" in (tmp_path / "page.html").read_text()


def test_missing_layers_fail_in_every_tier(folders, ids, tmp_path):
    gone = "model.layers.1.mlp.up_proj"

    def take(tensors):
        for name in [name for name in tensors if name.startswith(gone)]:
            del tensors[name]

    other = edited(folders, tmp_path, take)
    texts = of_all_tiers(folders, other, ids)
    assert all(f"only in the reference: `{gone}`" in text for text in texts)
    assert all("the models were not run: " in text for text in texts[2:])
    limited = run(folders[0], other, "--token-ids", ids, "--fail-over", "kl.mean>9")
    assert limited.exit_code == 1, limited.output


def test_layers_that_the_reference_lacks_fail_in_every_tier(folders, ids, tmp_path):
    def add(tensors):
        for name in [name for name in tensors if name.startswith("model.layers.1.")]:
            tensors[name.replace("layers.1.", "layers.2.")] = tensors[name].clone()

    for text in of_all_tiers(folders, edited(folders, tmp_path, add), ids):
        assert "PROBLEM layers that the reference lacks: `model.layers.2.mlp.down_proj`" in text


@pytest.mark.parametrize("times", [1e-6, -1.0, float("nan")])
def test_input_scales_without_tokens(folders, ids, tmp_path, times):
    """One of three like it is far off; one that is no scale at all fails."""
    source = tiny.llama(tmp_path / "three", layers=3)
    made = tmp_path / "fp8"
    options = ("--scheme", "FP8", "--input-absmax", "4", "--quiet", "--no-verify")
    assert CliRunner().invoke(main, ["convert", str(source), str(made), *options]).exit_code == 0
    name = "model.layers.1.mlp.up_proj"
    clean = run(source, made).stdout
    assert "21 static input scales were not judged: only outputs show what they lose" in clean
    assert "off those of other blocks" not in clean
    tensors = load_file(made / "model.safetensors")
    tensors[f"{name}.input_scale"] *= times
    content = json.loads((made / "config.json").read_text())
    other = tiny.write(tmp_path / "other", content, tensors)
    done = run(source, other)
    if times == 1e-6:
        line = f"input scales 1000 times and more off those of other blocks: `{name}`"
        assert line in done.stdout
        assert f"differ from the reference's: `{name}`" in run(made, other).stdout
        return
    structure = run(source, other, "--structure")
    assert structure.exit_code == 1
    assert f"PROBLEM `{name}`: `{name}.input_scale` with " in structure.stdout
    assert done.exit_code == (1 if times == -1 else 2)  # NaN is not read
    assert f"{name}.input_scale" in done.output


def test_names_that_would_steer_a_terminal_are_written_out(tmp_path):
    name = "a\x1b[31m\u202eb\nc.weight"
    config, tensors = tiny.config(), tiny.tensors(tiny.config())
    sides = [
        tiny.write(tmp_path / f"{n}", config, {**tensors, name: torch.full((8,), n + 1.0)})
        for n in (0, 1)
    ]
    page = tmp_path / "page.html"
    shown = r"a\x1b[31m\u202eb\nc.weight"
    for way in ((), ("--markdown",), ("--html", page)):
        done = run(*sides, *way)
        assert done.exit_code == 1, done.output
        assert not {"\x1b", "\u202e"} & set(done.stdout)
        assert shown in done.stdout or way == ("--markdown",)
    assert shown.replace(".", ".<wbr>") in page.read_text()
    assert not {"\x1b", "\u202e"} & set(page.read_text())


def test_one_token_has_no_standard_error(folders, tmp_path):
    file = tmp_path / "one.json"
    file.write_text("[[5]]")
    page = tmp_path / "page.html"
    done = run(*folders, "--token-ids", file, "--html", page)
    assert done.exit_code == 0, done.output
    assert "nan" not in done.stdout
    assert "over 1 token\n" in done.stdout
    assert "nan" not in re.sub(r"<s(cript|tyle).*?</s", "", page.read_text(), flags=re.DOTALL)


def test_a_candidate_with_folded_scales_is_told(folders, tmp_path):
    """As AWQ does: a norm divided by a scale, the weights that follow multiplied by it."""
    tensors = load_file(folders[0] / "model.safetensors")
    block = "model.layers.0"
    tensors[f"{block}.input_layernorm.weight"] /= 4
    for name in ("q_proj", "k_proj", "v_proj"):
        tensors[f"{block}.self_attn.{name}.weight"] *= 4
    config = json.loads((folders[0] / "config.json").read_text())
    folded = tiny.write(tmp_path / "folded", config, tensors)
    done = run(folders[0], folded)
    assert done.exit_code == 1
    assert "1 norm differs too: if scales were folded" in " ".join(done.stdout.split())
    assert "folded" not in run(*folders).stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_output_that_cannot_be_written(folders):
    command = [sys.executable, "-m", "quantload", "compare", *map(str, folders), "--json"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, check=False, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "error: [Errno 28]" in done.stderr


def test_an_interrupted_command_is_no_failed_check(folders, monkeypatch):
    def interrupt(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("quantload.api.compare", interrupt)
    done = run(*folders)
    assert (done.exit_code, done.stderr) == (130, "interrupted\n")


def test_a_page_needs_a_name(folders):
    done = run(*folders, "--html", ".")
    assert done.exit_code == 2
    assert "cannot write `.`" in done.stderr
