"""The `stats` command: its tokens, its file, and what it prints."""

from __future__ import annotations

import json

import pytest
import tiny_checkpoints as tiny
from click.testing import CliRunner
from safetensors.torch import load_file

from quantload.cli import main

DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.llama(tmp_path_factory.mktemp("stats") / "source")


@pytest.fixture
def ids(tmp_path):
    file = tmp_path / "ids.json"
    file.write_text(json.dumps({"ids": [[1, 2, 3, 4], [5, 6]]}))
    return file


def run(*arguments):
    return CliRunner().invoke(main, ["stats", *map(str, arguments), "--device", "cpu", "--quiet"])


def test_token_ids(folder, ids, tmp_path):
    out = tmp_path / "stats.safetensors"
    done = run(folder, out, "--token-ids", ids)
    assert done.exit_code == 0, done.output
    assert "6 tokens in 2 sequences, statistics of 15 modules" in done.stdout
    assert f"written: {out}" in done.stdout
    assert load_file(out)[f"{DOWN}.tokens"].tolist() == [6]
    assert {file.name for file in tmp_path.iterdir()} == {"ids.json", "stats.safetensors"}


def test_json_and_max_tokens(folder, ids, tmp_path):
    out = tmp_path / "stats.safetensors"
    done = run(folder, out, "--token-ids", ids, "--max-tokens", 5, "--json")
    content = json.loads(done.stdout)
    assert content["quantload_stats"] == 1
    assert content["num_tokens"] == 5
    assert content["metadata"]["num_sequences"] == "2"
    tensors = load_file(out)
    assert content["modules"][DOWN] == {
        "tokens": 5,
        "input_absmax": tensors[f"{DOWN}.input_absmax"].item(),
    }
    assert content["without_statistics"] == ["model.embed_tokens"]
    assert content["unseen"] == content["warnings"] == []
    assert content["peak_rss"] > 1 << 20


def test_a_taken_place(folder, ids, tmp_path):
    out = tmp_path / "stats.safetensors"
    out.write_text("mine")
    done = run(folder, out, "--token-ids", ids)
    assert done.exit_code == 2
    assert f"output `{out}` is there already" in done.output
    assert "--overwrite" in done.output
    assert out.read_text() == "mine"
    assert run(folder, out, "--token-ids", ids, "--overwrite").exit_code == 0
    assert load_file(out)


def test_convert_takes_the_file(folder, ids, tmp_path):
    out = tmp_path / "stats.safetensors"
    assert run(folder, out, "--token-ids", ids).exit_code == 0
    command = ["convert", folder, tmp_path / "out", "--scheme", "NVFP4", "--stats", out]
    command += ["--observer", "search", "--plan", "--json"]
    done = CliRunner().invoke(main, [str(part) for part in command])
    assert done.exit_code == 0, done.output
    assert "warning" not in done.stderr
    modules = json.loads(done.stdout)["modules"]
    used = [m["importance"] for m in modules if m["importance"]]
    assert len(used) == 14
