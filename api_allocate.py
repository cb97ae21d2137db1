"""Schemes under a budget of bits: which layers get which, and whether that is worth it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from pathlib import Path

import torch

from quantload.accuracy.plain_choices import in_order, order_by_kind, uniform
from quantload.accuracy.score_table import Cost, Score, ScoreTable
from quantload.accuracy.scoring import KEEP, HowToScore, score_layers, scored_at
from quantload.accuracy.statistics import source_digest
from quantload.api_load import parse_device
from quantload.api_plan import as_source, plan
from quantload.arguments import (
    as_sequences,
    as_texts,
    check_flags,
    check_progress,
    check_type,
    plain,
)
from quantload.errors import ConfigError
from quantload.loader.model_dtype import own_dtype, parse_dtype
from quantload.loader.plan import Plan
from quantload.loader.quantized_view import quantized_view
from quantload.loader.source import Source
from quantload.progress import Progress, Silent

ADDITIVE = (0.7, 1.4)  # measured over predicted KL at which effects of layers add up
_EXPERT = re.compile(r"(.*\.experts\.)\d+\.[^.]+")
_BATCH_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Schemes for all groups, and what they cost.

    Args:
        name: How it was chosen.
        schemes: Name of the scheme, by module.
        bits_per_weight: Of the weights that are shared out, scales included.
        kl_mean: KL(reference || mix) in nats a token, on tokens that no score has seen; None if it
            was not run.
        kl_standard_error: Of that mean.
    """

    name: str
    schemes: Mapping[str, str]
    bits_per_weight: float
    kl_mean: float | None = None
    kl_standard_error: float | None = None


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """What was chosen.

    Args:
        best: The mix with the least KL; the first if none was run.
        mixes: All that were tried: by scores, by a rule of layers' kinds, uniform and, where
            effects do not add up, by gradients again, at the first of these.
        predicted: Sum of the scores of the mix by scores: with "gradient" and "kl" an estimate of
            its KL, in nats a token.
        curve: (bits a weight, sum of scores) of all budgets that are spent to the last bit.
        table: The scores, for other budgets.
    """

    best: Mix
    mixes: tuple[Mix, ...]
    predicted: float
    curve: tuple[tuple[float, float], ...] = field(repr=False)
    table: ScoreTable = field(repr=False)

    @property
    def additivity(self) -> float | None:
        """KL of the mix by scores over the sum of its parts; None if that is not known."""
        kl = self.mixes[0].kl_mean
        if kl is None or self.table.score == "weights" or not self.predicted:
            return None
        return kl / self.predicted

    @property
    def adds_up(self) -> bool:
        """False if the sum of the parts is far from what was measured."""
        ratio = self.additivity
        return ratio is None or ADDITIVE[0] <= ratio <= ADDITIVE[1]

    def rules_text(self) -> str:
        """Return a file for `quantload convert --config`."""
        counts: dict[str, int] = {}
        for scheme in self.best.schemes.values():
            counts[scheme] = counts.get(scheme, 0) + 1
        usual = max(sorted(counts), key=lambda scheme: counts[scheme])
        measured = (
            ""
            if self.best.kl_mean is None
            else f", KL {self.best.kl_mean:.4f} +- {self.best.kl_standard_error:.4f} nats a token"
        )
        rules = {
            _rule_of(module): scheme
            for module, scheme in self.best.schemes.items()
            if scheme != usual
        }
        return "\n".join(
            [
                f"# {self.best.bits_per_weight:.3f} bits a weight{measured}, chosen "
                f"{self.best.name}",
                f'scheme = "{usual}"',
                "",
                "[rules]",
                *(f'"{name}" = "{scheme}"' for name, scheme in rules.items()),
                "",
            ]
        )


def _rule_of(module: str) -> str:
    """Return what a rule names: all experts of a block have one scheme."""
    expert = _EXPERT.fullmatch(module)
    return expert[1] if expert else module


