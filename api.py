"""The public functions: each walk spelled out in a few lines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any

import torch

from quantload.accuracy.compare import ComparedTokens, ModelComparison, Tier, with_outputs
from quantload.accuracy.compare_weights import compare_weights
from quantload.accuracy.config_defaults import config_differences
from quantload.accuracy.limits import checked_tier, parse_limit, with_limits
from quantload.accuracy.one_model import apart_alike, lone_names
from quantload.accuracy.statistics import ids_digest
from quantload.accuracy.structure import compare_structure
from quantload.accuracy.tied_head import has_own_head
from quantload.accuracy.verify import VerifyReport, verify_sources
from quantload.accuracy.verify_output import has_manifest, unreadable, verify_output
from quantload.api_explain import explain
from quantload.api_generate import load_tokenizer
from quantload.api_load import load, load_model, model_shares, parse_device
from quantload.api_plan import as_source, facts_of, inspect, plan
from quantload.arguments import (
    as_path,
    as_sequences,
    as_texts,
    check_flags,
    check_progress,
    check_type,
)
from quantload.errors import (
    CheckpointError,
    ConfigError,
    FormatError,
    QuantloadError,
    SourceNotFound,
    UnknownFormat,
    UnsupportedVariant,
    WrongType,
)
from quantload.loader.convert import run_plan
from quantload.loader.model_dtype import own_dtype, parse_dtype
from quantload.loader.peak_memory import peak_rss
from quantload.loader.plan import Plan, PlanOptions
from quantload.loader.ranks import Ranks
from quantload.loader.source import Source
from quantload.loader.staging import check_place
from quantload.loader.workers import Resources
from quantload.progress import Progress, Silent
from quantload.quant.scheme import Scheme

_EXECUTE = "`quantload.api.execute(plan, output)` carries out what `quantload.plan` returned"


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Args:
        plan: The executed plan.
        folder: Where the output is.
        report: Its verification; None if that was left out.
        seconds: What writing took, without verification; 0 if it was there already.
        peak_rss: The most memory of this process until then, in bytes.
    """

    plan: Plan
    folder: Path
    report: VerifyReport | None
    seconds: float = 0.0
    peak_rss: int = 0


def execute(
    plan: Plan,
    output: str | Path,
    *,
    verify_output: bool = True,
    progress: Progress | None = None,
    resources: Resources | None = None,
    ranks: Ranks | None = None,
) -> Conversion:
    """Carry out a plan.

    Args:
        plan: From `plan`.
        output: New folder; it appears under this name only when it is complete.
        verify_output: Decode every tensor of the output and compare it with the source.
        progress: Draws progress; silent by default.
        resources: Memory, threads and device that may be used.
        ranks: The processes that write this output together; None is this one alone. The first of
            them verifies.

    Raises:
        OutputError: The folder is taken or cannot be written.
    """
    check_type("plan", plan, Plan, expected="what `quantload.plan` returns", hint=_EXECUTE)
    check_flags(verify_output=verify_output)
    _check_run(progress, resources)
    place = as_path("output", output, expected="a new folder")
    progress, ranks = progress or Silent(), ranks or Ranks()
    started = time.perf_counter()
    folder = run_plan(plan, place, progress, resources, ranks)
    done = Conversion(plan, folder, None, time.perf_counter() - started, peak_rss())
    if not verify_output or not ranks.is_first:
        return done
    return replace(done, report=verify_plan(plan, folder, progress, resources))


def verify_plan(
    plan: Plan,
    output: str | Path,
    progress: Progress | None = None,
    resources: Resources | None = None,
) -> VerifyReport:
    """Decode every tensor of the output of a plan and compare it with the plan's source."""
    nearest = plan.options.observer == "minmax"  # a search may clip by more than a step
    opened, progress = inspect(output), progress or Silent()
    return verify_sources(
        opened, plan.source, progress, nearest=nearest, plan=plan, resources=resources
    )


def convert(
    source: str | Path | Source,
    output: str | Path,
    scheme: str | Scheme | None,
    *,
    verify_output: bool = True,
    progress: Progress | None = None,
    resources: Resources | None = None,
    **decisions: Any,  # noqa: ANN401 - the keyword arguments of `plan`
) -> Conversion:
    """Convert a checkpoint.

    Args:
        source: What to convert.
        output: New folder; it appears under this name only when it is complete.
        scheme: See `plan`.
        verify_output: See `execute`.
        progress: See `execute`.
        resources: See `execute`.
        decisions: Keyword arguments of `plan`: rules, group_size, options, trust_remote_code.

    Raises:
        QuantloadError: See `plan` and `execute`.
    """
    check_flags(verify_output=verify_output)
    _check_run(progress, resources)
    if isinstance(source, Plan):
        raise WrongType("`source` is a plan, expected a checkpoint", hint=_EXECUTE)
    check_place(as_path("output", output, expected="a new folder"))
    made = plan(source, scheme, **decisions)
    return execute(
        made, output, verify_output=verify_output, progress=progress, resources=resources
    )


def _check_run(progress: object, resources: object) -> None:
    check_progress(progress)
    check_type("resources", resources, (Resources, NoneType), expected="a `Resources`")


