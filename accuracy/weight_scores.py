"""What schemes cost, told from weights alone: without tokens, and for what no token reached.

    error    ||W' - W||^2 of a weight and what its scheme makes of it

Where some weights of a kind are scored from tokens, the others of that kind get the same score for
the same error: of experts, those of their block and projection come first. An expert to which no
token was routed thus counts as if the average of the routed ones' tokens had met it; with a larger
error of its own it counts for more than they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from quantload.loader.experts import apart_as_in
from quantload.loader.source import Source
from quantload.mappers.facts import expert_blocks
from quantload.progress import Progress
from quantload.quant.metrics import error_sums

Scores = dict[str, dict[str, float]]  # by module and scheme


def weight_errors(
    source: Source, views: Mapping[str, Source], modules: Sequence[str], progress: Progress
) -> Scores:
    """Return ||W' - W||^2 of each module under each scheme.

    Args:
        source: The checkpoint.
        views: The same with all of its weights in a scheme, by name of the scheme.
        modules: Checkpoint names, as the views have them.
        progress: Advances by modules.
    """
    found: Scores = {module: {} for module in modules}
    apart = apart_as_in(source, next(iter(views.values())))
    progress.start("weights", total=len(modules), unit="weights")
    for module in modules:
        stored = apart.read_dense(module, torch.float32)
        for name, view in views.items():
            value = view.read_dense(module, torch.float32)
            found[module][name] = error_sums(value.cpu(), stored.cpu()).noise
        progress.advance(1, note=module)
    progress.finish()
    return found


def like_others(
    scores: Mapping[str, Mapping[str, float]],
    missing: Sequence[str],
    errors_of: Callable[[Sequence[str]], Scores],
) -> Scores:
    """Return scores of modules that have none, from those of their kind and the weights' errors.

    Args:
        scores: What is known; at least one module.
        missing: Modules without a score.
        errors_of: Returns the weight errors of some modules.
    """
    block = {m: n for n, members in enumerate(expert_blocks([*scores, *missing])) for m in members}

    def kind(module: str) -> str:
        return module.rpartition(".")[2]

    keys: tuple[Callable[[str], object], ...] = (
        lambda m: (block.get(m), kind(m)),
        kind,
        lambda m: "",
    )
    alike: dict[str, list[str]] = {}
    for module in missing:
        found = ([m for m in scores if key(m) == key(module)] for key in keys)
        alike[module] = next(members for members in found if members)
    needed = dict.fromkeys([*missing, *(m for members in alike.values() for m in members)])
    errors = errors_of(list(needed))
    return {
        module: {
            name: errors[module][name] * _ratio(scores, errors, alike[module], name)
            for name in errors[module]
        }
        for module in missing
    }


def _ratio(
    scores: Mapping[str, Mapping[str, float]], errors: Scores, members: Iterable[str], name: str
) -> float:
    """Score for an error, over all of some modules."""
    known = list(members)
    error = sum(errors[module][name] for module in known)
    return sum(scores[module][name] for module in known) / error if error else 0.0


__all__ = ["Scores", "like_others", "weight_errors"]
