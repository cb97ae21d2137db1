"""Products of one token that also do what follows them in a decoder's layer, and what waits.

    product         y = W x
    gated_product   silu(gate) * up of a weight that holds both
    added_product   hidden + W x, and the next norm of it, but for its factor

A norm's factor needs the whole row, which no program of a product has. So a product leaves the row
times the norm's weight, with sums of squares of its parts, and the next one multiplies its result:
what is handed on so is `Waiting`. It holds the largest magnitudes of parts, too, where the next
product makes codes of it. So a layer of a decode step is five kernels: three of these products, one
more for q, k and v, and attention.

Letters: N output features, K input features.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from quantload.runtime.kernels import nibble_stream, rounded_stream
from quantload.runtime.kernels.add_norm import Codes, NormWeight
from quantload.runtime.kernels.dependent_launch import launches_early, processors
from quantload.runtime.kernels.nibble_weight import NibbleWeight
from quantload.runtime.kernels.rounded_weight import PackedRounded
from quantload.runtime.launch_settings import find

__all__ = [
    "Waiting",
    "added_product",
    "candidates",
    "family",
    "gated_product",
    "product",
    "rule",
    "why_not",
]

_SETTINGS = ("tiles", "slots", "warps", "beside", "each", "late", "kb")
_BESIDE = 111 << 10  # bytes of shared memory of a small product's program
_LARGE = 122 << 10  # of a program beside which one of those fits
_ALONE = 118  # KB, of which two do not fit a processor
_MOST = 227 << 10
_WARPS = 8


@dataclass(frozen=True)
class Waiting:
    """A row that a product reads, and what that has still to do with it.

    Args:
        values: [1, K] bfloat16.
        peaks: Float32, the largest of them is that of |values|; None where nobody makes codes.
        sums: [K / 16] float32, sums of parts of `values`; None where nobody has made them.
        hidden: [1, K] the residual stream, if `values` is that times a norm's weight.
        squares: [K / 16] float32, sums of squares of `hidden`.
        eps: Of the norm.
    """

    values: Tensor
    peaks: Tensor | None = None
    sums: Tensor | None = None
    hidden: Tensor | None = None
    squares: Tensor | None = None
    eps: float = 0.0


Packed = NibbleWeight | PackedRounded


def why_not(weight: object) -> str:
    """Say why the kernels do not serve a weight, "" if they do."""
    if isinstance(weight, NibbleWeight):
        return _why_not_nibbles(weight)
    if isinstance(weight, PackedRounded):
        return _why_not_codes(weight)
    return f"a weight that is kept as `{type(weight).__name__}`"


def _why_not_nibbles(weight: NibbleWeight) -> str:
    blocks, rows, columns = weight.words.shape
    if (weight.form, weight.kind, weight.dtype) != ("int", "bf16", torch.bfloat16):
        return f"codes of form {weight.form} with scales {weight.kind} in {weight.dtype}"
    if (weight.group, columns, weight.features) != (128, 64, blocks * 256) or rows % 32:
        return f"{rows} x {weight.features} in groups of {weight.group}"
    if weight.zero is not None or weight.offset is not None or weight.outer is not None:
        return "zero points, offsets or factors of rows"
    if weight.columns is not None:
        return "columns in another order"
    return _why_not_device(weight.words)


def _why_not_codes(weight: PackedRounded) -> str:
    rows, features = weight.codes.shape
    if weight.codes.dtype != torch.float8_e4m3fn or weight.group or weight.sums is not None:
        return f"{weight.layout}"
    if rows % 32 or features % 128:
        return f"{rows} x {features}"
    return _why_not_device(weight.codes)


def _why_not_device(tensor: Tensor) -> str:
    if tensor.device.type != "cuda":
        return f"a weight on {tensor.device.type}"
    found = torch.cuda.get_device_capability(tensor.device)
    return "" if found[0] == 9 else f"compute capability {found[0]}.{found[1]}, expected 9.0"


# -- calls -----------------------------------------------------------------------------------------


def product(weight: Packed, x: Tensor | Codes | Waiting, bias: Tensor | None = None) -> Tensor:
    """Return W x + bias [1, N].

    Args:
        weight: `why_not` has no objection.
        x: [1, K] for nibbles; codes, or values with peaks, for codes; or what waits.
        bias: [N].
    """
    y: Tensor = _run(weight, x, bias)[0]
    return y


def gated_product(
    weight: Packed, x: Tensor | Codes | Waiting, bias: Tensor | None = None, *, peaks: bool
) -> Waiting:
    """Return silu(gate) * up [1, N / 2]; the gate is the first half of the rows.

    Args:
        weight: Of both.
        x: As for `product`.
        bias: [N].
        peaks: The next product makes codes and is told the largest magnitudes; else it is told
            sums.
    """
    values, _, _, found = _run(weight, x, bias, glu=True, peaks=peaks)
    return Waiting(values, found if peaks else None, None if peaks else found)


def added_product(
    weight: Packed,
    x: Tensor | Codes | Waiting,
    bias: Tensor | None,
    hidden: Tensor,
    norm: NormWeight,
    *,
    peaks: bool,
) -> Waiting:
    """Return hidden + W x + bias, for the product behind a norm of it.

    Args:
        weight: Of the product.
        x: As for `product`.
        bias: [N].
        hidden: [1, N] the residual stream.
        norm: What the next product's input is normed with.
        peaks: The next product makes codes and is told the largest magnitudes; else it is told
            sums.
    """
    stream, scaled, squares, found = _run(weight, x, bias, hidden=hidden, norm=norm, peaks=peaks)
    told = found if peaks else None, None if peaks else found
    return Waiting(scaled, told[0], told[1], stream, squares, norm.eps)


def _run(weight, x, bias, *, hidden=None, norm=None, glu=False, peaks=False):
    waits = x if isinstance(x, Waiting) else Waiting(x) if isinstance(x, Tensor) else None
    rest = (
        bias, hidden, None if norm is None else norm.weight, norm is not None and norm.offset,
        glu, peaks,
    )  # fmt: skip
    if isinstance(weight, NibbleWeight):
        assert waits is not None, "nibbles take values"
        given = waits.values, waits.sums, waits.squares, waits.eps
        return _nibbles(*given, weight.words, weight.scale, *rest)
    if waits is None:
        return _codes(x.codes, x.scales, None, None, 0.0, weight.codes, weight.scale, *rest)
    assert waits.peaks is not None, "codes are made of values with peaks"
    return _codes(
        waits.values, None, waits.peaks, waits.squares, waits.eps, weight.codes, weight.scale, *rest
    )


def _results(
    like: Tensor, rows: int, *, stream: bool, glu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return room for y, the stream times the norm's weight, squares, and peaks or sums."""
    count = rows // 2 if glu else rows
    out = like.new_empty((1, count), dtype=torch.bfloat16)
    scaled = like.new_empty((1, count if stream else 0), dtype=torch.bfloat16)
    squares = like.new_empty(count // 16 if stream else 0, dtype=torch.float32)
    return out, scaled, squares, like.new_empty(count // 16, dtype=torch.float32)


@torch.library.custom_op("quantload::one_token_nibbles", mutates_args=())
def _nibbles(
    x: Tensor, sums_in: Tensor | None, squares_in: Tensor | None, eps: float, words: Tensor,
    scale: Tensor, bias: Tensor | None, hidden: Tensor | None, norm: Tensor | None, offset: bool,
    glu: bool, peaks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    blocks, rows, _ = words.shape
    results = _results(words, rows, stream=hidden is not None, glu=glu)
    out, scaled, squares, found = results
    settings = _settings(rows, blocks * 256, x.device, glu=glu, nibbles=True)
    shape = _shape(nibble_stream.shared_bytes, rows, blocks, x.device, settings)
    with torch.cuda.device_of(x):
        made = nibble_stream.nibble_stream[(shape.programs,)](
            x, sums_in, words, scale, bias, out, out if squares_in is None else squares_in,
            out if hidden is None else hidden, out if norm is None else norm, scaled, squares,
            found, rows, blocks, shape.units, rows // 2, x.shape[1], eps,
            GLU=glu, RESIDUAL=hidden is not None, OFFSET=offset, NORMED=squares_in is not None,
            PEAKS=peaks,
            TILES_IN=_tiles(squares_in), **shape.constants,
        )  # fmt: skip
    _check_shared(made, shape.size)
    return results


@torch.library.custom_op("quantload::one_token_codes", mutates_args=())
def _codes(
    x: Tensor, x_scale: Tensor | None, peaks_in: Tensor | None, squares_in: Tensor | None,
    eps: float, codes: Tensor, scale: Tensor, bias: Tensor | None, hidden: Tensor | None,
    norm: Tensor | None, offset: bool, glu: bool, peaks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rows, features = codes.shape
    results = _results(codes, rows, stream=hidden is not None, glu=glu)
    out, scaled, squares, found = results
    blocks = features // 128
    settings = _settings(rows, features, x.device, glu=glu, nibbles=False)
    shape = _shape(rounded_stream.shared_bytes, rows, blocks, x.device, settings)
    with torch.cuda.device_of(x):
        made = rounded_stream.rounded_stream[(shape.programs,)](
            x if x_scale is None else x.view(torch.int32), out if x_scale is None else x_scale,
            out if peaks_in is None else peaks_in, out if squares_in is None else squares_in,
            codes.view(torch.int8), scale, bias, out, out if hidden is None else hidden,
            out if norm is None else norm, scaled, squares, found,
            features, blocks, shape.units, rows // 2, features, eps,
            GLU=glu, RESIDUAL=hidden is not None, OFFSET=offset, NORMED=squares_in is not None,
            PEAKS=peaks,
            PEAKS_IN=0 if peaks_in is None else peaks_in.numel(), TILES_IN=_tiles(squares_in),
            **shape.constants,
        )  # fmt: skip
    _check_shared(made, shape.size)
    return results


@_nibbles.register_fake
def _(x, sums_in, squares_in, eps, words, scale, bias, hidden, norm, offset, glu, *rest):
    return _results(words, words.shape[1], stream=hidden is not None, glu=glu)


@_codes.register_fake
def _(x, x_scale, peaks_in, squares_in, eps, codes, scale, bias, hidden, *rest):
    _, _, glu, _ = rest
    return _results(codes, len(codes), stream=hidden is not None, glu=glu)


def _tiles(squares: Tensor | None) -> int:
    return 32 if squares is None else max(32, triton.next_power_of_2(squares.numel()))


def _check_shared(made: object, size: int) -> None:
    """What a kernel lays out itself starts with shared memory only if nothing else is there."""
    found = getattr(getattr(made, "metadata", None), "shared", size)
    assert found == size, f"{found} bytes of shared memory, expected {size}"


# -- settings --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shape:
    """How rows are shared out.

    Args:
        programs: Of the launch.
        units: Groups of tiles.
        size: Bytes of shared memory of a program, whole KB.
        constants: Of the kernel.
    """

    programs: int
    units: int
    size: int
    constants: Mapping[str, object]


def _shape(bytes_of, rows: int, blocks: int, device: torch.device, settings: list[int]) -> _Shape:
    tiles, slots, warps, beside, each, late, least = settings
    units = rows // (16 * tiles)
    programs = min(units, processors(device) * each)
    most = -(-units // programs)
    size = max(_needed(bytes_of, blocks, most, tiles, slots, warps, beside), least * 1024)
    early = launches_early(device)
    constants = {
        "UNITS": most, "J": -(-blocks // beside), "JX": -(-blocks // warps), "R": tiles,
        "S": slots, "WK": beside,
        "EVEN": blocks % beside == 0, "LATE": bool(late), "EARLY": early, "SIZE": size // 1024,
        "num_warps": warps, **({"launch_pdl": True} if early else {}),
    }  # fmt: skip
    return _Shape(programs, units, size, constants)


def _needed(bytes_of, blocks, units, tiles, slots, warps, beside) -> int:
    """Return bytes of shared memory in whole KB, one of them that makes the tensor exist."""
    laid_out: int = bytes_of(
        blocks=blocks, units=units, tiles=tiles, slots=slots, warps=warps, beside=beside
    )
    return (-(-laid_out // 1024) + 1) * 1024


def family(*, glu: bool, nibbles: bool) -> str:
    """Name under which measured settings are kept."""
    return f"one token {'nibbles' if nibbles else 'e4m3'}{' gated' if glu else ''}"


def _settings(
    rows: int, features: int, device: torch.device, *, glu: bool, nibbles: bool
) -> list[int]:
    """Look settings up, within an operator: what is compiled does not see the table."""
    found = find(family(glu=glu, nibbles=nibbles), device, m=1, n=rows, k=features)
    found = found or rule(rows, features, processors(device), glu=glu, nibbles=nibbles)
    return [({"kb": 0} | dict(found))[name] for name in _SETTINGS]


@functools.cache
def rule(
    rows: int, features: int, processors: int, *, glu: bool, nibbles: bool
) -> Mapping[str, int]:
    """Return settings for a shape that was not measured.

    Rows are shared out so that the busiest program has the fewest. Programs leave room for those of
    the next product, which then load their weights already; those of a large one fill more than
    half of a processor, so that none gets two of them.
    """
    tiles = 2 if glu else _tiles_of(rows, processors)
    units = -(-rows // (16 * tiles * processors))  # of a program
    apart = min(1 << (units - 1).bit_length(), _WARPS)  # warps with tiles of their own
    beside = _WARPS // apart
    blocks = features // (256 if nibbles else 128)
    bytes_of = nibble_stream.shared_bytes if nibbles else rounded_stream.shared_bytes
    large = units > 2
    room = _LARGE if large else _BESIDE
    slots = min(4, -(-units // apart) * -(-blocks // beside))
    while slots > 1 and _needed(bytes_of, blocks, units, tiles, slots, _WARPS, beside) > room:
        slots -= 1
    made = (tiles, slots, _WARPS, beside, 1, 0, _ALONE if large else 0)
    return dict(zip(_SETTINGS, made, strict=True))


def _tiles_of(rows: int, processors: int) -> int:
    whole = [tiles for tiles in (3, 2, 1) if rows % (16 * tiles) == 0]
    return min(whole, key=lambda tiles: -(-rows // (16 * tiles) // processors) * tiles)


def candidates(
    rows: int, features: int, *, glu: bool, nibbles: bool
) -> Iterator[Mapping[str, int]]:
    """Yield launch settings to be measured, for 132 processors."""
    bytes_of = nibble_stream.shared_bytes if nibbles else rounded_stream.shared_bytes
    blocks = features // (256 if nibbles else 128)
    kinds = itertools.product((2,) if glu else (1, 2, 3), (8, 16, 4), (1, 2, 4, 8, 16), (1, 2))
    for tiles, warps, beside, each in kinds:
        units = -(-rows // (16 * tiles * 132 * each))
        apart = warps // beside
        if rows % (16 * tiles) or not apart or apart > 2 * units or warps * each > 16:
            continue
        items = -(-units // apart) * -(-blocks // beside)
        for slots in range(1, min(items, 6) + 1):
            size = _needed(bytes_of, blocks, units, tiles, slots, warps, beside)
            if (size + 1024) * each <= _MOST + 1024:
                for late in (0, 1):
                    made = (tiles, slots, warps, beside, each, late, 0)
                    yield dict(zip(_SETTINGS, made, strict=True))
