"""How the weights of all experts of a block lie in memory for the grouped kernel.

One tensor holds the words of all experts, and each expert is packed into its part when it arrives:
the block never exists twice. Words are those of `nibble_layout` or `byte_layout`, of rows in which
gate and up, however they come, alternate in eights.

Letters: E experts, N output features as they come, P >= N packed rows, K input features, C columns
of a slice, B blocks of slices, G groups of columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantload.quant.qtensor import QuantTensor
from quantload.runtime.kernels.byte_layout import pack_bytes
from quantload.runtime.kernels.grouped_weight import (
    SCALE_DTYPES,
    GroupedWeight,
    Rows,
    codes_of,
    natural_places,
    packed_places,
    slots_of,
)
from quantload.runtime.kernels.nibble_folded import form_of, held_scales, pack_codes
from quantload.runtime.kernels.nibble_layout import lookup_table, pack_nibbles

__all__ = ["ExpertStack", "GroupedWeight", "Rows", "why_not"]

_SLICE_WIDTHS = (64, 32, 16)
_BIAS = 8  # int2 .. int4 are held as code + 8
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORD_BYTES = 8
_KINDS = {dtype: kind for kind, dtype in SCALE_DTYPES.items()}
_LARGEST_ZERO = 63  # what `unpack4` subtracts exactly


# -- which weights -----------------------------------------------------------------------------


def why_not(weight: QuantTensor) -> str | None:
    """Say why the kernel cannot multiply with an expert's weight, or None."""
    grid = weight.grid
    if 0 in weight.shape:
        return f"the weight is empty: {weight.shape[0]} x {weight.shape[1]}"
    if weight.group_of is not None:
        return "columns are in act-order"
    if weight.inner is not None:
        return "columns have factors of their own"
    if weight.offset is not None:
        return "zero points are offsets"
    if _form_of(weight) is None:
        zeros = "" if weight.zero is None else " with zero points"
        return f"grid {grid.name}{zeros} is not served"
    if weight.zero is not None and _nibble_zeros(weight) is None:
        return "zero points are no small whole numbers"
    if grid.name == "e5m2" and not bool(weight.codes.float().isfinite().all()):
        return "e5m2 codes that are infinite or NaN"
    if weight.scale.dtype == torch.float8_e4m3fn and bool((_bytes(weight.scale) >= 127).any()):
        return "e4m3 scales with a sign or NaN"
    if _slice_width(weight) is None:
        dtype = weight.multiplier.dtype
        return f"groups of {weight.block[1]} columns with {dtype} scales are no slices of 16 to 64"
    return None


def _form_of(weight: QuantTensor) -> str | None:
    grid, has_zero = weight.grid, weight.zero is not None
    if grid.bits > 4:
        is_signed = grid.is_integer and grid.storage == torch.int8
        name = "int8" if is_signed else grid.name
        return name if name in ("int8", "e4m3", "e5m2") and not has_zero else None
    if grid.is_integer:
        return "zero" if has_zero else "int" if grid.storage == torch.int8 else "uint"
    if has_zero:
        return None
    return "e2m1" if grid.name == "e2m1" else "table"


def _nibble_zeros(weight: QuantTensor) -> Tensor | None:
    """[R, G] uint8 zero points in units of a nibble, or None if they are no such numbers."""
    assert weight.zero is not None, "asked for zero points"
    lift = _BIAS if weight.grid.storage == torch.int8 else 0
    zero = weight.zero.double() + lift
    if bool(((zero < 0) | (zero > _LARGEST_ZERO) | (zero != zero.round())).any()):
        return None
    return zero.to(torch.uint8)