def allocate_schemes(  # noqa: PLR0913 - a keyword for each choice of the user
    source: str | Path,
    *,
    bits: float,
    schemes: Sequence[str],
    sequences: Sequence[Sequence[int]] = (),
    score: Score = "gradient",
    scores: ScoreTable | None = None,
    cost: Cost = "stored",
    verify: bool = True,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str = torch.float32,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
) -> Allocation:
    """Choose each fused group's scheme so that all weights together take `bits` bits a weight.

    Half of the sequences score the schemes (`accuracy/scoring.py`), the other half judge the
    result beside two plain choices of the same size: if one of those is better it is taken.

    Args:
        source: A checkpoint, best in full precision.
        bits: Stored bits of a weight, scales included, in the mean of those that are shared out;
            what `convert` keeps by default (head, embeddings, routers) does not count.
        schemes: Names of schemes, and "keep" for full precision.
        sequences: Token ids; two sequences at least, unless weights score: then all of them judge.
        score: "gradient", "kl" (one group at a time) or "weights" (no tokens).
        scores: What an earlier call found for this checkpoint: nothing is scored again.
        cost: "stored" counts all bits; "active" those of experts by the share of tokens that meets
            them.
        verify: Run the mixes; without it the mix by scores is taken as it is.
        device: Where the model runs; None takes CUDA where there is one.
        dtype: dtype in which it runs; "auto" takes the checkpoint's own.
        progress: Draws progress; silent by default.
        trust_remote_code: Run modelling code that comes with the checkpoint.

    Raises:
        ConfigError: The budget is below the smallest scheme, schemes do not fit, there are too few
            tokens, or scores are of another checkpoint.
        QuantloadError: As `load`.
    """
    check_flags(verify=verify, trust_remote_code=trust_remote_code)
    check_progress(progress)
    check_type("bits", bits, Real, expected="a number")
    bits = float(plain(bits))
    place, kind = parse_device(device), parse_dtype(dtype)
    schemes = as_texts("schemes", schemes, example="W4A16")
    sequences = as_sequences("sequences", sequences)
    if not (math.isfinite(bits) and bits > 0):
        raise ConfigError(f"found a budget of `{bits}` bits a weight, expected a positive number")
    names = list(dict.fromkeys(schemes))
    if len(names) < 2:
        raise ConfigError(f"found `{len(names)}` schemes, expected two and more")
    usable = [ids for ids in sequences if len(ids)]
    half = len(usable) // 2 if score != "weights" else 0
    needs_both = score != "weights" and scores is None
    if (needs_both and not half) or (verify and len(usable) <= half):
        raise ConfigError(
            f"found `{len(usable)}` sequences of tokens, expected two and more: some score, others "
            "judge",
            hint="give a longer text; `--no-data --no-verify` runs nothing",
        )
    opened = as_source("source", source, warns=True)
    how = HowToScore(
        score=score,
        device=place,
        dtype=kind or own_dtype(opened),
        trust_remote_code=trust_remote_code,
    )
    told = progress or Silent()
    run = _Run(opened, names, usable[:half], usable[half:], how, told)
    table = run.scored() if scores is None else _checked(scores, opened, names)
    if cost == "active" and all(row.active == 1.0 for row in table.rows.values()):
        raise ConfigError(
            "`active` bits are asked for, and no weight is known to meet only some tokens: there "
            "are no experts, or the config does not say how many a token has",
            hint="leave out `--cost active`",
        )
    mixes = [_mix(name, of, table, cost) for name, of in _choices(table, bits, cost).items()]
    if verify:
        mixes = [run.judged(mix) for mix in mixes]
    found = Allocation(
        best=min(mixes, key=lambda mix: mix.kl_mean or 0.0) if verify else mixes[0],
        mixes=tuple(mixes),
        predicted=table.predicted(mixes[0].schemes),
        curve=tuple(table.curve(cost)),
        table=table,
    )
    if found.adds_up or score != "gradient" or not half:
        return found
    again = run.scored_at(mixes[0], table).solve(bits, cost)
    last = run.judged(_mix("by gradients at the mix", again, table, cost))
    best = min(found.best, last, key=lambda mix: mix.kl_mean or 0.0)
    return replace(found, best=best, mixes=(*found.mixes, last))


