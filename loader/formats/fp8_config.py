"""What the configs of `fp8`, `fbgemm_fp8` and `mxfp8` say.

key                        meaning
activation_scheme          "dynamic" or "static"; without it, GPTQModel leaves inputs alone, and
                           all others mean "dynamic"
weight_block_size          [rows, columns] of a block; null: a scale for the tensor or a row. Left
                           out: that, or blocks of 128 x 128, the default of transformers
ignored_layers,            modules in full precision, see `exclusions.py`
modules_to_not_convert
extra_config               AutoRound: {module: {"bits": 16, ...}} is in full precision
dynamic                    GPTQModel: {"-:regex": {}} is in full precision
fmt, format,               number format of the codes: e4m3 or e5m2
checkpoint_format
scale_fmt                  "ue8m0": scales are powers of two, in whatever dtype
expert_dtype               "fp4": weights of experts are e2m1 in groups of 32
weight_scale_method        GPTQModel: "tensor", "row" or "block"
weight_scale_semantics     GPTQModel: "inverse", scales are divisors
bits, sym, data_type       8, true, "fp" where AutoRound and GPTQModel write them

Source: `FineGrainedFP8Config` and `FbgemmFp8Config` of transformers 5.24.0, `Fp8Config` of vLLM
0.33.0, `FP8Config` of GPTQModel 7.7.0, AutoRound 0.16.1, Quark 0.13 (custom mode `fp8`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from quantload.errors import FormatMismatch, UnsupportedVariant, listed
from quantload.loader.checkpoint import Checkpoint
from quantload.loader.formats.exclusions import Exclusions
from quantload.loader.formats.float8 import Block
from quantload.quant.grid import E4M3, E5M2, Grid
from quantload.quant.scheme import InputScheme, ScaleKind

DEFAULT_BLOCK: Block = (128, 128)
_LISTS = ("ignored_layers", "modules_to_not_convert")
_GRIDS = {
    "e4m3": E4M3,
    "e4m3fn": E4M3,
    "float8_e4m3fn": E4M3,
    "fp8_e4m3": E4M3,
    "e5m2": E5M2,
    "float8_e5m2": E5M2,
    "fp8_e5m2": E5M2,
}
_MX_BLOCK: Block = (1, 32)


@dataclass(frozen=True, kw_only=True)
class Fp8Config:
    """A parsed config.

    Args:
        method: `quant_method`.
        grid: Number format of the codes.
        block: Rows and columns of a block; None if there are none.
        is_block_stated: False if the config does not mention blocks.
        is_static: True if the checkpoint holds the scales of inputs.
        is_weight_only: True if inputs stay in full precision.
        divides: True if scales are divisors.
        method_of_scale: "tensor", "row" or "block" if the config says so, else "".
        exponents_only: True if scales are bytes of exponents and nothing else.
        exclusions: Modules in full precision.
        excluded_starts: The same, as regular expressions for the start of their names.
        converted: Modules that the config names as quantized.
    """

    method: str
    grid: Grid
    block: Block | None
    is_block_stated: bool
    is_static: bool
    is_weight_only: bool
    divides: bool
    method_of_scale: str
    exponents_only: bool
    exclusions: Exclusions
    excluded_starts: tuple[re.Pattern[str], ...]
    converted: frozenset[str]

    def input_of(self, block: Block | None) -> InputScheme | None:
        """Return how the input of a weight with such blocks is quantized."""
        if self.is_weight_only:
            return None
        if self.is_static:
            return _STATIC_INPUT
        return _TOKEN_INPUT if block is None else _group_input(block[1], self.exponents_only)

    def excluded_by(self, module: str) -> str:
        """Return the entry that leaves a module in full precision, "" if none does."""
        for pattern in self.excluded_starts:
            if pattern.match(module):
                return f"dynamic: -:{pattern.pattern}"
        return self.exclusions.entry_for(module)

    def entries(self) -> list[str]:
        """Return the entries of the lists of modules in full precision, as "<list>: <entry>"."""
        return [f"{key}: {entry}" for entry, key in self.exclusions.entries.items()]


_STATIC_INPUT = InputScheme(grid=E4M3, granularity="tensor", dynamic=False)
_TOKEN_INPUT = InputScheme(grid=E4M3, granularity="token")


@cache
def _group_input(columns: int, exponents_only: bool) -> InputScheme:
    scale: ScaleKind = "e8m0" if exponents_only else "float"
    return InputScheme(grid=E4M3, granularity="group", group_size=columns, scale=scale)


def parse_config(checkpoint: Checkpoint) -> Fp8Config:
    """Read the quantization config of a checkpoint.

    Raises:
        FormatMismatch: A value is of the wrong type or makes no sense.
        UnsupportedVariant: It asks for something that is not read.
    """
    content = checkpoint.quantization_config
    assert content is not None, "detected by its config"
    place = f"`{checkpoint.quantization_config_file}` of `{checkpoint.name}`"
    return _Parser(content, place).parse()


class _Parser:
    def __init__(self, content: Mapping[str, Any], place: str) -> None:
        self.content, self.place = content, place

    def parse(self) -> Fp8Config:
        method = str(self.content.get("quant_method")).lower()
        self._check_facts()
        is_gptqmodel = "weight_scale_method" in self.content or self._text("method") == "fp8"
        scheme = self._choice("activation_scheme", ("dynamic", "static"))
        block = self._block("weight_block_size")
        is_mx = method == "mxfp8"
        if is_mx and block not in (None, _MX_BLOCK):
            raise self._mismatch("weight_block_size", "[1, 32], the blocks of MXFP8")
        block = _MX_BLOCK if is_mx else block
        scale_fmt = self._choice("scale_fmt", ("float", "ue8m0"))
        return Fp8Config(
            method=method,
            grid=self._grid(),
            block=block,
            is_block_stated=is_mx or is_gptqmodel or "weight_block_size" in self.content,
            is_static=scheme == "static",
            is_weight_only=is_gptqmodel and not scheme,
            divides=is_gptqmodel,
            method_of_scale=self._choice("weight_scale_method", ("tensor", "row", "block")),
            exponents_only=is_mx or (block == _MX_BLOCK and scale_fmt == "ue8m0"),
            exclusions=Exclusions(self._excluded()),
            excluded_starts=self._excluded_starts(),
            converted=frozenset(self._names("modules_to_convert")),
        )

    # -- values ------------------------------------------------------------------------------------

    def _mismatch(self, key: str, expected: str) -> FormatMismatch:
        return FormatMismatch(
            f"`{key}` is `{self.content.get(key)!r}`, expected {expected}, in {self.place}"
        )

    def _text(self, key: str) -> str:
        """Return a text in lower case; "" if it is left out or null."""
        value = self.content.get(key)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self._mismatch(key, "a text")
        return value.lower()

    def _choice(self, key: str, known: tuple[str, ...]) -> str:
        value = self._text(key)
        if value and value not in known:
            raise UnsupportedVariant(
                f"`{key}` is `{value}`, which is not read, expected {listed(known)}, in "
                f"{self.place}"
            )
        return value

    def _block(self, key: str) -> Block | None:
        value = self.content.get(key)
        if value is None:
            return None
        if (
            not isinstance(value, list | tuple)
            or len(value) != 2
            or not all(type(size) is int and size > 0 for size in value)
        ):
            raise self._mismatch(key, "two positive integers or null")
        return value[0], value[1]

    def _names(self, key: str) -> list[str]:
        value = self.content.get(key)
        if value is None:
            return []
        if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
            raise self._mismatch(key, "a list of module names or null")
        return list(value)

    def _table(self, key: str) -> Mapping[str, Any]:
        value = self.content.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping) or not all(
            isinstance(v, Mapping) for v in value.values()
        ):
            raise self._mismatch(key, "a table of tables or null")
        return value

    def _grid(self) -> Grid:
        keys = [key for key in ("fmt", "format", "checkpoint_format") if self._text(key)]
        grids = {key: _GRIDS.get(self._text(key)) for key in keys}
        for key, grid in grids.items():
            if grid is None:
                raise UnsupportedVariant(
                    f"`{key}` is `{self.content[key]}`, which is not read, expected "
                    f"{listed(_GRIDS, limit=7)}, in {self.place}"
                )
        found = {grid.name: grid for grid in grids.values() if grid is not None}
        if len(found) > 1:
            raise self._mismatch(keys[0], f"the same as in {listed(keys)}")
        return next(iter(found.values()), E4M3)

    def _check_facts(self) -> None:
        """Refuse facts that contradict FP8, where a producer states them."""
        bits = self.content.get("bits")
        if bits is not None and (type(bits) is not int or bits != 8):
            raise self._mismatch("bits", "8")
        if self.content.get("sym", True) is False:
            raise self._mismatch("sym", "true: FP8 has no zero points")
        self._choice("expert_dtype", ("fp8", "fp4", "mxfp4"))
        self._choice("weight_scale_semantics", ("inverse",))
        self._choice("data_type", ("fp", "fp8", "fp8_e4m3", "mx_fp", "float"))

    # -- lists -------------------------------------------------------------------------------------

    def _excluded(self) -> dict[str, str]:
        entries = {name: key for key in _LISTS for name in self._names(key)}
        for name, facts in self._table("extra_config").items():
            bits = facts.get("bits")
            if bits is not None and type(bits) is not int:
                raise self._mismatch("extra_config", "numbers of bits")
            if bits is not None and bits >= 16:
                entries[name] = "extra_config"
            elif bits not in (None, 8):
                raise UnsupportedVariant(
                    f"`extra_config` gives `{name}` {bits} bits; only 8 and 16 are read, in "
                    f"{self.place}"
                )
        return entries

    def _excluded_starts(self) -> tuple[re.Pattern[str], ...]:
        found = []
        for entry in self._table("dynamic"):
            if not entry.startswith("-:"):
                raise UnsupportedVariant(
                    f"`dynamic` gives modules options of their own (`{entry}`), which is not read, "
                    f"in {self.place}"
                )
            try:
                found.append(re.compile(entry[2:]))
            except re.error as error:
                raise self._mismatch("dynamic", f"regular expressions ({error})") from error
        return tuple(found)
