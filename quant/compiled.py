"""Quantization and packing on a CPU by compiled loops; where there is none, the caller's own way.

One pass over what fits the processor's cache, on one thread, without the interpreter's lock:
callers run several. Results are those of `rtn` and of `packing`, bit for bit.

numba compiles the loops when they are first used and keeps them on disk. To import it takes about a
second, and to compile two more: it waits until PyTorch would have worked for as long.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import cache
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from quantload.quant.compiled_arguments import (
    EXPONENTS,
    FLOAT_GRIDS,
    FORMS,
    LIKE,
    array_of,
    blocks_of,
    bytes_of,
    floats,
    order_of,
    tag_of,
)
from quantload.quant.grid import E2M3, E4M3, Grid
from quantload.quant.scheme import WeightScheme

_WORTH_STARTING = 1 << 24  # elements
_BYTE = torch.uint8
_BITS = range(2, 8)  # of 1 bit there is no loop, 8 bits need none
Quantized = tuple[Tensor, Tensor, Tensor | None]  # codes, scales, zero points
_seen = 0  # elements that came before numba was started


def start() -> bool:
    """Import numba now, as for a large model; False if it cannot be used here."""
    global _seen
    _seen = _WORTH_STARTING
    return _modules() is not None


def expect(elements: int) -> None:
    """Tell how many elements are to come: for many of them numba starts now."""
    _modules_for(elements)


def quantize(
    weight: Tensor,
    scheme: WeightScheme,
    *,
    given: Tensor | None = None,
    outer: Tensor | None = None,
) -> Quantized | None:
    """Quantize a weight to the nearest codes, as `rtn.round_to_nearest` does.

    Args:
        weight: [N, K] float dtype.
        scheme: Grid, granularity, symmetry and kind of scales.
        given: [1, 1] the scale of the tensor, in the weight's dtype; None computes it. Only for
            granularity "tensor".
        outer: [1] float32, the global scale; only for e4m3 scales.

    Returns:
        Codes [N, K] in the grid's storage dtype, scales [R, G], and zero points or None. Where a
        block holds NaN or infinity its scale is not finite and its codes mean nothing; e4m3 scales
        need a finite range to tell. None if there is no loop for this weight and scheme, if numba
        cannot be used, or is not worth its start yet.
    """
    loops = _loops_for(weight, scheme, given)
    if loops is None:
        return None
    weight = weight.detach().contiguous()
    if scheme.scale == "e8m0":
        return _with_powers_of_two(loops, weight, scheme)
    if scheme.scale == "e4m3":
        assert outer is not None, "e4m3 scales have a global scale"
        limits = (scheme.grid.high, outer.item(), E4M3.high)
        return _with_e4m3_scales(loops.quantize_e4m3_scales, weight, scheme, limits)
    if given is not None:
        return _with_one_scale(loops, weight, scheme, given)
    forms, eps = (weight.dtype, weight.dtype, torch.float32), torch.finfo(weight.dtype).eps
    return _with_own_scales(loops, weight, scheme, forms, (eps, 0.0))


def quantize_on_stored_scales(
    weight: Tensor,
    scheme: WeightScheme,
    *,
    scale_dtype: torch.dtype,
    given: Tensor | None = None,
    outer: Tensor | None = None,
) -> Quantized | None:
    """Quantize a weight to the nearest codes, as the function of this name in `stored_scales` does.

    Args:
        weight: [N, K] float dtype.
        scheme: Grid, granularity and symmetry; scales that are floats or e4m3.
        scale_dtype: dtype of float scales: float32 or float16.
        given: [1, 1] the scale of the tensor as it is stored; only for granularity "tensor".
        outer: [1] float32, multiplies e4m3 scales.

    Returns:
        As `quantize`.
    """
    loops = _loops_for(weight, scheme, given)
    if loops is None:
        return None
    weight = weight.detach().contiguous()
    if scheme.scale == "e4m3":
        assert outer is not None, "e4m3 scales have a scale for the tensor"
        limits = (scheme.grid.high, outer.item(), E4M3.high, 2.0**-9)
        return _with_e4m3_scales(loops.quantize_e4m3_multipliers, weight, scheme, limits)
    if given is not None:
        return _with_one_scale(loops, weight, scheme, given, arithmetic=torch.float32)
    is_half, finfo = scale_dtype == torch.float16, torch.finfo(scale_dtype)
    through = weight.dtype if is_half and weight.dtype == torch.bfloat16 else torch.float32
    special = finfo.eps, finfo.smallest_normal if is_half else 0.0
    forms = scale_dtype, torch.float32, through
    return _with_own_scales(loops, weight, scheme, forms, special, is_guarded=True)


def find_range(weight: Tensor) -> Tensor | None:
    """Return the smallest and largest value of a weight [N, K]: [2], in its dtype.

    Both are NaN where one is. None as for `quantize`.
    """
    modules = _modules_for(weight.numel()) if _is_read(weight) else None
    if modules is None:
        return None
    found = torch.empty(2, dtype=weight.dtype)
    modules[0].find_range(array_of(weight.detach().contiguous()), array_of(found))
    return found


def pack_dense(fields: Tensor, bits: int, *, signed: bool) -> Tensor | None:
    """Pack fields into bit strings, as `packing.pack_dense` does.

    Args:
        fields: [N, K] uint8, contiguous, K a multiple of 32.
        bits: Bits of a field.
        signed: True if fields are two's complement; they become offset binary.

    Returns:
        [N, K * bits / 8] uint8, or None as for `quantize`.
    """
    on_cpu = fields.device.type == "cpu" and fields.numel() > 0
    modules = _modules_for(fields.numel()) if on_cpu and bits in _BITS else None
    if modules is None:
        return None
    loops = modules[1]
    packed = torch.empty(fields.shape[0], fields.shape[1] // 8 * bits, dtype=torch.uint8)
    source, target = fields.view(-1).numpy(), packed.view(-1).numpy()
    flip = np.full(8, 1 << (bits - 1) if signed else 0, np.uint8)
    match bits:
        case 4:
            loops.pack_halves(source.view(np.uint16), target, flip.view(np.uint16)[0])
        case 2:
            loops.pack_quarters(source.view(np.uint32), target, flip.view(np.uint32)[0])
        case _:
            lanes = [_lanes(bits, 8), *(_lanes(bits << i, 16 << i) for i in range(3))]
            eights, flips = source.view(np.uint64), flip.view(np.uint64)
            loops.pack_strings(eights, target, flips[0], bits, np.array(lanes, np.uint64))
    return packed


def pack_eight_rows(codes: Tensor) -> Tensor | None:
    """Pack int4 codes [N, K], N a multiple of 8, to [K, N / 8] int32 as AWQ shuffles them.

    None as for `quantize`.
    """
    on_cpu = codes.device.type == "cpu" and codes.numel() > 0
    modules = _modules_for(codes.numel()) if on_cpu else None
    if modules is None:
        return None
    packed = torch.empty(codes.shape[1], codes.shape[0] // 8, dtype=torch.int32)
    source, target = bytes_of(codes.contiguous()), packed.numpy().view(np.uint32)
    modules[1].pack_eight_rows(source, target, np.empty((16, 64), np.uint32))
    return packed


def is_ready(elements: int) -> bool:
    """True if loops can be used, and are worth numba's start for this many elements more."""
    return _modules_for(elements) is not None


