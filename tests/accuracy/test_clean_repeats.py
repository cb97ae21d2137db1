"""Nothing is flagged where nothing is worse: every layer is measured again, in other arithmetic.

A repeat judges a candidate whose values are those of the baseline by `verify`, `compare` and
`baseline check`, which measures layers although their digests agree.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import tiny_checkpoints as tiny
import torch
from smollm2 import smollm2_file
from tiny_moe import tiny_moe

from quantload import api, api_baseline
from quantload.accuracy import streaming
from quantload.accuracy.baseline_file import read_baseline
from quantload.accuracy.baseline_verdict import change_db
from quantload.loader.formats.targets import target_named
from quantload.loader.plan_options import PlanOptions

SCHEMES = ("W4A16:g32", "W4A16_ASYM:g32", "FP8_DYNAMIC", "W8A8", "NVFP4A16")
KINDS = ("llama", "moe")
FEWEST = 50  # repeats in all


@dataclass(frozen=True)
class Repeat:
    """What differs from what the baseline was written with: float32, all threads, sdpa."""

    candidate: str = "same"
    dtype: str = "float32"
    threads: int = 2
    attention: str | None = None
    is_reversed: bool = False

    @property
    def change(self):
        """What differs in the arithmetic, for the table."""
        eager = [] if self.attention is None else [self.attention]
        return ", ".join([self.dtype, f"{self.threads} threads", *eager])


REPEATS = [
    Repeat(threads=1),
    Repeat(dtype="bfloat16"),
    Repeat(dtype="bfloat16", threads=1),
    Repeat(candidate="converted anew"),
    Repeat(candidate="converted anew", dtype="bfloat16", threads=1, is_reversed=True),
    Repeat(candidate="in small files", threads=1, is_reversed=True),
    Repeat(candidate="in small files", dtype="bfloat16"),
    Repeat(attention="eager"),
    Repeat(attention="eager", dtype="bfloat16"),
]


@contextmanager
def arithmetic(monkeypatch, repeat):
    before = torch.get_num_threads()
    torch.set_num_threads(repeat.threads)
    with monkeypatch.context() as patch:
        if repeat.attention is not None:
            build = functools.partial(streaming.build_on_meta, attn_implementation=repeat.attention)
            patch.setattr(streaming, "build_on_meta", build)
        try:
            yield
        finally:
            torch.set_num_threads(before)


@dataclass(frozen=True)
class Made:
    """A source, what was made of it, and the baseline of that."""

    source: object
    candidates: dict[str, object]
    file: object
    sequences: list[list[int]]


def tokens(vocabulary, *, sequences=8, length=48):
    generator = torch.Generator().manual_seed(7)
    return torch.randint(3, vocabulary, (sequences, length), generator=generator).tolist()


def make(folder, source, scheme, sequences, *, forms=("same", "converted anew", "in small files")):
    small = PlanOptions(max_shard_bytes=40_000)
    candidates = {
        form: api.convert(
            source,
            folder / form,
            scheme,
            verify_output=False,
            options=small if "small" in form else None,
        ).folder
        for form in forms
    }
    file = folder / "baseline.json"
    api_baseline.write_baseline(source, candidates["same"], file, sequences=sequences, device="cpu")
    return Made(source, candidates, file, sequences)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    @functools.cache
    def of(kind, scheme):
        folder = tmp_path_factory.mktemp("repeats")
        if kind == "llama":
            source = tiny.llama(folder / "source", hidden=128, intermediate=256)
        else:
            source = tiny_moe(folder / "source")
        return make(folder, source, scheme, tokens(96))

    return of


def alarms(made, repeat):
    """What the three say against a candidate that is as it was, and what the check measured."""
    candidate = made.candidates[repeat.candidate]
    verified = api.verify(candidate, made.source, nearest=True)
    found = [f"verify: {layer.module}" for layer in verified.layers if layer.problem]
    sequences = made.sequences[::-1] if repeat.is_reversed else made.sequences
    compared = api.compare(
        made.source,
        candidate,
        sequences=sequences,
        device="cpu",
        dtype=getattr(torch, repeat.dtype),
    )
    found += [f"compare: {text}" for text in (*compared.failures, *compared.problems)]
    report = api_baseline.check_baseline(
        candidate,
        made.file,
        reference=made.source,
        measure_all=True,
        device="cpu",
        dtype=repeat.dtype,
    )
    found += [f"check: {v.name}: {v.failure}" for v in report.layers if v.failure]
    found += [f"check: {text}" for text in report.failures]
    assert verified.passed == compared.passed == report.passed == (not found)
    assert report.unchanged == len(report.layers)  # the same values, and yet measured
    return found, report


def noise(report):
    """By how many dB each statistic moved, largest of all layers or blocks."""
    before, now = report.baseline, report.now

    def largest(changes):
        return max((abs(change) for change in changes), default=0.0)

    def of_layers(statistic):
        pairs = (
            (getattr(layer, statistic), getattr(now.layers[name], statistic))
            for name, layer in before.layers.items()
        )
        return largest(change_db(*pair) for pair in pairs if all(pair))

    kl = [one.end["kl_mean"][0] for one in (before, now)]
    return {
        "weight": of_layers("weight"),
        "steps": of_layers("steps"),
        "output": of_layers("output"),
        "output median": of_layers("output_median"),
        "output mean": abs({gate.what: gate.change for gate in report.gates}["mean of outputs"]),
        "block median": largest(change_db(m, now.blocks[p]) for p, m in before.blocks.items()),
        "KL": 0.5 * abs(change_db(*kl)),
        "top-1": abs(before.end["top1"][0] - now.end["top1"][0]),
    }


@pytest.mark.parametrize(
    ("kind", "scheme", "number"), [("llama", "W4A16:g32", 4), ("moe", "W8A8", 2)]
)
def test_a_clean_repeat_raises_no_alarm(made, monkeypatch, kind, scheme, number):
    repeat = REPEATS[number]
    with arithmetic(monkeypatch, repeat):
        found, report = alarms(made(kind, scheme), repeat)
    assert found == []
    moved = noise(report)
    assert moved["weight"] < 1e-4
    assert moved["output median"] > 1e-6  # other arithmetic was used


@pytest.mark.slow
def test_no_clean_repeat_raises_an_alarm(made, monkeypatch):
    count, found, table = 0, [], {}
    for kind in KINDS:
        for scheme in SCHEMES:
            for repeat in REPEATS:
                with arithmetic(monkeypatch, repeat):
                    said, report = alarms(made(kind, scheme), repeat)
                found += [(kind, scheme, repeat, text) for text in said]
                count += 1
                keep_largest(table, (repeat.change, scheme), noise(report))
    show(table)
    assert found == []
    assert count >= FEWEST


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["W4A16", "W8A8"])
def test_smollm2_raises_no_alarm(tmp_path, monkeypatch, scheme):
    source = smollm2_file()
    ids = tokens(49_000, sequences=2, length=64)
    made = make(tmp_path, source, scheme, ids, forms=("same",))
    found, table = [], {}
    for repeat in (REPEATS[0], REPEATS[1]):
        with arithmetic(monkeypatch, repeat):
            said, report = alarms(made, repeat)
        found += [(repeat, text) for text in said]
        keep_largest(table, (repeat.change, scheme), noise(report))
    show(table)
    assert found == []


def keep_largest(table, key, moved):
    kept = table.setdefault(key, moved)
    table[key] = {name: max(value, kept[name]) for name, value in moved.items()}


def show(table):
    for (change, scheme), moved in sorted(table.items()):
        numbers = ", ".join(f"{name} {value:.2g}" for name, value in moved.items())
        print(f"{change}; {scheme}: {numbers}")  # noqa: T201 - with -s


@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_another_packing_of_equal_values_passes(tmp_path, form):
    """From another tool's format to compressed-tensors: only words and names differ."""
    source = tiny.llama(tmp_path / "source", hidden=128, intermediate=128)
    options = PlanOptions(target=target_named(form), dtype=torch.float16)
    first = api.convert(source, tmp_path / form, "W4A16_ASYM:g32", options=options).folder
    again = api.convert(first, tmp_path / "again", "same").folder
    file = tmp_path / "baseline.json"
    api_baseline.write_baseline(source, first, file)
    report = api_baseline.check_baseline(again, file, reference=source)
    assert report.passed, report.failures
    before, now = read_baseline(file).layers, report.now.layers
    assert {name: layer.encoding for name, layer in now.items()} == {
        name: layer.encoding for name, layer in before.items()
    }
    moved = [change_db(layer.weight, now[name].weight) for name, layer in before.items()]
    assert max(map(abs, moved)) < 1e-4
