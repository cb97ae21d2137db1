"""Launch settings of kernels: what was measured on a card, else the kernel's own rule.

A table for each card, a JSON file, holds for each kernel, shape and number of tokens the fastest
settings that were found, and what the card itself reaches:

    {"card": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0",
     "limits": {"read_gb_s": 4580, "tflops": {"bf16": 802, "fp8": 1541, "int8": 1576}},
     "kernels": {"nibble int4 g128": {"6144x4096": {"1": {"rows": 64, "splits": 4}, ...}}},
     "us": {"nibble int4 g128": {"6144x4096": {"1": 7.1, ...}}}}

Shapes are N x K of a weight; "us" is the time of a call with those settings, or with those of the
kernel's rule where it was not beaten. Two tables are looked at: `tuned/NVIDIA_H200.json` in the
package, and one of the same name in the user's cache folder, which `quantload tune` writes and
which wins, entry by entry.

The settings of the fewest measured tokens that hold the asked-for ones serve, if they are at most
twice as many, or at most 8, the least that a tensor core takes at once. Where those tokens have a
time and no settings, the kernel's rule was not beaten, and serves. What was not measured has no
settings, and the rule decides, too: so an unknown card or shape is slower at worst.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from quantload.errors import ConfigError
from quantload.runtime.launch_settings_names import why_not_settings
from quantload.runtime.launch_settings_text import installed_version, table_text

__all__ = [
    "CardLimits",
    "Settings",
    "Table",
    "Trial",
    "card_limits",
    "find",
    "forget",
    "measured_us",
    "parse_table",
    "read_table",
    "trying",
    "user_table",
]

Settings = Mapping[str, int]
_ByTokens = dict[str, dict[str, dict[int, Any]]]  # kernel -> NxK -> tokens -> settings or us
_Entries = tuple[tuple[int, tuple[tuple[str, int], ...] | None], ...]
_AT_ONCE = 8  # tokens: a product of fewer is as large


@dataclass(frozen=True)
class CardLimits:
    """What a card reaches, measured.

    Args:
        read_gb_s: GB/s at which a kernel reads memory that it only reads.
        tflops: Tera operations per second of large matrix products, by the dtype of the operands:
            "bf16", "fp8", "int8".
    """

    read_gb_s: float
    tflops: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Table:
    """What was measured on one card.

    Args:
        card: Its name, as torch gives it.
        limits: What it reaches; None if that was not measured.
        kernels: {kernel: {"NxK": {tokens: settings}}}.
        us: {kernel: {"NxK": {tokens: microseconds}}}, with those settings.
    """

    card: str
    limits: CardLimits | None = None
    kernels: _ByTokens = field(default_factory=dict)
    us: _ByTokens = field(default_factory=dict)

    def add(
        self, kernel: str, shape: str, tokens: int, settings: Settings | None, us: float
    ) -> None:
        """Put in settings, None for those of the kernel's rule, and the time of a call."""
        self.kernels.get(kernel, {}).get(shape, {}).pop(tokens, None)
        if settings is not None:
            self.kernels.setdefault(kernel, {}).setdefault(shape, {})[tokens] = dict(settings)
        self.us.setdefault(kernel, {}).setdefault(shape, {})[tokens] = round(us, 3)

    def updated(self, other: Table) -> Table:
        """Return this table with the entries of another one in the place of its own.

        Where the other one has a time and no settings, its rule takes the place of settings.
        """
        merged = Table(self.card, other.limits or self.limits)
        for table in (self, other):
            for part, into in ((table.kernels, merged.kernels), (table.us, merged.us)):
                for kernel, shapes in part.items():
                    for shape, entries in shapes.items():
                        into.setdefault(kernel, {}).setdefault(shape, {}).update(entries)
        for kernel, shapes in other.us.items():
            for shape, times in shapes.items():
                settings = merged.kernels.get(kernel, {}).get(shape, {})
                for tokens in times.keys() - other.kernels.get(kernel, {}).get(shape, {}).keys():
                    settings.pop(tokens, None)
        return merged

    def as_text(self) -> str:
        """Return the JSON of the table."""
        limits = None
        if self.limits is not None:
            limits = {"read_gb_s": self.limits.read_gb_s, "tflops": dict(self.limits.tflops)}
        head: dict[str, Any] = {
            "card": self.card,
            "torch": torch.__version__,
            "triton": installed_version("triton"),
        }
        if limits is not None:
            head["limits"] = limits
        return table_text({**head, "kernels": self.kernels, "us": self.us})


