"""Loading: a checkpoint becomes a working model, on one process or on a rank of several."""

from __future__ import annotations

import logging
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING

import torch

from quantload.api_plan import Rules, as_source, inspect, source_to_load
from quantload.arguments import check_counts, check_flags, check_progress, check_type
from quantload.errors import MissingTensor
from quantload.layers.cut import as_parallel
from quantload.loader.assign import assign, planned
from quantload.loader.model_dtype import own_dtype, parse_dtype
from quantload.loader.places import RankShare
from quantload.loader.plan import Plan
from quantload.loader.source import Source
from quantload.mappers.facts import missing_layers
from quantload.progress import Progress
from quantload.quant.scheme import Scheme
from quantload.runtime.devices import parse_device
from quantload.runtime.parallel import Parallel
from quantload.written_models import load_written

_log = logging.getLogger("quantload")

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quantload.layers.model_shares import ModuleShare
    from quantload.layers.placement import FusedRows
    from quantload.layers.preparation import PreparedModel


def load(  # noqa: PLR0913 - a keyword for each choice of the user
    source: str | Path | Source | Plan,
    *,
    scheme: str | Scheme | None = None,
    rules: Rules = (),
    group_size: int | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    fuse: bool = True,
    quantize_inputs: bool = True,
    exact: bool = True,
    fast_paths: bool | None = None,
    parallel: Parallel | None = None,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load a checkpoint, quantized or not, as a working transformers model.

    Where a class was registered for its architecture (`register_model`), that is built instead.

    With a `scheme` or `rules` weights are quantized while they are read: the model has every bit of
    one that is loaded from the output of `convert` with the same arguments, and nothing is written.
    What is in memory beside the model is one weight, or the members of a fused group that share a
    scale. `load("meta-llama/Llama-3.1-8B", scheme="FP8_DYNAMIC", rules=["lm_head=W8A16"])`

    Args:
        source: A folder, a GGUF file, a hub id, what `inspect` returned, or a plan from `plan`
            (which also takes statistics for fixed input scales, and observers).
        scheme: Quantize every module that no rule covers to this, for example "FP8_DYNAMIC"; None
            keeps them as they are stored.
        rules: Schemes of single modules, as in `plan`.
        group_size: Group size of `scheme`.
        device: Where the model lives, and where weights are quantized; None takes CUDA where there
            is one.
        dtype: dtype of activations and full-precision parameters; None and "auto" take the
            config's, or the one in which most floats are stored if it names none.
        fuse: Run q/k/v and gate/up as one product each.
        quantize_inputs: Round the inputs of layers as the checkpoint says; False keeps them in full
            precision, so that the model shows its weights alone.
        exact: Give every weight the values that the producer's own code gives it, rounded as it
            rounds them. False multiplies unrounded where the model's dtype is wider, as
            transformers does: float32 and float16 models of bfloat16 scales then have kernels.
        fast_paths: Run gated linear units and RMS norms in fewer passes over memory. None takes the
            ways that give the bits of the model's own code, True also those that differ by
            rounding, False none; see `explain_fast_paths` in `layers/fast_paths.py`.
        parallel: This process among those that share the model, from `Parallel.from_environment`
            in a process of `torchrun`; every process calls `load`, and gets the same results from
            its model. None is one process.
        progress: Draws progress; silent by default.
        trust_remote_code: Run modelling code that comes with the checkpoint.

    Raises:
        QuantloadError: The checkpoint is not sound, or transformers cannot build its model.
        ConfigError: Scheme and rules do not fit, or quantize nothing; or an argument is of a type
            or value that is not taken.
    """
    check_flags(fuse=fuse, quantize_inputs=quantize_inputs, exact=exact)
    check_flags(trust_remote_code=trust_remote_code)
    check_type("fast_paths", fast_paths, (bool, NoneType), expected="`True`, `False` or None")
    as_parallel(parallel)  # refuses what is none
    check_progress(progress)
    kind = parse_dtype(dtype)
    place = parse_device(parallel.device if parallel and device is None else device)
    opened = source_to_load(
        source,
        scheme,
        rules=rules,
        group_size=group_size,
        device=place,
        trust_remote_code=trust_remote_code,
    )
    return load_model(
        opened,
        device=place,
        dtype=kind,
        fuse=fuse,
        quantize_inputs=quantize_inputs,
        exact=exact,
        fast_paths=fast_paths,
        parallel=parallel,
        progress=progress,
        trust_remote_code=trust_remote_code,
    )


def load_model(  # noqa: PLR0913 - as `load`
    source: Source,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    fuse: bool = True,
    quantize_inputs: bool = True,
    exact: bool = True,
    fast_paths: bool | None = None,
    parallel: Parallel | None = None,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load an opened checkpoint: build, probe, replace layers, stream weights; see `load`."""
    from quantload.layers import surgery  # transformers: seconds to import
    from quantload.layers.aux_hidden_states import offer_aux_hidden_states
    from quantload.layers.fast_paths import use_fast_paths

    for warning in source.warnings:
        _log.warning("`%s`: %s", source.checkpoint.name, warning)
    written = load_written(
        source,
        dtype=dtype,
        parallel=parallel,
        device=device,
        quantize_inputs=quantize_inputs,
        exact=exact,
        progress=progress,
    )
    if written is not None:
        return written  # type: ignore[return-value]  # the user's class, see `load`
    prepared = _prepared(
        source,
        dtype=dtype,
        fuse=fuse,
        quantize_inputs=quantize_inputs,
        parallel=parallel,
        trust_remote_code=trust_remote_code,
    )
    model = prepared.model
    done = assign(
        model,
        source,
        prepared.mapper,
        device=device,
        tied=prepared.tied,
        exact=exact,
        share=RankShare(prepared.parts, prepared.elsewhere),
        progress=progress,
    )
    finished = surgery.finish(model, device, untied=done.untied)
    if fast_paths is not False:
        use_fast_paths(finished, dtype=prepared.dtype, exact=not fast_paths)
    offer_aux_hidden_states(finished, parallel)
    return finished


def _prepared(
    source: Source,
    *,
    dtype: torch.dtype | None = None,
    fuse: bool = True,
    quantize_inputs: bool = True,
    parallel: Parallel | None = None,
    trust_remote_code: bool = False,
) -> PreparedModel:
    """Build the model of a checkpoint and put our layers into it; nothing is read."""
    from quantload.layers import meta_model, preparation  # transformers: seconds to import

    config, folder = source.checkpoint.config, source.checkpoint.folder
    if reason := missing_layers(config, source.checkpoint.tensors):
        raise MissingTensor(f"`{source.checkpoint.name}` is incomplete: {reason}")
    dtype = dtype or own_dtype(source)
    model = meta_model.build_on_meta(
        config, folder, dtype=dtype, trust_remote_code=trust_remote_code
    )
    schemes = {name: w.scheme for name, w in source.weights.items() if w.scheme is not None}
    if not quantize_inputs:
        schemes = preparation.without_inputs(schemes)
    return preparation.prepare(
        model,
        schemes,
        source.weights,
        dtype=dtype,
        names=source.checkpoint.tensors,
        fuse=fuse,
        parallel=parallel,
    )


def fused_rows(source: Source, *, trust_remote_code: bool = False) -> dict[str, FusedRows]:
    """Say, without loading, which members of fused layers the model of a checkpoint has.

    Returns:
        By path in the model.

    Raises:
        QuantloadError: As `load`.
    """
    from quantload.layers import placement  # transformers: seconds to import

    prepared = _prepared(source, trust_remote_code=trust_remote_code)
    return placement.fused_rows(prepared.model)


def model_shares(
    source: str | Path | Source, *, tp: int = 1, pp: int = 1, trust_remote_code: bool = False
) -> list[ModuleShare]:
    """Say, without loading, what the first rank of each stage would hold of a checkpoint's model.

    That the checkpoint has all that the model needs is proven as for `load`.

    Args:
        source: A folder, a GGUF file, a hub id, or what `inspect` returned.
        tp: Ranks that share layers.
        pp: Stages.
        trust_remote_code: Run modelling code that comes with the checkpoint.

    Raises:
        QuantloadError: As `load`.
    """
    from quantload.layers.model_shares import shares_of  # transformers: seconds to import

    check_flags(trust_remote_code=trust_remote_code)
    check_counts(1, tp=tp, pp=pp)
    opened = as_source("source", source)
    found = []
    for stage in range(pp):
        parallel = Parallel(tp_size=tp, pp_rank=stage, pp_size=pp)
        prepared = _prepared(opened, trust_remote_code=trust_remote_code, parallel=parallel)
        share = RankShare(prepared.parts, prepared.elsewhere)
        jobs = planned(prepared.model, opened, prepared.mapper, tied=prepared.tied, share=share)
        stored: dict[tuple[str, str, int], int] = {}
        for job in jobs:
            for target in job.targets():
                place = target.module, target.leaf, target.slot
                stored[place] = stored.get(place, 0) + job.num_bytes // job.slots
        found += shares_of(prepared, stored, stage=stage)
    return found


__all__ = ["fused_rows", "inspect", "load", "load_model", "parse_device"]
