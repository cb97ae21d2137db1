"""Measure a checkpoint for its baseline, layer by layer.

    unchanged     every digest is that of the baseline: nothing is measured; a reference that is
                  given is held to its digests all the same
    changed       layers with another digest are measured against the reference, or estimated from
                  the sketch of it that was kept; `baseline_verdict.py` judges them

What cannot be compared is an error, never a pass: another reference, encoding or set of tokens. An
encoding is a scheme, not a file format: the same codes in another packing are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantload.accuracy.baseline import ABSENT, LayerBaseline
from quantload.accuracy.baseline_sketch import Sketch
from quantload.accuracy.compare import LayerComparison
from quantload.accuracy.compare_weights import (
    check_one_model,
    compare_plain,
    compare_values,
)
from quantload.accuracy.value_digest import value_digest
from quantload.errors import BaselineError, NotComparable
from quantload.loader.checkpoint import files_kept_open
from quantload.loader.experts import apart_as_in, split_experts
from quantload.loader.source import Source, SourceWeight
from quantload.progress import Progress
from quantload.quant.qtensor import QuantTensor

if TYPE_CHECKING:
    from quantload.accuracy.compare_outputs import OutputComparison
    from quantload.accuracy.end_metrics import EndMetrics

_FEWEST_POSITIONS = 2
_SHOWN_SCALES = 4


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """How layers are measured.

    Args:
        known: Layers of the baseline; those whose digest is the same are not measured.
        only: Glob of the layers that are looked at.
        again: Measure known layers too.
        sketch: Reads that of the reference, for estimates where there is no reference.
        sigma_db: Standard error of such an estimate.
        collects: A sketch that the reference's values are added to.
        estimates: What that says of each layer's error, by name; filled with it.
    """

    known: Mapping[str, LayerBaseline] = field(default_factory=dict)
    only: str = "*"
    again: bool = False
    sketch: Callable[[], Sketch] | None = None
    sigma_db: float = 0.0
    collects: Sketch | None = None
    estimates: dict[str, float] = field(default_factory=dict)


@torch.no_grad()
@files_kept_open()
def measured_layers(
    reference: Source | None,
    candidate: Source,
    progress: Progress,
    how: Measuring | None = None,
) -> dict[str, LayerBaseline]:
    """Measure the weights and other tensors of a candidate; one is in memory at a time.

    Args:
        reference: What it is compared with; None if every layer should be known, or sketched.
        candidate: The checkpoint that is judged.
        progress: Advances by layers.
        how: What is measured; everything by default.

    Returns:
        Layers by name; one that is as in the baseline is the very object of `how.known`.

    Raises:
        NotComparable: The checkpoints are not of one model, the reference or an encoding is not
            that of the baseline, or a layer has changed and nothing says what the reference has.
        BaselineError: A number is not finite.
    """
    how = how or Measuring()
    candidate = _in_form_of(candidate, how.known)
    if reference is not None:
        reference = apart_as_in(_in_form_of(reference, how.known), candidate)
        candidate = apart_as_in(candidate, reference)
        check_one_model(reference, candidate)
    found: dict[str, LayerBaseline] = {}
    progress.start("layers", total=len(candidate.weights), unit="layers")
    for item in _items(candidate, how.only):
        found[item.name] = _measured(item, reference, how)
        progress.advance(1 if item.weight is not None else 0, note=item.name)
    progress.finish()
    return found


def _in_form_of(source: Source, known: Container[str]) -> Source:
    """Return a checkpoint with its experts one by one, unless a baseline has them in one tensor.

    New baselines have them one by one, as outputs are measured; whichever way files hold them.
    """
    apart = split_experts(source, unserved=True)
    joined = {name.removesuffix(".weight") for name in apart.parameter_of.values()}
    return source if any(name in known for name in joined) else apart.source


@dataclass(frozen=True)
class _Item:
    """A weight or another tensor of the candidate."""

    candidate: Source
    name: str
    weight: SourceWeight | None  # None for a tensor that is none of a layer's

    @property
    def encoding(self) -> str:
        """How it is held, whatever the file format."""
        if self.weight is None:
            return str(self.candidate.plain[self.name].dtype).removeprefix("torch.")
        return str(self.weight.scheme or self.weight.encoding)

    def read(self) -> QuantTensor | Tensor:
        """Read it."""
        if self.weight is None:
            return self.candidate.read_plain(self.name)
        return self.candidate.read_weight(self.name)

    def original(self, reference: Source) -> QuantTensor | Tensor | None:
        """Read the reference's; None if that has none."""
        if self.weight is not None:
            return reference.read_weight(self.name) if self.name in reference.weights else None
        both = (source.plain.get(self.name) for source in (reference, self.candidate))
        if all(entry is not None and entry.dtype.is_floating_point for entry in both):
            return reference.read_plain(self.name)
        return None  # integers have no relative error

    def compare(
        self, reference: Source, original: QuantTensor | Tensor, held: QuantTensor | Tensor
    ) -> LayerComparison:
        """Compare it with the reference's."""
        if self.weight is None:
            return compare_plain(reference, self.candidate, self.name)
        return compare_values((reference.weights[self.name], original), (self.weight, held))


