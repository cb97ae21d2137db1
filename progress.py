"""How long loops report progress: a small protocol, and a silent default.

The library never draws. A caller passes an object with these three methods; `cli.py` passes one
that draws bars on a terminal.
"""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives the progress of one or more phases, one after the other."""

    def start(self, phase: str, *, total: int, unit: str) -> None:
        """Begin a phase of `total` steps, counted in `unit` ("B", "layers", "tokens")."""

    def advance(self, amount: int, *, note: str = "") -> None:
        """Count `amount` more steps of the current phase; `note` names what was just done."""

    def finish(self) -> None:
        """End the current phase."""


class Silent:
    """The default: shows nothing."""

    def start(self, phase: str, *, total: int, unit: str) -> None:
        """Show nothing."""

    def advance(self, amount: int, *, note: str = "") -> None:
        """Show nothing."""

    def finish(self) -> None:
        """Show nothing."""
