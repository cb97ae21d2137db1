"""The weights of all experts of a block as the grouped kernel reads them.

Words are those of `nibble_layout`, `nibble_folded` or `byte_layout`, of rows in which gate and up,
however they come, alternate in eights. `grouped_layout` makes them.

Letters: E experts, N output features as they come, P >= N packed rows, K input features, C columns
of a slice, B blocks of slices, G groups of columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from quantload.runtime.kernels.byte_layout import unpack_bytes
from quantload.runtime.kernels.nibble_folded import GROUPS, unpack_codes, values_of
from quantload.runtime.kernels.nibble_layout import unpack_nibbles

__all__ = [
    "SCALE_DTYPES",
    "GroupedWeight",
    "Rows",
    "codes_of",
    "natural_places",
    "packed_places",
    "slots_of",
]

Rows = Literal["plain", "halves", "alternate"]  # no gate; gate before up; gate, up, gate, up ...
SCALE_DTYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32,
    "e8m0": torch.float8_e8m0fnu, "e4m3": torch.float8_e4m3fn,
}  # fmt: skip
"""Kind of scales -> dtype."""

_EIGHT = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupedWeight:
    """The weights of all experts as the kernel reads them.

    Args:
        words: [E, B, P, C] int16.
        scale: [E, G, P] integers with the bits of the scales that a block meets, side by side; None
            where a row has one scale, which is then in `outer`.
        zero: [E, G, P] integers with as many bytes, in units of a nibble, or None.
        outer: [E, P] float32, multiplier of a row, or None.
        bias: [E, P] float32, or None.
        table: [24] int32 of `lookup_table`, or None.
        form: "int", "uint", "zero", "e2m1", "table": nibbles; "int8", "e4m3", "e5m2": bytes;
            "fp4_32", "fp4_16": words and scale [E, B, 4, P, groups of a slice] of `nibble_folded`.
        kind: What a scale is: "bf16", "fp16", "fp32", "e8m0", "e4m3", or "none".
        group: Columns that share a scale; K if a row does.
        rows: How rows were ordered before they were packed.
        out_features: N.
        in_features: K.
    """

    words: Tensor
    scale: Tensor | None
    zero: Tensor | None
    outer: Tensor | None
    bias: Tensor | None
    table: Tensor | None
    form: str
    kind: str
    group: int
    rows: Rows
    out_features: int
    in_features: int

    @property
    def experts(self) -> int:
        """E."""
        return self.words.shape[0]

    @property
    def slots(self) -> int:
        """Codes of a word."""
        return slots_of(self.form)

    def tensors(self) -> dict[str, Tensor]:
        """Return the parts that are tensors, by field name."""
        return {name: part for name, part in vars(self).items() if isinstance(part, Tensor)}

    def with_tensors(self, parts: Mapping[str, Tensor]) -> GroupedWeight:
        """Return the weight with other tensors, by field name."""
        return replace(self, **parts)  # type: ignore[arg-type]

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [E, N, K], computed in float32."""
        return torch.stack([self._values(e).to(dtype) for e in range(self.experts)])

    def _values(self, e: int) -> Tensor:
        places = natural_places(self.rows, self.out_features, self.words.device)
        if self.form in GROUPS:
            assert self.scale is not None, "scales of FP4"
            assert self.outer is not None, "factors of FP4"
            values = values_of(self.words[e], self.scale[e], self.in_features)
            return (values * self.outer[e][:, None])[places]
        codes = codes_of(self.words[e], self.form, self.in_features)
        values = _values_of(codes, self.form, self.table)
        group = torch.arange(self.in_features, device=codes.device) // self.group
        if self.zero is not None:
            values = values - _apart(self.zero[e], torch.uint8).t().float()[:, group]
        if self.scale is not None:
            scale = _apart(self.scale[e], SCALE_DTYPES[self.kind])
            values = values * scale.float().t()[:, group]
        if self.outer is not None:
            values = values * self.outer[e][:, None]
        return values[places]


def slots_of(form: str) -> int:
    """Return the codes of a word."""
    return 2 if form in ("int8", "e4m3", "e5m2") else 4


def codes_of(words: Tensor, form: str, features: int) -> Tensor:
    """Return the codes [P, K] uint8 of an expert's words."""
    if form in GROUPS:
        return unpack_codes(words, features)
    return (unpack_nibbles if slots_of(form) == 4 else unpack_bytes)(words, features)


def _values_of(codes: Tensor, form: str, table: Tensor | None) -> Tensor:
    if table is not None:
        return table[8:].view(torch.float32)[codes.int()]
    if form == "e2m1":
        size = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=codes.device)
        return torch.cat([size, -size])[codes.int()]
    if slots_of(form) == 2:
        storage = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
        return codes.view(storage[form]).float()
    return codes.float() - (8 if form == "int" else 0)


def packed_places(rows: Rows, count: int, device: torch.device) -> Tensor:
    """Return [P], the row that each packed row comes from, -1 for padding."""
    if rows == "plain":
        return torch.arange(count, device=device)
    each = count // 2
    packed = torch.arange(2 * -(-each // _EIGHT) * _EIGHT, device=device)
    part, inner = packed // _EIGHT % 2, packed // (2 * _EIGHT) * _EIGHT + packed % _EIGHT
    natural = part * each + inner if rows == "halves" else 2 * inner + part
    return natural.masked_fill(inner >= each, -1)


def natural_places(rows: Rows, count: int, device: torch.device) -> Tensor:
    """Return [N], the packed row of each row."""
    packed = packed_places(rows, count, device)
    natural = torch.empty(count, dtype=torch.long, device=device)
    here = (packed >= 0).nonzero().flatten()
    natural[packed[here]] = here
    return natural


def _apart(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo `_by_group` but for the order of rows: [G, P]."""
    return part.unsqueeze(-1).view(dtype).movedim(2, 1).flatten(0, 1)
