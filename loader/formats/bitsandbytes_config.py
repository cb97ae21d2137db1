"""bitsandbytes: what the config says, and the JSON state that lies beside each 4-bit weight."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quantload.errors import FormatMismatch, UnsupportedVariant
from quantload.loader.checkpoint import Checkpoint, TensorEntry
from quantload.loader.formats.matching import matches_suffix, matches_transformers

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_MAX_STATE_BYTES = 4096


@dataclass(frozen=True)
class BnbConfig:
    """What a quantization config says.

    Args:
        bits: 4 or 8; None if there is no config.
        kind: "nf4" or "fp4"; "" if the config does not say.
        skipped: Patterns of modules that stay in full precision, by transformers' rule.
        entry: The entry that asks for quantization, for people; "" if there is none.
    """

    bits: int | None
    kind: str
    skipped: tuple[str, ...]
    entry: str

    def skipped_by(self, module: str) -> str:
        """Return the pattern that leaves a module out, "" if none does."""
        matching = (p for p in self.skipped if matches_transformers(p, module))
        return next((p for p in matching if _keeps_components(p, module)), "")

    def check_bits(self, bits: int, kind: str, name: str, checkpoint_name: str) -> None:
        """Compare with what a tensor holds.

        Raises:
            FormatMismatch: The config says another number of bits, or another type.
        """
        if self.bits is None:
            return
        if self.bits != bits or (bits == 4 and self.kind and self.kind != kind):
            said = f"{self.bits} bits" + (f", {self.kind}" if self.bits == 4 else "")
            raise FormatMismatch(
                f"tensor `{name}` holds `{kind}`, but the config says `{said}`, in "
                f"`{checkpoint_name}`",
                hint="these files are not the ones that the config was written for",
            )


def _keeps_components(pattern: str, module: str) -> bool:
    """False if the pattern is only the end of a component: `kv_proj` of `qkv_proj`.

    transformers 5.24 leaves such a module out, earlier versions and vLLM do not: here the files
    decide, and neither is worth a warning.
    """
    return matches_suffix(pattern, module) or not module.endswith(pattern)


def parse_config(config: Mapping[str, Any], checkpoint_name: str) -> BnbConfig:
    """Read a quantization config; an empty one says nothing.

    Raises:
        FormatMismatch: A value is of a wrong type, or the config asks for 4 and for 8 bits.
    """
    if not config:
        return BnbConfig(bits=None, kind="", skipped=(), entry="")
    asked = {bits: _flag(config, f"load_in_{bits}bit", checkpoint_name) for bits in (4, 8)}
    if asked[4] == asked[8]:
        found = f"load_in_4bit = {asked[4]}, load_in_8bit = {asked[8]}"
        raise FormatMismatch(
            f"the bitsandbytes config says `{found}`, expected one of them to be true, in "
            f"`{checkpoint_name}`"
        )
    bits = 4 if asked[4] else 8
    kind = config.get("bnb_4bit_quant_type")
    if kind is not None and not isinstance(kind, str):
        raise _wrong("bnb_4bit_quant_type", kind, "`nf4` or `fp4`", checkpoint_name)
    if bits == 4 and kind is not None and kind not in ("nf4", "fp4"):
        raise UnsupportedVariant(
            f"`bnb_4bit_quant_type` is `{kind}`, expected `nf4` or `fp4`, in `{checkpoint_name}`"
        )
    skipped = config.get("llm_int8_skip_modules")
    return BnbConfig(
        bits=bits,
        kind=kind or "",
        skipped=_patterns(skipped, checkpoint_name),
        entry=f"load_in_{bits}bit",
    )


def _flag(config: Mapping[str, Any], key: str, checkpoint_name: str) -> bool:
    value = config.get(key, config.get(f"_{key}"))
    if value is not None and not isinstance(value, bool):
        raise _wrong(key, value, "true or false", checkpoint_name)
    return bool(value)


def _patterns(value: object, checkpoint_name: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(p, str) and p for p in value):
        raise _wrong("llm_int8_skip_modules", value, "a list of names", checkpoint_name)
    for pattern in value:
        try:
            re.compile(pattern)
        except (re.error, OverflowError) as error:
            what = f"regular expressions ({error})"
            raise _wrong("llm_int8_skip_modules", pattern, what, checkpoint_name) from error
    return tuple(dict.fromkeys(value))


def _wrong(key: str, value: object, expected: str, checkpoint_name: str) -> FormatMismatch:
    return FormatMismatch(
        f"`{key}` of the bitsandbytes config is `{value!r}`, expected {expected}, in "
        f"`{checkpoint_name}`"
    )


@dataclass(frozen=True)
class QuantState:
    """The state of one 4-bit parameter.

    Args:
        kind: "nf4" or "fp4".
        shape: Shape of the parameter: (N, K), or (E, rows, columns).
        dtype: dtype that finished values are rounded to.
        blocksize: Elements that share one scale.
        nested_blocksize: Scales that share one scale of their own; 0 without double quantization.
        nested_offset: What is added to every scale.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    blocksize: int
    nested_blocksize: int = 0
    nested_offset: float = 0.0

    @property
    def elements(self) -> int:
        """Number of elements of the parameter."""
        return math.prod(self.shape)