def _items(candidate: Source, only: str) -> Iterator[_Item]:
    for name, weight in candidate.weights.items():
        if fnmatchcase(name, only):
            yield _Item(candidate, name, weight)
    for name in candidate.plain:
        if fnmatchcase(name, only):
            yield _Item(candidate, name, None)


def _measured(item: _Item, reference: Source | None, how: Measuring) -> LayerBaseline:
    held, before = item.read(), how.known.get(item.name)
    found = LayerBaseline(
        candidate=value_digest(held),
        reference=ABSENT,
        encoding=item.encoding,
        weight=0.0,
        input=_input_scale(held),
    )
    if before is not None and before.encoding != item.encoding:
        raise NotComparable(
            f"`{item.name}` is `{item.encoding}`, in the baseline it is `{before.encoding}`",
            hint="a change of scheme is a new baseline: write it again",
        )
    original = None if reference is None else item.original(reference)
    if original is not None:
        found = replace(found, reference=value_digest(original))
    if reference is not None and before is not None:
        _check_reference(item.name, before.reference, found.reference)
    is_same = before is not None and before.candidate == found.candidate
    if before is not None and is_same and (not how.again or before.reference == ABSENT):
        return before
    if before is not None and before.reference == ABSENT:
        return found  # nothing but equal is known of it
    if reference is None:
        return _estimated(item, held, found, before, how)
    if original is None:  # as an untied head
        return found
    if how.collects is not None:
        how.collects.add(item.name, _values(original))
        how.estimates[item.name] = how.collects.relative_error(item.name, _values(held))
    return _with_errors(found, item.compare(reference, original, held))


def _input_scale(held: QuantTensor | Tensor) -> str | None:
    """Return the fixed scale of a layer's input, and zero point, as a text; None without."""
    if not isinstance(held, QuantTensor) or held.input_scale is None:
        return None
    values = held.input_scale.flatten().tolist()
    is_divisor = held.evaluation.input == "/"
    shown = ", ".join(f"{value:.9g}" for value in values[:_SHOWN_SCALES])
    if len(values) > _SHOWN_SCALES:
        shown = f"{len(values)} of digest {value_digest(held.input_scale)}"
    zero = "" if held.input_zero is None else f", zero {held.input_zero.flatten().tolist()[0]:g}"
    return f"{'1 / ' if is_divisor else ''}{shown}{zero}"


def _check_reference(name: str, before: str, now: str) -> None:
    """Refuse another reference than the baseline's, whatever became of the candidate."""
    if before == now:
        return
    told = "is not there" if now == ABSENT else f"has digest `{now}`"
    was = "there was none" if before == ABSENT else f"it has `{before}`"
    raise NotComparable(
        f"the reference's `{name}` {told}, in the baseline {was}",
        hint="check against the reference that the baseline was made with, or write it again",
    )


def _values(held: QuantTensor | Tensor) -> Tensor:
    return held if isinstance(held, Tensor) else held.dequantize()


def _estimated(
    item: _Item,
    held: QuantTensor | Tensor,
    found: LayerBaseline,
    before: LayerBaseline | None,
    how: Measuring,
) -> LayerBaseline:
    if before is None:  # added: judged as that, whatever its error
        return found
    sketch = None if how.sketch is None else how.sketch()
    if sketch is None or item.name not in sketch.parts:
        raise NotComparable(
            f"`{item.name}` has changed since the baseline was written: the reference is needed to "
            "say whether it got worse",
            hint="give it with `--ref`, or write baselines with `--sketch`",
        )
    relative = sketch.relative_error(item.name, _values(held))
    if not math.isfinite(relative):
        raise BaselineError(f"`{item.name}`: values of the candidate are not finite")
    return replace(found, reference=before.reference, weight=relative, estimate_db=how.sigma_db)


def _with_errors(found: LayerBaseline, row: LayerComparison) -> LayerBaseline:
    assert row.weight is not None, "weights are compared"
    if row.problem or not math.isfinite(row.weight.relative):
        raise BaselineError(
            f"`{row.module}`: {row.problem or 'the reference is zero, the candidate is not'}"
        )
    rounding = row.rounding
    return replace(
        found,
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


def block_medians(outputs: OutputComparison) -> dict[str, float]:
    """Return the median over tokens of the error of the hidden states after each block, by path."""
    return {path: errors.median for path, errors in outputs.propagated.items()}


__all__ = [
    "Measuring",
    "block_medians",
    "end_numbers",
    "measured_layers",
    "with_output_errors",
]
