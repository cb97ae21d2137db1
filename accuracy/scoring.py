"""Score every layer of a checkpoint under every scheme, as a table from which budgets are solved.

    gradient   `sensitivity.py`: one forward and one way back, the default
    kl         KL(reference || reference with one group quantized), group by group: no gradients,
               a forward for each group and scheme
    weights    ||W' - W||^2 / N: the squared error of an output feature for inputs of mean square 1,
               so that few features that many read (k and v of grouped queries) count; no tokens

What no token reached (experts) and what cannot be told apart in the model is scored by its weights
in proportion to others of its kind, see `weight_scores.py`, and says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from quantload.accuracy.plain_choices import Group
from quantload.accuracy.score_table import Row, Score, ScoreTable
from quantload.accuracy.statistics import ids_digest, source_digest
from quantload.accuracy.weight_scores import Scores, like_others, weight_errors
from quantload.errors import ConfigError, counted, listed
from quantload.loader.plan import Plan
from quantload.loader.plan_row import PlanRow
from quantload.loader.quantized_view import quantized_view
from quantload.loader.source import Source
from quantload.mappers.expert_layouts import text_config
from quantload.mappers.facts import expert_blocks
from quantload.progress import Progress

if TYPE_CHECKING:
    from quantload.accuracy.streaming import StreamedModel

KEEP = "keep"
_CPU = torch.device("cpu")
_TOP_K = (  # what configs call the number of experts of a token
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_top_k",
    "moe_topk",
    "moe_k",
    "experts_per_token",
)
_log = logging.getLogger("quantload")


@dataclass(frozen=True, kw_only=True)
class HowToScore:
    """How layers are scored.

    Args:
        score: By what.
        labels: Next tokens of the gradient's loss: "sampled" from the model, or the "text"'s own.
        device: Where models run.
        dtype: dtype in which they run.
        trust_remote_code: Run modelling code that comes with the checkpoint.
    """

    score: Score = "gradient"
    labels: str = "sampled"
    device: torch.device = _CPU
    dtype: torch.dtype = torch.float32
    trust_remote_code: bool = False


def score_layers(
    source: Source,
    plans: Mapping[str, Plan],
    sequences: Sequence[Sequence[int]],
    how: HowToScore,
    progress: Progress,
    *,
    keep: bool = False,
) -> ScoreTable:
    """Score all modules that the plans quantize.

    Args:
        source: The checkpoint.
        plans: A plan with one scheme for everything, by name of the scheme.
        sequences: Token ids; none are needed where weights score.
        how: How.
        progress: Is told what is done.
        keep: Full precision is a choice too: it costs nothing.

    Raises:
        ConfigError: The plans do not quantize the same modules, or memory is too small.
        QuantloadError: As running the model.
    """
    rows = _rows_by_module(plans)
    views = {name: quantized_view(made, device=how.device) for name, made in plans.items()}
    modules, groups = list(rows), _groups(next(iter(plans.values())), list(rows))
    estimated: dict[str, str] = {}
    if how.score == "weights":
        errors = weight_errors(source, views, modules, progress)
        height = {module: next(iter(of.values())).shape[0] for module, of in rows.items()}
        scores = {m: {n: e / height[m] for n, e in of.items()} for m, of in errors.items()}
    else:
        scores, estimated = _measured(source, views, groups, sequences, how, progress)
    shares = active_shares(source, modules)
    used = sequences if how.score != "weights" else ()
    return ScoreTable(
        score=how.score,
        source_sha256=source_digest(source),
        token_ids_sha256=ids_digest(used) if used else "",
        num_tokens=sum(map(len, used)),
        groups=tuple(groups),
        rows={
            module: _row(of, scores[module], shares.get(module, 1.0), estimated.get(module), keep)
            for module, of in rows.items()
        },
    )


def scored_at(  # noqa: PLR0913 - all that a score needs
    mix: Mapping[str, str],
    mixed: Source,
    source: Source,
    plans: Mapping[str, Plan],
    table: ScoreTable,
    sequences: Sequence[Sequence[int]],
    how: HowToScore,
    progress: Progress,
) -> ScoreTable:
    """Score again at a mix: what changes of single groups cost where the others are quantized.

    A change from one scheme to another costs the slope of KL(reference || mix) along it and, by
    itself, what the larger of the two costs at the reference. Scores of a group's scheme at the mix
    are zero points of its own: only differences mean anything.

    Args:
        mix: Scheme of each module.
        mixed: The checkpoint in it.
        source: The checkpoint.
        plans: A plan with one scheme for everything, by name of the scheme.
        table: Scores at the reference, by gradients.
        sequences: Token ids that scored.
        how: How.
        progress: Is told what is done.
    """
    from quantload.accuracy.sensitivity import slopes

    views = {name: quantized_view(made, device=how.device) for name, made in plans.items()}
    candidates = {name: _opens(view, how, round_inputs=True) for name, view in views.items()}
    reference = _opens(source, how, round_inputs=False)
    if KEEP in table.schemes:
        candidates[KEEP] = reference
    found = slopes(
        _opens(mixed, how, round_inputs=False),
        reference,
        candidates,
        list(table.rows),
        sequences,
        progress,
    )
    rows = {}
    for module, row in table.rows.items():
        slope, own = found.scores.get(module), mix[module]
        scores = {}
        for name, score in row.scores.items():
            if slope is None:
                scores[name] = score
            else:
                itself = 0.0 if name == own else max(score, row.scores[own])
                scores[name] = slope[name] - slope[own] + itself
        rows[module] = replace(row, scores=scores)
    return replace(table, rows=rows)


def _row(
    rows: Mapping[str, PlanRow],
    scores: Mapping[str, float],
    active: float,
    estimated: str | None,
    keep: bool,
) -> Row:
    first = next(iter(rows.values()))
    elements = first.shape[0] * first.shape[1]
    bits = {name: 8.0 * row.output_bytes for name, row in rows.items()}
    found = {name: scores[name] for name in bits}
    if keep:
        bits[KEEP], found[KEEP] = 8.0 * first.dtype.itemsize * elements, 0.0
    return Row(elements=elements, active=active, bits=bits, scores=found, estimated=estimated or "")


def _rows_by_module(plans: Mapping[str, Plan]) -> dict[str, dict[str, PlanRow]]:
    rows: dict[str, dict[str, PlanRow]] = {}
    for name, made in plans.items():
        for row in made.rows:
            if row.scheme is not None:
                rows.setdefault(row.module, {})[name] = row
    partial_rows = [module for module, of in rows.items() if len(of) < len(plans)]
    if partial_rows or not rows:
        raise ConfigError(
            f"{listed(partial_rows)} cannot have each of the schemes {listed(list(plans))}"
            if rows
            else f"nothing can be quantized to {listed(list(plans))}",
            hint="`quantload convert --plan` says why of each scheme; leave one out",
        )
    return rows


def _groups(made: Plan, modules: Sequence[str]) -> list[Group]:
    """Return the modules that must have one scheme together, in the order of the checkpoint."""
    blocks = expert_blocks(modules)
    together = (*made.groups, *blocks)  # engines run all experts of a block in one scheme
    of = {module: group for group in together for module in group}
    wanted = set(modules)
    found: dict[Group, None] = {}
    for module in modules:
        members = tuple(m for m in of.get(module, (module,)) if m in wanted)
        found[members] = None
    return list(found)


def active_shares(source: Source, modules: Sequence[str]) -> dict[str, float]:
    """Return which share of the tokens meets each expert: top-k / E; {} without experts."""
    config = text_config(source.checkpoint.config)
    chosen = next((config[key] for key in _TOP_K if isinstance(config.get(key), int)), None)
    shares: dict[str, float] = {}
    for block in expert_blocks(modules):
        experts = len({module.rpartition(".")[0] for module in block})
        share = 1.0 if chosen is None else min(1.0, chosen / experts)
        shares |= dict.fromkeys(block, share)
    return shares


# -- with tokens -----------------------------------------------------------------------------------


def _measured(
    source: Source,
    views: Mapping[str, Source],
    groups: Sequence[Group],
    sequences: Sequence[Sequence[int]],
    how: HowToScore,
    progress: Progress,
) -> tuple[Scores, dict[str, str]]:
    reference = _opens(source, how, round_inputs=False)
    candidates = {name: _opens(view, how, round_inputs=True) for name, view in views.items()}
    modules = [module for group in groups for module in group]
    estimated: dict[str, str] = {}
    if how.score == "kl":
        from quantload.accuracy.swap_scores import swap_scores

        scores, hidden = swap_scores(reference, candidates, groups, sequences, progress)
    else:
        from quantload.accuracy.sensitivity import gradient_scores

        found = gradient_scores(
            reference,
            candidates,
            modules,
            sequences,
            progress,
            labels="text" if how.labels == "text" else "sampled",
        )
        scores, hidden = found.scores, list(found.hidden)
        estimated |= dict.fromkeys(found.unseen, "no token reached it")
    estimated |= dict.fromkeys(hidden, "its outputs cannot be told apart in the model")
    if estimated:
        if not scores:
            raise ConfigError("no layer could be scored", hint="`--no-data` scores weights")
        _tell(estimated)
        errors = partial(_errors, source, views, progress)
        scores = {**scores, **like_others(scores, list(estimated), errors)}
    return scores, estimated


def _opens(source: Source, how: HowToScore, *, round_inputs: bool) -> Callable[[], StreamedModel]:
    from quantload.accuracy.streaming import open_streamed  # transformers: seconds

    return partial(
        open_streamed,
        source,
        device=how.device,
        dtype=how.dtype,
        round_inputs=round_inputs,
        trust_remote_code=how.trust_remote_code,
    )


def _errors(
    source: Source, views: Mapping[str, Source], progress: Progress, modules: Sequence[str]
) -> Scores:
    return weight_errors(source, views, modules, progress)


def _tell(estimated: Mapping[str, str]) -> None:
    for reason in dict.fromkeys(estimated.values()):
        modules = [module for module, why in estimated.items() if why == reason]
        _log.warning(
            "%s scored by weights, in proportion to others of their kind (%s): %s",
            counted(len(modules), "module was", "modules were"),
            reason,
            listed(modules),
        )


__all__ = ["KEEP", "HowToScore", "active_shares", "score_layers", "scored_at"]