def verify(
    output: str | Path | Source,
    source: str | Path | Source,
    *,
    nearest: bool = False,
    progress: Progress | None = None,
) -> VerifyReport:
    """Decode every tensor of `output` and compare it with `source`.

    Args:
        output: A checkpoint in any format that quantload reads.
        source: The checkpoint that it was made from.
        nearest: The output was rounded to nearest: hold every weight to its rounding step. Known of
            what `convert` wrote, see `verify_output`.
        progress: Draws progress; silent by default.

    Returns:
        What was compared. Of an output that is damaged, or whose config and headers contradict each
        other, that alone: nothing else can be compared.

    Raises:
        QuantloadError: The source cannot be used; or the output is not there, or in a format that
            is not read.
    """
    check_flags(nearest=nearest)
    check_progress(progress)
    opened = as_source("source", source, warns=True)
    try:
        made = as_source("output", output, warns=True)
    except (CheckpointError, FormatError) as error:
        unread = isinstance(error, SourceNotFound | UnknownFormat | UnsupportedVariant)
        if unread and not has_manifest(output):
            raise
        return unreadable(error)  # it is there, and not what it claims to be
    return verify_output(made, opened, progress or Silent(), nearest=nearest)


def compare(  # noqa: PLR0913 - a keyword for each choice of the user
    reference: str | Path | Source,
    candidate: str | Path | Source,
    *,
    sequences: Sequence[Sequence[int]] = (),
    tier: Tier | None = None,
    limits: Sequence[str] = (),
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = torch.float32,
    progress: Progress | None = None,
    resources: Resources | None = None,
    trust_remote_code: bool = False,
) -> ModelComparison:
    """Compare two checkpoints layer by layer; with token sequences also by running both.

    Args:
        reference: The checkpoint that is taken as right, in any format that is read; it may be
            quantized itself.
        candidate: The checkpoint that is judged.
        sequences: Token ids to run through both.
        tier: What is measured: "structure" (headers and scales), "weights" too, outputs of "layers"
            on equal inputs too, or all up to what the models say at the "end". None is "end" with
            sequences, "weights" without.
        limits: Conditions of failure such as `layer.sqnr<15`, in place of the built-in limits on
            the size of errors; see `accuracy/limits.py`.
        device: Where the models run; default cuda if there is one.
        dtype: dtype in which they run; None and "auto" take that of the reference.
        progress: Draws progress; silent by default.
        resources: Memory and threads for weights.
        trust_remote_code: Run modelling code that comes with a checkpoint.

    Raises:
        NotComparable: They are not of the same model, or an output is not finite. Where layers are
            missing or configs differ, which fails, `not_run` of the result says why nothing ran.
        ConfigError: A limit cannot be read, or its statistic is not measured in this tier; there
            are no sequences where they are needed.
    """
    check_flags(trust_remote_code=trust_remote_code)
    _check_run(progress, resources)
    parsed = [parse_limit(text) for text in as_texts("limits", limits, example="layer.sqnr<15")]
    progress, sequences = progress or Silent(), as_sequences("sequences", sequences)
    place, kind = parse_device(device), parse_dtype(dtype)
    tier = checked_tier(tier, parsed, has_tokens=any(sequences))
    sources = (
        as_source("reference", reference, warns=True),
        as_source("candidate", candidate, warns=True),
    )
    structure = compare_structure(*sources, progress)
    one, other = (source.checkpoint.config for source in sources)
    found = ModelComparison(layers=(), **lone_names(*apart_alike(*sources)))
    if tier != "structure":
        found = compare_weights(*sources, progress, resources=resources)
    found = replace(
        found,
        tier=tier,
        structure=structure,
        config_differences=tuple(config_differences(other, one, own_head=has_own_head(sources[1]))),
    )
    if tier in ("layers", "end"):
        from quantload.accuracy.compare_outputs import compare_running  # transformers: seconds

        try:
            outputs = compare_running(
                *sources,
                sequences,
                progress,
                device=place,
                dtype=kind or own_dtype(sources[0]),
                trust_remote_code=trust_remote_code,
                isolated_only=tier == "layers",
            )
        except ConfigError:
            raise
        except QuantloadError as error:
            if not (found.config_differences or found.only_in_reference or structure.problems):
                raise
            # what was compared fails already, whether the models run or not
            found = replace(found, tier="weights", not_run=str(error))
        else:
            found = replace(with_outputs(found, outputs), tokens=_tokens(sequences))
    return with_limits(found, parsed)


def _tokens(sequences: Sequence[Sequence[int]]) -> ComparedTokens:
    kept = [ids for ids in sequences if ids]
    return ComparedTokens(sha256=ids_digest(kept), count=sum(map(len, kept)), sequences=len(kept))


__all__ = [
    "Conversion",
    "PlanOptions",
    "compare",
    "convert",
    "execute",
    "explain",
    "facts_of",
    "inspect",
    "load",
    "load_model",
    "load_tokenizer",
    "model_shares",
    "parse_device",
    "plan",
    "verify",
    "verify_plan",
]
