"""What the GEMM benchmark measures: shapes, formats, canonical weights, inputs, exact products."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantload.layers.linear import QuantLinear
from quantload.quant.activation import fake_quantize, fake_quantize_static, with_input_scale
from quantload.quant.grid import table_grid
from quantload.quant.qtensor import Evaluation, QuantTensor
from quantload.quant.rtn import quantize_rtn
from quantload.quant.scheme import Scheme, parse_scheme

if TYPE_CHECKING:
    from types import ModuleType

SHAPES = {
    "8b.qkv": (6144, 4096),
    "8b.o": (4096, 4096),
    "8b.gate_up": (28672, 4096),
    "8b.down": (4096, 14336),
    "70b.gate_up": (57344, 8192),
    "70b.down": (8192, 28672),
    "s.4096x1024": (4096, 1024),
    "s.6144x1024": (6144, 1024),
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)


@dataclass(frozen=True)
class Format:
    """A format of the tables.

    Args:
        scheme: As quantload writes it; "" is full precision.
        rounds_input: Whether the input is rounded.
        compute: What multiplies: a key of the card's measured limits.
    """

    scheme: str
    rounds_input: bool = False
    compute: str = "bf16"


FORMATS = {
    "bf16": Format(""),
    "w4a16_g128": Format("W4A16"),
    "w4a16_g128_asym": Format("W4A16_ASYM"),
    "mxfp4_a16": Format("MXFP4A16"),
    "nvfp4_a16": Format("NVFP4A16"),
    "fp8_a16": Format("FP8_DYNAMIC"),
    "int8_a16": Format("W8A8"),
    "nf4_g64_a16": Format("W4A16:g64"),
    "fp8_ch": Format("FP8_DYNAMIC", True, "fp8"),
    "fp8_tensor": Format("FP8", True, "fp8"),
    "fp8_blk": Format("FP8_BLOCK", True, "fp8"),
    "mxfp8": Format("MXFP8", True, "fp8"),
    "int8_ch": Format("W8A8", True, "int8"),
    "w4a8_fp8": Format("W4AFP8", True, "fp8"),
    "w4a8_int8": Format("W4A8", True, "int8"),
}

# the 16 values of QLoRA's NormalFloat (Dettmers et al., 2023), as bitsandbytes has them
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


def scheme_of(fmt: str) -> Scheme:
    """Return the scheme of a format of the tables."""
    form = FORMATS[fmt]
    scheme = parse_scheme(form.scheme)
    return scheme if form.rounds_input else replace(scheme, input=None)


def dense_weight(n: int, k: int, device: torch.device) -> Tensor:
    """Return a random weight [n, k] in bfloat16, always the same for a shape."""
    generator = torch.Generator(device).manual_seed(7 * n + k)
    weight = torch.randn(n, k, device=device, dtype=torch.bfloat16, generator=generator)
    return weight.mul_(0.02)


def quantized(fmt: str, dense: Tensor) -> QuantTensor:
    """Return the canonical weight of a format."""
    if fmt.startswith("nf4"):
        return _nf4(dense)
    scheme = scheme_of(fmt)
    assert scheme.weight is not None, fmt
    weight = quantize_rtn(dense, scheme.weight)
    if scheme.input is not None and scheme.input.needs_scale:
        given = with_input_scale(weight, scheme.input, absmax=5.0)
        weight = replace(given, input_scale=given.input_scale.to(dense.device))
    return weight


def _nf4(dense: Tensor) -> QuantTensor:
    """Round to the nearest value of the table, groups of 64 by their largest magnitude."""
    values = torch.tensor(NF4, device=dense.device)
    groups = dense.float().unflatten(1, (-1, 64))
    scale = groups.abs().amax(-1)
    codes = torch.bucketize(groups / scale[..., None], (values[1:] + values[:-1]) / 2)
    return QuantTensor(
        codes=codes.flatten(1).to(torch.uint8), grid=table_grid("nf4", NF4), scale=scale,
        block=(1, 64), evaluation=Evaluation(dtype=torch.float32),
    )  # fmt: skip


def our_layer(fmt: str, weight: QuantTensor | Tensor) -> QuantLinear:
    """Return the layer that a loaded model would have."""
    n, k = weight.shape
    scheme = scheme_of(fmt)
    layer = QuantLinear(k, n, bias=False, scheme=scheme, dtype=torch.bfloat16, prefix=fmt)
    layer.receive("weight", 0, weight)
    layer.finish(torch.device("cuda"))
    return layer.eval()


def weight_bytes(fmt: str, weight: QuantTensor | Tensor) -> int:
    """Return the bytes of a weight as its format stores it, scales included."""
    if isinstance(weight, Tensor):
        return weight.nbytes
    parts = weight.tensors()
    codes = parts.pop("codes").numel() * weight.grid.bits / 8
    zero = parts.pop("zero", None)
    zeros = 0.0 if zero is None else zero.numel() * weight.grid.bits / 8
    return int(codes + zeros + sum(part.nbytes for part in parts.values()))


def exact_rows(weight: QuantTensor | Tensor, start: int, stop: int) -> Tensor:
    """Return rows of a weight in float64."""
    if isinstance(weight, Tensor):
        return weight[start:stop].double()
    rows = weight.rows(start, min(stop, weight.shape[0]))
    evaluation = replace(rows.evaluation, dtype=torch.float64, result=None, scale=None)
    return replace(rows, evaluation=evaluation).dequantize()


def rounded_input(
    fmt: str, weight: QuantTensor | Tensor, x: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return x as the format's input scheme rounds it when scales are of `dtype`, in float64."""
    scheme = scheme_of(fmt).input if fmt != "bf16" else None
    if scheme is None:
        return x.double()
    if scheme.dynamic:
        return fake_quantize(x.to(dtype), scheme).double()
    assert isinstance(weight, QuantTensor), "a static input has a scale"
    assert weight.input_scale is not None, "a static input has a scale"
    return fake_quantize_static(x.float(), scheme.grid, weight.input_scale.float(), None).double()


