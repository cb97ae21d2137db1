"""Search of scales on the codes that are stored: less error than minmax, without data.

    error         sum over a block of importance[k] * (read[n, k] - w[n, k])^2, where `read` is what
                  a reader makes of the codes: in its dtype, rounded as it rounds
    candidates    what minmax gives, and around its scale:
                  float     16 scales from (bits + 1) / 10 of it (half of it for grids of floats) to
                            where nothing is clipped; then, twice, the scale that fits the codes of
                            the best, sum(importance * w * v) / sum(importance * v^2) where v is
                            the value less the zero point
                  e4m3      those up to 4 codes below and 7 above, with the global scale as it is
                  e8m0      the powers of two below and above
                  zeros     integer zero points one below and one above, with each of these scales

A candidate is rounded to what is stored before it is judged. Its codes are the nearest ones, by
`w * (1 / scale) + zero` in float32. It replaces minmax only where its error is smaller by more than
float32 sums can err, so that no block gets worse, and ties stay with minmax.

Every sum has a fixed order, by halves: a weight gives the same codes in slices of rows, on any
device, and in compiled loops (`compiled_search`).

Sources: the search for scales with squared errors is that of the weight observers of llm-compressor
0.14 and of ggml's quantization, the fitted scale ggml's; all e4m3 codes are tried by ModelOpt 0.47,
and maxima at 4 or 6 by arXiv 2512.02010.

Letters: N output features, K input features, R blocks of rows, G groups of columns, r and c rows
and columns of one block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from quantload.errors import ConfigError, ShapeError
from quantload.quant import compiled
from quantload.quant.chunks import row_chunks
from quantload.quant.code_values import values_of
from quantload.quant.grid import Grid
from quantload.quant.qtensor import QuantTensor
from quantload.quant.rtn import as_blocks
from quantload.quant.scheme import WeightScheme

Observer = Literal["minmax", "search"]

_SCALES, _FITS = 16, 2
_E4M3_MOVES, _E4M3_LAST = (0, *range(-4, 0), *range(1, 8)), 126
_E8M0_MOVES, _E8M0_LAST = (0, -1, 1), 254
_ZERO_MOVES = (0, -1, 1)
# A sum by halves of 2^20 float32 numbers errs by less than 2^-18 of it. Where squares of float32
# become subnormal they err by more: such blocks stay as they are.
_LESS = 1 - 2.0**-16
_SMALLEST_ERROR = 2.0**-100
_ELEMENTS = 1 << 18  # of a chunk: its temporaries stay in the cache


def obstacle(scheme: WeightScheme) -> str:
    """Say why scales of a scheme cannot be searched; "" if they can."""
    if scheme.granularity == "tensor":
        return "one scale for the tensor is not searched, since rows are quantized one by one"
    if scheme.grid.table is not None and scheme.grid.name not in ("e2m1", "e2m3", "e3m2"):
        return f"codes of the table `{scheme.grid.name}` have no scale to search"
    return ""


def search_scales(
    weight: Tensor,
    quantized: QuantTensor,
    scheme: WeightScheme,
    *,
    importance: Tensor | None = None,
) -> QuantTensor:
    """Return a quantized weight with the scales, zero points and codes of least error.

    Args:
        weight: [N, K] bfloat16, float16 or float32; or a slice of rows of one, a multiple of the
            rows of a block.
        quantized: The same, rounded to nearest with minmax scales in the form of any format. Its
            codes are overwritten.
        scheme: How it was quantized.
        importance: [K] float32, what an error in each column counts, not negative: the mean square
            of the inputs. None counts all alike.

    Raises:
        ConfigError: Scales of this scheme are not searched, see `obstacle`.
        ShapeError: The importance is not one of K numbers that are finite and not negative.
    """
    if reason := obstacle(scheme):
        raise ConfigError(reason, hint="take the observer `minmax`")
    weight = weight.detach()
    counts = None if importance is None else _counts(importance, weight)
    rows = quantized.block[0]
    step = max(1, _ELEMENTS // max(1, weight.shape[1] * rows)) * rows
    scales, zeros = [], []
    for start, stop in _chunks(weight, rows, step):
        found = _searched(weight[start:stop], _rows_of(quantized, start, stop), counts)
        quantized.codes[start:stop] = found.codes
        scales.append(found.scale)
        zeros += [] if found.zero is None else [found.zero]
    return replace(quantized, scale=torch.cat(scales), zero=torch.cat(zeros) if zeros else None)


def _chunks(weight: Tensor, multiple: int, step: int) -> Iterator[tuple[int, int]]:
    rows, columns = weight.shape
    if weight.device.type != "cpu":
        yield from row_chunks((rows, columns), weight.device, multiple=multiple)
        return
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def _rows_of(quantized: QuantTensor, start: int, stop: int) -> QuantTensor:
    """Return whole blocks of rows."""
    rows = quantized.block[0]
    blocks = slice(start // rows, -(-stop // rows))
    zero, outer = quantized.zero, quantized.outer
    return replace(
        quantized,
        codes=quantized.codes[start:stop],
        scale=quantized.scale[blocks],
        zero=None if zero is None else zero[blocks],
        outer=outer if outer is None or outer.shape[0] == 1 else outer[start:stop],
    )


def _counts(importance: Tensor, weight: Tensor) -> Tensor:
    """Return the importance [K] float32, times a power of two: the largest is in [0.5, 1).

    A mean would depend on the order in which threads add.
    """
    if tuple(importance.shape) != (weight.shape[1],):
        raise ShapeError(
            f"the importance of columns has shape `{tuple(importance.shape)}`, expected "
            f"({weight.shape[1]},)"
        )
    numbers = importance.to("cpu", torch.float64)
    if not bool((numbers >= 0).all()) or not bool(numbers.isfinite().all()):
        raise ShapeError(
            f"the importance of columns reaches from {float(numbers.min())} to "
            f"{float(numbers.max())}, expected finite numbers that are not negative"
        )
    _, exponent = math.frexp(float(numbers.max()))
    return (numbers * 2.0**-exponent).to(torch.float32).to(weight.device)


# -- candidates ------------------------------------------------------------------------------------


def _scales_around(quantized: QuantTensor, dtype: torch.dtype) -> Tensor:
    """Return the scales [C, B, 1] that are tried, as they are stored, first those of minmax.

    Args:
        quantized: Has the scales of minmax.
        dtype: That of the weight.
    """
    scale = quantized.scale
    if scale.dtype == torch.float8_e4m3fn:
        return _moved(scale, _E4M3_MOVES, 1, _E4M3_LAST)
    if scale.dtype == torch.float8_e8m0fnu:
        return _moved(scale, _E8M0_MOVES, 0, _E8M0_LAST)
    factors = torch.tensor(factors_of(quantized.grid, symmetric=quantized.zero is None))
    tried = scale.to(torch.float32) * factors.to(scale.device)[:, None, None]
    return torch.cat([scale[None], _stored(tried, scale.dtype, dtype)])


def factors_of(grid: Grid, *, symmetric: bool) -> list[float]:
    """Return what the scale of minmax is multiplied by, for scales that are floats."""
    low = (grid.bits + 1) / 10 if grid.is_integer else 0.5
    high = 1.0 if grid.is_float8 or not symmetric else (grid.high - grid.low) / 2 / grid.high
    if grid.table is not None:
        high = 1.5
    return [low + (high - low) * i / (_SCALES - 1) for i in range(_SCALES)]


def _moved(scale: Tensor, moves: tuple[int, ...], first: int, last: int) -> Tensor:
    codes = scale.view(torch.uint8).to(torch.int32)
    tried = torch.stack([(codes + move).clamp_(first, last) for move in moves])
    return tried.to(torch.uint8).view(scale.dtype)


def _stored(scale: Tensor, dtype: torch.dtype, model_dtype: torch.dtype) -> Tensor:
    """Round scales as formats store them: engines cast those in float16 to the model's dtype."""
    if dtype == torch.float16:
        scale = scale.to(model_dtype).to(torch.float32)
    return scale.to(dtype)


