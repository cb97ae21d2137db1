"""`quantload baseline`: exit codes and what is written for CI."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import tiny_checkpoints as tiny
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from quantload import api
from quantload.accuracy.baseline import Baseline, LayerBaseline
from quantload.accuracy.baseline_verdict import BaselineReport, judge
from quantload.accuracy.html_check import check_page
from quantload.cli import main
from quantload.cli_baseline_report import (
    check_json,
    error_junit,
    error_lines,
    github_lines,
    junit_text,
    summary,
)
from quantload.errors import BaselineError

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


def test_codes_of_what_cannot_be_judged_are_in_the_reports_too(made, tmp_path):
    """A CI that only reads the reports must not take those of an earlier run."""
    source, output, broken, file = made
    run("write", source, output, file, "--overwrite", "--quiet")
    junit = tmp_path / "junit.xml"
    other = api.convert(source, tmp_path / "w4", "W4A16:g32").folder
    cases = (
        (3, (broken, file), "NotComparable", "::error file="),
        (3, (other, file, "--ref", source), "NotComparable", "not comparable: "),
        (2, (output, tmp_path / "none.json"), "BaselineError", "no check: there is no baseline"),
        (2, (tmp_path / "nothing", file), "", "::error file="),
        (2, (output, file, "--measure-all"), "ConfigError", "only against the reference"),
        (2, (output, file, "--dtype", "float9"), "ConfigError", "unknown dtype: `float9`"),
    )
    for code, arguments, kind, told in cases:
        junit.unlink(missing_ok=True)
        found = run("check", *arguments, "--junit", junit, "--github", "--quiet")
        assert found.exit_code == code, found.output
        assert told in found.output
        suite = ElementTree.parse(junit).getroot()
        assert (suite.get("errors"), suite.get("failures")) == ("1", "0")
        assert kind in suite[0].find("error").get("type")


def test_strict_fails_on_gains(made, tmp_path):
    source, output, broken, _ = made
    file, junit = tmp_path / "worse.json", tmp_path / "junit.xml"
    run("write", source, broken, file, "--quiet")
    arguments = ("check", output, file, "--ref", source, "--quiet", "--github", "--junit", junit)
    found = run(*arguments)
    assert found.exit_code == 0
    assert "::notice file=" in found.output
    assert "can be tightened" in found.output
    assert ElementTree.parse(junit).getroot().get("failures") == "0"
    found = run(*arguments, "--strict")
    assert found.exit_code == 1
    assert "::error file=" in found.output
    assert ElementTree.parse(junit).getroot().get("failures") == "1"
    assert json.loads(run(*arguments[:-3], "--strict", "--json").stdout)["passed"] is False


def test_accepting_keeps_tokens_tolerances_and_the_sketch(made, tmp_path):
    source, output, broken, _ = made
    file, ids = tmp_path / "b.json", tmp_path / "ids.json"
    ids.write_text("[[1, 5, 9, 2, 8], [4, 4, 7]]")
    with_tokens = ("--token-ids", ids, "--device", "cpu", "--sketch", "--repeats", "1", "--json")
    found = run("write", source, output, file, *with_tokens, "--remade", output, "--quiet")
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout)
    assert told["tokens"] == 8
    assert told["sketch"] == "b.sketch.safetensors"
    assert told["repeat_sigma_db"]["weight"] == 0.0
    assert told["repeat_sigma_db"]["output_median"] > 0.0
    content = json.loads(file.read_text())
    assert content["repeats"]["runs"] == ["1 x bfloat16 arithmetic", "1 x made again"]
    assert content["blocks"].keys() == {"model.layers.0", "model.layers.1"}
    content["tolerances"]["layers"] = {"*.v_proj": {"weight_db": 1.5}}
    file.write_text(json.dumps(content))
    assert run("write", source, broken, file, "--overwrite", "--device", "cpu").exit_code == 0
    after = json.loads(file.read_text())
    for key in ("tokens", "tolerances", "repeats"):
        assert after[key] == content[key]
    assert after["sketch"]["sha256"] == content["sketch"]["sha256"]
    assert after["layers"][GATE]["weight"] > 0.5
    found = run("check", output, file, "--quiet")  # without its reference, by the sketch
    assert found.exit_code == 0
    assert "was estimated from the sketch of the reference" in found.output.replace("\n", " ")
    file.write_text(file.read_text().replace("v_proj", "w_proj", 1))
    found = run("write", source, output, file, "--overwrite")
    assert found.exit_code == 2
    assert "delete it" in found.output


def test_everything_is_measured_in_another_dtype(made, tmp_path):
    source, output, _, _ = made
    file, ids = tmp_path / "b.json", tmp_path / "ids.json"
    ids.write_text(json.dumps([[(3 * i + j * j) % 96 for i in range(16)] for j in range(8)]))
    assert run("write", source, output, file, "--token-ids", ids, "--quiet").exit_code == 0
    options = ("--ref", source, "--measure-all", "--dtype", "bfloat16", "--device", "cpu")
    found = json.loads(run("check", output, file, *options, "--json", "--quiet").stdout)
    assert found["passed"]
    assert found["unchanged"] == len(found["layers"]) == len(json.loads(file.read_text())["layers"])
    assert {gate["what"] for gate in found["gates"]} == {
        *("mean of weights", "mean of outputs", "blocks", "kl_mean", "top1")
    }
    assert any("both ran in bfloat16" in note for note in found["notes"])
    assert any(abs(gate["change"]) > 1e-6 for gate in found["gates"])
    ids.write_text("[[1, 5, 9, 2, 8], [4, 4, 7]]")  # medians of 8 tokens jump
    written = run("write", source, output, file, "--token-ids", ids, "--overwrite", "--quiet")
    assert "8 tokens were run" in written.output
    assert "fewer than 128 tokens" in written.output
    found = json.loads(run("check", output, file, *options, "--json", "--quiet").stdout)
    assert found["passed"]
    assert {gate["what"] for gate in found["gates"]} == {"mean of weights"}
    assert any("8 tokens: too few to judge outputs" in note for note in found["notes"])


def test_repeats_need_tokens(made, tmp_path):
    source, output, _, _ = made
    found = run("write", source, output, tmp_path / "b.json", "--repeats", "2")
    assert found.exit_code == 2
    assert "repeats in other arithmetic need tokens" in found.output
    other = api.convert(source, tmp_path / "w4", "W4A16:g32").folder
    found = run("write", source, output, tmp_path / "b.json", "--remade", other)
    assert found.exit_code == 3
    assert "is no repeat of" in found.output


@pytest.mark.slow
def test_exit_codes_of_the_process(made, tmp_path):
    source, output, broken, _ = made
    file = tmp_path / "b.json"
    command = [sys.executable, "-m", "quantload", "baseline"]
    for arguments, code in (
        (("write", source, output, file), 0),
        (("write", source, output, file), 2),
        (("check", output, file), 0),
        (("check", broken, file, "--ref", source), 1),
        (("check", broken, file), 3),
    ):
        done = subprocess.run([*command, *map(str, arguments)], check=False, capture_output=True)
        assert done.returncode == code, (arguments, done.stderr)


def test_names_that_steer_a_terminal_are_written_out(made, tmp_path):
    """A tensor's name comes from a file that anyone may have made."""
    source, output, broken, _ = made
    hostile = "model.layers.0.mlp.\x1b[31mg\u202eate\nproj"
    folders = []
    for folder in (source, output, broken):
        tensors = load_file(folder / "model.safetensors")
        tensors[f"{hostile}.scale"] = torch.ones(2) * (1 + len(folders))
        copy = tmp_path / folder.name
        copy.mkdir()
        (copy / "config.json").write_bytes((folder / "config.json").read_bytes())
        save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
        folders.append(copy)
    file, junit, page = (tmp_path / name for name in ("b.json", "junit.xml", "page.html"))
    run("write", *folders[:2], file, "--quiet")
    found = run(
        *("check", folders[2], file, "--ref", folders[0], "--quiet", "--github"),
        *("--junit", junit, "--html", page),
    )
    assert found.exit_code == 1, found.output
    shown = r"model.layers.0.mlp.\x1b[31mg\u202eate\nproj.scale"
    assert shown in found.output
    names = [case.get("name") for case in ElementTree.parse(junit).getroot()]
    assert shown in names
    for text in (found.output, junit.read_text(), page.read_text()):
        assert "\x1b" not in text
        assert "\u202e" not in text
    error = BaselineError("of `a\x00b`", hint="\x1b[2J")
    told = ElementTree.fromstring(error_junit(error, file))[0].find("error").get("message")
    assert told == "of `a\\x00b`\n\nhint: \\x1b[2J"
    assert error_lines(error, file)[0].endswith(r"of `a\x00b`%0A%0Ahint: \x1b[2J")


