"""Arguments of public functions, checked where they come in: a wrong one is refused by its name.

Types are checked here that would otherwise fail somewhere below, or be taken for something else:
any text is true, and a text is a sequence of texts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from quantload.errors import ConfigError, WrongType

_LONGEST = 60  # characters of a value that are shown
_PLACE = "a folder, a GGUF file or a hub id"


def shown(value: object) -> str:
    """Return a value for a message: short ones as they are, and always their type."""
    kind = type(value).__name__
    if value is None or isinstance(value, bool):
        return f"`{value}`"
    if not isinstance(value, str | bytes | int | float | os.PathLike | list | tuple | dict):
        return f"the class `{value.__name__}`" if isinstance(value, type) else f"of type `{kind}`"
    text = str(value) if isinstance(value, str | os.PathLike) else repr(value)
    return f"`{text}` of type `{kind}`" if len(text) <= _LONGEST else f"of type `{kind}`"


def check_type(
    name: str,
    value: object,
    kinds: type | tuple[type, ...],
    *,
    expected: str,
    hint: str = "",
) -> None:
    """Refuse a value of another type; True and False are no numbers, scalars of arrays are.

    Raises:
        WrongType: It is of none of these types.
    """
    wanted = kinds if isinstance(kinds, tuple) else (kinds,)
    found = value if isinstance(value, wanted) else plain(value)
    is_flag = isinstance(found, bool) and bool not in wanted and object not in wanted
    if is_flag or not isinstance(found, wanted):
        raise WrongType(f"`{name}` is {shown(value)}, expected {expected}", hint=hint)


def plain(value: Any) -> Any:  # noqa: ANN401 - whatever a user passes
    """Return the Python number of a scalar of numpy or torch; everything else as it is."""
    if getattr(value, "ndim", None) != 0 or not callable(getattr(value, "item", None)):
        return value
    try:
        return value.item()
    except RuntimeError:  # a tensor without data
        return value


def check_flags(**flags: object) -> None:
    """Refuse what is neither True nor False: any text, "no" too, would count as True.

    Raises:
        WrongType: One is something else.
    """
    for name, value in flags.items():
        check_type(name, value, bool, expected="`True` or `False`")


def check_counts(least: int, **counts: object) -> tuple[int, ...]:
    """Return whole numbers as `int`; refuse what is none, or too small.

    Raises:
        WrongType: One is no whole number.
        ConfigError: One is less than `least`.
    """
    for name, value in counts.items():
        check_type(name, value, Integral, expected=f"a whole number, at least {least}")
    found = {name: int(plain(value)) for name, value in counts.items()}
    for name, count in found.items():
        if count < least:
            raise ConfigError(f"`{name}` is {count}, expected at least {least}")
    return tuple(found.values())


def as_counts(name: str, value: object, *, least: int, expected: str) -> list[int]:
    """Return several whole numbers.

    Raises:
        WrongType: They are none, or no sequence.
        ConfigError: One is less than `least`.
    """
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise WrongType(f"`{name}` is {shown(value)}, expected {expected}")
    return [count for each in value for count in check_counts(least, **{name: each})]


def as_pair(name: str, value: object, *, expected: str) -> tuple[int, int]:
    """Return two whole numbers of any size, from a tuple or a list.

    Raises:
        WrongType: They are something else.
    """
    pair: list[Any] = []
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        pair = [plain(each) for each in value]
    if len(pair) != 2 or any(isinstance(e, bool) or not isinstance(e, Integral) for e in pair):
        raise WrongType(f"`{name}` is {shown(value)}, expected {expected}")
    return int(pair[0]), int(pair[1])


def as_bytes(name: str, value: object) -> int:
    """Return a size in bytes, at least 1; `5e9` is one.

    Raises:
        WrongType: It is no whole number.
        ConfigError: It is less than 1.
    """
    found = plain(value)
    is_whole = isinstance(found, float) and found.is_integer()
    return check_counts(1, **{name: int(found) if is_whole else value})[0]


def check_progress(progress: object) -> None:
    """Refuse what cannot draw progress.

    Raises:
        WrongType: It lacks a method of `quantload.progress.Progress`.
    """
    methods = ("start", "advance", "finish")
    if progress is None or all(callable(getattr(progress, name, None)) for name in methods):
        return
    raise WrongType(
        f"`progress` is {shown(progress)}, expected an object with `start`, `advance` and `finish`",
        hint="see `quantload.progress.Progress`; None draws nothing",
    )


def as_path(name: str, value: str | os.PathLike[str], *, expected: str) -> Path:
    """Return a path with `~` as it is.

    Raises:
        WrongType: It is no text and no path.
        ConfigError: It is empty.
    """
    check_type(name, value, (str, os.PathLike), expected=expected)
    if not isinstance(os.fspath(value), str):  # a path of bytes
        raise WrongType(f"`{name}` is {shown(value)}, expected {expected}, as text")
    if not str(value).strip():
        raise ConfigError(f"`{name}` is empty, expected {expected}")
    return Path(value)


def check_source(name: str, value: object, *, expected: str = _PLACE) -> None:
    """Refuse what names no checkpoint; an empty name is left to who opens it.

    Raises:
        WrongType: It is no text and no path.
    """
    hint = "give its path as `str` or `Path`"
    if hasattr(value, "named_modules"):
        hint = "a loaded model is no checkpoint: give what it was loaded from"
    elif hasattr(value, "checkpoint") or hasattr(value, "source"):
        hint = "give the path of what was opened"
    check_type(name, value, (str, os.PathLike), expected=expected, hint=hint)
    if not isinstance(os.fspath(value), str):  # type: ignore[call-overload]  # checked above
        raise WrongType(f"`{name}` is {shown(value)}, expected {expected}, as text", hint=hint)


def as_texts(name: str, value: object, *, example: str) -> list[str]:
    """Return several texts; one alone is refused, since it is a sequence of its characters.

    Raises:
        WrongType: They are no texts, or no sequence.
    """
    hint = f"for example `{name}=[{example!r}]`"
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
        raise WrongType(f"`{name}` is {shown(value)}, expected a list of texts", hint=hint)
    texts = list(value)
    for text in texts:
        if not isinstance(text, str):
            raise WrongType(f"an entry of `{name}` is {shown(text)}, expected texts", hint=hint)
    return texts


def as_token_ids(name: str, value: Any) -> list[int]:  # noqa: ANN401 - whatever a user passes
    """Return token ids, from a list, an array or a tensor of one dimension.

    Raises:
        WrongType: They are something else.
    """
    ids = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(ids, str | bytes | Mapping) or not hasattr(ids, "__iter__"):
        raise WrongType(f"`{name}` is {shown(value)}, expected a list of token ids", hint=_TOKENIZE)
    ids = [token if type(token) is int else plain(token) for token in ids]
    for token in ids:
        if type(token) is not int and (isinstance(token, bool) or not isinstance(token, Integral)):
            found = f"an entry of `{name}` is {shown(token)}"
            raise WrongType(f"{found}, expected a token id", hint=_TOKENIZE)
    return [int(token) for token in ids]


def as_sequences(name: str, value: Any) -> list[list[int]]:  # noqa: ANN401 - as above
    """Return sequences of token ids, from lists, arrays or a tensor of two dimensions.

    Raises:
        WrongType: They are something else.
    """
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
        raise WrongType(
            f"`{name}` is {shown(value)}, expected lists of token ids, one for each sequence",
            hint=_TOKENIZE,
        )
    return [as_token_ids(f"{name}[{number}]", ids) for number, ids in enumerate(value)]


def as_prompts(prompts: Any) -> list[Any]:  # noqa: ANN401 - as above
    """Return the prompts of a call that may be given one alone: a text, or token ids.

    Raises:
        WrongType: They are neither texts nor lists.
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | Mapping) or not hasattr(prompts, "__iter__"):
        raise WrongType(f"`prompts` is {shown(prompts)}, expected texts or lists of token ids")
    several: list[Any] = prompts.tolist() if hasattr(prompts, "tolist") else list(prompts)
    is_one = bool(several) and isinstance(plain(several[0]), Integral)
    return [several] if is_one else several