# -- one chunk -------------------------------------------------------------------------------------
# Its blocks are the rows of a weight [B, E], each with one scale: B = R * G, E = r * c.


@dataclass
class _Best:
    """The best candidate of each block so far: scale and zero [B, 1], error to stay below [B]."""

    scale: Tensor
    zero: Tensor | None
    error: Tensor
    is_new: Tensor


def _searched(weight: Tensor, quantized: QuantTensor, counts: Tensor | None) -> QuantTensor:
    """Search the blocks of a chunk."""
    block = quantized.block
    blocks = _flat(weight.to(torch.float32), block)
    read = _flat(quantized.dequantize().to(torch.float32), block)
    if counts is not None:
        counts = _flat(counts.expand(weight.shape), block)
    shape = quantized.scale.shape
    flat = replace(
        quantized,
        codes=_flat(quantized.codes.view(torch.uint8), block).view(quantized.codes.dtype),
        scale=quantized.scale.reshape(-1, 1),
        zero=None if quantized.zero is None else quantized.zero.reshape(-1, 1),
        block=(1, blocks.shape[1]),
    )
    tried = _scales_around(flat, weight.dtype)
    found = _searched_by_loops(blocks, read, flat, counts, tried, weight.dtype)
    found = found or _searched_by_torch(blocks, read, flat, counts, tried, weight.dtype)
    codes = torch.unflatten(found.codes.view(torch.uint8), 0, tuple(shape))
    codes = torch.unflatten(codes, 2, (-1, block[1]))
    codes = codes.transpose(1, 2).flatten(2).flatten(0, 1)[: weight.shape[0], : weight.shape[1]]
    return replace(
        quantized,
        codes=codes.view(quantized.codes.dtype),
        scale=found.scale.reshape(shape),
        zero=None if found.zero is None else found.zero.reshape(shape),
    )