def test_counts_are_told_in_sentences():
    layer = LayerBaseline(candidate="0", reference="1", encoding="W8A8", weight=0.1)
    now = replace(layer, candidate="2", weight=0.2)
    baseline = Baseline(
        reference="r", candidate="c", bits_per_weight=8.0, layers={"a": layer, "b": layer}
    )
    same = replace(layer)  # measured again
    one = summary(judge(baseline, {"a": now, "b": same}))
    assert "FAILED 1 layer is worse than it may be" in one
    assert "1 unchanged layer was measured too" in one
    assert "FAILED 2 layers are worse than they may be" in summary(
        judge(baseline, {"a": now, "b": now})
    )
    assert "2 unchanged layers were measured too" in summary(
        judge(baseline, {"a": same, "b": same})
    )


def test_a_changed_config_is_in_every_report():
    line = "config: `rms_norm_eps` is `0.1`, expected `1e-05`"
    report = BaselineReport(unchanged=3, config=(line,))
    file = Path("b.json")
    assert summary(report)[1:] == [f"FAILED {line}", "FAILED"]
    suite = ElementTree.fromstring(junit_text(report, file))
    assert suite[0].find("failure").get("message") == line
    assert github_lines(report, file) == [f"::error file=b.json::{line}"]
    assert check_json(report)["config"] == [line]
    page = check_page(report, candidate="c", baseline="b.json", accept="quantload")
    assert f'<li class="failed">{line}</li>' in page
