"""Statistics of inputs: for fixed scales of inputs, and for the search for scales of weights.

    stats.safetensors
        <module>.input_absmax       float32 [1] or []: the largest |x| that the layer ever met
        <module>.input_mean_square  float32 [K]: E[x^2] of each input feature over all tokens
        <module>.input_min, .input_max, .tokens    beside these in files of `quantload stats`, for
                                    people: not read here

Modules have their checkpoint names. Members of a fused group see one input: the largest absmax that
the file has for them serves all, since engines want one number. A mean square serves the module
whose name it has, and no other.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from quantload.errors import CheckpointError, ConfigError, FormatMismatch, SourceNotFound, listed
from quantload.loader.checkpoint import TensorEntry, files_kept_open, read_entry
from quantload.loader.safetensors_header import read_header
from quantload.quant.activation import default_absmax
from quantload.quant.scheme import Scheme

_ABSMAX, _MEAN_SQUARE = ".input_absmax", ".input_mean_square"
_KNOWN = (_ABSMAX, _MEAN_SQUARE, ".input_min", ".input_max", ".tokens")


@dataclass(frozen=True, slots=True)
class InputMeanSquare:
    """E[x^2] of the input features of a module, in a file: what an error in each column counts.

    Args:
        entry: Where it lies, float32 [K].
        sha256: Of its bytes when it was checked.
        is_zero: True if it is zero in all columns: no input ever reached the module.
    """

    entry: TensorEntry
    sha256: str
    is_zero: bool = False

    def read(self) -> Tensor:
        """Read it, [K] float32.

        Raises:
            CheckpointError: It is not what was checked any more.
        """
        values = read_entry(self.entry)
        if _digest(values) != self.sha256:
            raise CheckpointError(
                f"tensor `{self.entry.name}` has changed since the plan was made, in "
                f"`{self.entry.file}`",
                hint="convert again, and leave the file as it is meanwhile",
            )
        return values


@dataclass(frozen=True)
class InputStatistics:
    """What is known of the inputs of layers.

    Args:
        absmax: Largest |x| by module.
        stated: Largest |x| of the modules that are not listed, as the user states it; None if he
            does not.
        file: Where the numbers come from, for messages.
        mean_square: E[x^2] of input features by module.
        sha256: Of the file.
        others: Tensors of the file that are none of these.
    """

    absmax: Mapping[str, float] = field(default_factory=dict)
    stated: float | None = None
    file: Path | None = None
    mean_square: Mapping[str, InputMeanSquare] = field(default_factory=dict)
    sha256: str | None = None
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class InputAbsmax:
    """The largest |x| that the number for an input covers.

    Args:
        value: The largest |x|.
        origin: Where it comes from, for people.
        is_default: True if neither data nor the user say so.
    """

    value: float
    origin: str
    is_default: bool = False


@files_kept_open()
def read_stats(file: Path, *, stated: float | None = None) -> InputStatistics:
    """Read a file of statistics; mean squares are checked, and read again when they are needed.

    Args:
        file: `stats.safetensors`, whatever it is called.
        stated: Largest |x| of the modules that the file leaves out.

    Raises:
        SourceNotFound: There is no such file.
        HeaderError: It is damaged.
        FormatMismatch: It has only other tensors, or numbers that no input can reach.
    """
    if not file.is_file():
        raise SourceNotFound(f"no file `{file}`, expected statistics of inputs (safetensors)")
    entries = read_header(file)
    absmax = {name: _number(entry) for name, entry in _of_leaf(entries, _ABSMAX)}
    mean_square = {name: _features(entry) for name, entry in _of_leaf(entries, _MEAN_SQUARE)}
    if not absmax and not mean_square:
        raise FormatMismatch(
            f"`{file}` has no tensors `<module>{_ABSMAX}` or `<module>{_MEAN_SQUARE}`, found "
            f"{listed(entries) or 'nothing'}",
            hint="statistics of inputs are float32 tensors, [1] and [input features] of each layer",
        )
    return InputStatistics(
        absmax=absmax,
        stated=stated,
        file=file,
        mean_square=mean_square,
        sha256=_sha256_of(file),
        others=tuple(name for name in entries if not name.endswith(_KNOWN)),
    )


def _of_leaf(entries: Mapping[str, TensorEntry], leaf: str) -> list[tuple[str, TensorEntry]]:
    """Return (module, entry) of the tensors that are called so."""
    return [(n.removesuffix(leaf), entry) for n, entry in entries.items() if n.endswith(leaf)]


def _sha256_of(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"cannot read `{file}`: {error.strerror or error}") from error


def _digest(values: Tensor) -> str:
    return hashlib.sha256(values.numpy().data).hexdigest()


def _features(entry: TensorEntry) -> InputMeanSquare:
    if entry.dtype != torch.float32 or len(entry.shape) != 1:
        raise FormatMismatch(
            f"tensor `{entry.name}` is `{entry.dtype}` of shape `{entry.shape}`, expected "
            f"`{torch.float32}` with one number for each input feature, in `{entry.file}`"
        )
    values = read_entry(entry)
    wrong = (~(values.isfinite() & (values >= 0))).nonzero()
    if len(wrong):
        place = int(wrong[0])
        raise FormatMismatch(
            f"tensor `{entry.name}` is `{values[place].item()}` at feature {place}, expected "
            f"finite numbers that are not negative, in `{entry.file}`"
        )
    return InputMeanSquare(entry, _digest(values), is_zero=not bool(values.any()))


def _number(entry: TensorEntry) -> float:
    if entry.dtype != torch.float32 or entry.shape not in ((), (1,)):
        raise FormatMismatch(
            f"tensor `{entry.name}` is `{entry.dtype}` of shape `{entry.shape}`, expected "
            f"`{torch.float32}` of shape `(1,)`, in `{entry.file}`"
        )
    value = read_entry(entry).item()
    if not math.isfinite(value) or value < 0:
        raise FormatMismatch(
            f"tensor `{entry.name}` is `{value}`, expected a finite number that is not negative, "
            f"in `{entry.file}`"
        )
    return float(value)


def input_absmax_for(
    scheme: Scheme,
    module: str,
    stats: InputStatistics | None = None,
    *,
    members: Sequence[str] = (),
) -> InputAbsmax | None:
    """Return the largest |x| that the number for a module's input covers.

    Args:
        scheme: How the module is quantized.
        module: Its checkpoint name.
        stats: What is known of inputs.
        members: Modules that see the same input, such as its fused group.

    Returns:
        None if the checkpoint holds no number for the input of this scheme.

    Raises:
        ConfigError: Nothing is known of the input, and the scheme has no default.
    """
    if scheme.input is None or not scheme.input.needs_scale:
        return None
    stats = stats or InputStatistics()
    known = [stats.absmax[name] for name in (module, *members) if name in stats.absmax]
    if known:
        return InputAbsmax(max(known), f"`{stats.file}`" if stats.file else "statistics")
    if stats.stated is not None:
        return InputAbsmax(stats.stated, "stated")
    default = default_absmax(scheme.input)
    if default is not None:
        return InputAbsmax(default, "a default without data", is_default=True)
    if stats.file is None:
        raise ConfigError(
            f"scheme `{scheme}` has a fixed scale for the input of `{module}`, and nothing says "
            "how large that input gets",
            hint="give statistics with `--stats FILE`, or the largest value with "
            "`--input-absmax X`; `FP8_DYNAMIC` needs neither",
        )
    raise ConfigError(
        f"tensor `{module}{_ABSMAX}` is missing in `{stats.file}`, and scheme `{scheme}` has a "
        "fixed scale for its input",
        hint="collect statistics of all layers, or give `--input-absmax X` for those left out",
    )