def check_tokenizer(tokenizer: object) -> None:
    """Refuse what is no tokenizer; None is none.

    Raises:
        WrongType: It cannot decode.
    """
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        raise WrongType(
            f"`tokenizer` is {shown(tokenizer)}, expected a tokenizer of transformers",
            hint="`quantload.load_tokenizer` reads that of a checkpoint",
        )


def check_callable(name: str, value: object) -> None:
    """Refuse what cannot be called; None is allowed.

    Raises:
        WrongType: It is something else.
    """
    if value is not None and not callable(value):
        raise WrongType(f"`{name}` is {shown(value)}, expected a function or None")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Refuse what is none of some names.

    Raises:
        ConfigError: It is something else.
    """
    if not isinstance(value, str) or value not in choices:
        listed = ", ".join(f"`{choice}`" for choice in choices)
        found = f"`{value}`" if isinstance(value, str) else shown(value)
        raise ConfigError(f"`{name}` is {found}, expected one of {listed}")


_TOKENIZE = 'for example `[tokenizer("some text")["input_ids"]]`'

__all__ = [
    "as_bytes",
    "as_counts",
    "as_path",
    "as_prompts",
    "as_sequences",
    "as_texts",
    "as_token_ids",
    "check_callable",
    "check_choice",
    "check_counts",
    "check_flags",
    "check_progress",
    "check_source",
    "check_tokenizer",
    "check_type",
    "plain",
    "shown",
]
