"""Cache scales of a checkpoint come in the order of its layers."""

import pytest
import tiny_checkpoints as tiny
import torch

from quantload.api import inspect
from quantload.errors import UnsupportedVariant
from quantload.loader.kept_scales import read_cache_scales


def source(folder, extra):
    content = tiny.config(layers=12)
    tensors = tiny.tensors(content)
    tiny.write(folder, content, {**tensors, **{k: torch.tensor(v) for k, v in extra.items()}})
    return inspect(folder)


def named(number, which, leaf="self_attn.{}_scale"):
    return f"model.layers.{number}.{leaf.format(which)}"


EVERY = {
    named(number, which): [number + (0.5 if which == "v" else 0.25)]
    for number in range(12)
    for which in "kv"
}


def test_none(tmp_path):
    assert read_cache_scales(source(tmp_path / "m", {})) is None


def test_layers_are_sorted_by_number(tmp_path):
    keys, values = read_cache_scales(source(tmp_path / "m", EVERY))
    assert keys == [number + 0.25 for number in range(12)]
    assert values == [number + 0.5 for number in range(12)]


def test_one_scale_for_both_and_queries_do_not_count(tmp_path):
    extra = {named(n, "kv"): float(n) for n in range(12)} | {named(0, "q"): 3.0}
    assert read_cache_scales(source(tmp_path / "m", extra)) == ([*range(12)], [*range(12)])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({named(3, "v"): None}, "cache scales are missing: `v of layer 3`"),
        ({named(3, "v"): [1.0, 2.0]}, "holds 2 numbers of the cache"),
        ({named(3, "v", "self_attn.{}_zero_point"): [1.0]}, "and no zero point"),
    ],
)
def test_refusals(tmp_path, changed, message):
    extra = {name: value for name, value in (EVERY | changed).items() if value is not None}
    with pytest.raises(UnsupportedVariant, match=message):
        read_cache_scales(source(tmp_path / "m", extra))


def test_zero_points_of_zero_say_nothing(tmp_path):
    extra = EVERY | {named(3, "v", "self_attn.{}_zero_point"): [0.0]}
    assert read_cache_scales(source(tmp_path / "m", extra)) is not None
