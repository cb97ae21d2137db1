"""What causes the drift of a candidate: one unit after the other is exchanged in the reference.

    first pass    every unit that differs, on the first tokens:
                      KL(reference || reference with the candidate's unit)
    second pass   the units with the largest KL, and those that could be first, on all tokens; also
                      noise      noise of the same norm in the same outputs: does the direction of
                                 the error matter?
                      put back   KL(reference || candidate with the reference's unit): how much of
                                 the drift goes away?

Units are ranked by their KL: by what they do to the output. Of a candidate of few bits the most
sensitive layer, quantized as well as can be, may do more than a fault elsewhere. So the error of
each module's output on the reference's inputs is held against those of the same module in other
blocks. What is off by twice as much, and has a twentieth of the sum of all effects, is a suspect,
and comes before all that is not. What does less to the output is named, but not moved: such faults
are for `compare` to find.

Effects add where KL(reference || candidate) is about the sum of the single ones; where the ratio is
outside 0.7 to 1.4 they do not, and shares are of the sum, not of the drift. Exchanging nothing has
to give exactly 0.

After exllamav3's `eval/model_diff_attrib.py` (single exchanges, isotropic control, additivity).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantload.accuracy.attribution_result import CLEAR, Attribution, KlMean, UnitDrift
from quantload.accuracy.attribution_runs import CANDIDATE, Measured, Variant, run_variants
from quantload.accuracy.attribution_units import By, Unit, block_number, find_units
from quantload.accuracy.compare_weights import check_one_model
from quantload.accuracy.config_defaults import config_differences
from quantload.accuracy.end_metrics import standard_error
from quantload.accuracy.streaming import StreamedModel, open_streamed
from quantload.accuracy.streaming_tokens import batches_of, check_sequences
from quantload.accuracy.tied_head import has_own_head
from quantload.errors import NotComparable
from quantload.layers.pipeline import PipelineCut
from quantload.loader.checkpoint import files_kept_open
from quantload.loader.source import Source
from quantload.progress import Progress

_FEWEST_ALIKE = 4  # other units of a kind that say what is usual
_BATCH_TOKENS = 512
_CPU = torch.device("cpu")
_STATES_BYTES = 1 << 30  # of hidden states that wait on the CPU at a time


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How drift is attributed.

    Args:
        by: What is exchanged at once.
        first_tokens: Tokens of the first pass.
        top: How many units are looked at closer, on all tokens; 0 for none.
        device: Where both models run.
        dtype: dtype in which they run.
        trust_remote_code: Run modelling code that comes with a checkpoint.
        seed: Of the noise.
    """

    by: By = "group"
    first_tokens: int = 256
    top: int = 10
    device: torch.device = _CPU
    dtype: torch.dtype = torch.float32
    trust_remote_code: bool = False
    seed: int = 0


@files_kept_open()
def attribute_drift(
    reference: Source,
    candidate: Source,
    sequences: Sequence[Sequence[int]],
    progress: Progress,
    settings: Settings,
) -> Attribution:
    """Exchange the units in which two checkpoints differ one at a time, and rank them.

    Both run with inputs rounded as their schemes say, so that a layer that is equal in both adds
    nothing.

    Args:
        reference: The checkpoint that is taken as right.
        candidate: The checkpoint whose drift is explained.
        sequences: Token ids; every position counts.
        progress: Advances by runs of a block.
        settings: How.

    Raises:
        ConfigError: A token id is none of the vocabulary, or a sequence is too long.
        NotComparable: The models differ in more than values, or outputs of the reference are not
            finite.
        ModelError: The model has no logits.
    """
    check_one_model(reference, candidate)
    pair = _Pair(reference, candidate, settings)
    models = pair.open()
    check_sequences(models[0].model, sequences)
    units, equal = find_units(*models, settings.by, progress)
    kept = _cut(sequences, settings.first_tokens)
    first = pair.run(_first_variants(units), kept, progress, "first pass", models)
    rows, chosen = _ranked(first, units, models[0].cut), first
    refined = _to_refine(first, rows, settings.top)
    if refined:
        known = first if list(map(list, sequences)) == kept else {}
        asked = [v for v in _second_variants(refined, first) if v not in known]
        chosen = {**known, **pair.run(asked, sequences, progress, "second pass")}
        rows = _with_second(rows, refined, chosen)
    configs = candidate.checkpoint.config, reference.checkpoint.config
    return Attribution(
        units=tuple(rows),
        by=settings.by,
        whole=_mean(chosen[CANDIDATE]),
        whole_first=_mean(first[CANDIDATE]),
        sum_of_parts=sum(_mean(first[_swap(unit)]).mean for unit in units),
        nothing=max((_mean(m).mean for v, m in first.items() if _is_control(v)), default=0.0),
        lead=_lead(chosen if refined else first, rows),
        equal=tuple(equal),
        config=tuple(config_differences(*configs, own_head=has_own_head(candidate))),
        why_whole=models[0].why_whole,
    )


