"""Quantization of a layer's input while it runs, in the input's own dtype.

    symmetric     x' = round(x / scale) * scale
    asymmetric    x' = (round(x / scale + zero) - zero) * scale

with scale and zero as in `rtn`, per tensor, per token, or per group of features of a token; or
fixed, as a checkpoint holds them. In MX formats the scale of a group is the power of two

    scale = 2^(floor(log2(max|x|)) - floor(log2(high)))

one more where the largest |x| is 1.75 times its power of two or above. In NVFP4 the scale of a
group is an e4m3 number, divided by the global scale that the checkpoint holds.

Source: `compute_dynamic_scales_and_zp` and `fake_quantize` of compressed-tensors 0.20.1, which want
a batch axis and whole groups; here any leading axes and a partial last group are fine.

NaN and infinity are not looked for, since that would wait for the device: they make their whole
token or group NaN.

To `torch.compile` a rounding is one operation: a compiler that keeps what is between two steps in
float32 finds other scales, and other codes, than the format's own steps in the input's dtype do.
What is exchanged with other processes before is a largest value, which no compiler changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from quantload.errors import ConfigError
from quantload.quant.grid import Grid, grid_named
from quantload.quant.qtensor import QuantTensor
from quantload.quant.rtn import as_blocks, round_to_nearest, scaled_blocks
from quantload.quant.scales import BlockScales, block_scales, global_scale, minmax_scale
from quantload.quant.scheme import Granularity, InputScheme, WeightScheme

NVFP4_ABSMAX = 2688.0


def fake_quantize(x: Tensor, scheme: InputScheme, *, outer: Tensor | None = None) -> Tensor:
    """Quantize and dequantize an input.

    Args:
        x: [..., K] float dtype.
        scheme: A dynamic scheme per tensor, token or group of features.
        outer: [1] float32, the global scale of a scheme with e4m3 scales, a divisor.

    Returns:
        [..., K] of the same dtype, each value on the scheme's grid. What is rounded to zero from
        below is -0.0, as in the original, which never turns a code into an integer.

    Raises:
        ConfigError: The scheme is static, or needs a global scale.
    """
    if not scheme.dynamic:
        raise ConfigError(
            "a static input scheme takes its scale from the checkpoint, found `dynamic = false`"
        )
    if scheme.scale == "e4m3" and outer is None:
        raise ConfigError("inputs with e4m3 scales take a global scale from the checkpoint")
    if x.numel() == 0:
        return x
    if torch.compiler.is_compiling():
        return _one_operation(x.detach(), outer, *_in_parts(scheme))  # type: ignore[no-any-return]
    tokens = x.detach().reshape(-1, x.shape[-1])
    n_tokens, n_features = tokens.shape
    weight_scheme = _as_weight_scheme(scheme)
    blocks = as_blocks(tokens, weight_scheme.block_of(n_tokens, n_features))
    scales = block_scales(blocks, weight_scheme, shared=None, outer=outer)
    values = _on_grid(blocks, scales, scheme.grid)
    return values[:, :n_features].reshape(x.shape).to(x.dtype)


@torch.library.custom_op("quantload::fake_quantize", mutates_args=())
def _one_operation(
    x: Tensor,
    outer: Tensor | None,
    grid: str,
    granularity: str,
    group_size: int,
    symmetric: bool,
    scale: str,
) -> Tensor:
    scheme = _of_parts(grid, granularity, group_size, symmetric=symmetric, scale=scale)
    return fake_quantize(x, scheme, outer=outer).contiguous()


@_one_operation.register_fake
def _(x: Tensor, *args: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _in_parts(scheme: InputScheme) -> tuple[str, str, int, bool, str]:
    """Return a dynamic scheme as an operation takes it."""
    size = scheme.group_size or 0
    return scheme.grid.name, scheme.granularity, size, scheme.symmetric, scheme.scale


def _of_parts(
    grid: str, granularity: str, group_size: int, *, symmetric: bool, scale: str
) -> InputScheme:
    return InputScheme(
        grid=grid_named(grid),
        granularity=granularity,  # type: ignore[arg-type]
        group_size=group_size or None,
        symmetric=symmetric,
        scale=scale,  # type: ignore[arg-type]
    )


def fake_quantize_columns(
    x: Tensor,
    scheme: InputScheme,
    columns: tuple[int, int],
    *,
    exchange_max: Callable[[Tensor], Tensor],
    outer: Tensor | None = None,
) -> Tensor:
    """Quantize and dequantize the columns of an input whose others are held by other processes.

    The result is that of `fake_quantize` on all columns, cut: what shares a scale is looked at as a
    whole, in all processes.

    Args:
        x: [..., K / processes] float dtype, the columns of this process.
        scheme: A dynamic scheme.
        columns: (start of these columns, K).
        exchange_max: Takes the largest of each element over the processes.
        outer: As in `fake_quantize`.
    """
    start, total = columns
    size = _features_of_scale(scheme, total)
    if size < total and x.shape[-1] % size == 0:
        return fake_quantize(x, scheme, outer=outer)  # no group lies in two processes
    if x.shape[:-1].numel() == 0:
        return x
    blocks, _ = _columns_in_blocks(x, scheme, columns)
    ends = torch.stack([-blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3))]).clamp(min=0)
    first, count = start // size, blocks.shape[2]
    reached = ends.new_zeros(*ends.shape[:2], -(-total // size))
    reached[..., first : first + count] = ends
    ends = exchange_max(reached)[..., first : first + count]
    if torch.compiler.is_compiling():
        parts = (*_in_parts(scheme), start, total)
        return _one_columns_operation(x.detach(), ends, outer, *parts)  # type: ignore[no-any-return]
    return _within_ends(x, ends, scheme, columns, outer)


def _features_of_scale(scheme: InputScheme, total: int) -> int:
    """Return how many of `total` features of a token share a scale."""
    is_group = scheme.granularity == "group" and scheme.group_size is not None
    return min(scheme.group_size or total, total) if is_group else total


def _columns_in_blocks(
    x: Tensor, scheme: InputScheme, columns: tuple[int, int]
) -> tuple[Tensor, int]:
    """Return blocks [R, r, G, c] of [..., k], and how many zeros fill the first group before it."""
    start, total = columns
    tokens = x.detach().reshape(-1, x.shape[-1])
    size = _features_of_scale(scheme, total)
    left = start % size if size < total else 0  # zeros never widen a range
    padded = torch.nn.functional.pad(tokens, (left, 0)) if left else tokens
    rows = len(tokens) if scheme.granularity == "tensor" else 1
    return as_blocks(padded, (rows, size if size < total else tokens.shape[1])), left


def _within_ends(
    x: Tensor, ends: Tensor, scheme: InputScheme, columns: tuple[int, int], outer: Tensor | None
) -> Tensor:
    """Round columns [..., k] by `ends` [2, R, G]: what -x and x reach in all processes."""
    blocks, left = _columns_in_blocks(x, scheme, columns)
    low, high = ends
    scales = block_scales(
        torch.stack([-low, high], dim=-1)[:, None],
        _as_weight_scheme(scheme),
        shared=None,
        outer=outer,
    )
    values = _on_grid(blocks, scales, scheme.grid)
    return values[:, left : left + x.shape[-1]].reshape(x.shape).to(x.dtype)


@torch.library.custom_op("quantload::fake_quantize_columns", mutates_args=())
def _one_columns_operation(  # noqa: PLR0913 - what an operation takes is flat
    x: Tensor,
    ends: Tensor,
    outer: Tensor | None,
    grid: str,
    granularity: str,
    group_size: int,
    symmetric: bool,
    scale: str,
    start: int,
    total: int,
) -> Tensor:
    scheme = _of_parts(grid, granularity, group_size, symmetric=symmetric, scale=scale)
    return _within_ends(x, ends, scheme, (start, total), outer).contiguous()


@_one_columns_operation.register_fake
def _(x: Tensor, *args: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _on_grid(blocks: Tensor, scales: BlockScales, grid: Grid) -> Tensor:
    """Round blocks [R, r, G, c] to a grid; returns the values [R * r, G * c]."""
    values = grid.nearest(scaled_blocks(blocks, scales.divisor, scales.zero, grid))
    if scales.zero is not None:
        values -= scales.zero.to(blocks.dtype)[:, None, :, None]
    values *= scales.divisor[:, None, :, None]
    return values.flatten(2).flatten(0, 1)


def fake_quantize_static(x: Tensor, grid: Grid, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Quantize and dequantize an input with a fixed scale.

    Args:
        x: [..., K] float dtype.
        grid: Number grid of the codes.
        scale: [1], a multiplier; x / scale is computed in the wider of both dtypes.
        zero: [1], in units of a code, or None.

    Returns:
        [..., K] in the dtype of x.
    """
    if torch.compiler.is_compiling():
        return _one_static_operation(x.detach(), scale, zero, grid.name)  # type: ignore[no-any-return]
    scaled = x.detach() / scale
    if zero is not None:
        scaled = scaled + zero.to(scaled.dtype)
    values = grid.nearest(scaled)
    if zero is not None:
        values -= zero.to(values.dtype)
    return (values * scale).to(x.dtype)


