"""What a rank reads of the experts of a block that lie quantized in one parameter.

The oracle is the whole weight, read by the source, taken apart and cut by the region.
"""

from __future__ import annotations

import math
from functools import cache

import fp8_files
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from modelopt_encoder import flat
from modelopt_encoder import write as write_modelopt
from torch import nn

from quantload.loader import portion
from quantload.loader.formats import open_source
from quantload.loader.open import open_checkpoint
from quantload.loader.places import Job
from quantload.loader.readings import Readings
from quantload.loader.stream import Settings, Stream
from quantload.mappers.targets import Target
from quantload.quant.region import WHOLE, Region
from tests.loader.formats.test_modelopt_experts import stacked

CPU = torch.device("cpu")
P = "model.layers.0.mlp.experts.gate_up_proj"
EXPERTS, ROWS, COLUMNS = 3, 24, 64
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": []}


def fp8(folder, spelled, block=None, *, config=fp8_files.FP8):
    codes = fp8_files.codes((EXPERTS, ROWS, COLUMNS))
    tensors = {P: codes, f"{P}_scale": fp8_files.scales(spelled, fp8_files.F32)}
    blocks = {} if block is None else {"weight_block_size": list(block)}
    return fp8_files.write(folder, tensors, {**config, **blocks})


def in_blocks(*block):
    shape = EXPERTS, -(-ROWS // block[0]), -(-COLUMNS // block[1])
    return lambda folder: fp8(folder, shape, block)


def mxfp4(folder):
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (EXPERTS, ROWS, COLUMNS // 32, 16), generator=generator)
    scales = torch.randint(100, 140, (EXPERTS, ROWS, COLUMNS // 32), generator=generator)
    tensors = {f"{P}_blocks": blocks.byte(), f"{P}_scales": scales.byte()}
    return fp8_files.write(folder, tensors, MXFP4)


def modelopt(algorithm, *, is_transposed):
    def make(folder):
        tensors, _ = stacked(algorithm, ROWS, COLUMNS, is_transposed=is_transposed, count=EXPERTS)
        return write_modelopt(folder / "source", {}, flat(algorithm), plain=tensors)

    return make


ENCODINGS = {
    "mxfp4": mxfp4,
    "fp8, blocks that divide": in_blocks(8, 16),
    "fp8, blocks that are cut": in_blocks(7, 5),
    "fp8, groups": in_blocks(1, 32),
    "fp8, one block": in_blocks(128, 128),
    "fp8, a scale an expert": lambda folder: fp8(folder, (EXPERTS, 1, 1)),
    "fp8, one scale": lambda folder: fp8(folder, ()),
    "fp8, a scale a row": lambda folder: fp8(folder, (EXPERTS, ROWS, 1)),
    "fp8, input features first": lambda folder: fp8(
        folder, (EXPERTS, 1, COLUMNS), config={"quant_method": "fbgemm_fp8"}
    ),
    "nvfp4": modelopt("NVFP4", is_transposed=False),
    "nvfp4, input features first": modelopt("NVFP4", is_transposed=True),
    "modelopt fp8 a row": modelopt("FP8_PER_CHANNEL_PER_TOKEN", is_transposed=False),
    "modelopt fp8 a row, input features first": modelopt(
        "FP8_PER_CHANNEL_PER_TOKEN", is_transposed=True
    ),
}


class Experts(nn.Module):
    """Knows what a rank holds of each slot."""

    dtype = torch.float32

    def __init__(self, held) -> None:
        super().__init__()
        self.held = held

    def awaits(self):
        return {}

    def region(self, leaf, slot):
        return self.held[slot]

    def receive(self, leaf, slot, value):
        raise AssertionError("nothing is handed over")

    def finish(self, device):
        pass

    def has_input_first(self, leaf):
        return False


@pytest.fixture(scope="module")
def source_of(tmp_path_factory):
    @cache
    def make(name):
        folder = ENCODINGS[name](tmp_path_factory.mktemp("experts"))
        return open_source(open_checkpoint(folder))

    return make


def read(source, regions, parts):
    """Return what a rank gets by slot, and the bytes that were planned and read."""
    (weight,) = (w for w in source.weights.values() if w.experts)
    rows, columns = weight.shape
    job = Job(
        target=Target(weight.module, "gate_up"),
        name=weight.module,
        weight=weight,
        shape=(rows // parts, columns),
        num_bytes=0,
        slots=EXPERTS * parts,
    )
    found = Readings(source, CPU).of(job, Experts(regions), WHOLE, torch.float32)
    fetches = [fetch for reading in found for fetch in reading.fetches]
    with Stream(fetches, CPU, Settings(2, 1 << 12, gap_bytes=0)) as stream:
        stream.wait(fetches)
        values = {reading.slot: reading.value() for reading in found}
    assert all(reading.is_cut for reading in found)
    return values, sum(reading.num_bytes for reading in found), stream.bytes_read


def expected_of(source, slot, parts, region):
    (weight,) = (w for w in source.weights.values() if w.experts)
    height = weight.shape[0] // parts
    whole = source.read_weight(weight.module)
    return region.of(whole.rows(slot * height, (slot + 1) * height))


def spans(length):
    cuts = st.integers(0, length)
    return st.tuples(cuts, cuts).filter(lambda pair: pair[0] < pair[1])


@pytest.mark.parametrize("encoding", ENCODINGS)
@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_region_of_any_expert(source_of, encoding, data):
    source = source_of(encoding)
    (weight,) = (w for w in source.weights.values() if w.experts)
    parts = data.draw(st.sampled_from([1, 2]), label="parts")
    height = weight.shape[0] // parts
    runs = st.none() | st.lists(spans(height), min_size=1, max_size=2).map(tuple)
    region = st.builds(Region, runs, st.none() | spans(weight.shape[1]))
    regions = data.draw(
        st.lists(st.none() | region, min_size=EXPERTS * parts, max_size=EXPERTS * parts)
    )
    smallest = data.draw(st.sampled_from([1, 4096]), label="smallest piece")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(portion, "SMALLEST_PIECE", smallest)
        values, planned, done = read(source, regions, parts)
    held = {slot for slot, found in enumerate(regions) if found is not None}
    assert values.keys() == held
    for slot in held:
        expected = expected_of(source, slot, parts, regions[slot])
        assert values[slot].shape == expected.shape
        assert torch.equal(values[slot].dequantize(), expected.dequantize())
    assert planned == done


def bytes_of_expert(source):
    (weight,) = (w for w in source.weights.values() if w.experts)
    stored = (source.checkpoint.tensors[name] for name in weight.leaves.values())
    return sum(e.num_bytes // EXPERTS for e in stored if math.prod(e.shape) > EXPERTS)


@pytest.mark.parametrize("encoding", ["mxfp4", "nvfp4", "fp8, blocks that divide"])
@pytest.mark.parametrize("axis", ["rows", "columns"])
def test_a_rank_of_two_reads_half(source_of, encoding, axis, monkeypatch):
    monkeypatch.setattr(portion, "SMALLEST_PIECE", 1)
    source = source_of(encoding)
    regions = [Region(rows=((8, 20),)) if axis == "rows" else Region(columns=(32, 64))] * EXPERTS
    _, planned, done = read(source, regions, 1)
    each = bytes_of_expert(source)
    is_cut = (encoding, axis) == ("fp8, blocks that divide", "rows")  # 8..24 of 24 are read
    half = each * 2 / 3 if is_cut else each / 2
    assert planned == done
    assert half * EXPERTS <= planned <= half * EXPERTS + 8 * EXPERTS * EXPERTS
