"""What is streamed to a GPU and decoded there is what the CPU has, bit for bit."""

from __future__ import annotations

from functools import cache

import pytest
import tiny_checkpoints as tiny
import torch
from converting import converted, opened

from quantload.api import load
from quantload.errors import HeaderError, NonFiniteWeight
from quantload.loader.formats.targets import target_named
from quantload.loader.stats import InputStatistics
from quantload.quant.qtensor import QuantTensor

pytestmark = pytest.mark.gpu

SCHEMES = [
    *("W4A16:g32", "W4A16_ASYM:g32", "W3A16:g32", "W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK"),
    *("NVFP4A16", "MXFP4A16", "MXFP6A16", "MXFP8A16", "fp8 FP8_BLOCK", "fp8 FP8"),
    *("modelopt NVFP4", "modelopt FP8_BLOCK", "gptq W4A16:g32", "awq W4A16_ASYM:g32"),
]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    dense = tiny.llama(tmp_path_factory.mktemp("dense") / "model", hidden=256, intermediate=384)

    @cache
    def make(scheme: str):
        if scheme == "dense":
            return dense
        name, _, text = scheme.rpartition(" ")
        target = target_named(name or "compressed-tensors")
        known = InputStatistics(stated=12.0)
        folder = tmp_path_factory.mktemp("made") / "model"
        return converted(dense, folder, text, target=target, stats=known)

    return make


@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_are_decoded_on_the_device(folder_of, scheme, monkeypatch):
    from quantload.layers.linear import QuantLinear

    got = {}

    def receive(self, leaf, slot, value):
        got[self.prefix, leaf, slot, value.device.type] = value
        return original(self, leaf, slot, value)

    original = QuantLinear.receive
    monkeypatch.setattr(QuantLinear, "receive", receive)
    for device in ("cpu", "cuda"):
        load(folder_of(scheme), device=device)
    keys = [key[:3] for key in got if key[3] == "cuda"]
    assert len(keys) > 10
    for key in keys:
        mine, theirs = got[*key, "cuda"], got[*key, "cpu"]
        assert type(mine) is type(theirs)
        if not isinstance(mine, QuantTensor):
            assert torch.equal(mine.cpu(), theirs)
            continue
        assert (mine.block, mine.evaluation) == (theirs.block, theirs.evaluation)
        for name, part in theirs.tensors().items():
            found = mine.tensors()[name]
            assert found.device.type == "cuda"
            assert torch.equal(found.cpu().view(torch.uint8), part.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_dense_model(folder_of, dtype):
    on_cpu = load(folder_of("dense"), device="cpu", dtype=dtype)
    on_gpu = load(folder_of("dense"), device="cuda", dtype=dtype)
    theirs = on_cpu.state_dict()
    for name, tensor in on_gpu.state_dict().items():
        assert tensor.device.type == "cuda", name
        assert torch.equal(tensor.cpu(), theirs[name]), name


def test_many_loads_in_a_row(folder_of):
    """Memory that a model gives back is reused by the next while nothing else waits for it."""
    expected = load(folder_of("dense"), device="cpu").state_dict()
    for _ in range(20):
        model = load(folder_of("dense"), device="cuda")
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor.cpu(), expected[name]), name


def test_nan_is_found_on_the_device(tmp_path):
    content = tiny.config()
    made = tiny.tensors(content)
    made["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    folder = tiny.write(tmp_path, content, made)
    with pytest.raises(NonFiniteWeight, match=r"layers\.1\.mlp\.up_proj\.weight"):
        load(folder, device="cuda")


def test_a_truncated_file(tmp_path):
    folder = tiny.llama(tmp_path)
    file = folder / "model.safetensors"
    source = opened(folder)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(HeaderError, match="file ends inside tensor"):
        load(source, device="cuda")


def test_memory_is_the_model_and_a_little(tmp_path):
    """Beside what is kept, the device has no more than what is read ahead and one layer."""
    folder = tiny.llama(tmp_path, hidden=1024, intermediate=4096, layers=8, vocabulary=512)
    load(folder, device="cuda")  # libraries take memory once
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = load(folder, device="cuda")
    kept = torch.cuda.memory_allocated() - before
    size = sum(
        t.nbytes
        for t in tiny.tensors(
            tiny.config(hidden=1024, intermediate=4096, layers=8, vocabulary=512)
        ).values()
    )
    assert kept <= 1.05 * size
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * size
    assert model is not None
