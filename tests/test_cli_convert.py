"""`convert` before and after: forecast, summary, the manifest behind `verify`, and `--push`."""

import json
import os
import re
import shutil
import subprocess
import sys

import fake_hub
import pytest
import tiny_checkpoints as tiny
from click.testing import CliRunner
from huggingface_hub import constants

from quantload import cli_output, cli_plan
from quantload.cli import main
from quantload.errors import UploadError
from quantload.loader.manifest import MANIFEST
from quantload.loader.push import push_folder

WEIGHTS = "model.safetensors"
REPO = "owner/tiny"


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def folder(tmp_path):
    return tiny.llama(tmp_path / "source")


# -- the plan --------------------------------------------------------------------------------------


def test_the_plan_says_what_it_will_take(tmp_path, folder):
    (folder / "tokenizer.json").write_text("{}")
    arguments = ("convert", folder, tmp_path / "out", "--scheme", "W4A16:g32")
    done = run(*arguments, "--plan")
    assert done.exit_code == 0, done.output
    assert run(*arguments).exit_code == 0
    size = (tmp_path / "out" / WEIGHTS).stat().st_size
    assert f"\n{WEIGHTS}: {size} bytes\n" in done.stdout
    assert f"output: {size} bytes" in done.stdout
    assert "beside them: 1 files of the source, 2 bytes" in done.stdout
    assert re.search(r"^W4A16:g32 +14 +73728 +4\.\d\d +\d+ *$", done.stdout, re.M)
    assert re.search(r"^memory: at most [\d.]+ MiB above", done.stdout, re.M)
    assert re.search(r"^disk: [\d.]+ KiB needed, [\d.]+ GiB free$", done.stdout, re.M)
    assert re.search(
        r"^time: [\d.]+ s to [\d.]+ s with \d+ threads?, without ver", done.stdout, re.M
    )
    assert re.search(r"^  convert +[\d.]+ s  W4A16:g32 [\d.]+ .B/s of source$", done.stdout, re.M)
    assert "% of the sampled places were in the page cache" in done.stdout


def test_the_forecast_in_json(tmp_path, folder):
    done = run("convert", folder, tmp_path / "out", "--scheme", "W8A8", "--plan", "--json")
    content = json.loads(done.stdout)
    forecast = content["forecast"]
    assert 1 << 26 < forecast["peak_memory_bytes"] < 1 << 29  # of small weights
    assert 0 < forecast["seconds"]["low"] <= forecast["seconds"]["high"] < 60
    assert forecast["rates"]["convert"].keys() == {"W8A8"}
    assert forecast["rates"]["free"] > content["output_bytes"]
    rows = {row["scheme"]: row for row in content["schemes"]}
    assert rows["W8A8"]["modules"] == 14
    assert rows["W8A8"]["bits_per_weight"] == pytest.approx(
        8 * rows["W8A8"]["bytes"] / rows["W8A8"]["weights"], abs=1e-4
    )
    assert sum(row["bytes"] for row in rows.values()) < content["output_bytes"]


def test_many_files_are_one_line(tmp_path, folder):
    arguments = ("convert", folder, tmp_path / "out", "--scheme", "W8A8", "--max-shard-size", "4KB")
    done = run(*arguments, "--plan")
    assert re.search(r"^model-00001-of-(\d+).safetensors to model-\1-of-\1", done.stdout, re.M)
    assert run(*arguments, "--plan", "--all").stdout.count("\nmodel-000") > 12


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.123, "0.12 s"), (12.3, "12 s"), (119, "119 s"), (121, "2 min"), (7300, "2.0 h")],
)
def test_seconds_for_people(seconds, text):
    assert cli_plan._seconds(seconds) == text


def test_rates_for_people():
    assert [cli_output.rate(n) for n in (0, 99.9e6, 1e8, 2.345e9)] == [
        *("0.0 MB/s", "99.9 MB/s", "0.10 GB/s", "2.35 GB/s")
    ]


# -- the summary -----------------------------------------------------------------------------------


def test_the_summary_adds_up(tmp_path, folder):
    done = run("convert", folder, tmp_path / "out", "--scheme", "W8A8", "--layers", "0")
    assert done.exit_code == 0, done.output
    content = (folder / WEIGHTS).read_bytes()
    total = len(content) - 8 - int.from_bytes(content[:8], "little")
    assert f"What became of {total} bytes of tensors" in done.stdout
    (line,) = re.findall(
        r"^(\d+) quantized, (\d+) copied, (\d+) dropped: (\d+) b", done.stdout, re.M
    )
    quantized, copied, dropped, everything = map(int, line)
    assert quantized + copied + dropped == everything == total
    assert min(quantized, copied, dropped) > 0
    assert re.search(r"^[\d.]+ s, [\d.]+ .B/s of source, peak memory [\d.]+ .iB", done.stdout, re.M)


def test_the_summary_in_json(tmp_path, folder):
    arguments = ("--scheme", "W8A8", "--json", "--no-verify")
    content = json.loads(run("convert", folder, tmp_path / "out", *arguments).stdout)
    summary = content["summary"]
    counted = summary["source_bytes"]
    assert counted["total"] == sum(counted[use] for use in counted if use != "total")
    assert sum(row["bytes"] for row in summary["reasons"]) == counted["total"]
    assert summary["source_bytes_per_second"] == pytest.approx(
        counted["total"] / summary["seconds"]
    )
    assert summary["peak_rss_bytes"] > 50 << 20
    assert content["pushed"] is None


# -- verify without a source -----------------------------------------------------------------------


