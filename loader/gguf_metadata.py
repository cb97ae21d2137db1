"""Read the metadata of a GGUF file key by key, and keep account of which keys were understood.

Keys are read under the name of the architecture ("llama.block_count"). A key that is not understood
is an error, since it may change the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quantload.errors import (
    FormatMismatch,
    HeaderError,
    UnsupportedVariant,
    listed,
)

OTHER_SOURCE = "start from the model's safetensors checkpoint"
# Metadata that changes no result, or is derived from what is checked.
_WITHOUT_EFFECT = ("rope.scaling.finetuned", "tensor_data_layout")


def special_token_ids(metadata: Mapping[str, Any], path: Path) -> dict[str, int | None]:
    """Return the ids of the tokens "bos", "eos", "unk" and "pad"; None where there is none.

    Raises:
        HeaderError: An id is no number.
    """
    # What llama.cpp assumes where a file with a SentencePiece vocabulary is silent.
    sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    defaults = {"bos": 1, "eos": 2, "unk": 0} if sentencepiece else {}
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {}
    for name, key in keys.items():
        token = metadata.get(f"tokenizer.ggml.{key}_token_id", defaults.get(name))
        if token is not None and (not isinstance(token, int) or token < 0):
            raise HeaderError(
                f"metadata key `tokenizer.ggml.{key}_token_id` is `{token}`, expected a token id, "
                f"in `{path}`"
            )
        ids[name] = token
    return ids


class Metadata:
    """The metadata under the name of the architecture.

    Args:
        metadata: All metadata of the file.
        path: The file, for messages.
    """

    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        self.architecture = str(metadata.get("general.architecture"))
        self.path = path
        self.all = metadata
        self._read: set[str] = set()
        self.ignore(*_WITHOUT_EFFECT)

    def full(self, key: str) -> str:
        """Return the key under the name of the architecture."""
        return f"{self.architecture}.{key}"

    def has(self, key: str) -> bool:
        """Return whether the key is there."""
        return self.full(key) in self.all

    def ignore(self, *keys: str) -> None:
        """Take note of keys that change nothing."""
        self._read.update(keys)

    def value(self, key: str, default: Any = None) -> Any:  # noqa: ANN401
        """Return a single value.

        Raises:
            HeaderError: It is missing, and there is no default.
            UnsupportedVariant: There is one for each layer.
        """
        value = self._any(key, default)
        if isinstance(value, np.ndarray | list):
            raise UnsupportedVariant(
                f"metadata key `{self.full(key)}` differs from layer to layer, expected one value, "
                f"in `{self.path}`"
            )
        return value

    def _any(self, key: str, default: Any = None) -> Any:  # noqa: ANN401
        self._read.add(key)
        value = self.all.get(self.full(key), default)
        if value is None:
            raise HeaderError(f"metadata key `{self.full(key)}` is missing, in `{self.path}`")
        return value

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """Return an integer that is at least `least`."""
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            kind = "a positive integer" if least else "an integer, 0 or more"
            raise HeaderError(
                f"metadata key `{self.full(key)}` is `{value}`, expected {kind}, in `{self.path}`"
            )
        return value

    def counts(self, key: str, layers: int) -> list[int]:
        """Return an integer of each layer, 0 or more; one value stands for all layers."""
        value = self._any(key)
        listed_values = value.tolist() if isinstance(value, np.ndarray) else value
        found = listed_values if isinstance(listed_values, list) else [value] * layers
        if len(found) != layers or any(not isinstance(n, int) or n < 0 for n in found):
            raise HeaderError(
                f"metadata key `{self.full(key)}` is `{found}`, expected {layers} integers, "
                f"in `{self.path}`"
            )
        return found

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number, as the shortest decimal: 1e-05 for 9.99999974e-06."""
        value = self.value(key, default)
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise HeaderError(
                f"metadata key `{self.full(key)}` is `{value}`, expected a number, in `{self.path}`"
            )
        return float(str(np.float32(value)))

    def epsilon(self, default: float | None = None) -> float:
        """Return the epsilon of the norms, under whichever of its two keys it is.

        Raises:
            FormatMismatch: Both are there and differ.
        """
        keys = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
        found = {self.number(key) for key in keys if self.has(key)}
        if len(found) > 1:
            raise FormatMismatch(
                f"metadata keys `{self.full(keys[0])}` and `{self.full(keys[1])}` differ: "
                f"{listed(found)}, in `{self.path}`"
            )
        return found.pop() if found else self.number(keys[0], default)

    def refuse_unless(self, key: str, neutral: Any, meaning: str) -> None:  # noqa: ANN401
        """Raise UnsupportedVariant unless a value is neutral or missing."""
        value = self.value(key, neutral)
        if value != neutral:
            raise UnsupportedVariant(
                f"metadata key `{self.full(key)}` is `{value}`: {meaning} is not read, "
                f"in `{self.path}`",
                hint=OTHER_SOURCE,
            )

    def refuse_unread(self) -> None:
        """Raise UnsupportedVariant if there are keys that were neither read nor ignored."""
        prefix = self.full("")
        unread = {
            key
            for key in self.all
            if key.startswith(prefix) and key.removeprefix(prefix) not in self._read
        }
        if unread:
            raise UnsupportedVariant(
                f"metadata keys that may change the result are not understood: {listed(unread)}, "
                f"in `{self.path}`",
                hint=OTHER_SOURCE,
            )
