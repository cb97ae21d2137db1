"""Baselines: what every layer of a checkpoint lost, written once and checked ever after."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from quantload.accuracy.baseline import (
    Baseline,
    Tokens,
    Tolerances,
    baseline_text,
    read_baseline,
)
from quantload.accuracy.baseline_check import BaselineReport, judge, measured_layers
from quantload.accuracy.statistics import ids_digest
from quantload.api_plan import inspect
from quantload.errors import BaselineError, OutputError
from quantload.loader.source import Source
from quantload.progress import Progress, Silent


def write_baseline(
    reference: str | Path,
    candidate: str | Path,
    file: str | Path,
    *,
    sequences: Sequence[Sequence[int]] = (),
    tolerances: Tolerances | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Baseline:
    """Measure every layer of a checkpoint against its reference and write that to a file.

    Args:
        reference: The checkpoint that is taken as right, in any format that is read.
        candidate: The checkpoint that the baseline is of.
        file: A JSON file, see `accuracy/baseline.py`.
        sequences: Token ids to run through both; without any, only weights are measured.
        tolerances: What checks allow; the defaults of `Tolerances`.
        overwrite: Replace a file that is there.
        progress: Draws progress; silent by default.

    Raises:
        OutputError: The file is there, or cannot be written.
        NotComparable: The checkpoints are not of one model.
    """
    place = Path(file)
    if place.exists() and not overwrite:
        raise OutputError(
            f"`{place}` is there already",
            hint="`--overwrite` replaces it: what the candidate has lost by then is accepted",
        )
    made = _measured(reference, candidate, sequences, tolerances or Tolerances(), progress)
    write_text(place, baseline_text(made))
    return made


def check_baseline(
    candidate: str | Path,
    file: str | Path,
    *,
    reference: str | Path | None = None,
    tolerances: Tolerances | None = None,
    only: str = "*",
    progress: Progress | None = None,
) -> BaselineReport:
    """Hold a checkpoint to a baseline; an unchanged one passes without its reference.

    Args:
        candidate: The checkpoint that is judged.
        file: From `write_baseline`.
        reference: What the baseline was made with; needed if a layer has changed.
        tolerances: In place of those in the file.
        only: Glob of the layers that are looked at.
        progress: Draws progress; silent by default.

    Raises:
        BaselineError: The file cannot be read or is damaged.
        NotComparable: The reference, an encoding or the model is another than the baseline's, or a
            layer has changed and no reference is given.
    """
    baseline = read_baseline(Path(file))
    opened = inspect(candidate)
    source = None if reference is None else inspect(reference)
    now = measured_layers(source, opened, progress or Silent(), known=baseline.layers, only=only)
    asked = {name: layer for name, layer in baseline.layers.items() if fnmatchcase(name, only)}
    if not asked and not now:
        raise BaselineError(
            f"`{only}` matches no layer of `{file}` or of `{opened.checkpoint.name}`"
        )
    held = replace(baseline, layers=asked, tolerances=tolerances or baseline.tolerances)
    made = replace(baseline, candidate=_name(opened), layers={**baseline.layers, **now})
    return replace(judge(held, now), now=made)


def _measured(
    reference: str | Path,
    candidate: str | Path,
    sequences: Sequence[Sequence[int]],
    tolerances: Tolerances,
    progress: Progress | None,
) -> Baseline:
    source, opened = inspect(reference), inspect(candidate)
    layers = measured_layers(source, opened, progress or Silent())
    return Baseline(
        reference=_name(source),
        candidate=_name(opened),
        bits_per_weight=_bits_per_weight(opened),
        layers=layers,
        tokens=_tokens(sequences),
        tolerances=tolerances,
        made_on=_made_on(),
    )


def _name(source: Source) -> str:
    return Path(source.checkpoint.name).name


def _bits_per_weight(source: Source) -> float:
    """Bits of the stored weights of layers for each of their elements, scales included."""
    tensors = source.checkpoint.tensors
    names = {name for weight in source.weights.values() for name in weight.leaves.values()}
    elements = sum(
        weight.shape[0] * weight.shape[1] * max(weight.experts, 1)
        for weight in source.weights.values()
    )
    return 8 * sum(tensors[name].num_bytes for name in names) / max(elements, 1)


def _tokens(sequences: Sequence[Sequence[int]]) -> Tokens | None:
    kept = tuple(tuple(int(number) for number in ids) for ids in sequences if len(ids))
    if not kept:
        return None
    return Tokens(sha256=ids_digest(kept), count=sum(map(len, kept)), ids=kept)


def _made_on() -> dict[str, str]:
    return {"machine": platform.machine(), "torch": torch.__version__}


def write_text(file: Path, text: str) -> None:
    """Write a file that appears only when it is complete.

    Raises:
        OutputError: It cannot be written.
    """
    partial = file.with_name(f".{file.name}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OutputError(f"cannot write `{file}`: {error.strerror or error}") from error


__all__ = ["check_baseline", "write_baseline"]
