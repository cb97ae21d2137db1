"""Where a tensor of a checkpoint goes, and how it gets there: data only, no tensors.

    stored tensor  --Cut-->  what is taken of it  --Piece or Join-->  part of a parameter

Most tensors are a whole parameter, and have none of the three. Rows are output features: a `Cut`
applies to a quantized weight, its scales and its bias alike.

Letters: E experts, N output features, K input features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Transposition = Literal["never", "always", "by shape"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a parameter [E, parts * N, K]: rows part * N .. (part + 1) * N of one expert.

    With `is_transposed` the parameter is [E, K, parts * N].
    """

    expert: int
    part: int
    parts: int
    is_transposed: bool = False

    def __str__(self) -> str:
        return f"expert {self.expert}" + (f", part {self.part}" if self.parts > 1 else "")


@dataclass(frozen=True, slots=True)
class Cut:
    """What of a stored tensor goes to a place.

    Args:
        rows: Indices along `axis` that are taken, in this order; None is all of them. Steps other
            than 1 are rows that alternate on disk, or that are ordered otherwise within heads.
        axis: 0: output features of a weight [N, K] or a bias [N]; 1: those of the weights
            [E, N, K] of E experts.
        transposed: Whether the last two axes change places; "by shape" if only so it fits.
        rest: Why indices that no place takes are left out, "" if every index has to be taken.
    """

    rows: tuple[range, ...] | None = None
    axis: int = 0
    transposed: Transposition = "never"
    rest: str = ""

    @property
    def length(self) -> int | None:
        """How many indices are taken; None if that is up to the tensor."""
        return None if self.rows is None else sum(len(run) for run in self.rows)

    def __str__(self) -> str:
        words = [] if self.rows is None else [_rows_text(self.rows, self.axis)]
        if self.transposed != "never":
            words.append("transposed" + (" if only so it fits" * (self.transposed == "by shape")))
        return ", ".join(words)


def _rows_text(rows: tuple[range, ...], axis: int) -> str:
    shown = [
        f"{run.start}..{run.stop}" + (f" by {run.step}" if run.step != 1 else "")
        for run in rows[:2]
    ]
    more = f" and {len(rows) - 2} more runs" if len(rows) > 2 else ""
    return ("rows " if axis == 0 else "rows of each expert ") + ", ".join(shown) + more


@dataclass(frozen=True, slots=True)
class Join:
    """A part of a parameter that several tensors fill one after the other, whatever their heights.

    Args:
        part: Number of this tensor.
        parts: How many there are.
        axis: Axis of the parameter along which they follow one another.
    """

    part: int
    parts: int
    axis: int = 0

    def __str__(self) -> str:
        return f"part {self.part} of {self.parts}"


@dataclass(frozen=True, slots=True)
class Target:
    """A place in the model.

    Args:
        module: Dotted path of the module; "" is the model itself.
        leaf: Name of the tensor in the module ("weight", "bias", ...); for what goes with a
            parameter of another name, both: "gate_up_proj.input_scale".
        slot: Position in the stack, 0 for a module that is no stack.
        piece: The part of a parameter [E, parts * N, K] that one expert's weight [N, K] fills.
        cut: What of the stored tensor goes there; None is all of it, as it is.
        join: The part of the parameter that it fills, if it shares it with other tensors.
    """

    module: str
    leaf: str
    slot: int = 0
    piece: Piece | None = None
    cut: Cut | None = None
    join: Join | None = None

    @property
    def name(self) -> str:
        """Full name of the parameter."""
        return f"{self.module}.{self.leaf}" if self.module else self.leaf

    @property
    def place(self) -> Target:
        """The parameter or slot alone, whatever part of it is filled with whatever rows."""
        return Target(self.module, self.leaf, self.slot)

    @property
    def is_shared(self) -> bool:
        """True if the tensor fills only a part of the place."""
        return self.piece is not None or self.join is not None

    @property
    def is_weight(self) -> bool:
        """True if the place is the weight of a layer, and gets rows of the tensor as they are."""
        straight = self.cut is None or (self.cut.axis == 0 and self.cut.transposed == "never")
        return self.leaf == "weight" and not self.is_shared and straight

    def __str__(self) -> str:
        words = [str(part) for part in (self.piece, self.join, self.cut) if part is not None]
        if words:
            return f"{self.name}[{', '.join(words)}]"
        return f"{self.name}[{self.slot}]" if self.slot else self.name


@dataclass(frozen=True, slots=True)
class Converted:
    """One of the names that an architecture makes of a checkpoint name.

    Args:
        name: Name in the model.
        piece: The part of the parameter that one expert fills.
        cut: What of the stored tensor goes there.
        join: The part of the parameter that it fills among others.
        slot: Position in the stack that the name means.
    """

    name: str
    piece: Piece | None = None
    cut: Cut | None = None
    join: Join | None = None
    slot: int = 0

    def at(self, module: str, leaf: str) -> Target:
        """Return the place, once it is known which module the name means."""
        return Target(module, leaf, self.slot, self.piece, self.cut, self.join)


@dataclass(frozen=True, slots=True)
class Conversion:
    """What an architecture makes of a checkpoint name.

    Args:
        to: The parameters that get a part of the tensor; one, for most.
        refused: Why the tensor cannot be used, "" if it can.
        steps: The rules that fired, for people.
    """

    to: tuple[Converted, ...]
    refused: str = ""
    steps: tuple[str, ...] = ()

    @classmethod
    def unchanged(cls, name: str) -> Conversion:
        """Return the conversion that changes nothing."""
        return cls((Converted(name),))


__all__ = ["Conversion", "Converted", "Cut", "Join", "Piece", "Target", "Transposition"]
