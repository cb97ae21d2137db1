"""Weights of GPTQ and AWQ that are decoded on a GPU have the bits of those decoded on a CPU."""

from __future__ import annotations

import pytest
import torch

from quantload.loader.formats.awq_layout import AwqLayout, decode_awq
from quantload.loader.formats.gptq_layout import GptqLayout, decode_gptq
from quantload.loader.source import SourceWeight

pytestmark = pytest.mark.gpu

N, K, GROUPS = 96, 256, 8
DEVICE = torch.device("cuda")


def described(leaves, dtype):
    return SourceWeight(
        module="a",
        shape=(N, K),
        scheme=None,
        encoding="",
        dtype=dtype,
        leaves={leaf: leaf for leaf in leaves},
    )


def words(generator, *shape):
    every = torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64)
    return every.to(torch.int32)


def scales(generator, dtype):
    return (torch.rand(GROUPS, N, generator=generator) + 0.01).to(dtype)


def assert_same_bits(found, expected):
    assert found.block == expected.block
    assert found.evaluation == expected.evaluation
    parts = found.tensors()
    assert parts.keys() == expected.tensors().keys()
    for name, tensor in expected.tensors().items():
        assert parts[name].is_cuda, name
        bits = [t.cpu().contiguous().reshape(-1).view(torch.uint8) for t in (parts[name], tensor)]
        assert torch.equal(*bits), name
    assert torch.equal(found.dequantize().cpu(), expected.dequantize())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("has_order", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq(bits, has_order, dtype):
    generator = torch.Generator().manual_seed(bits)
    parts = {
        "qweight": words(generator, K * bits // 32, N),
        "qzeros": words(generator, GROUPS, N * bits // 32),
        "scales": scales(generator, dtype),
    }
    if has_order:
        order = torch.randperm(K, generator=generator)
        parts["g_idx"] = (order // (K // GROUPS)).to(torch.int32)
    layout = GptqLayout(bits=bits, group_size=K // GROUPS, symmetric=False, desc_act=has_order)
    weight, decoded = described(parts, dtype), []
    for device in ("cpu", DEVICE):
        heard = []
        moved = {leaf: tensor.to(device) for leaf, tensor in parts.items()}
        found = decode_gptq(moved, weight, layout, checkpoint_name="m", warn=heard.append)
        decoded.append((found, heard))
    (expected, told), (found, heard) = decoded
    assert (expected.group_of is not None) == has_order
    assert heard == told
    assert_same_bits(found, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
def test_awq(bits, dtype):
    generator = torch.Generator().manual_seed(bits)
    parts = {
        "qweight": words(generator, K, N * bits // 32),
        "qzeros": words(generator, GROUPS, N * bits // 32),
        "scales": scales(generator, dtype),
    }
    weight = described(parts, dtype)
    layout = AwqLayout(bits=bits, group_size=K // GROUPS, symmetric=False)
    expected = decode_awq(parts, weight, layout, checkpoint_name="m")
    moved = {leaf: tensor.to(DEVICE) for leaf, tensor in parts.items()}
    assert_same_bits(decode_awq(moved, weight, layout, checkpoint_name="m"), expected)