def test_verify_against_the_manifest(tmp_path, folder):
    output = tmp_path / "out"
    assert run("convert", folder, output, "--scheme", "W8A8", "--no-verify").exit_code == 0
    done = run("verify", output)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.endswith("verify: passed\n")
    data = bytearray((output / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (output / WEIGHTS).write_bytes(data)
    done = run("verify", output)
    assert done.exit_code == 1
    assert f"FAILED `{WEIGHTS}` has changed" in done.stdout
    content = json.loads(run("verify", output, "--json").stdout)
    assert content["passed"] is False
    assert len(content["problems"]) == 1


def test_verify_without_source_and_manifest(folder):
    done = run("verify", folder)
    assert done.exit_code == 2
    assert f"no `{MANIFEST}` can be read in `{folder}`" in done.stderr
    done = run("verify", folder, "--nearest")
    assert done.exit_code == 2
    assert "are about a comparison with `--source`" in done.stderr


def test_verify_says_what_it_took_from_the_manifest(tmp_path, folder):
    output = tmp_path / "out"
    arguments = ("convert", folder, output, "--scheme", "W8A8", "--layers", "1", "--no-verify")
    assert run(*arguments).exit_code == 0
    done = run("verify", output, "--source", folder)
    assert (done.exit_code, done.stderr) == (0, "")
    notes = [line for line in done.stdout.splitlines() if line.startswith(f"`{MANIFEST}` says: ")]
    assert [note.partition(": ")[2] for note in notes] == [
        "only layers 1 of the source were written",
        "rounded to nearest, every weight is held to its rounding step",
    ]
    content = json.loads(run("verify", output, "--source", folder, "--json").stdout)
    assert content["notes"] == notes


# -- push ------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch, tmp_path):
    running, stop = fake_hub.start()
    monkeypatch.setattr(constants, "ENDPOINT", running.endpoint)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("HF_TOKEN", fake_hub.TOKEN)
    yield running
    stop()


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_push_and_push_again(hub, tmp_path, folder):
    output = tmp_path / "out"
    arguments = ("convert", folder, output, "--scheme", "W8A8", "--push", REPO, "--private")
    hub.refusals["POST .*/commit/"] = 500
    done = run(*arguments)
    assert done.exit_code == 2
    assert f"error: the upload to `{REPO}` failed" in done.stderr
    assert "run the same command again" in done.stderr
    written = {f.name: (f.stat().st_mtime_ns, f.read_bytes()) for f in output.iterdir()}
    hub.refusals.clear()
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    assert "verify: passed" in done.stdout
    assert "written by an earlier run, and verified again" in done.stdout
    (commit,) = hub.repositories[REPO].commits
    assert f"pushed: {hub.endpoint}/{REPO}/commit/{commit}" in done.stdout
    assert hub.repositories[REPO].private
    assert {f.name: (f.stat().st_mtime_ns, f.read_bytes()) for f in output.iterdir()} == written
    remote = {k: v for k, v in hub.repositories[REPO].files.items() if k != ".gitattributes"}
    assert remote == {name: data for name, (_, data) in written.items()}
    other = run("convert", folder, output, "--scheme", "W4A16:g32", "--push", REPO)
    assert other.exit_code == 2
    assert f"output folder `{output}` is not empty" in other.stderr


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_an_output_that_fails_verification_is_not_pushed(hub, tmp_path, folder):
    output = tmp_path / "out"
    arguments = ("convert", folder, output, "--scheme", "W8A8")
    assert run(*arguments, "--no-verify").exit_code == 0
    data = bytearray((output / WEIGHTS).read_bytes())
    data[-300:] = bytes(300)
    (output / WEIGHTS).write_bytes(data)
    done = run(*arguments, "--push", REPO)
    assert done.exit_code == 1
    assert "verify: FAILED" in done.stdout
    assert hub.repositories == {}


def test_what_push_needs_is_asked_before_anything_is_written(hub, tmp_path, folder, monkeypatch):
    arguments = ("convert", folder, tmp_path / "out", "--scheme", "W8A8")
    done = run(*arguments, "--push", REPO, "--no-verify")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "`--push` uploads what was verified: leave out `--no-verify`" in done.stderr
    assert "`--private` is that of `--push`" in run(*arguments, "--private").stderr
    assert "expected `OWNER/NAME`" in run(*arguments, "--push", "tiny").stderr
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "does not know the token" in run(*arguments, "--push", REPO).stderr
    monkeypatch.delenv("HF_TOKEN")
    assert "there is no token" in run(*arguments, "--push", REPO).stderr
    assert not (tmp_path / "out").exists()
    assert hub.repositories == {}


def test_an_unfinished_output_is_not_pushed(hub, tmp_path, folder):
    output = tmp_path / "out"
    assert run("convert", folder, output, "--scheme", "W8A8", "--no-verify").exit_code == 0
    unfinished = shutil.copytree(output, tmp_path / ".out.unfinished" / "checkpoint")
    (unfinished / MANIFEST).unlink()
    with pytest.raises(UploadError, match="is not a finished output"):
        push_folder(unfinished, REPO)
    assert hub.requests == []


@pytest.mark.slow
@pytest.mark.parametrize("refused", [None, "GET /api/whoami"])
def test_one_of_several_processes_uploads(hub, tmp_path, folder, refused):
    if refused:
        hub.refusals[refused] = 401
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += ["2", "-m", "quantload", "convert", str(folder), str(tmp_path / "out")]
    command += ["--scheme", "W8A8", "--push", REPO, "--workers", "1"]
    address = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    environment = {**os.environ, **address, "HF_HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) is (refused is None), done.stderr
    assert hub.count("GET /api/whoami") == 1
    assert hub.count(f"POST /api/models/{REPO}/commit") == (refused is None)
    assert done.stdout.count("written: ") == done.stdout.count("pushed: ") == (refused is None)
