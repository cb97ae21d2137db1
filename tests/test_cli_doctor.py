"""The `doctor` command: exit codes, text and JSON, with names that a probe of the model knows."""

from __future__ import annotations

import json

import pytest
import served
import torch
from click.testing import CliRunner

from quantload import doctor
from quantload.cli import main


def run(*arguments):
    return CliRunner().invoke(main, ["doctor", *map(str, arguments)])


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return served.llama(tmp_path_factory.mktemp("doctor") / "good")


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    def change(content, made):
        for name in [n for n in made if n.startswith("model.layers.0.self_attn.k_proj.")]:
            del made[name]
        made["model.layers.0.self_attn.k_proj.weight"] = torch.randn(64, 128).bfloat16()
        made["model.extra"] = torch.ones(3)
        del made["model.norm.weight"]
        content["quantization_config"]["ignore"].append("model.layers.0.self_attn.k_proj")

    return served.llama(tmp_path_factory.mktemp("doctor") / "bad", change=change)


def test_a_checkpoint_that_loads(good):
    done = run(good, "--engine", "vllm", "--tp", "2")
    assert done.exit_code == 0, done.output
    assert "loads; 0 errors, 0 warnings" in done.stdout
    assert "checked against vLLM 0.32.0 rules, kernels of cuda, 2 devices" in done.stdout


def test_a_checkpoint_that_does_not(bad):
    done = run(bad)
    assert done.exit_code == 1
    assert "will not load, or will be wrong; 3 errors, 0 warnings" in done.stdout
    assert "error: fused-scheme, model.layers.0.self_attn.q_proj" in done.stdout
    assert "error: missing, model.norm" in done.stdout
    assert "error: unexpected, model.extra" in done.stdout


def test_layers_that_differ_in_their_number_are_one(tmp_path):
    folder = served.llama(tmp_path / "model", "W8A16")
    done = run(folder, "--device", "cpu")
    assert "error: kernel, model.layers.{0-1}.mlp.down_proj (2 layers)" in done.stdout
    assert "14 errors" in done.stdout
    every = run(folder, "--device", "cpu", "--all")
    assert "error: kernel, model.layers.1.mlp.down_proj\n" in every.stdout


def test_json(bad):
    done = run(bad, "--json", "--engine", "sglang")
    content = json.loads(done.stdout)
    assert done.exit_code == 1
    assert (content["engine"], content["engine_version"]) == ("sglang", "0.5.23")
    assert content["passed"] is False
    assert {finding["rule"]: finding["level"] for finding in content["findings"]} == {
        "fused-scheme": "error",
        "missing": "error",
        "unexpected": "warning",
    }
    keys = {"rule", "level", "layer", "found", "expected", "hint", "source"}
    assert all(set(finding) == keys for finding in content["findings"])


def test_usage(good, tmp_path):
    assert run(good, "--engine", "tgi").exit_code == 2
    assert run(tmp_path / "nothing").exit_code == 2
    done = run(good, "--engine", "sglang", "--device", "cpu")
    assert done.exit_code == 2
    assert "kernels of SGLang on `cpu` are not known" in done.stderr


def test_from_python(good, bad):
    assert doctor(good, "transformers").passed
    assert [finding.rule for finding in doctor(bad, "transformers").errors] == ["missing"]
