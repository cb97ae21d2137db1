"""What decodes leaves does so where they are: no tensor of the host gets in between.

The meta device stands for a card: torch refuses an operation on it and on a tensor of the host.
Whatever the code asks of values, the answer is no.
"""

from __future__ import annotations

import pytest
import torch

from quantload.errors import FormatMismatch
from quantload.loader.formats import finite, gptq_groups
from quantload.loader.formats.awq_layout import AwqLayout, decode_awq
from quantload.loader.formats.gptq_layout import GptqLayout, decode_gptq
from quantload.loader.source import SourceWeight

N, K, GROUPS = 64, 128, 4


@pytest.fixture(autouse=True)
def no_values(monkeypatch):
    def equal(one, two):
        assert one.device == two.device
        return False

    monkeypatch.setattr(torch.Tensor, "__bool__", lambda _: False)
    monkeypatch.setattr(finite, "is_finite", lambda _: True)
    monkeypatch.setattr(gptq_groups.torch, "equal", equal)


def described(leaves):
    return SourceWeight(
        module="a",
        shape=(N, K),
        scheme=None,
        encoding="",
        dtype=torch.float16,
        leaves={leaf: leaf for leaf in leaves},
    )


def words(*shape):
    return torch.empty(shape, dtype=torch.int32, device="meta")


def scales():
    return torch.empty(GROUPS, N, dtype=torch.float16, device="meta")


def assert_all_there(weight):
    assert weight.shape == (N, K)
    assert {tensor.device.type for tensor in weight.tensors().values()} == {"meta"}


@pytest.mark.parametrize("is_planar", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq(bits, is_planar):
    parts = {
        "qweight": words(K * bits // 32, N),
        "qzeros": words(GROUPS, N * bits // 32),
        "scales": scales(),
        "g_idx": words(K),
    }
    layout = GptqLayout(
        bits=bits, group_size=32, symmetric=False, is_planar=is_planar and bits == 3, desc_act=True
    )
    heard = []
    found = decode_gptq(parts, described(parts), layout, checkpoint_name="m", warn=heard.append)
    assert found.group_of is not None
    assert_all_there(found)


def test_zero_points_of_a_symmetric_weight(monkeypatch):
    """All answers being no, they are compared with each known mistake before they are refused."""
    monkeypatch.setattr(torch.Tensor, "__int__", lambda _: 0)
    parts = {"qweight": words(K * 3 // 32, N), "qzeros": words(GROUPS, 6), "scales": scales()}
    layout = GptqLayout(bits=3, group_size=32, symmetric=True)
    with pytest.raises(FormatMismatch, match="not those of a symmetric weight"):
        decode_gptq(parts, described(parts), layout, checkpoint_name="m", warn=print)


@pytest.mark.parametrize("bits", [4, 5, 8])
def test_awq(bits):
    parts = {
        "qweight": words(K, N * bits // 32),
        "qzeros": words(GROUPS, N * bits // 32),
        "scales": scales(),
    }
    layout = AwqLayout(bits=bits, group_size=32, symmetric=False)
    assert_all_there(decode_awq(parts, described(parts), layout, checkpoint_name="m"))