def exact_product(
    fmt: str, weight: QuantTensor | Tensor, x: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return x' @ W^T in float64, [M, N]; the weight is cut so that memory stays bounded.

    Args:
        fmt: The format.
        weight: [N, K].
        x: [M, K].
        dtype: Of the scales of a rounded input: quantload's are of the dtype of x, as those of
            compressed-tensors; other kernels' are float32.
    """
    rounded, n = rounded_input(fmt, weight, x, dtype), weight.shape[0]
    parts = [rounded @ exact_rows(weight, start, start + 8192).T for start in range(0, n, 8192)]
    return torch.cat(parts, dim=1)


def as_harness_weight(bench: ModuleType, fmt: str, weight: QuantTensor | Tensor) -> Any:
    """Return a weight in the form that peers' plug-ins of the anchors harness take."""
    n, k = weight.shape
    if isinstance(weight, Tensor):
        return bench.QWeight(fmt, n, k, q=weight, scale=None)
    codes, scale, more = weight.codes, weight.scale, {}
    if fmt.startswith("w4a16"):
        codes = (codes.to(torch.int16) + 8).to(torch.uint8)
        if weight.zero is not None:
            more["zero"] = (weight.zero.to(torch.int16) + 8).to(torch.uint8)
    elif fmt == "mxfp4_a16":
        scale = scale.view(torch.uint8)
    elif fmt == "nvfp4_a16":
        assert weight.outer is not None, "NVFP4 has a global scale"
        assert weight.evaluation.outer == "scale/", weight.evaluation
        more["gscale"] = (1 / weight.outer.float()).view(1)
    else:
        scale = scale.float().view(1) if fmt == "fp8_tensor" else scale.float()
    return bench.QWeight(fmt, n, k, q=codes, scale=scale, **more)
