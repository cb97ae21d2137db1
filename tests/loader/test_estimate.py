"""The probe measures and leaves nothing behind; the estimate is arithmetic on what it measured."""

import os
from dataclasses import replace

import pytest
import tiny_checkpoints as tiny
import torch
from click.testing import CliRunner
from converting import converted, opened, plan_of
from safetensors.torch import load_file

from quantload.cli import main
from quantload.loader import estimate as estimates
from quantload.loader.estimate import Rates, estimate, probe
from quantload.loader.layer_selection import select_layers
from quantload.loader.plan import PlanOptions, make_plan
from quantload.loader.tally import tally
from quantload.loader.weight_rows import WeightRows
from quantload.loader.workers import Resources
from quantload.mappers.facts import facts_from_names
from quantload.quant import compiled
from quantload.quant.rules import QuantConfig

WEIGHTS = "model.safetensors"
ONE = Resources(workers=1)
RATES = Rates(
    threads=4,
    read=1e6,
    cached=0.5,
    convert={"W4A16:g32": 2e6, "W8A8": 4e6},
    sha256=5e6,
    write=8e6,
    flush=1e5,
    free=10**9,
    obstacle="",
    seconds=0.1,
)


@pytest.fixture
def folder(tmp_path):
    return tiny.llama(tmp_path / "source")


def test_arithmetic(folder):
    plan = plan_of(folder, "W4A16:g32", ["model.layers.1.=W8A8"])
    found = estimate(plan, RATES)
    layer = (64 * 64 * 2 + 32 * 64 * 2 + 3 * 64 * 128) * 2
    data = sum(t.nbytes for t in load_file(folder / WEIGHTS).values())
    assert found.read == pytest.approx(data / 1e6)
    assert found.convert == pytest.approx(layer / 2e6 + layer / 4e6)
    assert found.write == pytest.approx(plan.output_bytes / 8e6)
    assert found.flush == pytest.approx(plan.output_bytes / 1e5)
    assert found.sha256 == pytest.approx(plan.output_bytes / 5e6)
    assert found.high == pytest.approx(found.read + found.convert + found.flush + found.sha256)
    computed = found.convert + found.sha256 / 4  # one file is hashed by one of four threads
    assert found.low == pytest.approx(max(found.read / 4, computed, found.write / 4, found.sha256))
    assert found.not_tried == ()


def test_the_slowest_part_is_what_takes_the_time(folder):
    plan = plan_of(folder, "W4A16:g32", ["model.layers.1.=W8A8"])
    slow = {"read": {"read": 1e2}, "sha256": {"sha256": 1e2}, "write": {"write": 1e2, "flush": 1e2}}
    for part, rates in slow.items():
        found = estimate(plan, replace(RATES, **rates))
        share = 1 if part == "sha256" else 4
        assert found.low == pytest.approx(getattr(found, part) / share)


def test_what_was_not_tried_counts_as_the_slowest_other(folder):
    plan = plan_of(folder, "FP8_DYNAMIC", ["model.layers.1.=W8A8"])
    found = estimate(plan, RATES)
    layer = (64 * 64 * 2 + 32 * 64 * 2 + 3 * 64 * 128) * 2
    assert found.not_tried == ("FP8_DYNAMIC",)
    assert found.convert == pytest.approx(layer / 2e6 + layer / 4e6)
    assert estimate(plan, replace(RATES, convert={})) is None
    assert estimate(plan, replace(RATES, write=None, flush=None)) is None
    assert estimate(plan_of(folder, None), replace(RATES, convert={})).convert == 0


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        ("W4A16:g32", {"W4A16:g32"}),
        ("FP8_BLOCK", {"FP8_BLOCK"}),
        ("W8A8", {"W8A8"}),
        ("dense", set()),
    ],
)
def test_the_probe_tries_every_scheme(tmp_path, folder, scheme, expected):
    before = sorted(tmp_path.rglob("*"))
    rates = probe(plan_of(folder, scheme), tmp_path / "not" / "there", Resources(workers=2))
    assert rates.convert.keys() == expected
    assert all(0 < speed < 1e12 for speed in rates.convert.values())
    assert 0 < rates.flush < rates.write
    assert min(rates.read, rates.sha256, rates.seconds) > 0
    status = os.statvfs(tmp_path)
    assert rates.free == pytest.approx(status.f_bavail * status.f_frsize, rel=0.2)
    assert sorted(tmp_path.rglob("*")) == before
    assert estimate(plan_of(folder, scheme), rates).low > 0