def _slice_width(weight: QuantTensor) -> int | None:
    """Return C: groups are a slice, two or whole blocks, and their scales fit an integer."""
    group, slots = weight.block[1], 2 if weight.grid.bits > 4 else 4
    if group >= weight.shape[1]:
        return _SLICE_WIDTHS[0]
    itemsize = _loadable(weight.multiplier[:1, :1]).itemsize
    for width in _SLICE_WIDTHS:
        count = max(1, slots * width // group)
        fits = group in (width, 2 * width) or group % (slots * width) == 0
        if fits and count * itemsize <= _WORD_BYTES:
            return width
    return None


def _per_row(weight: QuantTensor) -> QuantTensor:
    """Give each row its own scales; the values stay equal."""
    return weight if weight.block[0] == 1 else weight.refined((1, weight.block[1]))


@dataclass(frozen=True)
class _Packed:
    """One expert: parts as in `GroupedWeight`, without the axis of experts."""

    parts: dict[str, Tensor | None]
    table: Tensor | None
    form: str
    kind: str
    group: int

    @property
    def likeness(self) -> tuple[object, ...]:
        """What experts must have in common."""
        parts = [None if part is None else (part.dtype, part.shape) for part in self.parts.values()]
        return (*parts, self.form, self.kind, self.group)


def _pack(weight: QuantTensor, rows: Rows, dtype: torch.dtype) -> _Packed:
    """Lay one expert out that `why_not` accepts; exact, but for products with `outer`."""
    folded = _folded(weight, rows)
    if folded is not None:
        return folded
    form, width = _form_of(weight), _slice_width(weight)
    assert form is not None, "`why_not` accepts it"
    assert width is not None, "`why_not` accepts it"
    places = packed_places(rows, weight.shape[0], weight.device)
    words = _words(weight, form, width, places)
    per_row, block = _per_row(weight), slots_of(form) * width
    group = min(weight.block[1], weight.shape[1])
    count = 1 if group == weight.shape[1] else max(1, block // group)  # groups of a block
    groups = -(-words.shape[0] * block // group) if count == 1 else words.shape[0] * count
    scale, outer = _scale_and_outer(per_row, form)
    if scale is not None and scale.itemsize == 2 and count == 1:
        scale = scale.float()  # exact; kernels pipeline loads of 4 bytes and more
    zero = None if weight.zero is None else _nibble_zeros(per_row)
    parts = {
        "words": words,
        "scale": None if scale is None else _by_group(scale, places, groups, count),
        "zero": None if zero is None else _by_group(zero, places, groups, count),
        "outer": None if outer is None else outer[places.clamp(min=0)],
    }
    values = weight.grid.table if form == "table" else None
    table = None if values is None else _table(values, dtype, words)
    kind = "none" if scale is None else _KINDS[scale.dtype]
    return _Packed(parts, table, form, kind, group)


def _folded(weight: QuantTensor, rows: Rows) -> _Packed | None:
    """Pack FP4 as `nibble_folded` says; None if it serves no such weight."""
    if weight.grid.name != "e2m1" or weight.zero is not None:
        return None
    form = form_of(weight.multiplier.dtype, weight.block[1])
    places = packed_places(rows, weight.shape[0], weight.device).clamp(min=0)
    codes = weight.codes.view(torch.uint8)[places]
    if form is None:
        return None
    scales = _per_row(weight).multiplier[places]
    held = held_scales(codes, scales)
    if held is None:
        return None
    scale, outer = held
    if weight.outer is not None:
        factor = weight.outer.double().flatten().expand(weight.shape[0])[places]
        outer = outer / factor if weight.evaluation.outer.endswith("/") else outer * factor
    parts = {"words": pack_codes(codes), "scale": scale, "zero": None, "outer": outer.float()}
    return _Packed(parts, None, form, "none", weight.block[1])


def _table(values: tuple[float, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
    padded = torch.tensor(values + (0.0,) * (16 - len(values)))
    return lookup_table(padded, dtype).to(like.device)


def _words(weight: QuantTensor, form: str, width: int, places: Tensor) -> Tensor:
    """[B, P, C] words; padding repeats the first row."""
    codes = weight.codes.view(torch.uint8)[places.clamp(min=0)]
    if slots_of(form) == 2:
        return pack_bytes(codes, columns=width)
    if weight.grid.storage == torch.int8:
        codes = (codes + _BIAS) & 15  # wraps around: two's complement becomes code + 8
    return pack_nibbles(codes, columns=width)


def _scale_and_outer(weight: QuantTensor, form: str) -> tuple[Tensor | None, Tensor | None]:
    """[N, G] scales, and [N] factors of rows: `outer`, and the only scale of a row."""
    rows, outer = weight.shape[0], None
    scale: Tensor | None = weight.multiplier
    assert scale is not None, "a weight has scales"
    if weight.outer is not None:
        factor = weight.outer.double().flatten().expand(rows)
        outer = 1 / factor if weight.evaluation.outer.endswith("/") else factor
    if form == "e4m3":  # the kernel does not know NaN: it makes all products of its row NaN
        broken = (weight.codes.view(torch.uint8) & 127 == 127).any(dim=1)
        ones = scale.new_ones(rows, dtype=torch.float64) if outer is None else outer
        outer = ones.masked_fill(broken, torch.nan)
    if scale.shape[1] == 1:
        only = scale.float().double().flatten()
        outer, scale = only if outer is None else only * outer, None
    return None if scale is None else _loadable(scale), None if outer is None else outer.float()


def _loadable(scale: Tensor) -> Tensor:
    return scale if scale.dtype in _KINDS else scale.float()


def _by_group(part: Tensor, places: Tensor, groups: int, count: int) -> Tensor:
    """[N, G] to [groups / count, P] integers of `count` groups; those of padding are zeros."""
    raw = _bytes(part)[places.clamp(min=0)].t()
    raw = torch.nn.functional.pad(raw, (0, 0, 0, max(0, groups - raw.shape[0])))
    beside: Tensor = raw.unflatten(0, (-1, count)).movedim(1, 2).contiguous()  # [.., P, count]
    return beside.view(_INTEGERS[count * part.itemsize])[..., 0]


# -- putting experts together ------------------------------------------------------------------


class ExpertStack:
    """The weights of experts, packed one by one into their places.

    Args:
        experts: E.
        rows: How rows of a weight are ordered.
        dtype: dtype of inputs.
    """

    def __init__(self, experts: int, rows: Rows, dtype: torch.dtype) -> None:
        self.experts, self.rows, self.dtype = experts, rows, dtype
        self._first: _Packed | None = None
        self._parts: dict[str, Tensor] = {}
        self._small: dict[int, dict[str, Any]] = {}
        self._shape = (0, 0)

    def add(self, expert: int, weight: QuantTensor) -> str | None:
        """Pack one expert on its device; return why it cannot join the others, or None."""
        reason = why_not(weight)
        if reason is not None:
            return reason
        packed = _pack(weight, self.rows, self.dtype)
        if self._first is None:
            self._start(packed, weight.shape)
        assert self._first is not None, "started"
        if (packed.likeness, weight.device) != (self._first.likeness, self._parts["words"].device):
            return "experts are quantized in different ways"
        for name, place in self._parts.items():
            part = packed.parts[name]
            assert part is not None, "experts are alike"
            _bytes(place[expert]).copy_(_bytes(part))
        self._small[expert] = {k: v for k, v in vars(weight).items() if k != "codes"}
        return None

    def _start(self, packed: _Packed, shape: tuple[int, int]) -> None:
        self._shape = shape
        for name, part in packed.parts.items():
            if part is not None:
                self._parts[name] = part.new_empty((self.experts, *part.shape))
        kept: dict[str, Tensor | None] = {
            name: None if part is None else part.new_empty(part.shape, device="meta")
            for name, part in packed.parts.items()
        }
        self._first = replace(packed, parts=kept)

    def taken_out(self, expert: int) -> QuantTensor:
        """Return an expert as it was added."""
        assert self._first is not None, "an expert was added"
        words = self._parts["words"][expert]
        codes = codes_of(words, self._first.form, self._shape[1])
        codes = codes[natural_places(self.rows, self._shape[0], codes.device)]
        small = self._small[expert]
        grid = small["grid"]
        if grid.storage == torch.int8 and grid.bits <= 4:
            codes = codes.view(torch.int8) - 8
        return QuantTensor(codes=codes.view(grid.storage), **small)

    def finished(self, biases: list[Tensor] | None) -> GroupedWeight:
        """Return the weight of all experts, with biases [N] of each, or None."""
        assert self._first is not None, "experts were added"
        assert len(self._small) == self.experts, "all of them were"
        self._small = {}
        bias = None
        if biases is not None:
            device = self._parts["words"].device
            places = packed_places(self.rows, self._shape[0], device).clamp(min=0)
            bias = torch.stack(biases).to(device).float()[:, places].contiguous()
        return GroupedWeight(
            words=self._parts["words"],
            scale=self._parts.get("scale"),
            zero=self._parts.get("zero"),
            outer=self._parts.get("outer"),
            bias=bias,
            table=self._first.table,
            form=self._first.form,
            kind=self._first.kind,
            group=self._first.group,
            rows=self.rows,
            out_features=self._shape[0],
            in_features=self._shape[1],
        )


def _bytes(part: Tensor) -> Tensor:
    return part.view(torch.uint8) if part.itemsize == 1 else part