def read_state(checkpoint: Checkpoint, entry: TensorEntry, kind: str) -> QuantState:
    """Read and check the state of one parameter: a few hundred bytes.

    Args:
        checkpoint: An open checkpoint.
        entry: Header of `<parameter>.quant_state.bitsandbytes__<kind>`.
        kind: "nf4" or "fp4".

    Raises:
        FormatMismatch: It is not the JSON object that bitsandbytes writes.
    """
    if entry.dtype != torch.uint8 or len(entry.shape) != 1 or entry.num_bytes > _MAX_STATE_BYTES:
        raise FormatMismatch(
            f"tensor `{entry.name}` is `{entry.dtype}` of shape `{entry.shape}`, expected the "
            f"bytes of a small JSON object, in `{checkpoint.name}`"
        )
    raw = bytes(checkpoint.read(entry.name).numpy())
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise FormatMismatch(
            f"tensor `{entry.name}` holds no JSON: {error}, in `{checkpoint.name}`"
        ) from error
    if not isinstance(content, dict):
        raise FormatMismatch(
            f"tensor `{entry.name}` holds a JSON {type(content).__name__}, expected an object, in "
            f"`{checkpoint.name}`"
        )
    return _StateParser(content, f"tensor `{entry.name}`", checkpoint.name).parse(kind)


@dataclass(frozen=True)
class _StateParser:
    content: Mapping[str, Any]
    where: str
    checkpoint_name: str

    def parse(self, kind: str) -> QuantState:
        if self.content.get("quant_type") != kind:
            raise self.wrong("quant_type", f"`{kind}`")
        shape = self.content.get("shape")
        if not isinstance(shape, list) or not shape or not all(_is_count(size) for size in shape):
            raise self.wrong("shape", "a list of positive numbers")
        dtype = self.content.get("dtype")
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise self.wrong("dtype", "`float32`, `float16` or `bfloat16`")
        state = QuantState(kind, tuple(shape), _DTYPES[dtype], self.count("blocksize"))
        nested = [key for key in self.content if key.startswith("nested")]
        return self.nested(state) if nested else state

    def nested(self, state: QuantState) -> QuantState:
        if self.content.get("nested_dtype") != "float32":
            raise self.wrong("nested_dtype", "`float32`")
        offset = self.content.get("nested_offset")
        if not isinstance(offset, float) or not math.isfinite(offset):
            raise self.wrong("nested_offset", "a finite number with a decimal point")
        return QuantState(
            kind=state.kind,
            shape=state.shape,
            dtype=state.dtype,
            blocksize=state.blocksize,
            nested_blocksize=self.count("nested_blocksize"),
            nested_offset=offset,
        )

    def count(self, key: str) -> int:
        value = self.content.get(key)
        if not isinstance(value, int) or not _is_count(value):
            raise self.wrong(key, "a positive number")
        return value

    def wrong(self, key: str, expected: str) -> FormatMismatch:
        found = self.content.get(key, "nothing")
        return FormatMismatch(
            f"{self.where}: `{key}` is `{found!r}`, expected {expected}, in "
            f"`{self.checkpoint_name}`"
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 40
