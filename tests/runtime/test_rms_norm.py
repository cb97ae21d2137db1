"""The kernel of RMS norms: its formula in torch, with torch's mean bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
EPS = 1e-5


def by_torch(x: Tensor, weight: Tensor, *, late: bool, offset: bool) -> Tensor:
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)
    if late:
        return (1.0 + weight.float() if offset else weight) * y.to(x.dtype)
    return (y * (1.0 + weight.float() if offset else weight.float())).to(x.dtype)


def mean_of_squares(x: Tensor) -> Tensor:
    return x.float().pow(2).mean(-1, keepdim=True)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("dtypes", [(F32, F32), (F16, F16), (F16, F32), (F32, F16)], ids=str)
@pytest.mark.parametrize("shape", [(3, 100), (2, 5, 4, 64), (7,)], ids=str)
def test_norms_are_their_formula(
    late: bool,
    offset: bool,
    dtypes: tuple[torch.dtype, torch.dtype],
    shape: tuple[int, ...],
    kernel_device: torch.device,
) -> None:
    from quantload.runtime.kernels.rms_norm import rms_norm

    x = torch.randn(shape, device=kernel_device).mul(0.01).to(dtypes[0])  # eps counts
    weight = torch.randn(shape[-1:], device=kernel_device).to(dtypes[1])
    if late and offset and dtypes[1] != F32:
        weight = weight.float()  # 1 + w is a sum in float32
    kind = {"late": late, "offset": offset}
    expected = by_torch(x, weight, **kind)
    exact = rms_norm(x, weight, EPS, **kind, variance=mean_of_squares(x))
    assert exact.dtype == expected.dtype
    assert torch.equal(exact, expected)
    near = rms_norm(x, weight, EPS, **kind)
    assert torch.allclose(near, expected, rtol=2e-3 if F16 in dtypes else 1e-6)


def test_heads_of_a_wider_product_are_read_where_they_are(kernel_device: torch.device) -> None:
    from quantload.runtime.kernels.rms_norm import rms_norm

    heads = torch.randn(2, 3, 96, device=kernel_device)[..., :64].view(2, 3, 4, 16)
    weight = torch.randn(16, device=kernel_device)
    kind = {"late": False, "offset": False}
    found = rms_norm(heads, weight, EPS, **kind, variance=mean_of_squares(heads))
    assert torch.equal(found, by_torch(heads, weight, **kind))
    assert rms_norm(heads[:0], weight, EPS, **kind).shape == (0, 3, 4, 16)


def test_what_the_kernel_does_not_take() -> None:
    from quantload.runtime.kernels.rms_norm import why_not

    assert why_not(64, torch.device("cpu")) == "it runs on CUDA, not cpu"
    assert why_not(1 << 17, torch.device("cuda")) == "rows of 131072 are wider than 65536"
    assert why_not(8192, torch.device("cuda")) is None


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128, 576, 4096, 8192, 5376])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_the_card_has_the_bits_of_torch(
    width: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    from quantload.runtime.kernels.rms_norm import rms_norm

    x = torch.randn(257, width, device=kernel_device).mul(2).to(dtype)
    weight = torch.randn(width, device=kernel_device).to(dtype)
    for late in (False, True):
        kind = {"late": late, "offset": not late}
        found = rms_norm(x, weight, EPS, **kind, variance=mean_of_squares(x))
        assert torch.equal(found, by_torch(x, weight, **kind))


@pytest.mark.gpu
def test_the_inverse_root_of_every_mean_has_the_bits_of_torch(kernel_device: torch.device) -> None:
    from quantload.runtime.kernels.rms_norm import rms_norm

    one = torch.ones(1, device=kernel_device)
    step = 1 << 24
    for start in range(1 << 23, 0x7F800000, step):  # all positive normal float32
        bits = torch.arange(start, min(start + step, 0x7F800000), device=kernel_device)
        mean = bits.to(torch.int32).view(F32)[:, None]
        x = torch.ones_like(mean)
        found = rms_norm(x, one, 0.0, late=False, offset=False, variance=mean)
        assert torch.equal(found, torch.rsqrt(mean))