def _flat(tensor: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the blocks of [N, K] as rows [B, E]; partial blocks are filled with zeros."""
    return as_blocks(tensor, block).transpose(1, 2).flatten(2).flatten(0, 1)


def _searched_by_torch(
    blocks: Tensor,
    read: Tensor,
    quantized: QuantTensor,
    counts: Tensor | None,
    tried: Tensor,
    dtype: torch.dtype,
) -> QuantTensor:
    error = _errors(blocks, read, counts)
    error = torch.where(error >= _SMALLEST_ERROR, error * _LESS, 0.0)
    best = _Best(quantized.scale, quantized.zero, error, torch.zeros_like(error, dtype=torch.bool))
    for scale in tried:
        for move in _ZERO_MOVES if quantized.zero is not None else (0,):
            _try(best, blocks, quantized, counts, scale, _moved_zero(quantized, move))
    for _ in range(_FITS if quantized.scale.dtype.itemsize > 1 else 0):
        scale = _fitted(best, blocks, quantized, counts, dtype)
        _try(best, blocks, quantized, counts, scale, best.zero)
    chosen = replace(quantized, scale=best.scale, zero=best.zero)
    chosen = _coded(blocks, chosen, _inverse(chosen))
    return replace(chosen, codes=_chosen(best.is_new[:, None], chosen.codes, quantized.codes))


def _try(
    best: _Best,
    blocks: Tensor,
    quantized: QuantTensor,
    counts: Tensor | None,
    scale: Tensor,
    zero: Tensor | None,
) -> None:
    """Take a candidate where its error is less than that of the best."""
    candidate = replace(quantized, scale=scale, zero=zero)
    inverse = _inverse(candidate)
    read = _coded(blocks, candidate, inverse).dequantize().to(torch.float32)
    error = _errors(blocks, read, counts)
    is_less = (error < best.error) & inverse[:, 0].isfinite()
    best.error = torch.where(is_less, error, best.error)
    best.scale = _chosen(is_less[:, None], scale, best.scale)
    if zero is not None and best.zero is not None:
        best.zero = torch.where(is_less[:, None], zero, best.zero)
    best.is_new |= is_less


def _chosen(mask: Tensor, one: Tensor, other: Tensor) -> Tensor:
    if one.dtype.itemsize > 1:
        return torch.where(mask, one, other)
    return torch.where(mask, one.view(torch.uint8), other.view(torch.uint8)).view(one.dtype)


def _moved_zero(quantized: QuantTensor, move: int) -> Tensor | None:
    if quantized.zero is None:
        return None
    grid, zero = quantized.grid, quantized.zero.to(torch.int32)
    return (zero + move).clamp_(int(grid.low), int(grid.high)).to(quantized.zero.dtype)


def _inverse(quantized: QuantTensor) -> Tensor:
    """Return 1 / scale [B, 1] float32, of the scale that its reader multiplies by."""
    return 1 / quantized.folded().scale.to(torch.float32)


def _coded(blocks: Tensor, quantized: QuantTensor, inverse: Tensor) -> QuantTensor:
    """Return the tensor with the codes [B, E] that are nearest on its scales and zero points."""
    zero = quantized.zero
    scaled = (blocks * inverse).add_(0.0 if zero is None else zero.to(torch.float32))
    return replace(quantized, codes=quantized.grid.round(scaled))


def _errors(blocks: Tensor, read: Tensor, counts: Tensor | None) -> Tensor:
    """Return the error [B] float32 of each block; NaN or infinity where there is no number."""
    squares = (read - blocks).square_()
    return _sums(squares if counts is None else squares.mul_(counts))


def _sums(terms: Tensor) -> Tensor:
    """Add up [B, E] to [B], by halves; the terms are overwritten."""
    count = terms.shape[1]
    while count > 1:
        half = (count + 1) // 2
        terms[:, : count - half] += terms[:, half:count]
        count = half
    return terms[:, 0]


def _fitted(
    best: _Best,
    blocks: Tensor,
    quantized: QuantTensor,
    counts: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the scales [B, 1] that fit the codes of the best candidates, as they are stored."""
    coded = replace(quantized, scale=best.scale, zero=best.zero)
    coded = _coded(blocks, coded, _inverse(coded))
    values = values_of(coded.codes, coded.grid, torch.float32)
    if coded.zero is not None:
        values = values - coded.zero.to(torch.float32)
    weighted = values if counts is None else values * counts
    scale = _sums(weighted * blocks) / _sums(weighted * values)
    return _stored(scale[:, None], coded.scale.dtype, dtype)


def _searched_by_loops(
    blocks: Tensor,
    read: Tensor,
    quantized: QuantTensor,
    counts: Tensor | None,
    tried: Tensor,
    dtype: torch.dtype,
) -> QuantTensor | None:
    """Search by compiled loops; None where there are none."""
    zero, is_fitted = quantized.zero, quantized.scale.dtype.itemsize > 1
    is_half = quantized.scale.dtype == torch.float16
    multipliers = torch.cat([replace(quantized, scale=s).folded().scale for s in tried], dim=1)
    found = compiled.search_blocks(
        blocks,
        read,
        counts,
        multipliers.to(torch.float32),
        None if zero is None else zero.to(torch.float32),
        grid=quantized.grid,
        forms=(
            quantized.rounded_to,
            quantized.scale.dtype if is_fitted else torch.float32,
            dtype if is_half else torch.float32,
        ),
        moves=_ZERO_MOVES if zero is not None else (0,),
        limits=(_LESS, _SMALLEST_ERROR),
        fits=_FITS if is_fitted else 0,
    )
    if found is None:
        return None
    codes, places, scales, zeros = found
    is_new = (places >= 0)[:, None]
    if is_fitted:
        scale = torch.where(is_new, scales[:, None].to(quantized.scale.dtype), quantized.scale)
    else:
        at = places.clamp(min=0).to(torch.int64)  # the first are those of minmax
        scale = tried.view(torch.uint8)[at, torch.arange(len(at))].view(tried.dtype)
    return replace(
        quantized,
        codes=_chosen(is_new, codes.view(quantized.codes.dtype), quantized.codes),
        scale=scale,
        zero=None if zero is None else zeros[:, None].to(zero.dtype),
    )
