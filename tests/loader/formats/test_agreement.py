"""What a config says of modules, against what the files hold: counts and entries without use."""

import re
import time

import torch
from int_packing import memory_checkpoint

from quantload.loader.formats.agreement import ConfigSays, about_unused_entries, count_entries


def _checkpoint(*modules):
    return memory_checkpoint({f"{m}.weight": torch.zeros(1, 1) for m in modules}, {})


def _starts(pattern):
    return re.compile(pattern[3:]).match if pattern.startswith("re:") else None


def test_counts():
    said = {name: ConfigSays(True, "x: re:.*") for name in "abd"}
    said["c"] = ConfigSays(False, "y: c")
    stored = {"a": True, "b": True, "c": False, "d": False}  # of d the files decide
    assert count_entries(said, stored) == {"x: re:.*": 2, "y: c": 1}


def test_entries_that_match_nothing():
    entries = ["ignore: a.b", "ignore: a.c", "ignore: re:a", "ignore: re:b", "ignore: re:x"]
    checkpoint = _checkpoint("a.b", "x.lm_head")
    (told,) = about_unused_entries(entries, {"ignore: re:x": 1}, checkpoint, _starts)
    assert told.startswith("2 entries of the quantization config match no module: ")
    assert "`ignore: a.c`, `ignore: re:b`, in `memory`" in told


def test_an_entry_for_a_tied_head_is_no_fault():
    entries = ["ignore: lm_head", "ignore: re:.*lm_head"]
    assert not about_unused_entries(entries, {}, _checkpoint("a.b"), _starts)
    assert about_unused_entries(entries, {}, _checkpoint("x.lm_head"), _starts)


def test_many_entries_and_many_modules_take_no_time():
    checkpoint = _checkpoint(*(f"layers.{n}.up" for n in range(20_000)))
    entries = [f"ignore: re:.*{n}.down" for n in range(5000)]
    entries += [f"ignore: layers.{n}.down" for n in range(5000)]
    start = time.process_time()
    assert about_unused_entries(entries, {}, checkpoint, _starts)
    assert time.process_time() - start < 2


def test_a_second_spelling_of_an_entry_is_no_fault():
    beside = ["ignore: tower.layers.0.fc", "ignore: model.tower.layers.0.fc"]
    checkpoint = _checkpoint("tower.layers.0.fc", "tower.layers.1.fc", "x.lm_head")
    assert not about_unused_entries(beside, {beside[0]: 1}, checkpoint, _starts)
    heads = ["ignore: lm_head", "ignore: x.lm_head"]
    assert not about_unused_entries(heads, {heads[1]: 1}, checkpoint, _starts)
    assert about_unused_entries(beside[1:], {}, checkpoint, _starts)
    assert about_unused_entries([beside[0], "ignore: tower.layers.2.fc"], {}, checkpoint, _starts)
