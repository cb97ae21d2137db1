"""The public functions: each walk spelled out in a few lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantload.accuracy.verify import VerifyReport, verify_sources
from quantload.errors import ConfigError
from quantload.layers.facts import probe_facts
from quantload.loader.convert import run_plan
from quantload.loader.formats import open_source
from quantload.loader.open import open_checkpoint
from quantload.loader.plan import DTYPE_NAMES, Plan, PlanOptions, make_plan
from quantload.loader.source import Source
from quantload.loader.writer import check_place
from quantload.mappers.facts import ModelFacts
from quantload.progress import Progress, Silent
from quantload.quant.rules import QuantConfig
from quantload.quant.scheme import Scheme

Rules = Mapping[str, object] | Iterable[str]


def inspect(source: str | Path) -> Source:
    """Open a checkpoint from its headers: `.weights` describes every module, `.format_name` the format.

    Args:
        source: A folder, a GGUF file, or a hub id such as `owner/name@revision`.
    """
    return open_source(open_checkpoint(source))


def facts_of(source: Source, *, trust_remote_code: bool = False) -> ModelFacts:
    """Return kinds of modules, fused groups and ties of a checkpoint, in its own names."""
    return probe_facts(
        source.checkpoint.config,
        source.checkpoint.folder,
        source.checkpoint.tensors,
        trust_remote_code=trust_remote_code,
    )


def plan(
    source: str | Path | Source,
    scheme: str | Scheme | None,
    *,
    rules: Rules = (),
    group_size: int | None = None,
    options: PlanOptions | None = None,
    trust_remote_code: bool = False,
) -> Plan:
    """Decide a whole conversion from headers; nothing is written.

    Args:
        source: What to convert.
        scheme: Scheme of every module that no rule covers, for example "W4A16"; None keeps them.
        rules: {"model.layers.0.": "W8A16"} or ["model.layers.0.=W8A16"]; see `quant/rules.py`.
        group_size: Group size of `scheme`.
        options: dtype, shard size, treatment of split groups.
        trust_remote_code: Run modelling code that comes with the checkpoint, to learn its groups.

    Raises:
        QuantloadError: Rules or scheme do not fit, or the checkpoint is not sound.
    """
    opened = source if isinstance(source, Source) else inspect(source)
    config = QuantConfig.from_options(scheme, rules, group_size=group_size)
    facts = facts_of(opened, trust_remote_code=trust_remote_code)
    return make_plan(opened, config, facts, options)


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Args:
        plan: The executed plan.
        folder: Where the output is.
        report: Its verification; None if that was left out.
    """

    plan: Plan
    folder: Path
    report: VerifyReport | None


def execute(
    plan: Plan, output: str | Path, *, verify_output: bool = True, progress: Progress | None = None
) -> Conversion:
    """Carry out a plan.

    Args:
        plan: From `plan`.
        output: New folder; it appears under this name only when it is complete.
        verify_output: Decode every tensor of the output and compare it with the source.
        progress: Draws progress; silent by default.

    Raises:
        OutputError: The folder is taken or cannot be written.
    """
    progress = progress or Silent()
    folder = run_plan(plan, Path(output), progress)
    report = verify_sources(inspect(folder), plan.source, progress) if verify_output else None
    return Conversion(plan, folder, report)


def convert(
    source: str | Path | Source,
    output: str | Path,
    scheme: str | Scheme | None,
    *,
    verify_output: bool = True,
    progress: Progress | None = None,
    **decisions: Any,  # noqa: ANN401 - the keyword arguments of `plan`
) -> Conversion:
    """Convert a checkpoint.

    Args:
        source: What to convert.
        output: New folder; it appears under this name only when it is complete.
        scheme: See `plan`.
        verify_output: See `execute`.
        progress: See `execute`.
        decisions: Keyword arguments of `plan`: rules, group_size, options, trust_remote_code.

    Raises:
        QuantloadError: See `plan` and `execute`.
    """
    check_place(Path(output))
    made = plan(source, scheme, **decisions)
    return execute(made, output, verify_output=verify_output, progress=progress)


def verify(
    output: str | Path, source: str | Path | Source, *, progress: Progress | None = None
) -> VerifyReport:
    """Decode every tensor of `output` and compare it with `source`.

    Args:
        output: A checkpoint in any format that quantload reads.
        source: The checkpoint that it was made from.
        progress: Draws progress; silent by default.
    """
    opened = source if isinstance(source, Source) else inspect(source)
    return verify_sources(inspect(output), opened, progress or Silent())


def parse_dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype of a name such as "bfloat16"; None stays None.

    Raises:
        ConfigError: No such dtype.
    """
    if name is None:
        return None
    if name not in DTYPE_NAMES:
        raise ConfigError(f"unknown dtype: `{name}`, expected one of {', '.join(DTYPE_NAMES)}")
    return DTYPE_NAMES[name]