def _mix(name: str, schemes: Mapping[str, str], table: ScoreTable, cost: Cost) -> Mix:
    return Mix(name=name, schemes=schemes, bits_per_weight=table.bits_per_weight(schemes, cost))


def _checked(scores: ScoreTable, source: Source, names: Sequence[str]) -> ScoreTable:
    found = source_digest(source)
    if scores.source_sha256 != found:
        raise ConfigError(
            f"the scores are of a checkpoint `{scores.source_sha256[:12]}`, expected "
            f"`{found[:12]}`, that of `{source.checkpoint.name}`",
            hint="score again: give `--scores` another file",
        )
    return scores.only(names)


_NAMES = {"gradient": "by gradients", "kl": "by KL of single groups", "weights": "by weights"}


def _choices(table: ScoreTable, bits: float, cost: Cost) -> dict[str, dict[str, str]]:
    sizes, groups = table.sizes(cost), table.groups
    budget = bits * sum(size.elements for size in sizes.values())
    return {
        _NAMES[table.score]: table.solve(bits, cost),
        "by kind of layer": in_order(groups, sizes, budget, order_by_kind(groups)),
        "uniform": uniform(sizes, budget),
    }


@dataclass(frozen=True)
class _Run:
    """Runs the checkpoint.

    Args:
        source: The checkpoint.
        names: Of the schemes.
        scoring: Token ids that score.
        judging: Token ids that judge, which no score has seen.
        how: How.
        progress: Is told what is done.
    """

    source: Source
    names: Sequence[str]
    scoring: Sequence[Sequence[int]]
    judging: Sequence[Sequence[int]]
    how: HowToScore
    progress: Progress

    def _plans(self) -> dict[str, Plan]:
        trust = self.how.trust_remote_code
        names = [name for name in self.names if name != KEEP]
        return {name: plan(self.source, name, trust_remote_code=trust) for name in names}

    def scored(self) -> ScoreTable:
        """Return the scores of all layers."""
        is_kept = KEEP in self.names
        plans = self._plans()
        return score_layers(self.source, plans, self.scoring, self.how, self.progress, keep=is_kept)

    def scored_at(self, mix: Mix, table: ScoreTable) -> ScoreTable:
        """Return the scores on top of a mix."""
        mixed, plans = self._view(mix), self._plans()
        return scored_at(
            mix.schemes, mixed, self.source, plans, table, self.scoring, self.how, self.progress
        )

    def _view(self, mix: Mix) -> Source:
        rules = {_rule_of(m): scheme for m, scheme in mix.schemes.items() if scheme != KEEP}
        if not rules:
            return self.source
        trust = self.how.trust_remote_code
        made = plan(self.source, None, rules=rules, trust_remote_code=trust)
        return quantized_view(made, device=self.how.device)

    def judged(self, mix: Mix) -> Mix:
        """Return a mix with its KL."""
        from quantload.accuracy.attribution_runs import CANDIDATE, run_variants
        from quantload.accuracy.end_metrics import standard_error
        from quantload.accuracy.streaming import open_streamed
        from quantload.accuracy.streaming_tokens import batches_of, check_sequences

        opens = partial(
            open_streamed,
            device=self.how.device,
            dtype=self.how.dtype,
            trust_remote_code=self.how.trust_remote_code,
        )
        models = opens(self.source), opens(self._view(mix), round_inputs=True)
        check_sequences(models[0].model, self.judging)
        batches = batches_of(self.judging, _BATCH_TOKENS)
        phase = f"KL {mix.name}"
        found = run_variants(*models, [CANDIDATE], batches, self.progress, phase=phase)
        kl = found[CANDIDATE].positions
        return replace(mix, kl_mean=float(kl.mean()), kl_standard_error=standard_error(kl))


__all__ = ["ADDITIVE", "Allocation", "Mix", "allocate_schemes"]
