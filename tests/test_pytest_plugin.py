"""The pytest plugin, in a pytest of its own: a process for each run, which torch needs."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import tiny_checkpoints as tiny
from safetensors.torch import load_file, save_file

from quantload import api, api_baseline
from quantload.accuracy.baseline_file import read_baseline
from quantload.pytest_plugin import QuantloadCheck

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
    assert "pytest test_it.py::test_layers --quantload-update-new` makes it" in text
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
    assert "to accept: pytest test_it.py::test_broken --quantload-update" in text
    assert "largest error in steps" in text  # what tol_db does not touch
    assert "the reference is needed" in text
    assert "give one a `name`" in text
    assert "weight errors grew by" in text  # the mean gate, in the mean of all layers
    kept = read_baseline(tmp_path / "baselines" / "test_it.test_broken.json")
    now = read_baseline(tmp_path / "report" / "baselines" / "test_it.test_broken.json")
    page = (tmp_path / "report" / "baselines" / "test_it.test_broken.html").read_text()
    assert DOWN in page
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


COUNTING = """
import pytest
from quantload import api_baseline

@pytest.fixture(autouse=True)
def counted(monkeypatch):
    check = api_baseline.check_baseline
    def count(*arguments, **options):
        with open("calls", "a") as stream:
            print("call", file=stream)
        return check(*arguments, **options)
    monkeypatch.setattr(api_baseline, "check_baseline", count)