@torch.library.custom_op("quantload::fake_quantize_static", mutates_args=())
def _one_static_operation(x: Tensor, scale: Tensor, zero: Tensor | None, grid: str) -> Tensor:
    return fake_quantize_static(x, grid_named(grid), scale, zero).contiguous()


@_one_static_operation.register_fake
def _(x: Tensor, *args: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def constant_input_scale(
    scheme: InputScheme, absmax: float, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the number that a checkpoint holds for an input, from the largest |x| it covers.

    What is larger is clipped. With e4m3 scales, groups whose largest |x| is below absmax / 28672
    lose precision, since their scale is subnormal, and below absmax / 458752 become zeros.

    Args:
        scheme: A symmetric scheme that `needs_scale`.
        absmax: Largest |x|; 0 for an input that was never anything else.
        dtype: dtype of a fixed scale; a global scale is float32.

    Returns:
        [1]: the fixed scale, a multiplier; with e4m3 scales the global scale, a divisor.

    Raises:
        ConfigError: `absmax` is no number that an input can reach.
    """
    assert scheme.needs_scale, f"a dynamic {scheme.granularity} scheme computes its scales"
    assert scheme.symmetric, "a zero point takes a smallest and a largest value"
    if not (math.isfinite(absmax) and absmax >= 0):
        raise ConfigError(f"the largest |x| of an input is `{absmax}`, expected a finite number")
    reach = torch.full((1,), absmax, dtype=torch.float32 if scheme.scale == "e4m3" else dtype)
    if not bool(reach.isfinite()):
        raise ConfigError(
            f"the largest |x| of an input is `{absmax}`, which `{dtype}` does not hold",
            hint="use bfloat16 or float32",
        )
    if scheme.scale == "e4m3":
        return global_scale(torch.cat([-reach, reach]))
    return minmax_scale(-reach, reach, scheme.grid, symmetric=True)[0]


def default_absmax(scheme: InputScheme) -> float | None:
    """Return a largest |x| that serves without data; None if there is none for a scheme.

    Fixed scales decide the precision of everything, so that they have none. A global scale only
    moves the range of e4m3 scales: see `NVFP4_ABSMAX`.
    """
    return NVFP4_ABSMAX if scheme.scale == "e4m3" else None


def with_input_scale(tensor: QuantTensor, scheme: InputScheme, absmax: float) -> QuantTensor:
    """Return a weight with the number that the checkpoint holds for its input.

    Args:
        tensor: A weight; a fixed scale gets the dtype of its scales.
        scheme: As in `constant_input_scale`.
        absmax: As in `constant_input_scale`.
    """
    is_float = tensor.scale.dtype in (torch.bfloat16, torch.float16, torch.float32)
    dtype = tensor.scale.dtype if is_float else tensor.rounded_to
    return replace(
        tensor,
        input_scale=constant_input_scale(scheme, absmax, dtype=dtype),
        evaluation=replace(tensor.evaluation, input="/" if scheme.scale == "e4m3" else "*"),
    )


def token_codes(
    x: Tensor, scheme: InputScheme, *, exchange_max: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize [M, K] per token; return codes [M, K] and scales [M, 1] in x's dtype.

    Args:
        x: [M, K] float dtype; with `exchange_max` the columns of this process.
        scheme: Symmetric, a scale a token.
        exchange_max: Takes the largest of each element over the processes with other columns.
    """
    assert scheme.granularity == "token", f"per-token codes of a {scheme.granularity} scheme"
    assert scheme.symmetric, "per-token codes come without zero points"
    if not len(x):  # nothing to reduce, and nothing to tell other processes
        return torch.empty_like(x, dtype=scheme.grid.storage), x.new_ones(0, 1)
    if exchange_max is None and torch.compiler.is_compiling():
        return _token_codes_operation(x.detach(), scheme.grid.name)  # type: ignore[no-any-return]
    if exchange_max is None:
        quantized = round_to_nearest(x, _as_weight_scheme(scheme))
        return quantized.codes, quantized.scale
    reached = exchange_max(x.detach().abs().amax(dim=1, keepdim=True))
    if torch.compiler.is_compiling():
        return _codes_within_operation(x.detach(), reached, scheme.grid.name)  # type: ignore[no-any-return]
    return _codes_within(x.detach(), reached, scheme.grid)


def _codes_within(x: Tensor, reached: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Codes of [M, K] and scales by `reached` [M, 1]: the largest |x| of each token anywhere."""
    scale, _ = minmax_scale(-reached, reached, grid, symmetric=True)
    codes = grid.round(scaled_blocks(as_blocks(x, (1, x.shape[1])), scale, None, grid))
    return codes.flatten(2).flatten(0, 1), scale


@torch.library.custom_op("quantload::token_codes", mutates_args=())
def _token_codes_operation(x: Tensor, grid: str) -> tuple[Tensor, Tensor]:
    return token_codes(x, InputScheme(grid=grid_named(grid), granularity="token"))


@torch.library.custom_op("quantload::token_codes_within", mutates_args=())
def _codes_within_operation(x: Tensor, reached: Tensor, grid: str) -> tuple[Tensor, Tensor]:
    return _codes_within(x, reached, grid_named(grid))


@_codes_within_operation.register_fake
def _(x: Tensor, reached: Tensor, grid: str) -> tuple[Tensor, Tensor]:
    return _empty_codes(x, grid), x.new_empty(len(x), 1)


@_token_codes_operation.register_fake
def _(x: Tensor, grid: str) -> tuple[Tensor, Tensor]:
    return _empty_codes(x, grid), x.new_empty(len(x), 1)


def _empty_codes(x: Tensor, grid: str) -> Tensor:
    storage = grid_named(grid).storage
    return torch.empty_like(x, dtype=storage, memory_format=torch.contiguous_format)


def _as_weight_scheme(scheme: InputScheme) -> WeightScheme:
    """Tokens are rows: a token scale is a channel scale, a feature group a block of one row."""
    granularity: Granularity = "tensor" if scheme.granularity == "tensor" else "channel"
    block = None
    if scheme.granularity == "group":
        assert scheme.group_size is not None, "a group scheme has a group size"
        granularity, block = "block", (1, scheme.group_size)
    return WeightScheme(
        grid=scheme.grid,
        granularity=granularity,
        symmetric=scheme.symmetric,
        block=block,
        scale=scheme.scale,
    )


__all__ = [
    "NVFP4_ABSMAX",
    "constant_input_scale",
    "default_absmax",
    "fake_quantize",
    "fake_quantize_columns",
    "fake_quantize_static",
    "token_codes",
    "with_input_scale",
]
