"""Which output features of which layer of a model a checkpoint's weight computes.

a layer of its own                      all of them
rows of a layer that several fill       those behind the rows of the parts before it
rows of a weight that is fused on disk  all of each layer that gets some
one projection of one expert            its part of the product of that expert

Where parts of a layer are no rows of it, nobody can say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from quantload.accuracy.streaming import StreamedModel
from quantload.layers.experts import FusedExperts
from quantload.loader.places import Job

ALONE = -1  # expert of a layer that has none


@dataclass(frozen=True)
class Columns:
    """Output features of a layer.

    Args:
        module: Checkpoint name of the weight that computes them.
        path: Path of the layer in the model; of experts, of the product of all of them.
        expert: Number of the expert; -1 for a layer that is not of experts.
        start: First feature.
        stop: Last feature, excluded.
    """

    module: str
    path: str
    expert: int
    start: int
    stop: int


def output_columns(model: StreamedModel, modules: Collection[str]) -> list[Columns]:
    """Return where the outputs of some weights appear; nothing for one that appears nowhere.

    Args:
        model: A model that is not loaded.
        modules: Checkpoint names of weights.
    """
    wanted = set(modules)
    by_layer: dict[str, list[Job]] = {}
    for job in model.jobs:
        if job.weight is not None:
            by_layer.setdefault(job.target.name, []).append(job)
    found: list[Columns] = []
    for jobs in by_layer.values():
        layer = model.model.get_submodule(jobs[0].target.module)
        if isinstance(layer, FusedExperts):
            found += _of_experts(layer, jobs)
        elif jobs[0].target.leaf == "weight" and hasattr(layer, "in_features"):
            found += _of_layer(jobs)
    return [columns for columns in found if columns.module in wanted]


def _of_layer(jobs: list[Job]) -> Iterator[Columns]:
    joins = [job.target.join for job in jobs if job.target.join is not None]
    if any(join.axis for join in joins) or any(job.target.piece is not None for job in jobs):
        return  # parts that are no rows
    start = 0
    for job in sorted(jobs, key=_part):
        yield Columns(job.name, job.target.module, ALONE, start, start + job.shape[0])
        start += job.shape[0]


def _part(job: Job) -> tuple[int, int]:
    join = job.target.join
    return job.target.slot, 0 if join is None else join.part


def _of_experts(layer: FusedExperts, jobs: list[Job]) -> Iterator[Columns]:
    for job in jobs:
        leaf = job.target.leaf
        if layer.layout.is_bias(leaf) or job.target.join is not None:
            continue
        projection = layer.layout.projection(leaf)
        path, rows = f"{job.target.module}.{leaf}_experts", projection.rows
        for target in job.targets():
            expert, part = divmod(target.slot, projection.parts)
            yield Columns(job.name, path, expert, part * rows, (part + 1) * rows)


__all__ = ["ALONE", "Columns", "output_columns"]
