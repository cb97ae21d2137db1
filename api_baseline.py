"""Baselines: what every layer of a checkpoint lost, written once and checked ever after."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quantload.accuracy.baseline import (
    Baseline,
    Tokens,
    Tolerances,
    baseline_text,
    read_baseline,
)
from quantload.accuracy.baseline_check import end_numbers, measured_layers, with_output_errors
from quantload.accuracy.baseline_verdict import BaselineReport, about_end, judge
from quantload.accuracy.statistics import ids_digest
from quantload.api_load import parse_device
from quantload.api_plan import inspect
from quantload.errors import BaselineError, OutputError
from quantload.loader.source import Source
from quantload.progress import Progress, Silent

if TYPE_CHECKING:
    from quantload.accuracy.compare_outputs import OutputComparison


def write_baseline(  # noqa: PLR0913 - a keyword for each choice of the user
    reference: str | Path,
    candidate: str | Path,
    file: str | Path,
    *,
    sequences: Sequence[Sequence[int]] = (),
    tolerances: Tolerances | None = None,
    device: str | torch.device | None = None,
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
        device: Where both run, in float32; None takes CUDA where there is one.
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
    progress = progress or Silent()
    source, opened = inspect(reference), inspect(candidate)
    made = Baseline(
        reference=_name(source),
        candidate=_name(opened),
        bits_per_weight=_bits_per_weight(opened),
        layers=measured_layers(source, opened, progress),
        tokens=_tokens(sequences),
        tolerances=tolerances or Tolerances(),
        made_on=_made_on(),
    )
    if made.tokens is not None:
        outputs = _run(source, opened, made.tokens, device, progress)
        layers = with_output_errors(made.layers, outputs, of=set(made.layers))
        made = replace(made, layers=layers, end=end_numbers(outputs.end))
    write_text(place, baseline_text(made))
    return made


def check_baseline(
    candidate: str | Path,
    file: str | Path,
    *,
    reference: str | Path | None = None,
    tolerances: Tolerances | None = None,
    only: str = "*",
    device: str | torch.device | None = None,
    progress: Progress | None = None,
) -> BaselineReport:
    """Hold a checkpoint to a baseline; an unchanged one passes without its reference.

    Args:
        candidate: The checkpoint that is judged.
        file: From `write_baseline`.
        reference: What the baseline was made with; needed if a layer has changed.
        tolerances: In place of those in the file.
        only: Glob of the layers that are looked at.
        device: Where both run if the baseline has tokens and a layer has changed.
        progress: Draws progress; silent by default.

    Raises:
        BaselineError: The file cannot be read or is damaged.
        NotComparable: The reference, an encoding or the model is another than the baseline's, or a
            layer has changed and no reference is given.
    """
    baseline = read_baseline(Path(file))
    opened = inspect(candidate)
    source = None if reference is None else inspect(reference)
    progress = progress or Silent()
    now = measured_layers(source, opened, progress, known=baseline.layers, only=only)
    changed = {name for name, layer in now.items() if layer is not baseline.layers.get(name)}
    end = baseline.end
    if changed and source is not None and baseline.tokens is not None:
        outputs = _run(source, opened, baseline.tokens, device, progress)
        now = with_output_errors(now, outputs, of=changed)
        end = end_numbers(outputs.end)
    asked = {name: layer for name, layer in baseline.layers.items() if fnmatchcase(name, only)}
    if not asked and not now:
        raise BaselineError(
            f"`{only}` matches no layer of `{file}` or of `{opened.checkpoint.name}`"
        )
    held = replace(baseline, layers=asked, tolerances=tolerances or baseline.tolerances)
    made = replace(baseline, candidate=_name(opened), layers={**baseline.layers, **now}, end=end)
    report = judge(held, now)
    failures = (*report.failures, *about_end(baseline, end, unchanged=not changed))
    return replace(report, failures=failures, now=made)


def _run(
    reference: Source,
    candidate: Source,
    tokens: Tokens,
    device: str | torch.device | None,
    progress: Progress,
) -> OutputComparison:
    from quantload.accuracy.compare_outputs import compare_running  # transformers: seconds

    return compare_running(
        reference,
        candidate,
        tokens.ids,
        progress,
        device=parse_device(device),
        dtype=torch.float32,
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
