"""The page of a check against a baseline."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import tiny_checkpoints as tiny
from click.testing import CliRunner
from read_page import Page, assert_self_contained
from safetensors.torch import load_file, save_file

from quantload import api, api_baseline
from quantload.accuracy.html_check import _change_axis, _height, check_page
from quantload.cli import main

UP = "model.layers.{}.mlp.up_proj"
DOWN = "model.layers.2.mlp.down_proj"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A source, what was made of it, the same with a broken layer and worse ones; a baseline."""
    folder = tmp_path_factory.mktemp("check")
    source = tiny.llama(folder / "source", layers=3)
    output = api.convert(source, folder / "out", "W4A16:g32").folder
    broken = folder / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((output / "config.json").read_bytes())
    tensors = load_file(output / "model.safetensors")
    tensors[f"{DOWN}.weight_scale"] *= 2
    for layer in range(3):
        tensors[f"{UP.format(layer)}.weight_scale"] *= 1.01
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    api_baseline.write_baseline(source, output, folder / "baseline.json")
    return source, output, broken, folder / "baseline.json"


@pytest.fixture(scope="module")
def report(folders):
    source, _, broken, file = folders
    return api_baseline.check_baseline(broken, file, reference=source)


def page_of(report, **more):
    text = check_page(
        report, candidate="<b>out", baseline="baselines/x.json", accept="write <it> &", **more
    )
    return Page(text)


def test_numbers_are_the_reports(report):
    page = page_of(report)
    assert_self_contained(page)
    table = page.tables["worst-table"]
    assert [row[0][0] for row in table.rows] == [v.name for v in report.worst(10)]
    assert table.rows[0][0][0] == DOWN
    for verdict in report.layers:
        name = verdict.name
        assert table.sort_keys("before")[name] == verdict.before.weight
        assert table.sort_keys("now")[name] == verdict.now.weight
        assert table.sort_keys("change dB")[name] == verdict.change_db
        assert table.sort_keys("tolerance dB")[name] == verdict.tolerance_db
        assert table.notes[name] == verdict.failure
        assert f"{name}: {verdict.change_db:+.3f} dB, may grow by" in page.sections["depth"]
    assert table.bad == [True] * 4
    assert "output now" not in table.heads  # no tokens
    assert page.figures == {"depth": 2}
    assert "tolerance 0.02 dB" in page.sections["depth"]


def test_a_failure_says_why_and_how_to_accept(report):
    page = page_of(report)
    assert "FAILED" in page.ids["verdict"]
    assert page.ids["accept"] == "write <it> &"
    for failure in report.failures:
        assert failure in page.shown
    assert report.failures
    assert "<b>out" in page.shown


def test_a_pass(folders):
    _, output, _, file = folders
    page = page_of(api_baseline.check_baseline(output, file))
    assert "passed: no layer is worse than it may be" in page.ids["verdict"]
    assert "accept" not in page.ids
    assert "Every layer has the digest of the baseline" in page.sections["depth"]
    assert page.figures == {}
    assert page.tables == {}


def test_layers_that_came_or_went_and_gains(report):
    better = replace(report.layers[0], change_db=-3.0, failure="")
    found = replace(report, layers=(better,), gates=(), added=("new.<x>",), removed=("gone",))
    page = page_of(found)
    assert "1 layer not in the baseline: new.<x>" in page.shown
    assert "1 layer missing from the candidate: gone" in page.shown
    assert f"which can be tightened: {better.name}" in page.shown
    kept = replace(found, added=(), removed=())
    assert "passed" in page_of(kept).ids["verdict"]
    assert "FAILED" in page_of(kept, strict=True).ids["verdict"]


def test_more_than_ten_layers_are_folded(report):
    verdict = report.layers[0]
    layers = tuple(replace(verdict, name=f"model.layers.{at}.q", change_db=at) for at in range(40))
    page = page_of(replace(report, layers=layers))
    assert [len(page.tables[name].rows) for name in ("worst-table", "rest-table")] == [10, 30]
    assert page.tables["worst-table"].rows[0][0][0] == "model.layers.39.q"
    assert page.tags["details"] == 1


def test_of_the_experts_of_a_block_the_worst_is_drawn(report):
    verdict = report.layers[0]
    names = [f"model.layers.{block}.mlp.experts.{at}.up" for block in range(2) for at in range(9)]
    layers = tuple(
        replace(verdict, name=name, change_db=float(at)) for at, name in enumerate(names)
    )
    page = page_of(replace(report, layers=layers))
    drawn = re.findall(r"(model\S+): \S+ dB, may grow", page.sections["depth"])
    assert drawn == [names[8], names[17]]
    assert "Of experts, those of each block that grew most" in page.sections["depth"]


def test_errors_that_were_none_before_stay_in_the_chart(report):
    layers = (replace(report.layers[0], change_db=999.0), *report.layers[1:])
    page = page_of(replace(report, layers=layers))
    assert "1 beyond 60 dB are drawn there" in page.sections["depth"]
    assert "+999.000 dB" in page.sections["depth"]


@pytest.mark.parametrize(
    ("changes", "low", "high"),
    [([0.003], "0", "+0.1"), ([-0.5, 2.0], "-1", "+10"), ([999.0], "0", "+60")],
)
def test_the_axis_of_changes_shows_small_and_large_ones(changes, low, high):
    """Ticks lie where heights of their numbers lie, in order, and hold every change."""
    axis = _change_axis([_height(change) for change in changes])
    assert (axis.ticks[0][1], axis.ticks[-1][1]) == (low, high)
    assert [at for at, _ in axis.ticks] == [_height(float(text)) for _, text in axis.ticks]
    assert [at for at, _ in axis.ticks] == sorted(at for at, _ in axis.ticks)
    assert all(axis.low <= _height(change) <= axis.high for change in changes)
    assert _height(0.02) - _height(0.0) > 0.1 * (_height(20.0) - _height(0.0))


def test_the_command_writes_it(folders, tmp_path):
    source, _, broken, file = folders
    page = tmp_path / "new" / "check.html"
    arguments = ["baseline", "check", str(broken), str(file), "--ref", str(source), "--quiet"]
    done = CliRunner().invoke(main, [*arguments, "--html", str(page)])
    assert done.exit_code == 1, done.output
    read = Page(page.read_text("utf-8"))
    assert DOWN in read.tables["worst-table"].column("layer")
    assert f"write {source} {broken} {file} --overwrite" in read.ids["accept"]


def test_the_page_of_compare(folders, tmp_path):
    source, output, _, _ = folders
    page = tmp_path / "compare.html"
    done = CliRunner().invoke(main, ["compare", str(source), str(output), "--html", str(page)])
    assert done.exit_code == 0, done.output
    assert "The 10 layers that lose most" in done.stdout
    read = Page(page.read_text("utf-8"))
    assert_self_contained(read)
    rows = {row.module: row for row in api.compare(source, output).layers}
    found = read.tables["layer-table"].sort_keys("weight")
    assert found == {name: row.weight.relative for name, row in rows.items()}
    bad = CliRunner().invoke(
        main, ["compare", str(source), str(output), "--html", str(source / "config.json" / "x")]
    )
    assert bad.exit_code == 2
    assert "cannot write" in bad.stderr