def find(kernel: str, device: torch.device, *, m: int, n: int, k: int) -> Settings | None:
    """Return the measured settings of a kernel on the card of `device`, or None.

    Args:
        kernel: Name of the kernel and of what its code is specialised for.
        device: Where it runs; other devices than CUDA's have no settings.
        m: Tokens.
        n: Output features.
        k: Input features.

    Raises:
        ConfigError: A table is damaged.
    """
    if _trial is not None:
        _trial.asked.append((kernel, m, n, k))
        if kernel == _trial.kernel:
            return _trial.settings
    if device.type != "cuda":
        return None
    if torch.compiler.is_compiling():
        return _first(_measured_for_compiler(device.index, kernel, n, k), m)
    return _find(kernel, _card(device.index), m, n, k)


@dataclass
class Trial:
    """What is asked for while settings are tried, and what one kernel gets for an answer.

    Args:
        kernel: The kernel that gets `settings`; "" is none.
        settings: None lets its rule decide.
        asked: (kernel, m, n, k) of each question.
    """

    kernel: str = ""
    settings: Settings | None = None
    asked: list[tuple[str, int, int, int]] = field(default_factory=list)


_trial: Trial | None = None


@contextlib.contextmanager
def trying(kernel: str = "", settings: Settings | None = None) -> Iterator[Trial]:
    """Have `find` give one kernel these settings, in all threads, and note what is asked for.

    Args:
        kernel: Name of the kernel, as in `find`; "" only takes notes.
        settings: Its settings; None lets its rule decide.
    """
    global _trial  # one process tunes one thing at a time
    before, _trial = _trial, Trial(kernel, settings)
    try:
        yield _trial
    finally:
        _trial = before


def measured_us(kernel: str, device: torch.device, *, m: int, n: int, k: int) -> float | None:
    """Return the time of a call with the settings of `find`, where just these tokens were measured.

    Args:
        kernel: As in `find`.
        device: As in `find`.
        m: Tokens.
        n: Output features.
        k: Input features.
    """
    if device.type != "cuda":
        return None
    us = _table(_card(device.index)).us.get(kernel, {}).get(f"{n}x{k}", {}).get(m)
    return None if us is None else float(us)


def card_limits(device: torch.device) -> CardLimits | None:
    """Return what the card of `device` reaches; None if it was not measured."""
    return _table(_card(device.index)).limits if device.type == "cuda" else None


def user_table(card: str) -> Path:
    """Return where the user's own table for a card lies, in the platform's cache folder.

    The environment variable QUANTLOAD_CACHE names another folder.
    """
    named = os.environ.get("QUANTLOAD_CACHE")
    if named:
        folder = Path(named)
    elif sys.platform == "darwin":
        folder = Path.home() / "Library" / "Caches" / "quantload"
    elif sys.platform == "win32":
        folder = Path(os.environ.get("LOCALAPPDATA", Path.home())) / "quantload" / "Cache"
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quantload"
    return folder / "tuned" / f"{_file_name(card)}.json"


def forget() -> None:
    """Read the tables again when they are asked for next."""
    for cached in (_find, _table):
        cached.cache_clear()


# -- reading ---------------------------------------------------------------------------------------