def search_blocks(  # noqa: PLR0913 - what the loops need
    blocks: Tensor,
    read: Tensor,
    counts: Tensor | None,
    scales: Tensor,
    zeros: Tensor | None,
    *,
    grid: Grid,
    forms: tuple[torch.dtype, torch.dtype, torch.dtype],
    moves: tuple[int, ...],
    limits: tuple[float, float],
    fits: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Search the scales of blocks, as `search` does.

    Args:
        blocks: [B, E] float32, each with one scale.
        read: [B, E] float32, what a reader makes of the codes.
        counts: [B, E] float32, what an error counts; None counts all alike.
        scales: [B, C] float32, tried in this order, first what the codes have.
        zeros: [B, 1] float32, or None.
        grid: Of the codes.
        forms: dtypes to which a reader rounds values, in which scales are stored, and to which
            scales are rounded before that.
        moves: What is added to zero points.
        limits: Factor of the error of the codes that others stay below; the smallest error.
        fits: How often a scale is fitted to codes.

    Returns:
        Of what was chosen codes [B, E] uint8, which scale [B] int32 (C for a fitted one, -1 for
        none, where codes mean nothing), scale [B] and zero point [B] float32. None as for
        `quantize`.
    """
    is_known = (grid.is_integer or grid in FLOAT_GRIDS) and blocks.device.type == "cpu"
    many = blocks.numel() * (scales.shape[1] * len(moves) + 2 * fits)
    if not is_known or not many or not _is_worth_it(many // 8) or _modules() is None:
        return None
    from quantload.quant import compiled_search as loops

    lanes, count = loops.LANES, len(blocks)
    tiles = _tiles(blocks, lanes)
    codes = torch.empty(tiles.shape, dtype=_BYTE)
    places = torch.empty(len(tiles), lanes, dtype=torch.int32)
    chosen = torch.unflatten(_tiles(scales, lanes), 1, (-1, lanes)).transpose(0, 1).contiguous()
    zero = _tiles(blocks.new_zeros(count, 1) if zeros is None else zeros, lanes).clone()
    loops.search_tiles(
        tiles.numpy(),
        _tiles(read, lanes).numpy(),
        (tiles[:, :0] if counts is None else _tiles(counts, lanes)).numpy(),
        chosen.numpy(),
        zero.numpy(),
        np.array(moves, np.float32),
        codes.numpy(),
        places.numpy(),
        floats(grid.low, grid.high, *limits),
        tuple(LIKE[form] for form in forms),
        fits,
        np.empty((3, tiles.shape[1]), np.float32),
        tag_of(grid),
    )
    codes = torch.unflatten(codes, 1, (-1, lanes)).transpose(1, 2).flatten(0, 1)[:count]
    return codes, places.flatten()[:count], chosen[0].flatten()[:count], zero.flatten()[:count]


def _tiles(blocks: Tensor, lanes: int) -> Tensor:
    """Lay blocks [B, E] side by side: [T, E * lanes], the last filled with zeros."""
    blocks = torch.nn.functional.pad(blocks, (0, 0, 0, -len(blocks) % lanes))
    return torch.unflatten(blocks, 0, (-1, lanes)).transpose(1, 2).flatten(1)


def _loops_for(weight: Tensor, scheme: WeightScheme, given: Tensor | None) -> ModuleType | None:
    """The loops that quantize, if there is one for this, and numba is there and worth its start."""
    grid = scheme.grid
    is_known = (
        _is_read(weight)
        and (scheme.granularity != "group" or weight.shape[1] % (scheme.group_size or 1) == 0)
        and (grid.is_integer or grid in FLOAT_GRIDS)
        and (scheme.symmetric or (grid.is_integer and scheme.scale == "float" and given is None))
        and (scheme.scale == "float" or scheme.granularity == "group")
    )
    modules = _modules_for(weight.numel()) if is_known else None
    return None if modules is None else modules[0]


def _is_read(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype in FORMS and weight.numel() > 0


def _is_worth_it(elements: int) -> bool:
    global _seen
    if _seen < _WORTH_STARTING:  # several threads may lose some of each other's
        _seen += elements
    return _seen >= _WORTH_STARTING


def _modules_for(elements: int) -> tuple[ModuleType, ModuleType] | None:
    return _modules() if _is_worth_it(elements) else None


@cache
def _modules() -> tuple[ModuleType, ModuleType] | None:
    """The loops that quantize and those that pack."""
    try:
        import numba

        from quantload.quant import compiled_kernels, compiled_packing
    except ModuleNotFoundError:
        return None
    except (ImportError, OSError) as error:  # made for another Python, NumPy or system
        warnings.warn(f"numba cannot be used, PyTorch quantizes: {error}", stacklevel=2)
        return None
    is_off = numba.config.DISABLE_JIT  # environment variable NUMBA_DISABLE_JIT
    return None if is_off else (compiled_kernels, compiled_packing)


# -- kinds of scales -------------------------------------------------------------------------------


def _with_own_scales(
    loops: ModuleType,
    weight: Tensor,
    scheme: WeightScheme,
    forms: tuple[torch.dtype, torch.dtype, torch.dtype],
    special: tuple[float, float],
    *,
    is_guarded: bool = False,
) -> Quantized:
    """Each block with the scale of its range.

    Args:
        loops: That quantize.
        weight: [N, K].
        scheme: Of float scales.
        forms: dtypes of scales, of the arithmetic, and that scales are rounded to before.
        special: Scale of zeros; below which scales are rounded up.
        is_guarded: True if zero points are seen from the scale as it is stored.
    """
    grid, block, shape = scheme.grid, *blocks_of(weight, scheme)
    codes, scale = torch.empty(weight.shape, dtype=grid.storage), torch.empty(shape, dtype=forms[0])
    steps = (grid.high - grid.low) / (2 if scheme.symmetric else 1)
    limits = floats(grid.low, grid.high, steps, *special)
    tags = tag_of(grid), LIKE[forms[1]], LIKE[forms[2]]
    arrays = array_of(weight), bytes_of(codes), array_of(scale)
    if scheme.symmetric:
        largest = np.empty(shape[1], order_of(weight))
        loops.quantize_symmetric(*arrays, largest, block, limits, tags)
        return codes, scale, None
    zeros, extremes = torch.empty(shape), np.empty((2, shape[1]), order_of(weight))
    loops.quantize_asymmetric(*arrays, zeros.numpy(), extremes, block, limits, tags, is_guarded)
    return codes, scale, zeros.to(grid.storage)


def _with_one_scale(
    loops: ModuleType,
    weight: Tensor,
    scheme: WeightScheme,
    scale: Tensor,
    *,
    arithmetic: torch.dtype | None = None,
) -> Quantized:
    grid = scheme.grid
    codes = torch.empty(weight.shape, dtype=grid.storage)
    tags = tag_of(grid), LIKE[arithmetic or weight.dtype]
    divisor, limits = np.float32(scale.item()), floats(grid.low, grid.high)
    loops.quantize_given(array_of(weight), bytes_of(codes), divisor, limits, tags)
    return codes, scale, None


def _with_powers_of_two(loops: ModuleType, weight: Tensor, scheme: WeightScheme) -> Quantized:
    grid, (_, width), shape = scheme.grid, *blocks_of(weight, scheme)
    codes, stored = torch.empty(weight.shape, dtype=grid.storage), torch.empty(shape, dtype=_BYTE)
    largest, divisors = np.empty(shape[1], order_of(weight)), array_of(weight.new_empty(shape[1]))
    limits, guard_bits = floats(grid.low, grid.high), 3 if grid == E2M3 else 1
    form = (*EXPONENTS[weight.dtype], guard_bits, int(math.log2(grid.high)))
    arrays = array_of(weight), bytes_of(codes), stored.numpy()
    tags = tag_of(grid), LIKE[weight.dtype]
    loops.quantize_powers_of_two(*arrays, largest, divisors, width, limits, form, tags)
    return codes, stored.view(torch.float8_e8m0fnu), None


def _with_e4m3_scales(
    loop: Callable[..., None], weight: Tensor, scheme: WeightScheme, numbers: tuple[float, ...]
) -> Quantized:
    grid, (_, width), shape = scheme.grid, *blocks_of(weight, scheme)
    codes, stored = torch.empty(weight.shape, dtype=grid.storage), torch.empty(shape, dtype=_BYTE)
    largest, divisors = np.empty(shape[1], order_of(weight)), np.empty(shape[1], np.float32)
    limits, tags = floats(grid.low, grid.high, *numbers), (tag_of(grid), np.float32(0))
    arrays = array_of(weight), bytes_of(codes), stored.numpy()
    loop(*arrays, largest, divisors, width, limits, tags)
    return codes, stored.view(torch.float8_e4m3fn), None


def _lanes(width: int, distance: int) -> int:
    """A 64-bit mask of `width` ones at every multiple of `distance`."""
    return sum(((1 << width) - 1) << shift for shift in range(0, 64, distance))