# -- running ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pair:
    """Both checkpoints, which are opened anew for each pass."""

    reference: Source
    candidate: Source
    settings: Settings

    def open(self) -> tuple[StreamedModel, StreamedModel]:
        """Open both, of which either both run block by block, or neither."""
        one, other = (self._open(source) for source in (self.reference, self.candidate))
        if one.num_blocks == other.num_blocks and (one.cut is None) == (other.cut is None):
            return one, other
        why = one.why_whole or other.why_whole
        if not why:
            raise NotComparable(
                f"the reference has `{one.num_blocks}` blocks, the candidate `{other.num_blocks}`"
            )
        return replace(one, cut=None, why_whole=why), replace(other, cut=None, why_whole=why)

    def _open(self, source: Source) -> StreamedModel:
        schemes = (weight.scheme for weight in source.weights.values())
        return open_streamed(
            source,
            device=self.settings.device,
            dtype=self.settings.dtype,
            round_inputs=any(s is not None and s.input is not None for s in schemes),
            trust_remote_code=self.settings.trust_remote_code,
        )

    def run(
        self,
        variants: Sequence[Variant],
        sequences: Sequence[Sequence[int]],
        progress: Progress,
        phase: str,
        models: tuple[StreamedModel, StreamedModel] | None = None,
    ) -> dict[Variant, Measured]:
        """Run variants, in several passes where their hidden states would take too much memory.

        Args:
            variants: What is run.
            sequences: Token ids.
            progress: Advances by runs of a block.
            phase: What the progress is of.
            models: What was opened and has not run yet, if there is something.
        """
        models = models or self.open()
        config = models[0].model.config.get_text_config()
        width = getattr(config, "hidden_size", None) or 4096
        each = sum(map(len, sequences)) * width * self.settings.dtype.itemsize
        size = max(16, _STATES_BYTES // max(each, 1))
        found: dict[Variant, Measured] = {}
        for start in range(0, len(variants), size):
            found |= run_variants(
                *(models or self.open()),
                variants[start : start + size],
                batches_of(sequences, _BATCH_TOKENS),
                progress,
                phase=phase,
                seed=self.settings.seed,
            )
            models = None
        return found


def _cut(sequences: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    kept: list[list[int]] = []
    for ids in sequences:
        if tokens > 0 and len(ids):
            kept.append(list(ids[:tokens]))
            tokens -= len(kept[-1])
    return kept


def _swap(unit: Unit) -> Variant:
    return Variant("reference", unit)


def _is_control(variant: Variant) -> bool:
    return variant.base == "reference" and variant.mode == "nothing"


def _first_variants(units: Sequence[Unit]) -> list[Variant]:
    controls = [Variant("reference", unit, "nothing") for unit in (*units[:1], *units[1:][-1:])]
    return [*map(_swap, units), *controls, CANDIDATE]


def _second_variants(units: Sequence[Unit], first: Mapping[Variant, Measured]) -> list[Variant]:
    noise = [
        Variant("reference", unit, "noise")
        for unit in units
        if _has_errors(unit, first[_swap(unit)])
    ]
    put_back = [Variant("candidate", unit) for unit in units]
    return [*map(_swap, units), *noise, *put_back, CANDIDATE]


def _has_errors(unit: Unit, found: Measured) -> bool:
    """True if each module of a unit was seen to return a tensor, as a router does not.

    What is tied was watched in the first block only, where a head does not run.
    """
    paths = {site.path for site in unit.sites}
    is_seen = paths <= found.errors.keys() or (unit.first != unit.last and bool(found.errors))
    return unit.has_outputs and is_seen


# -- ranking ---------------------------------------------------------------------------------------


def _ranked(
    found: Mapping[Variant, Measured], units: Sequence[Unit], cut: PipelineCut | None
) -> list[UnitDrift]:
    means = {unit: _mean(found[_swap(unit)]) for unit in units}
    errors = {unit: _errors(found[_swap(unit)]) for unit in units}
    usual = _Usual(errors, cut)
    total = sum(mean.mean for mean in means.values() if math.isfinite(mean.mean))
    rows = [
        usual.noted(UnitDrift(unit=unit, kl=mean, share=_ratio(mean.mean, total)))
        for unit, mean in means.items()
    ]
    return sorted(rows, key=lambda row: row.rank, reverse=True)


def _ratio(part: float, whole: float) -> float:
    if math.isinf(part):
        return 1.0
    return part / whole if whole else 0.0


def _errors(found: Measured) -> dict[str, float]:
    """Return the median over tokens of the relative error of each module's output, by path."""
    return {path: errors.median for path, errors in found.errors.items() if errors.num_tokens}


class _Usual:
    """Errors of outputs held against those of the same module in other blocks.

    Args:
        errors: By path, for each unit.
        cut: Where the blocks are.
    """

    def __init__(self, errors: Mapping[Unit, Mapping[str, float]], cut: PipelineCut | None) -> None:
        self._errors, self._cut = errors, cut
        self._alike: dict[object, list[float]] = {}
        for unit, of in errors.items():
            for path, error in of.items():
                self._alike.setdefault(self._kind(unit, path), []).append(error)

    def _kind(self, unit: Unit, path: str) -> object:
        number = block_number(path, self._cut)
        if number is None or self._cut is None:
            return path
        inside = path.removeprefix(f"{self._cut.layers}.{number}.")
        return inside, unit.reference, unit.candidate

    def noted(self, row: UnitDrift) -> UnitDrift:
        """Return a row with the error of its module that is furthest from what is usual."""
        best = row
        for path, error in self._errors[row.unit].items():
            others = list(self._alike[self._kind(row.unit, path)])
            others.remove(error)
            usual = statistics.median(others) if len(others) >= _FEWEST_ALIKE else 0.0
            of_kind = error / usual if usual else None
            if (of_kind or 0.0, error) > (best.of_kind or 0.0, best.error or 0.0):
                best = replace(row, error=error, of_kind=of_kind, member=path)
        return best


def _to_refine(
    found: Mapping[Variant, Measured], rows: Sequence[UnitDrift], top: int
) -> list[Unit]:
    """Return the first units, and those that could be the first of all, at most as many again."""
    if not rows or not top:
        return []
    leader = found[_swap(rows[0].unit)].positions
    close = [
        row.unit
        for row in rows[top:]
        if not _ahead(leader, found[_swap(row.unit)].positions) > CLEAR
    ]
    return [*(row.unit for row in rows[:top]), *close[:top]]


def _ahead(one: Tensor, other: Tensor) -> float:
    """Return by how many standard errors the mean of one is larger, positions paired."""
    difference = one - other
    if not bool(difference.isfinite().all()):
        return math.inf if bool(one.isinf().any() and other.isfinite().all()) else math.nan
    mean, error = float(difference.mean()), standard_error(difference)
    return mean / error if error else (math.inf if mean > 0 else 0.0)


def _with_second(
    rows: Sequence[UnitDrift], refined: Sequence[Unit], found: Mapping[Variant, Measured]
) -> list[UnitDrift]:
    asked = set(refined)
    better = []
    for row in rows:
        if row.unit not in asked:
            continue
        noise = found.get(Variant("reference", row.unit, "noise"))
        better.append(
            replace(
                row,
                kl=_mean(found[_swap(row.unit)]),
                refined=True,
                noise=None if noise is None else _mean(noise),
                put_back=_mean(found[Variant("candidate", row.unit)]),
            )
        )
    better.sort(key=lambda row: row.rank, reverse=True)
    return [*better, *(row for row in rows if row.unit not in asked)]


def _lead(found: Mapping[Variant, Measured], rows: Sequence[UnitDrift]) -> float | None:
    if len(rows) < 2 or rows[0].refined != rows[1].refined:
        return None
    return _ahead(*(found[_swap(row.unit)].positions for row in rows[:2]))


def _mean(found: Measured) -> KlMean:
    kl = found.positions
    if not bool(kl.isfinite().all()):
        return KlMean(mean=math.inf, standard_error=math.nan, tokens=kl.numel())
    return KlMean(mean=float(kl.mean()), standard_error=standard_error(kl), tokens=kl.numel())


__all__ = [
    "Settings",
    "attribute_drift",
]
