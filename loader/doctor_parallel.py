"""Rules of `doctor` about tensor parallel runs: what one device holds of a layer.

Engines split the output of a block (`o_proj`, `down_proj`, ...) along its columns, q/k/v, gate and
up along their rows, and leave all other linear layers whole. Where there are fewer key-value heads
than devices, each head is held by several.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from quantload.loader.doctor_subject import Finding, Subject
from quantload.loader.source import SourceWeight
from quantload.loader.tensor_parallel import SPLIT_INPUTS
from quantload.quant.scheme import Scheme

_SPLIT_OUTPUTS = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "gate_up_proj", "w1", "w3"}
_KEYS_AND_VALUES = {"k_proj", "v_proj"}
_EXPERT = re.compile(r"(?P<block>.*\.experts)\.\d+\.(?P<role>[^.]+)")
_FUSED = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}, {"w1", "w3"})


def _last(module: str) -> str:
    return module.rpartition(".")[2]


def engine_groups(subject: Subject) -> Iterator[tuple[str, ...]]:
    """Yield the groups of layers that a serving engine runs as one.

    Of the groups of the checkpoint those that engines fuse; of the experts of a block gate and up
    of all are one group, down of all another.
    """
    if not subject.engine.fuses:
        return
    for group in subject.facts.groups:
        if ".experts." not in group[0] and any({_last(m) for m in group} <= f for f in _FUSED):
            yield group
    experts: dict[tuple[str, str], list[str]] = {}
    for module in subject.source.weights:
        match = _EXPERT.fullmatch(module)
        if match:
            role = "input" if match["role"] in _SPLIT_OUTPUTS else match["role"]
            experts.setdefault((match["block"], role), []).append(module)
    yield from (tuple(members) for members in experts.values() if len(members) > 1)


def part_of(subject: Subject, weight: SourceWeight) -> tuple[int, int]:
    """Return rows and columns that one device runs as one layer, fused members together."""
    rows, columns = weight.shape
    last = _last(weight.module)
    if last in SPLIT_INPUTS:
        return rows, columns // subject.parts
    if last not in _SPLIT_OUTPUTS:
        return rows, columns
    members = [weight]
    for group in engine_groups(subject):
        if weight.module in group and ".experts." not in weight.module:
            members = [subject.source.weights[m] for m in group if m in subject.source.weights]
    return sum(rows_of_part(subject, member) for member in members), columns


def rows_of_part(subject: Subject, weight: SourceWeight) -> int:
    """Return rows of one layer, split along its rows, on one device."""
    rows, heads = weight.shape[0], subject.text_config.get("num_key_value_heads")
    parts = subject.parts
    if _last(weight.module) in _KEYS_AND_VALUES and isinstance(heads, int) and heads < parts:
        parts = max(heads, 1)
    return rows // parts


# -- rules -----------------------------------------------------------------------------------------


def heads_divide(subject: Subject) -> Iterator[Finding]:
    """Attention heads have to divide among devices; key-value heads may be held by several."""
    parts, config = subject.parts, subject.text_config
    heads = config.get("num_attention_heads")
    if parts == 1 or not isinstance(heads, int):
        return
    if heads % parts:
        yield _finding(subject, "", f"{heads} attention heads", f"a multiple of {parts}")
    cache_heads = config.get("num_key_value_heads") or heads
    if not isinstance(cache_heads, int):
        return
    may_repeat = subject.engine.fuses and parts % cache_heads == 0
    if cache_heads % parts and not may_repeat:
        expected = f"a multiple of {parts}" + (", or a divisor" if subject.engine.fuses else "")
        yield _finding(subject, "", f"{cache_heads} key-value heads", expected)


def layers_divide(subject: Subject) -> Iterator[Finding]:
    """Parts of split layers have to be whole, and to hold whole groups and blocks."""
    if subject.parts == 1:
        return
    for weight in subject.source.weights.values():
        last, (rows, columns) = _last(weight.module), weight.shape
        if last in SPLIT_INPUTS and not weight.experts:
            if columns % subject.parts:
                yield _finding(
                    subject, weight.module, f"{columns} columns", f"a multiple of {subject.parts}"
                )
            elif weight.scheme is not None:
                yield from _whole_groups(subject, weight, weight.scheme)
        elif last in _SPLIT_OUTPUTS and last not in _KEYS_AND_VALUES and rows % subject.parts:
            yield _finding(subject, weight.module, f"{rows} rows", f"a multiple of {subject.parts}")


def _whole_groups(subject: Subject, weight: SourceWeight, scheme: Scheme) -> Iterator[Finding]:
    if scheme.weight is None or not subject.engine.fuses:
        return
    size = scheme.weight.block_of(*weight.shape)[1]
    part = weight.shape[1] // subject.parts
    if 1 < size < weight.shape[1] and part % size:
        found = f"{weight.shape[1]} columns in {subject.parts} parts of {part}"
        yield _finding(subject, weight.module, found, f"parts that hold whole groups of {size}")


def blocks_fit(subject: Subject) -> Iterator[Finding]:
    """Blocks of fp8 must not be cut where members are fused, nor by a split."""
    if not subject.engine.fuses:
        return
    last_may_end = subject.engine.name == "vllm" and subject.parts == 1
    fused = {}
    for group in engine_groups(subject):
        for place, module in enumerate(group):
            is_last = place == len(group) - 1 and ".experts." not in module
            fused[module] = is_last and last_may_end
    for weight, scheme, _ in subject.quantized():
        assert scheme.weight is not None, "only quantized weights have blocks"
        is_split = subject.parts > 1 and _last(weight.module) in _SPLIT_OUTPUTS
        if scheme.weight.granularity != "block" or not (weight.module in fused or is_split):
            continue
        step = scheme.weight.block_of(*weight.shape)[0]
        is_split_rows = _last(weight.module) in _SPLIT_OUTPUTS
        rows = rows_of_part(subject, weight) if is_split_rows else weight.shape[0]
        if rows % step and not fused.get(weight.module, False):
            yield Finding(
                rule="block",
                level="error",
                layer=weight.module,
                found=f"{rows} rows" + (" on each device" if subject.parts > 1 else ""),
                expected=f"a multiple of {step}, the rows of a block, in a fused layer",
                hint="convert it with `--scheme FP8_DYNAMIC`, which has no blocks",
                source=subject.source_of("block"),
            )


def _finding(subject: Subject, layer: str, found: str, expected: str) -> Finding:
    return Finding(
        rule="parallel",
        level="error",
        layer=layer,
        found=found,
        expected=f"{expected}, for {subject.parts} devices",
        hint="use another `--tp`",
        source=subject.source_of("parallel"),
    )


RULES = (heads_divide, layers_divide, blocks_fit)
__all__ = ["RULES", "engine_groups", "part_of", "rows_of_part"]
