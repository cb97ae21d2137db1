"""From a model on the meta device to one whose layers wait for the tensors of a checkpoint.

The order matters: names and ties are those of the model as it is built; proofs run the modules' own
code, so they come before anything is cut; stages are cut before layers are replaced, so that only
what this rank holds is.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from quantload.layers.attention import use_attention
from quantload.layers.checkpoint_names import mapper_of
from quantload.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from quantload.layers.experts_surgery import CheckpointWeight, replace_experts
from quantload.layers.layer_builder import LayerBuilder, Sharing
from quantload.layers.meta_model import TransformersModel, tied_names
from quantload.layers.pipeline import cut_into_stages, find_cut
from quantload.layers.sharding import ShardPlan, plan_sharding
from quantload.layers.siblings import Siblings, find_siblings
from quantload.layers.surgery import replace_linears, schemes_in_model
from quantload.layers.vocabulary import replace_vocabulary
from quantload.mappers.mapper import WeightMapper
from quantload.quant.region import Region
from quantload.quant.scheme import Scheme
from quantload.runtime.parallel import Parallel

_log = logging.getLogger("quantload")


@dataclass(frozen=True)
class PreparedModel:
    """A model whose layers wait for tensors.

    Args:
        model: On the meta device, with our layers in it.
        mapper: From checkpoint names to its places.
        tied: Parameters of this rank that are another one.
        dtype: dtype of activations.
        siblings: Layers that read one input.
        plan: How ranks share its layers; None if there are no others.
        parts: Parameters of which this rank holds a region: {name: (shape of the whole, region)}.
        elsewhere: Paths of modules that other ranks hold.
    """

    model: TransformersModel
    mapper: WeightMapper
    tied: Mapping[str, str]
    dtype: torch.dtype
    siblings: Siblings
    plan: ShardPlan | None = None
    parts: Mapping[str, tuple[tuple[int, ...], Region]] = field(default_factory=dict)
    elsewhere: tuple[str, ...] = ()


def prepare(
    model: TransformersModel,
    schemes: Mapping[str, Scheme],
    weights: Mapping[str, CheckpointWeight],
    *,
    dtype: torch.dtype,
    names: Collection[str] = (),
    fuse: bool = True,
    parallel: Parallel | None = None,
) -> PreparedModel:
    """Put our layers into a model.

    Args:
        model: On the meta device, as it was built; changed in place.
        schemes: Scheme of each quantized module, by its name in the checkpoint.
        weights: The modules of the checkpoint, by name.
        dtype: dtype of activations.
        names: Names of all tensors of the checkpoint, see `mapper_of`.
        fuse: Run layers that read one input as one product.
        parallel: This process among those that share the model.

    Raises:
        ModelError: It cannot be cut into that many stages.
    """
    parallel = parallel or Parallel()
    mapper, tied = mapper_of(model, names), tied_names(model)
    plan = None
    if parallel.tp_size > 1:
        use_attention(model)
        plan = plan_sharding(model, parallel.tp_size)
    replace_experts(model, mapper, schemes, weights, dtype=dtype, parallel=parallel)
    in_model, siblings = schemes_in_model(mapper, schemes), find_siblings(model)
    elsewhere: tuple[str, ...] = ()
    if parallel.pp_size > 1:
        cut = find_cut(model, parallel.pp_size)
        elsewhere = cut_into_stages(model, cut, parallel, tied_head=f"{cut.head}.weight" in tied)
    sharing = Sharing(parallel, plan)
    builder = LayerBuilder(in_model, dtype, sharing)
    refused = replace_vocabulary(model, builder, _held(model, tied))
    for path, reason in refused.items():
        _log.warning("`%s` stays in full precision on every rank: %s", path, reason)
    stacks = replace_linears(model, in_model, siblings, dtype=dtype, fuse=fuse, sharing=sharing)
    return PreparedModel(
        model,
        mapper.with_stacks(stacks),
        tied=_held(model, tied),
        dtype=dtype,
        siblings=siblings,
        plan=None if plan is None else plan.without(refused),
        parts=dict(_cut_vectors(model, plan, parallel)),
        elsewhere=elsewhere,
    )


def _held(model: nn.Module, tied: Mapping[str, str]) -> dict[str, str]:
    """Return the ties between parameters of this rank."""
    return {one: two for one, two in tied.items() if _has(model, one) and _has(model, two)}


def _has(model: nn.Module, name: str) -> bool:
    """True if this rank has a parameter, or a layer that can share it.

    Other layers of ours have tensors of their own: a quantized weight is written for each of the
    modules that its model ties.
    """
    path, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:  # below a layer of another stage
        return False
    return leaf in module._parameters or isinstance(module, VocabParallelEmbedding | ParallelLMHead)


def _cut_vectors(
    model: nn.Module, plan: ShardPlan | None, parallel: Parallel
) -> list[tuple[str, tuple[tuple[int, ...], Region]]]:
    """Cut parameters with one number a head; returns them with their whole shapes."""
    found = []
    for name in plan.vectors if plan is not None else ():
        path, _, leaf = name.rpartition(".")
        if not _has(model, name):
            continue
        parameters = model.get_submodule(path)._parameters
        whole = parameters[leaf]
        assert whole is not None, f"{name} is a parameter"
        rows = parallel.share_of(whole.shape[0], f"the numbers of `{name}`")
        parameters[leaf] = nn.Parameter(whole[rows[0] : rows[1]], requires_grad=False)
        found.append((name, (tuple(whole.shape), Region(rows=(rows,)))))
    return found


def without_inputs(schemes: Mapping[str, Scheme]) -> dict[str, Scheme]:
    """Return schemes that leave inputs in full precision."""
    return {name: replace(scheme, input=None) for name, scheme in schemes.items()}


__all__ = ["PreparedModel", "prepare", "without_inputs"]
