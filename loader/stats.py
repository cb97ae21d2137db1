"""Statistics of inputs, for schemes whose checkpoint holds a number for the input of each layer.

    stats.safetensors
        <module>.input_absmax       float32 [1] or []: the largest |x| that the layer ever met

Modules have their checkpoint names. Members of a fused group see one input: the largest of what the
file has for them serves all, since engines want one number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from quantload.errors import ConfigError, FormatMismatch, SourceNotFound, listed
from quantload.loader.checkpoint import TensorEntry, read_entry
from quantload.loader.safetensors_header import read_header
from quantload.quant.activation import default_absmax
from quantload.quant.scheme import Scheme

_LEAF = ".input_absmax"


@dataclass(frozen=True)
class InputStatistics:
    """What is known of the inputs of layers.

    Args:
        absmax: Largest |x| by module.
        stated: Largest |x| of the modules that are not listed, as the user states it; None if he
            does not.
        file: Where the numbers come from, for messages.
    """

    absmax: Mapping[str, float] = field(default_factory=dict)
    stated: float | None = None
    file: Path | None = None


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


def read_stats(file: Path, *, stated: float | None = None) -> InputStatistics:
    """Read a file of statistics.

    Args:
        file: `stats.safetensors`, whatever it is called.
        stated: Largest |x| of the modules that the file leaves out.

    Raises:
        SourceNotFound: There is no such file.
        HeaderError: It is damaged.
        FormatMismatch: It has other tensors, or numbers that no input can reach.
    """
    if not file.is_file():
        raise SourceNotFound(f"no file `{file}`, expected statistics of inputs (safetensors)")
    entries = read_header(file)
    found = {
        name.removesuffix(_LEAF): _number(entry)
        for name, entry in entries.items()
        if name.endswith(_LEAF)
    }
    if not found:
        raise FormatMismatch(
            f"`{file}` has no tensors `<module>{_LEAF}`, found {listed(entries) or 'nothing'}",
            hint="statistics of inputs are float32 tensors [1], one for each layer",
        )
    return InputStatistics(absmax=found, stated=stated, file=file)


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
        f"tensor `{module}{_LEAF}` is missing in `{stats.file}`, and scheme `{scheme}` has a "
        "fixed scale for its input",
        hint="collect statistics of all layers, or give `--input-absmax X` for those left out",
    )