def test_a_quantized_source_is_decoded(tmp_path, folder):
    source = converted(folder, tmp_path / "w8a8", "W8A8")
    plan = plan_of(source, "W4A16:g32", ["model.layers.1.=dense"])
    assert probe(plan, tmp_path, ONE).convert.keys() == {"W4A16:g32", "full precision"}
    kept = plan_of(source, "W8A8")
    assert probe(kept, tmp_path, ONE).convert == {}


@pytest.mark.parametrize("is_decoded", [False, True])
@pytest.mark.parametrize("part", ["quantize", "encode"])
def test_slow_code_is_seen(monkeypatch, tmp_path, folder, part, is_decoded):
    if is_decoded:
        folder = converted(folder, tmp_path / "w8a8", "W8A8")
    plan = plan_of(folder, "W4A16:g32")
    fast = probe(plan, tmp_path, ONE).convert["W4A16:g32"]
    owner = WeightRows if part == "quantize" else type(plan.target)
    real = getattr(owner, part)

    def slow(*arguments):
        for _ in range(3000):
            made = real(*arguments)
        return made

    monkeypatch.setattr(owner, part, slow)
    assert probe(plan, tmp_path, ONE).convert["W4A16:g32"] < fast / 3


@pytest.mark.parametrize("scheme", ["W4A16:g32", "dense"])
def test_loops_are_compiled_where_the_conversion_compiles_them(
    monkeypatch, tmp_path, folder, scheme
):
    told = []
    monkeypatch.setattr(compiled, "expect", told.append)
    probe(plan_of(folder, scheme), tmp_path, ONE)
    assert told == [73728 if scheme == "W4A16:g32" else 0]


def test_a_weight_that_is_not_finite_is_left_to_the_conversion(tmp_path, folder):
    made = load_file(folder / WEIGHTS)
    made = {n: torch.full_like(t, float("nan")) if "proj" in n else t for n, t in made.items()}
    tiny.save_file(made, folder / WEIGHTS)
    assert probe(plan_of(folder, "W8A8"), tmp_path, ONE).convert == {}


def test_a_place_that_cannot_be_written(monkeypatch, tmp_path, folder):
    def refuse(**_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(estimates.tempfile, "TemporaryFile", refuse)
    rates = probe(plan_of(folder, "W8A8"), tmp_path / "out", ONE)
    assert (rates.write, rates.flush, rates.free) == (None, None, None)
    assert rates.obstacle == f"cannot write in `{tmp_path}`: Read-only file system"


def test_the_page_cache_is_told(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    held = estimates._is_cached(path, 0)
    if held is None:
        pytest.skip("this file system does not tell what is cached")
    assert held is True
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    assert estimates._is_cached(path, 0) is False


def test_places_are_spread_over_the_bytes(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 100)
    (tmp_path / "b").write_bytes(b"x" * (64 << 20))
    stretches = [(tmp_path / "a", 0, 100), (tmp_path / "b", 0, 64 << 20)]
    places = estimates._places(stretches)
    assert {path.name for path, _ in places} == {"b"}
    starts = [start for _, start in places]
    assert starts == sorted(starts)
    assert starts[0] < 2 << 20
    assert starts[-1] > 61 << 20
    assert all(start % 4096 == 0 for start in starts)


def test_only_what_is_read_counts(tmp_path):
    content = tiny.config(layers=8)
    folder = tiny.write(tmp_path / "in", content, tiny.tensors(content))
    source = select_layers(opened(folder), "7")
    kept = source.checkpoint.tensors.values()
    plan = make_plan(
        source,
        QuantConfig.from_options("W4A16:g32", ()),
        facts_from_names(source.weights, tied_head=False),
        PlanOptions(layers="7"),
    )
    found = tally(plan)
    assert found.read == sum(entry.num_bytes for entry in kept)
    assert found.read + found.of("dropped") == found.total > 2 * found.read
    stretches = {(path, start): size for path, start, size in estimates._stretches(plan)}
    assert stretches == {(entry.file, entry.start): entry.num_bytes for entry in kept}
    arguments = ["convert", str(folder), str(tmp_path / "out"), "--scheme", "W4A16:g32"]
    done = CliRunner().invoke(main, [*arguments, "--layers", "7", "--plan"])
    assert f"  {found.read} bytes are read, " in done.stdout


def test_places_lie_in_the_parts_that_are_read(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * (64 << 20))
    stretches = [(tmp_path / "a", start << 20, 4 << 20) for start in (8, 40)]
    starts = [start for _, start in estimates._places(stretches)]
    assert starts == sorted(starts)
    assert len(starts) == len(set(starts)) == 32
    assert all(8 << 20 <= start < 12 << 20 for start in starts[:16])
    assert all(40 << 20 <= start < 44 << 20 for start in starts[16:])
    assert estimates._places([]) == []