"""


def test_names_notes_and_what_a_session_finds_once(checkpoints, tmp_path):
    source, output, broken = checkpoints
    call = f"quantload_check({output!r}, ref={source!r}"
    (tmp_path / "conftest.py").write_text(COUNTING)
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        f"class TestOne:\n    def test_same(self, quantload_check):\n        {call})\n"
        f"class TestTwo:\n    def test_same(self, quantload_check):\n        {call})\n"
        "@pytest.mark.parametrize('kind', ['a/b', 'a-b', 'w4'])\n"
        f"def test_kinds(quantload_check, kind):\n    {call}, only='*.q_proj')\n"
        f"def test_better(quantload_check):\n    {call})\n"
        f"def test_strict(quantload_check):\n    {call}, strict=True)\n"
        f"def test_tier(quantload_check):\n    {call}, tier='blocks')\n"
    )
    assert run(tmp_path, "--quantload-update-new", "--deselect", "test_it.py::test_tier")[0] == 0
    files = {file.stem for file in (tmp_path / "baselines").iterdir()}
    usual = {"TestOne.test_same", "TestTwo.test_same", "test_kinds-w4", "test_kinds-a-b"}
    assert {f"test_it.{name}" for name in (*usual, "test_better", "test_strict")} <= files
    (other,) = files - {f"test_it.{name}" for name in (*usual, "test_better", "test_strict")}
    assert other.startswith("test_it.test_kinds-a-b-")  # of a/b
    for name in ("better", "strict"):
        file = tmp_path / "baselines" / f"test_it.test_{name}.json"
        api_baseline.write_baseline(source, broken, file, overwrite=True)
    kept = (tmp_path / "baselines" / "test_it.test_better.json").read_text()
    for name in ("gone.test_x", "test_it.test_better.w8", "test_it.test_tier.w8"):
        (tmp_path / "baselines" / f"{name}.json").write_text(kept)
    (tmp_path / "baselines" / "others.json").write_text("{}")
    code, text = run(tmp_path)
    assert code == 1
    assert text.count("PASSED test_it.py::") == 6
    assert "test_better.json can be tightened: 1 layer (model.layers.1.mlp.down_proj)" in text
    assert "FAILED better than the baseline, which can be tightened" in text
    assert 'tier is "blocks", expected' in text
    unused = {line.split()[0] for line in text.splitlines() if "is used by no test" in line}
    assert {file.rpartition("/")[2] for file in unused} == {
        "gone.test_x.json",
        "test_it.test_better.w8.json",  # not tier's: that test failed
    }
    assert len((tmp_path / "calls").read_text().split()) == 3  # all, q_proj alone, and better
    assert "is used by no test" not in run(tmp_path, "-k", "same")[1]


@pytest.mark.slow
def test_workers_of_xdist(checkpoints, tmp_path):
    pytest.importorskip("xdist")
    source, output, broken = checkpoints
    calls = {f"same{i}": f"quantload_check({output!r}, ref={source!r})" for i in range(3)}
    write_tests(tmp_path, broken=f"quantload_check({broken!r}, ref={source!r})", **calls)
    assert run(tmp_path, "-n", "2")[0] == 1  # written: four files, two workers
    file = tmp_path / "baselines" / "test_it.test_broken.json"
    api_baseline.write_baseline(source, output, file, overwrite=True)
    (tmp_path / "baselines" / "test_it.test_gone.json").write_text(file.read_text())
    code, text = run(tmp_path, "-n", "2", "--quantload-report", "report")
    assert code == 1
    assert text.count("PASSED") == 3
    assert f"  {DOWN}: " in text
    assert "test_it.test_gone.json is used by no test" in text
    assert len(list((tmp_path / "report" / "baselines").glob("*.json"))) == 4
    assert len(list((tmp_path / "report" / "baselines").glob("*.html"))) == 4


def test_tokens_and_tolerances(checkpoints, tmp_path):
    source, output, broken = checkpoints
    (tmp_path / "ids.json").write_text("[[1, 5, 9, 2, 8, 3, 11], [4, 4, 7]]")
    (tmp_path / "others.json").write_text("[[1, 5, 9]]")
    call = f"quantload_check({output!r}, ref={source!r}, device='cpu'"
    wide = {"weight_db": 99, "steps_db": 99, "noise_db": 99, "output_median_db": 999}
    write_tests(
        tmp_path,
        ids=f"{call}, tokens='ids.json')",
        others=f"{call}, tokens='others.json')",
        wide=f"quantload_check({broken!r}, ref={source!r}, tier='weights', mean_tol_db=99, "
        f"tolerances={{'*.down_proj': {wide!r}}})",
        unknown=f"{call}, tolerances={{'wieght_db': 1}})",
        nothing=f"{call}, tolerances={{'*.donw_proj': {{'weight_db': 1}}}})",
        small=f"{call}, tol_db=0.01)",
    )
    for name in ("others", "ids", "wide", "unknown", "nothing", "small"):
        api_baseline.write_baseline(
            source,
            output,
            tmp_path / "baselines" / f"test_it.test_{name}.json",
            sequences=[[1, 5, 9, 2, 8, 3, 11], [4, 4, 7]],
            device="cpu",
        )
    code, text = run(tmp_path)
    assert code == 1
    for name in ("ids", "wide", "small"):
        assert f"PASSED test_it.py::test_{name}" in text
    assert "has tokens of sha256" in text
    assert "have `wieght_db`, expected" in text
    assert "`*.donw_proj`, which matches none of its layers" in text
    assert "nothing was run: outputs of layers" in text
    file = tmp_path / "baselines" / "test_it.test_ids.json"
    assert run(tmp_path, "--quantload-update", "-k", "ids or others")[0] == 0
    assert read_baseline(file).tokens.count == 10
    assert read_baseline(file.with_name("test_it.test_others.json")).tokens.count == 3


class _Node(types.SimpleNamespace):
    """What the plugin asks of a test: its name, its file, and its class."""

    def listchain(self):
        return []


def baseline_file_of(test, name="", module="test_it"):
    node = _Node(name=test, path=Path(f"/t/{module}.py"), user_properties=[])
    request = types.SimpleNamespace(config=None, node=node)
    return QuantloadCheck(request).baseline_file(name)


ODD_IDS = ["a[b", "a-b", "a]", "a", "a][b", "[a]", "a.b", "a/b", "A-b]", "-a", "a-", "", "..", "ü"]


def test_no_two_tests_have_one_baseline():
    tests = [(f"test_p[{one}]", name) for one in ODD_IDS for name in ("", "b", "b]", "-b", "5")]
    tests += [("test_p", name) for name in ("", "a", "a-b", "p-a")]
    files = {baseline_file_of(*test) for test in tests}
    assert len(files) == len(tests)
    assert baseline_file_of("test_p[a-b]").name == "test_it.test_p-a-b.json"
    assert baseline_file_of("test_p[0.5]").name == "test_it.test_p-0.5.json"
    assert baseline_file_of("test_p", "w8").name == "test_it.test_p.w8.json"


TOKENS = """
import torch
from pathlib import Path
CALL = dict(ref={source!r}, device="cpu")
def test_empty(quantload_check):
    quantload_check({output!r}, tokens=[[1, 2, 3], [], [4, 5]], **CALL)
