"""KL(reference || reference with one group quantized), one group after the other.

No gradients are needed, so this works for models that have none; every group and scheme costs the
blocks behind it. Effects of single groups need not add up: see `accuracy.md`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quantload.accuracy.attribution_runs import Variant, run_variants
from quantload.accuracy.attribution_units import Site, Unit, block_number
from quantload.accuracy.output_columns import Columns, output_columns
from quantload.accuracy.plain_choices import Group
from quantload.accuracy.sensitivity import Open, Scores
from quantload.accuracy.streaming import StreamedModel
from quantload.accuracy.streaming_tokens import batches_of, check_sequences
from quantload.errors import ModelError
from quantload.progress import Progress

_BATCH_TOKENS = 512


def swap_scores(
    reference: Open,
    candidates: Mapping[str, Open],
    groups: Sequence[Group],
    sequences: Sequence[Sequence[int]],
    progress: Progress,
) -> tuple[Scores, list[str]]:
    """Exchange one group at a time.

    Args:
        reference: Opens the reference.
        candidates: Opens the model with all of its weights in a scheme, by name of the scheme.
        groups: Modules that are exchanged together.
        sequences: Token ids.
        progress: Advances by runs.

    Returns:
        Mean KL in nats a token, by module and scheme, that of a group in equal parts to its
        members; and the modules that could not be exchanged.

    Raises:
        ModelError: The model gives no logits, or what a scheme gives is not finite.
    """
    scores: Scores = {}
    hidden: list[str] = []
    for name, opened in candidates.items():
        models = reference(), opened()
        check_sequences(models[0].model, sequences)
        units, hidden = _units(models[1], groups, name)
        variants = {group: Variant("reference", unit) for group, unit in units.items()}
        found = run_variants(
            *models,
            list(variants.values()),
            batches_of(sequences, _BATCH_TOKENS),
            progress,
            phase=f"KL of {name}",
        )
        for group, variant in variants.items():
            kl = float(found[variant].positions.mean())
            if not kl < float("inf"):
                raise ModelError(f"outputs with `{group[0]}` in {name} are not finite")
            for module in group:
                scores.setdefault(module, {})[name] = kl / len(group)
    return scores, hidden


def _units(
    model: StreamedModel, groups: Sequence[Group], scheme: str
) -> tuple[dict[Group, Unit], list[str]]:
    """Return what is exchanged for each group, and the modules of which that is not known."""
    modules = [module for group in groups for module in group]
    places: dict[str, list[Columns]] = {}
    for columns in output_columns(model, modules):
        places.setdefault(columns.module, []).append(columns)
    units: dict[Group, Unit] = {}
    hidden: list[str] = []
    for group in groups:
        if any(module not in places for module in group):
            hidden += group
            continue
        paths = dict.fromkeys(columns.path for module in group for columns in places[module])
        numbers = [block_number(path, model.cut) for path in paths]
        inside = [number for number in numbers if number is not None]
        is_inside = len(inside) == len(numbers)
        units[group] = Unit(
            name=group[0],
            sites=tuple(Site(path) for path in paths),
            modules=group,
            reference="",
            candidate=scheme,
            first=min(inside) if is_inside else 0,
            last=max(inside) if is_inside else model.num_blocks - 1,
        )
    return units, hidden


__all__ = ["swap_scores"]