def parse_table(text: str, *, where: str) -> Table:
    """Return the table in a JSON text.

    Args:
        text: See the top of this file.
        where: Name of the file, for errors.

    Raises:
        ConfigError: It is no such table.
    """
    try:
        found = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise _damaged(where, f"it is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise _damaged(where, f"found {_kind(found)}, expected an object")
    card = found.get("card")
    if not isinstance(card, str) or not card:
        raise _damaged(where, f"`card` is `{card}`, expected the name of a card")
    table = Table(card, _limits(found["limits"], where) if "limits" in found else None)
    table.kernels = _entries(found.get("kernels", {}), "kernels", where)
    table.us = _entries(found.get("us", {}), "us", where)
    return table


def _limits(found: Any, where: str) -> CardLimits:  # noqa: ANN401 - whatever the file holds
    told: dict[str, Any] = found if isinstance(found, dict) else {}
    read, tflops = told.get("read_gb_s", 0), told.get("tflops", {})
    rates: list[Any] = [read, *(tflops.values() if isinstance(tflops, dict) else [None])]
    if not all(_is_number(rate) and rate > 0 for rate in rates):
        raise _damaged(
            where, f"`limits` is `{found}`, expected positive `read_gb_s` and `tflops` by dtype"
        )
    return CardLimits(float(read), {name: float(value) for name, value in tflops.items()})


def _entries(found: Any, name: str, where: str) -> _ByTokens:  # noqa: ANN401 - as above
    """Check {kernel: {"NxK": {tokens: entry}}}; an entry is settings, or a time in "us"."""
    result: _ByTokens = {}
    for kernel, shapes in _object(found, f"`{name}`", where).items():
        for shape, tokens in _object(shapes, f"`{name}.{kernel}`", where).items():
            place = f"`{name}.{kernel}.{shape}`"
            rows, _, columns = shape.partition("x")
            if not (rows.isdecimal() and columns.isdecimal()):
                raise _damaged(where, f"{place} is no shape, expected `NxK`, such as `6144x4096`")
            for count, entry in _object(tokens, place, where).items():
                if not count.isdecimal() or not int(count):
                    raise _damaged(where, f"{place} has tokens `{count}`, expected a number")
                asker = None if name == "us" else kernel
                _check(entry, asker, place=f"{place} at {count}", where=where)
                result.setdefault(kernel, {}).setdefault(shape, {})[int(count)] = entry
    return result


def _check(entry: Any, kernel: str | None, *, place: str, where: str) -> None:  # noqa: ANN401
    """Check the settings of a kernel, or a time."""
    if kernel is None:
        if not _is_number(entry) or entry <= 0:
            raise _damaged(where, f"{place} is `{entry}`, expected microseconds")
        return
    settings = _object(entry, place, where)
    wrong = next((k for k, v in settings.items() if type(v) is not int or v < 0), None)
    if wrong is not None:
        found = f"`{wrong}` is `{settings[wrong]}`"
        raise _damaged(where, f"{place}: {found}, expected an integer that is not negative")
    if why := why_not_settings(kernel, settings):
        raise _damaged(where, f"{place}: {why}")


def _object(found: Any, place: str, where: str) -> dict[str, Any]:  # noqa: ANN401 - as above
    if not isinstance(found, dict):
        raise _damaged(where, f"{place} is {_kind(found)}, expected an object")
    return found


def _is_number(found: object) -> bool:
    """True for a finite number; JSON of Python has others."""
    return isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found)


def _kind(found: object) -> str:
    return f"`{found}`" if isinstance(found, str | int | float) else f"a {type(found).__name__}"


def _damaged(where: str, message: str) -> ConfigError:
    return ConfigError(
        f"launch settings cannot be read: {message}, file `{where}`",
        hint="delete the file; `quantload tune` writes it anew",
    )


@functools.lru_cache(maxsize=4096)
def _find(kernel: str, card: str, m: int, n: int, k: int) -> Settings | None:
    return _first(_measured(card, kernel, n, k), m)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _measured_for_compiler(index: int | None, kernel: str, n: int, k: int) -> _Entries:
    """The entries for a card: a compiler warns of cached functions, and reads no files."""
    return _measured(_card(index), kernel, n, k)


def _measured(card: str, kernel: str, n: int, k: int) -> _Entries:
    """(tokens, settings) of a shape, in order of tokens; None where the rule was the best."""
    shape, table = f"{n}x{k}", _table(card)
    measured = table.kernels.get(kernel, {}).get(shape, {})
    timed = table.us.get(kernel, {}).get(shape, {})
    return tuple(
        (tokens, tuple(measured[tokens].items()) if tokens in measured else None)
        for tokens in sorted(measured.keys() | timed.keys())
    )


def _first(entries: _Entries, m: int) -> Settings | None:
    for tokens, settings in entries:
        if m <= tokens:
            is_near = tokens <= max(2 * m, _AT_ONCE)
            return dict(settings) if settings is not None and is_near else None
    return None


@functools.cache
def _table(card: str) -> Table:
    """Return the packaged table of a card with the user's entries in it; empty if there is none."""
    table = Table(card)
    packaged = resources.files("quantload.runtime") / "tuned" / f"{_file_name(card)}.json"
    if packaged.is_file():
        text = packaged.read_text(encoding="utf-8")
        table = table.updated(parse_table(text, where=packaged.name))
    own = user_table(card)
    if own.is_file():
        table = table.updated(read_table(own))
    return table


def read_table(path: Path) -> Table:
    """Return the table in a file.

    Raises:
        ConfigError: It cannot be read, or is no such table.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _damaged(str(path), str(error)) from error
    return parse_table(text, where=str(path))


def _card(index: int | None) -> str:
    return _card_of(torch.cuda.current_device() if index is None else index)


@functools.cache
def _card_of(index: int) -> str:
    return torch.cuda.get_device_name(index)


def _file_name(card: str) -> str:
    return "".join(c if c.isalnum() or c in "-." else "_" for c in card)