def test_tensor(quantload_check):
    quantload_check({output!r}, tokens=torch.tensor([[1, 2, 3], [4, 5, 6]]), **CALL)
def test_flat(quantload_check):
    quantload_check({output!r}, tokens=[1, 2, 3], **CALL)
def test_floats(quantload_check):
    quantload_check({output!r}, tokens=[[1.7, 2.2]], **CALL)
def test_none_in_it(quantload_check):
    quantload_check({output!r}, tokens=[[]], **CALL)
def test_unknown_id(quantload_check):
    quantload_check({output!r}, tokens=[[1, 2, 5000]], **CALL)
def test_without_ref(quantload_check):
    quantload_check({output!r}, tokens=[[9, 9, 9]])
"""


def test_tokens_that_are_none_are_refused(checkpoints, tmp_path):
    source, output, _ = checkpoints
    (tmp_path / "test_it.py").write_text(TOKENS.format(source=source, output=output))
    api_baseline.write_baseline(
        source,
        output,
        tmp_path / "baselines" / "test_it.test_without_ref.json",
        sequences=[[1, 2]],
        device="cpu",
    )
    code, text = run(tmp_path, "--quantload-update-new")
    for name in ("empty", "tensor"):
        assert f"PASSED test_it.py::test_{name}" in text
    for name in ("flat", "floats", "none_in_it", "unknown_id", "without_ref"):
        assert f"FAILED test_it.py::test_{name}" in text
    assert "sequence 0 is `1`, expected a list of token ids" in text
    assert "sequence 0 holds `1.7`, expected token ids" in text
    assert "there are no tokens in what was given" in text
    assert "has tokens of sha256" in text  # checked though there is no reference
    assert code == 1
    assert "Traceback" not in text
    assert "another exception occurred" not in text
    assert {file.stem for file in (tmp_path / "baselines").iterdir()} == {
        f"test_it.test_{name}" for name in ("empty", "tensor", "without_ref")
    }
    code, text = run(tmp_path, "-k", "empty or tensor")
    assert code == 0, text


def test_an_update_replaces_what_is_damaged(checkpoints, tmp_path):
    source, output, _ = checkpoints
    write_tests(tmp_path, it=f"quantload_check({output!r}, ref={source!r})")
    file = tmp_path / "baselines" / "test_it.test_it.json"
    file.parent.mkdir()
    file.write_text("<<<<<<< ours\n{}\n=======\n>>>>>>> theirs\n")
    code, text = run(tmp_path)
    assert code == 1
    assert "cannot read the baseline" in text
    assert text.count("Expecting value") < 4  # it is told once, and in pytest's summaries
    assert "another exception occurred" not in text
    code, text = run(tmp_path, "--quantload-update")
    assert code == 0, text
    assert "test_it.test_it.json was damaged, and is written anew: tokens and tolerances" in text
    assert read_baseline(file).layers
    damaged = file.read_text().replace('"weight_db": 0.02', '"weight_db": x')
    file.write_text(damaged)
    broken = "quantload_check('/nowhere', ref='/nowhere')"
    write_tests(tmp_path, it=broken)
    assert run(tmp_path, "--quantload-update")[0] == 1
    assert file.read_text() == damaged  # nothing took its place


def test_reports_that_cannot_be_written_fail_beside_the_verdict(checkpoints, tmp_path):
    source, output, broken = checkpoints
    write_tests(
        tmp_path,
        same=f"quantload_check({output!r}, ref={source!r})",
        broken=f"quantload_check({broken!r}, ref={source!r})",
    )
    for name in ("same", "broken"):
        file = tmp_path / "baselines" / f"test_it.test_{name}.json"
        api_baseline.write_baseline(source, output, file)
    (tmp_path / "taken").write_text("a file")
    code, text = run(tmp_path, "--quantload-report", "taken/report")
    assert code == 1
    assert text.count("FAILED test_it.py::") == 2
    assert "cannot write `taken/report/baselines/test_it.test_same.html`" in text
    assert f"  {DOWN}: " in text
    assert "Traceback" not in text
    assert "OutputError" not in text


def test_import_is_light():
    code = (
        "import sys, quantload.pytest_plugin\n"
        "heavy = {'torch', 'transformers', 'numba', 'safetensors'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    found = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert found.returncode == 0, found.stderr
