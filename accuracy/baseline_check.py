"""Hold a checkpoint to its baseline.

    unchanged     every digest is that of the baseline: it passes, without the reference
    changed       layers with another digest are measured against the reference; each may be worse
                  by its tolerance, and their mean over all layers by a tighter one

What cannot be compared is an error, never a pass: another reference, encoding or set of tokens.
Layers that are better by more than their tolerance are told, and so are layers that came or went.

A layer is held to four numbers: the relative error of its weight in dB, its largest error in steps,
its noisiest block (damage that the relative error of a large weight hides), and with tokens the
error of its output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch

from quantload.accuracy.baseline import LayerBaseline
from quantload.accuracy.compare import LayerComparison
from quantload.accuracy.compare_weights import (
    check_one_model,
    compare_plain,
    compare_values,
    shared_plain,
)
from quantload.accuracy.value_digest import value_digest
from quantload.errors import BaselineError, NotComparable
from quantload.loader.checkpoint import files_kept_open
from quantload.loader.experts import apart_as_in
from quantload.loader.source import Source
from quantload.progress import Progress

if TYPE_CHECKING:
    from quantload.accuracy.compare_outputs import OutputComparison
    from quantload.accuracy.end_metrics import EndMetrics

_FEWEST_POSITIONS = 2
_STEPS_FACTOR, _STEPS_MORE = 1.25, 0.05
_BLOCK_FACTOR, _BLOCK_MORE = 2.0, 4.0
_ABSENT = "absent"
_TINY = 1e-12  # a relative error that counts as none
_LARGEST_DB = 999.0


@torch.no_grad()
@files_kept_open()
def measured_layers(
    reference: Source | None,
    candidate: Source,
    progress: Progress,
    *,
    known: Mapping[str, LayerBaseline] | None = None,
    only: str = "*",
) -> dict[str, LayerBaseline]:
    """Measure the weights and other float tensors of a candidate; one is in memory at a time.

    Args:
        reference: What it is compared with; None if every layer should be known.
        candidate: The checkpoint that is judged.
        progress: Advances by layers.
        known: Layers that are not measured again if their digest is the same.
        only: Glob of the layers that are looked at.

    Raises:
        NotComparable: The checkpoints are not of one model, the reference is not that of `known`,
            or a layer has changed and there is no reference.
        BaselineError: A number is not finite.
    """
    if reference is not None:
        reference = apart_as_in(reference, candidate)
        candidate = apart_as_in(candidate, reference)
        check_one_model(reference, candidate)
    found: dict[str, LayerBaseline] = {}
    progress.start("layers", total=len(candidate.weights), unit="layers")
    for name, layer in _layers(reference, candidate, known or {}, only):
        found[name] = layer
        progress.advance(1 if name in candidate.weights else 0, note=name)
    progress.finish()
    return found


def _layers(
    reference: Source | None, candidate: Source, known: Mapping[str, LayerBaseline], only: str
) -> Iterator[tuple[str, LayerBaseline]]:
    for module, weight in candidate.weights.items():
        if not fnmatchcase(module, only):
            continue
        held, before = candidate.read_weight(module), known.get(module)
        digest = value_digest(held)
        if before is not None and before.candidate == digest:
            yield module, before
            continue
        source = _needed(reference, module, before)
        if module not in source.weights:
            yield module, _alone(digest, weight.encoding)
            continue
        original = source.read_weight(module)
        row = compare_values((source.weights[module], original), (weight, held))
        yield module, _layer(row, digest, value_digest(original), before)
    for name, entry in candidate.plain.items():
        if not entry.dtype.is_floating_point or not fnmatchcase(name, only):
            continue
        digest, before = value_digest(candidate.read_plain(name)), known.get(name)
        if before is not None and before.candidate == digest:
            yield name, before
            continue
        source = _needed(reference, name, before)
        if name not in shared_plain(source, candidate):
            yield name, _alone(digest, str(entry.dtype).removeprefix("torch."))
            continue
        row = compare_plain(source, candidate, name)
        yield name, _layer(row, digest, value_digest(source.read_plain(name)), before)


def _alone(digest: str, encoding: str) -> LayerBaseline:
    """A tensor that only the candidate has, as an untied head: nothing but equal is known of it."""
    return LayerBaseline(candidate=digest, reference=_ABSENT, encoding=encoding, weight=0.0)


def _needed(reference: Source | None, name: str, before: LayerBaseline | None) -> Source:
    if before is not None and before.reference == _ABSENT:
        raise NotComparable(
            f"`{name}` has changed since the baseline was written, and the reference has no such "
            "tensor to compare it with"
        )
    if reference is None:
        raise NotComparable(
            f"`{name}` has changed since the baseline was written: the reference is needed to "
            "say whether it got worse",
            hint="give it with `--ref`",
        )
    return reference


def _layer(
    row: LayerComparison, digest: str, of_reference: str, before: LayerBaseline | None
) -> LayerBaseline:
    assert row.weight is not None, "weights are compared"
    if row.problem or not math.isfinite(row.weight.relative):
        raise BaselineError(
            f"`{row.module}`: {row.problem or 'the reference is zero, the candidate is not'}"
        )
    if before is not None and before.reference != of_reference:
        raise NotComparable(
            f"the reference's `{row.module}` has digest `{of_reference}`, in the baseline it has "
            f"`{before.reference}`",
            hint="check against the reference that the baseline was made with, or write it again",
        )
    if before is not None and before.encoding != row.candidate:
        raise NotComparable(
            f"`{row.module}` is `{row.candidate}`, in the baseline it is `{before.encoding}`",
            hint="a change of scheme is a new baseline: write it again",
        )
    rounding = row.rounding
    return LayerBaseline(
        candidate=digest,
        reference=of_reference,
        encoding=row.candidate,
        weight=row.weight.relative,
        steps=None if rounding is None else rounding.max_steps,
        block=None if rounding is None else rounding.block_excess,
    )


def with_output_errors(
    layers: Mapping[str, LayerBaseline], outputs: OutputComparison, *, of: Set[str]
) -> dict[str, LayerBaseline]:
    """Return layers with the errors of their outputs.

    Args:
        layers: From `measured_layers`.
        outputs: What running both models showed; an expert that few tokens reached is left out.
        of: Layers that get them.
    """
    found = dict(layers)
    for name, errors in outputs.isolated.items():
        if name in found and name in of and name not in outputs.few:
            found[name] = replace(
                found[name],
                output=errors.sums.relative,
                output_median=errors.median,
                tokens=errors.num_tokens,
            )
    return found


def end_numbers(end: EndMetrics | None) -> dict[str, tuple[float, float]]:
    """Return mean and standard error of what is kept of the end; nothing without logits."""
    if end is None or end.num_tokens < _FEWEST_POSITIONS:
        return {}
    return {
        "kl_mean": (end.kl_mean, end.kl_standard_error),
        "top1": (end.top1, end.top1_standard_error),
    }


__all__ = ["end_numbers", "measured_layers", "with_output_errors"]
