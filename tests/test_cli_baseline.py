"""`quantload baseline`: exit codes and what is written for CI."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
import tiny_checkpoints as tiny
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from quantload import api
from quantload.cli import main

GATE = "model.layers.0.mlp.gate_proj"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    source = tiny.llama(folder / "source")
    output = api.convert(source, folder / "out", "W8A8").folder
    broken = folder / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((output / "config.json").read_bytes())
    tensors = load_file(output / "model.safetensors")
    tensors[f"{GATE}.weight_scale"] *= 2
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    return source, output, broken, folder / "baseline.json"


def run(*arguments):
    return CliRunner().invoke(main, ["baseline", *map(str, arguments)])


def test_the_way_of_a_baseline(made, tmp_path):
    source, output, broken, file = made
    written = run("write", source, output, file, "--quiet")
    assert written.exit_code == 0, written.output
    assert run("write", source, output, file, "--quiet").exit_code == 2
    assert run("check", output, file, "--quiet").exit_code == 0
    assert run("check", broken, file, "--quiet").exit_code == 3
    junit = tmp_path / "junit.xml"
    found = run("check", broken, file, "--ref", source, "--junit", junit, "--github", "--quiet")
    assert found.exit_code == 1
    assert f"baseline write {source} {broken} {file} --overwrite" in found.output
    assert f"::error file={file},title={GATE}::weight error" in found.output
    suite = ElementTree.parse(junit).getroot()
    assert suite.get("failures") == "2"
    failed = [case.get("name") for case in suite if case.find("failure") is not None]
    assert failed == [GATE, "baseline"]


def test_json(made):
    source, output, broken, file = made
    run("write", source, output, file, "--overwrite", "--quiet")
    found = json.loads(run("check", broken, file, "--ref", source, "--json", "--quiet").stdout)
    assert found["passed"] is False
    assert [row["layer"] for row in found["layers"]] == [GATE]
    assert found["layers"][0]["change_db"] > 5
