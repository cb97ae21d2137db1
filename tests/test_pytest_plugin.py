"""The pytest plugin, in a pytest of its own: a process for each run, which torch needs."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import tiny_checkpoints as tiny
from safetensors.torch import load_file, save_file

from quantload import api, api_baseline
from quantload.accuracy.baseline import read_baseline

DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A source, what was converted from it, and that with a broken layer."""
    folder = tmp_path_factory.mktemp("plugin")
    source = tiny.llama(folder / "source")
    output = api.convert(source, folder / "out", "W8A8").folder
    broken = folder / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((output / "config.json").read_bytes())
    tensors = load_file(output / "model.safetensors")
    tensors[f"{DOWN}.weight_scale"] *= 2
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    return str(source), str(output), str(broken)


def run(folder, *options, ci=False):
    loaded = [] if is_installed() else ["-p", "quantload.pytest_plugin"]
    environment = {k: v for k, v in os.environ.items() if k != "CI"} | ({"CI": "1"} if ci else {})
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *loaded]
    found = subprocess.run(
        [*command, "test_it.py", *options],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    return found.returncode, found.stdout + found.stderr


def is_installed():
    return any(entry.name == "quantload" for entry in entry_points(group="pytest11"))


def write_tests(folder, **calls):
    lines = [f"def test_{name}(quantload_check):\n    {call}\n" for name, call in calls.items()]
    (folder / "test_it.py").write_text("\n".join(lines))


def test_a_missing_baseline_fails_and_is_written_but_not_in_ci(checkpoints, tmp_path):
    source, output, _ = checkpoints
    write_tests(tmp_path, layers=f"quantload_check({output!r}, ref={source!r})")
    file = tmp_path / "baselines" / "test_it.test_layers.json"
    code, text = run(tmp_path, ci=True)
    assert code == 1
    assert "pytest 'test_it.py::test_layers' --quantload-update-new` makes it" in text
    assert not file.exists()
    code, text = run(tmp_path)
    assert code == 1
    assert "it is written now" in text
    assert file.exists()


def test_broken_layers_fail_by_name(checkpoints, tmp_path):
    source, output, broken = checkpoints
    write_tests(
        tmp_path,
        same=f"assert quantload_check({output!r}).passed",
        broken=f"quantload_check({broken!r}, ref={source!r})",
        others=f"quantload_check({broken!r}, ref={source!r}, only='*.q_proj')",
        lenient=f"quantload_check({broken!r}, ref={source!r}, tol_db=99)",
        alone=f"quantload_check({broken!r})",
        twice=f"quantload_check({output!r}); quantload_check({output!r})",
    )
    for name in ("same", "broken", "others", "lenient", "alone", "twice"):
        file = tmp_path / "baselines" / f"test_it.test_{name}.json"
        api_baseline.write_baseline(source, output, file)
    code, text = run(tmp_path, "--quantload-report", "report")
    assert code == 1
    for name in ("same", "others"):
        assert f"PASSED test_it.py::test_{name}" in text
    for name in ("broken", "lenient", "alone", "twice"):
        assert f"FAILED test_it.py::test_{name}" in text
    assert f"  {DOWN}: " in text
    assert "weight error" in text
    assert "to accept: pytest 'test_it.py::test_broken' --quantload-update" in text
    assert "largest error in steps" in text  # what tol_db does not touch
    assert "the reference is needed" in text
    assert "give one a `name`" in text
    kept = read_baseline(tmp_path / "baselines" / "test_it.test_broken.json")
    now = read_baseline(tmp_path / "report" / "test_it.test_broken.json")
    assert now.layers[DOWN].weight > 5 * kept.layers[DOWN].weight


def test_updates(checkpoints, tmp_path):
    source, output, broken = checkpoints
    write_tests(
        tmp_path,
        old=f"quantload_check({broken!r}, ref={source!r})",
        new=f"quantload_check({output!r}, ref={source!r}, name='w8')",
    )
    file = tmp_path / "baselines" / "test_it.test_old.json"
    api_baseline.write_baseline(source, output, file)
    before = file.read_text()
    code, text = run(tmp_path, "--quantload-update-new", ci=True)
    assert code == 1
    assert "PASSED test_it.py::test_new" in text
    assert (tmp_path / "baselines" / "test_it.test_new.w8.json").exists()
    assert file.read_text() == before
    assert run(tmp_path, "--quantload-update")[0] == 0
    assert read_baseline(file).layers[DOWN].weight > 0.5


def test_import_is_light():
    code = (
        "import sys, quantload.pytest_plugin\n"
        "heavy = {'torch', 'transformers', 'numba', 'safetensors'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    found = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert found.returncode == 0, found.stderr
