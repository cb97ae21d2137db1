"""Which settings the kernels of a family have, and within which bounds.

A table may be of another version, or written by hand: what a kernel would stumble over is found
when the table is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quantload.errors import listed

__all__ = ["why_not_settings"]

_POWER, _NUMBER = True, False


@dataclass(frozen=True)
class _Bounds:
    """Least and largest value; `power`: powers of two only (or 0, if that is the least)."""

    low: int
    high: int
    power: bool = _NUMBER

    def holds(self, value: int) -> bool:
        is_one = not self.power or value & (value - 1) == 0
        return self.low <= value <= self.high and is_one

    def __str__(self) -> str:
        kind = "a power of two" if self.power else "a number"
        return f"{kind} from {self.low} to {self.high}"


@dataclass(frozen=True)
class _Form:
    """Names that settings must have, and those that they may have."""

    needed: Mapping[str, _Bounds]
    optional: Mapping[str, _Bounds] = field(default_factory=dict)


_FLAG, _COUNT = _Bounds(0, 1), _Bounds(1, 4096)
_SET = _Bounds(1, 1)
_TILE, _WARPS, _STAGES = _Bounds(8, 512, _POWER), _Bounds(1, 16, _POWER), _Bounds(1, 32)
_TILED = {
    "rows": _TILE, "tokens": _TILE, "warps": _WARPS, "stages": _STAGES, "splits": _COUNT,
}  # fmt: skip
_OF_BYTES = (
    _Form({"dequantize": _SET}),
    _Form(_TILED, {"columns": _Bounds(8, 512, _POWER), "step": _Bounds(8, 512, _POWER)}),
)

# Family -> its forms; the first name of a form tells it from others, the last form has none.
_FORMS: Mapping[str, tuple[_Form, ...]] = {
    "byte": _OF_BYTES,
    "pairs": _OF_BYTES,
    "nibble": (
        _Form(
            {"path": _Bounds(0, 6)},
            {
                "rows": _TILE, "tokens": _TILE, "splits": _COUNT, "stages": _STAGES,
                "warps": _WARPS, "after": _FLAG, "tma": _FLAG, "unroll": _Bounds(1, 64, _POWER),
                "step": _Bounds(8, 512, _POWER), "swizzle": _COUNT, "early": _FLAG,
                "prefetch": _Bounds(0, 64), "shared": _Bounds(0, 8),
            },
        ),
    ),
    "rounded": (
        _Form({"library": _SET}),
        _Form({
            "fused": _SET, "bn": _TILE, "bk": _TILE, "stages": _STAGES, "warps": _WARPS,
            "splits": _COUNT,
        }),
        _Form(
            {
                "wide": _SET, "bn": _TILE, "stages": _STAGES, "band": _COUNT,
                "registers": _Bounds(24, 240),
            },
            {"shared": _FLAG},
        ),
        _Form({
            "parts": _Bounds(16, 128), "halves": _Bounds(1, 2), "stages": _STAGES,
            "splits": _COUNT, "beside": _FLAG,
        }),
        _Form({
            "bn": _TILE, "bm": _TILE, "bk": _TILE, "stages": _STAGES, "warps": _WARPS,
            "splits": _COUNT, "swap": _FLAG, "exact": _FLAG, "band": _COUNT,
        }),
    ),
    "grouped": (
        _Form(
            {
                "block": _TILE, "rows": _TILE, "warps": _WARPS, "stages": _STAGES,
                "parts": _Bounds(1, 16, _POWER), "tiles": _Bounds(1, 64),
            },
            {"after": _FLAG, "half": _FLAG},
        ),
    ),
    "grouped, summed": (_Form({"rows": _Bounds(0, 128, _POWER), "stages": _Bounds(0, 32)}),),
    "one token": (
        _Form(
            {
                "tiles": _Bounds(1, 64), "slots": _STAGES, "warps": _WARPS,
                "beside": _Bounds(1, 64), "each": _Bounds(1, 64), "late": _FLAG,
            },
            {"kb": _Bounds(0, 227)},
        ),
    ),
}  # fmt: skip


def _family(kernel: str) -> str:
    if kernel.startswith("one token "):
        return "one token"
    first = kernel.partition(" ")[0]
    return f"{first}, summed" if kernel.endswith(", summed") else first


def why_not_settings(kernel: str, settings: Mapping[str, int]) -> str | None:
    """Say what a kernel could not use, or None; of kernels that no version knows nothing is said.

    Args:
        kernel: Name under which the settings are kept.
        settings: Names and whole numbers.
    """
    forms = _FORMS.get(_family(kernel))
    if forms is None:
        return None
    marked = (form for form in forms[:-1] if next(iter(form.needed)) in settings)
    form = next(marked, forms[-1])
    known = {**form.needed, **form.optional}
    if unknown := settings.keys() - known.keys():
        return f"it has {listed(sorted(unknown))}, which this version does not know"
    if missing := form.needed.keys() - settings.keys():
        return f"it lacks {listed(sorted(missing))}"
    for name, value in settings.items():
        if not known[name].holds(value):
            return f"`{name}` is `{value}`, expected {known[name]}"
    return None
