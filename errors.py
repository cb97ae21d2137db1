"""The error tree. Every error a user can cause says what was found, what was expected and where.

    QuantloadError
    +-- CheckpointError            the files of a checkpoint are not what they claim to be
    |   +-- HeaderError            a safetensors or GGUF header is damaged, truncated or lies
    |   +-- MissingTensor          a tensor that the model or the format needs is not in the files
    |   +-- UnexpectedTensor       a tensor in the files has no place in the model
    |   +-- NonFiniteWeight        a weight to be quantized holds NaN or infinity
    |   +-- SourceNotFound         no such folder, file or hub repository, or no access to it
    +-- FormatError                the quantization format cannot be read or written
    |   +-- UnknownFormat          not a format that quantload reads
    |   +-- UnsupportedVariant     a known format, in a variant that quantload does not read
    |   +-- FormatMismatch         config and tensor headers contradict each other
    |   +-- NotLossless            a weight cannot be written without changing its values
    +-- ConfigError                rules, schemes or options do not fit
    |   +-- WrongType              an argument is of a type that is not taken
    |   +-- UnknownScheme          not the name of a scheme
    |   +-- UnusedRule             a rule that matches no module
    |   +-- RuleSplitsStack        a rule that quantizes q/k/v or gate/up differently
    +-- OutputError                the output folder cannot be used or written
    +-- UploadError                an output cannot be uploaded to the hub
    +-- WorkerError                another of several processes failed
    +-- ShapeError                 shapes do not fit each other
    +-- ModelError                 transformers cannot build or run the model
    +-- AccuracyError              a measured error is above its limit
    +-- NotComparable              two checkpoints are not of the same model
    +-- BaselineError              a baseline file cannot be read or is damaged

Message form: what is wrong, found and expected values in backticks, the place; then, where we
know a way out, a blank line and `hint:`.
"""

from __future__ import annotations

from collections.abc import Iterable


class QuantloadError(Exception):
    """Any error that quantload raises on purpose.

    Args:
        message: What is wrong, with the values found and expected, and where.
        hint: A way out, if there is one.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        self.message = message
        self.hint = hint
        super().__init__(f"{message}\n\nhint: {hint}" if hint else message)


class CheckpointError(QuantloadError, ValueError):
    """The files of a checkpoint are not what they claim to be."""


class HeaderError(CheckpointError):
    """A safetensors or GGUF header is damaged, truncated or does not fit the file."""


class MissingTensor(CheckpointError):
    """A tensor that the model or the format needs is not in the checkpoint."""


class UnexpectedTensor(CheckpointError):
    """A tensor in the checkpoint has no place in the model."""


class NonFiniteWeight(CheckpointError):
    """A weight that is to be quantized holds NaN or infinity."""


class SourceNotFound(CheckpointError):
    """There is no such folder, file or hub repository, or no access to it."""


class FormatError(QuantloadError, ValueError):
    """The quantization format cannot be read or written."""


class UnknownFormat(FormatError):
    """The checkpoint is in a format that quantload does not read."""


class UnsupportedVariant(FormatError):
    """The format is known, but not this variant of it."""


class FormatMismatch(FormatError):
    """The quantization config and the tensor headers contradict each other."""


class NotLossless(FormatError):
    """A quantized weight cannot be written in this format without changing its values."""


class ConfigError(QuantloadError, ValueError):
    """Rules, schemes or options do not fit."""


class WrongType(ConfigError, TypeError):
    """An argument is of a type that is not taken."""


class UnknownScheme(ConfigError):
    """The name is not the name of a scheme."""


class UnusedRule(ConfigError):
    """A rule matches no module of the checkpoint."""


class RuleSplitsStack(ConfigError):
    """A rule gives the members of one fused layer different schemes."""


class OutputError(QuantloadError, OSError):
    """The output folder cannot be used or could not be written."""

    def __str__(self) -> str:  # OSError would print a tuple of its arguments
        return str(self.args[0])


class WorkerError(QuantloadError, RuntimeError):
    """Another of the processes that write an output together failed.

    Args:
        message: What is wrong.
        hint: A way out, if there is one.
        is_certain: True if the same command would fail again.
    """

    def __init__(self, message: str, *, hint: str = "", is_certain: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.is_certain = is_certain


class UploadError(QuantloadError):
    """An output cannot be uploaded to the hub."""


class ShapeError(QuantloadError, ValueError):
    """Shapes do not fit each other."""


class ModelError(QuantloadError, ValueError):
    """transformers cannot build or run the model."""


class AccuracyError(QuantloadError):
    """A measured error is above its limit."""


class NotComparable(QuantloadError, ValueError):
    """Two checkpoints are not of the same model."""


class BaselineError(QuantloadError, ValueError):
    """A baseline file cannot be read, is damaged, or cannot be made."""


def listed(items: Iterable[object], *, limit: int = 5) -> str:
    """Join sorted items in backticks, cut at `limit`: "`a`, `b` and 12 more"."""
    names = sorted(str(item) for item in items)
    shown = ", ".join(f"`{name}`" for name in names[:limit])
    more = len(names) - limit
    return f"{shown} and {more} more" if more > 0 else shown


def printable(text: str, *, keep: str = "") -> str:
    r"""Return a text from a file, as a tensor's name, so that it shows as what it is.

    Characters that steer a terminal, turn the direction of writing or cannot stand in XML are
    written as Python's escapes: `\x1b`, `\u202e`, `\n`.

    Args:
        text: The text.
        keep: Such characters that stay, as line ends of a message.
    """
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def counted(count: int, one: str, more: str = "") -> str:
    """Return a number of things for people: "1 module is kept", "3 modules are kept".

    Args:
        count: How many.
        one: What follows the number 1.
        more: What follows any other number; "" adds an `s` to `one`.
    """
    return f"{count} {one if count == 1 else more or one + 's'}"
