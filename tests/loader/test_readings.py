"""What a rank reads: its bytes alone where the format allows it, and always the right values.

The oracle of every value is the whole weight, read by the source and cut by the region. That of the
bytes is the layout of the format, written out here, and the system calls, counted.
"""

from __future__ import annotations

import os
from functools import cache

import pytest
import torch
from converting import converted, opened
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rank_encodings import put_columns_in_no_order
from tiny_checkpoints import config, llama, tensors, write
from torch import nn

from quantload.errors import FormatMismatch
from quantload.loader import portion
from quantload.loader.assign import assign
from quantload.loader.formats.targets import target_named
from quantload.loader.places import Job
from quantload.loader.reading import put_in_row
from quantload.loader.readings import Readings
from quantload.loader.stats import InputStatistics
from quantload.loader.stream import Settings, Stream
from quantload.mappers.mapper import WeightMapper
from quantload.mappers.targets import Cut, Target
from quantload.quant.qtensor import QuantTensor
from quantload.quant.region import WHOLE, Region

CPU = torch.device("cpu")
LAYER = "model.layers.0"
HIDDEN, INNER = 192, 352  # no multiples of a block of 128
MODULES = {"self_attn.k_proj": (96, 192), "mlp.up_proj": (352, 192), "mlp.down_proj": (192, 352)}
SCHEMES = [
    *("dense", "W4A16:g32", "W4A16_ASYM:g32", "W8A16:g32", "W3A16:g32", "W6A16:g32", "W8A8"),
    *("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "NVFP4", "MXFP4A16", "MXFP6A16", "MXFP8A16"),
    *("fp8 FP8_BLOCK", "fp8 FP8", "modelopt NVFP4", "modelopt FP8_BLOCK"),
    *("gptq W4A16:g32", "gptq W4A16_ASYM:g32", "gptq W8A16:g32", "gptq W3A16:g32"),
    *("gptq W4A16_ASYM:g32 act-order", "gptq W2A16:g32 act-order", "gptq W4A16:channel"),
    *("awq W4A16_ASYM:g32", "awq W4A16_ASYM:channel"),
    "compressed-tensors W4A16_ASYM:g32 act-order",
]
WHOLE_ONLY = {"gptq W3A16:g32"}  # fields lie across words, and along both axes: read whole


class Layer(nn.Module):
    """Keeps what it gets."""

    def __init__(self, region: Region, shape=(0, 0), dtype=torch.float32) -> None:
        super().__init__()
        self.held, self.shape, self.dtype = region, shape, dtype
        self.got = {}

    def awaits(self):
        return {("weight", 0): self.shape}

    def region(self, leaf, slot):
        return self.held

    def receive(self, leaf, slot, value):
        self.got[leaf, slot] = value

    def finish(self, device):
        pass


@pytest.fixture(scope="module")
def source_of(tmp_path_factory):
    """Return an opened checkpoint in a scheme: made once, when it is needed."""
    dense = llama(
        tmp_path_factory.mktemp("dense") / "model", hidden=HIDDEN, intermediate=INNER, layers=1
    )

    @cache
    def make(scheme: str):
        if scheme == "dense":
            return opened(dense)
        name, text, *order = scheme.split() if " " in scheme else ("compressed-tensors", scheme)
        folder = tmp_path_factory.mktemp("made") / "model"
        known = InputStatistics(stated=12.0)  # for fixed scales of inputs
        converted(dense, folder, text, target=target_named(name), stats=known)
        if order:
            put_columns_in_no_order(folder)
        source = opened(folder)
        assert source.is_quantized
        return source

    return make


def job_of(source, module, **place):
    weight = source.weights[module]
    return Job(
        target=Target(module, "weight", **place),
        name=module,
        weight=weight,
        shape=weight.shape,
        num_bytes=0,
    )


def read(source, module, region, *, dtype=torch.bfloat16, cut=None):
    """Return what a rank gets, the planned bytes, and the bytes that the threads read."""
    job = job_of(source, module, cut=cut)
    (reading,) = Readings(source, CPU).of(job, Layer(region), WHOLE, dtype)
    with Stream(reading.fetches, CPU, Settings(2, 1 << 12, gap_bytes=0)) as stream:
        stream.wait(reading.fetches)
        value = reading.value()
    return (value if reading.is_cut else region.of(value)), reading.num_bytes, stream.bytes_read


def assert_same(found, expected):
    assert type(found) is type(expected)
    if not isinstance(found, QuantTensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
        return
    assert found.grid == expected.grid
    assert found.block == expected.block
    assert found.evaluation == expected.evaluation
    mine, theirs = found.tensors(), expected.tensors()
    assert mine.keys() == theirs.keys()
    for name, part in theirs.items():
        assert mine[name].dtype == part.dtype
        assert torch.equal(mine[name].view(torch.uint8), part.contiguous().view(torch.uint8)), name


def spans(length):
    cuts = st.integers(0, length)
    return st.tuples(cuts, cuts).filter(lambda pair: pair[0] < pair[1])


@pytest.mark.parametrize("scheme", SCHEMES)
@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_region_is_the_cut_of_the_whole(source_of, scheme, data):
    source = source_of(scheme)
    name = data.draw(st.sampled_from(sorted(MODULES)), label="module")
    rows, columns = MODULES[name]
    runs = data.draw(st.none() | st.lists(spans(rows), min_size=1, max_size=2), label="rows")
    span = data.draw(st.none() | spans(columns), label="columns")
    region = Region(None if runs is None else tuple(runs), span)
    smallest = data.draw(st.sampled_from([1, 4096]), label="smallest piece")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(portion, "SMALLEST_PIECE", smallest)
        found, planned, done = read(source, f"{LAYER}.{name}", region)
    assert_same(found, region.of(source.read_weight(f"{LAYER}.{name}")))
    whole = sum(
        source.checkpoint.tensors[leaf].num_bytes
        for leaf in source.weights[f"{LAYER}.{name}"].leaves.values()
    )
    if scheme in WHOLE_ONLY:
        assert planned == done == whole
    else:
        assert planned == done
        assert planned <= whole * (len(runs) if runs else 1)


def test_a_stored_order_is_composed_with_the_region(source_of):
    source = source_of("dense")
    whole = source.read_weight(f"{LAYER}.mlp.up_proj")
    cut = Cut((range(100, 200), range(10, 60)))  # a part of it that a layer takes
    region = Region(rows=((5, 20), (90, 120)))
    found, planned, _ = read(source, f"{LAYER}.mlp.up_proj", region, cut=cut)
    taken = torch.cat([whole[100:200], whole[10:60]])
    assert torch.equal(found, torch.cat([taken[5:20], taken[90:120]]))
    assert planned == 45 * HIDDEN * 2


def test_scales_of_zero_in_the_rows_of_one_rank(tmp_path):
    """Scales of all rows may not be zero; of some they may, and these are read as ever."""
    dense = llama(tmp_path / "dense", hidden=HIDDEN, intermediate=INNER, layers=1)
    source = opened(converted(dense, tmp_path / "made", "FP8_DYNAMIC"))
    module = f"{LAYER}.mlp.up_proj"
    entry = source.checkpoint.tensors[source.weights[module].leaves["weight_scale"]]
    with entry.file.open("r+b") as file:
        file.seek(entry.start)
        file.write(bytes(64 * entry.dtype.itemsize))
    region = Region(rows=((8, 60),))
    found, _, _ = read(source, module, region)
    assert_same(found, region.of(source.read_weight(module)))
    with entry.file.open("r+b") as file:
        file.seek(entry.start)
        file.write(bytes(entry.num_bytes))
    with pytest.raises(FormatMismatch, match="all scales of tensor"):
        read(source, module, region)


# -- bytes ----------------------------------------------------------------------------------------


def fourths(length: int, rank: int) -> tuple[int, int]:
    return rank * length // 4, (rank + 1) * length // 4


@pytest.fixture
def system(monkeypatch):
    """Count the bytes that system calls read."""
    counted = []
    preadv = os.preadv

    def counting(descriptor, buffers, offset):
        got = preadv(descriptor, buffers, offset)
        counted.append(got)
        return got

    monkeypatch.setattr(os, "preadv", counting)
    return counted


@pytest.mark.parametrize("rank", range(4))
def test_bytes_of_a_dense_column_parallel_weight(source_of, system, rank):
    region = Region(rows=(fourths(INNER, rank),))
    _, planned, done = read(source_of("dense"), f"{LAYER}.mlp.up_proj", region)
    assert planned == done == sum(system) == INNER // 4 * HIDDEN * 2


@pytest.mark.parametrize("rank", range(4))
def test_bytes_of_a_w4a16_column_parallel_weight(source_of, system, rank):
    region = Region(rows=(fourths(INNER, rank),))
    source = source_of("W4A16:g32")
    opened_with = len(system)
    _, planned, done = read(source, f"{LAYER}.mlp.up_proj", region)
    codes, scales, shape = HIDDEN // 2, HIDDEN // 32 * 2, 16  # bytes of a row; two int64
    assert planned == done == INNER // 4 * (codes + scales) + shape
    assert sum(system[opened_with:]) == done


@pytest.mark.parametrize("rank", range(4))
def test_bytes_of_packed_zero_points(source_of, rank):
    start, stop = fourths(INNER, rank)  # 8 zero points are in a word: rows 88..176 need 11 words
    _, planned, _ = read(
        source_of("W4A16_ASYM:g32"), f"{LAYER}.mlp.up_proj", Region(rows=((start, stop),))
    )
    groups = HIDDEN // 32
    assert planned == (stop - start) * (HIDDEN // 2 + 2 * groups) + 11 * 4 * groups + 16


def test_bytes_of_a_block_that_is_cut(source_of):
    """Rows 100..150 lie in two blocks of 128: 256 rows of codes and two of scales are read."""
    _, planned, _ = read(source_of("FP8_BLOCK"), f"{LAYER}.mlp.up_proj", Region(rows=((100, 150),)))
    assert planned == 256 * HIDDEN + 2 * 2 * 2


@pytest.mark.parametrize("scheme", ["dense", "W4A16:g32"])
@pytest.mark.parametrize("rank", range(4))
def test_bytes_of_row_parallel_weights(tmp_path, scheme, rank):
    """Pieces of a page or more are read alone; below, whole rows."""
    content = config(hidden=64, intermediate=32768, layers=1)
    folder = write(tmp_path / "dense", content, tensors(content))
    if scheme != "dense":
        folder = converted(folder, tmp_path / "made", scheme)
    source, module = opened(folder), f"{LAYER}.mlp.down_proj"
    region = Region(columns=fourths(32768, rank))
    found, planned, done = read(source, module, region)
    assert_same(found, region.of(source.read_weight(module)))
    if scheme == "dense":  # pieces of 16 KiB
        assert planned == done == 64 * 8192 * 2
    else:  # of codes 4096 bytes, of scales 512
        assert planned == done == 64 * (4096 + 1024 * 2) + 16


@pytest.mark.parametrize("order", ["", " act-order"])
@pytest.mark.parametrize("rank", range(4))
def test_bytes_of_gptq(source_of, order, rank, monkeypatch):
    """qweight [K / 8, N], scales [G, N], qzeros [G, N / 8], g_idx [K]; of any size."""
    monkeypatch.setattr(portion, "SMALLEST_PIECE", 1)
    source = source_of(f"gptq W4A16_ASYM:g32{order}")
    start, stop = fourths(INNER, rank)  # rows 88..176 are 11 words
    _, planned, done = read(source, f"{LAYER}.mlp.up_proj", Region(rows=((start, stop),)))
    groups = HIDDEN // 32
    per_row = 4 * HIDDEN // 8 + 2 * groups
    assert planned == done == (stop - start) * per_row + groups * 11 * 4 + 4 * HIDDEN
    start, stop = fourths(INNER, rank)  # columns 88..176 are in 64..192, or 11 words of 8
    _, planned, done = read(source, f"{LAYER}.mlp.down_proj", Region(columns=(start, stop)))
    if order:  # scales and zeros of all 11 groups
        words, groups, numbers = 11, 11, stop - start
    else:
        groups, numbers = -(-stop // 32) - start // 32, INNER
        words = 4 * groups
    expected = words * HIDDEN * 4 + groups * HIDDEN * 2 + groups * HIDDEN // 8 * 4 + 4 * numbers
    assert planned == done == expected


def test_a_rank_that_holds_nothing_reads_nothing(source_of):
    source = source_of("dense")
    name = f"{LAYER}.mlp.up_proj"
    job = job_of(source, name)
    assert Readings(source, CPU).of(job, Layer(None), WHOLE, torch.float32) == []


# -- experts --------------------------------------------------------------------------------------


class Experts(Layer):
    def __init__(self, regions, shape, *, input_first=False) -> None:
        super().__init__(WHOLE, shape)
        self.regions, self.input_first = regions, input_first

    def awaits(self):
        return {("gate_up", slot): self.shape for slot in range(len(self.regions))}

    def region(self, leaf, slot):
        return self.regions[slot]

    def has_input_first(self, leaf):
        return self.input_first


EXPERT_REGIONS = {
    "whole": [WHOLE] * 8,
    "two experts": [None] * 4 + [WHOLE] * 4,
    "rows": [Region(rows=((2, 5),))] * 8,
    "columns": [Region(columns=(8, 24))] * 8,
    "two runs": [Region(rows=((0, 1), (4, 6)))] * 8,
}


@pytest.mark.parametrize("input_first", [False, True])
@pytest.mark.parametrize("held", EXPERT_REGIONS)
def test_experts_in_one_tensor(tmp_path, held, input_first):
    """4 experts of 2 parts [6, 32] each; a rank reads those parts of them that it holds."""
    regions = EXPERT_REGIONS[held]
    whole = torch.randn(4, 12, 32)
    stored = whole.transpose(1, 2).contiguous() if input_first else whole
    folder = write(tmp_path, config(), {"layer.gate_up": stored})
    model = nn.Module()
    model.layer = layer = Experts(regions, (6, 32), input_first=input_first)
    mapper = WeightMapper({"layer": frozenset({"gate_up"})})
    done = assign(model, opened(folder), mapper, device=CPU, tied={})
    slots = whole.reshape(8, 6, 32)
    assert layer.got.keys() == {("gate_up", s) for s in range(8) if regions[s] is not None}
    for (_, slot), value in layer.got.items():
        assert torch.equal(value, regions[slot].of(slots[slot]))
        assert value.is_contiguous()
    expected = sum(4 * value.numel() for value in layer.got.values())
    if held == "columns":  # pieces are below a page: whole rows, of both parts
        expected *= 2
    elif input_first:  # the same; rows of the file are input features, and all are needed
        expected = {"two experts": 2, "whole": 2, "rows": 2, "two runs": 1}[held] * stored.nbytes
        expected //= 2 if held == "two experts" else 1
    assert done.read == expected


def test_members_lie_one_after_the_other(source_of):
    source, device = source_of("dense"), CPU
    readings = {}
    for slot, name in enumerate(("mlp.gate_proj", "mlp.up_proj")):
        job = job_of(source, f"{LAYER}.{name}", slot=slot)
        (readings[slot],) = Readings(source, device).of(job, Layer(WHOLE), WHOLE, torch.bfloat16)
    put_in_row(readings)
    fetches = [readings[slot].fetches[0] for slot in (1, 0)]
    with Stream(fetches, device) as stream:
        stream.wait(fetches)
        one, two = readings[0].value(), readings[1].value()
    assert one.data_ptr() + one.nbytes == two.data_ptr()
    assert torch.equal(one, source.read_weight(f"{LAYER}.mlp.gate_proj"))
    assert torch.equal(two, source.read_weight(f"{LAYER}.mlp.up_proj"))
