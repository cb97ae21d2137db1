"""Planning: a checkpoint is opened, and what it shall become is decided from headers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import NoneType

import torch

from quantload.arguments import check_flags, check_source, check_type
from quantload.errors import ConfigError
from quantload.layers.facts import probe_facts, ready_to_probe
from quantload.layers.short_process import Ask
from quantload.loader.formats import open_source
from quantload.loader.garbage import without_collections
from quantload.loader.layer_selection import select_layers
from quantload.loader.open import open_checkpoint
from quantload.loader.plan import Plan, PlanOptions, make_plan
from quantload.loader.quantized_view import quantized_view
from quantload.loader.source import Source
from quantload.mappers.facts import ModelFacts
from quantload.quant.rules import QuantConfig
from quantload.quant.scheme import DENSE, SAME, Scheme

_log = logging.getLogger("quantload")

Rules = Mapping[str, object] | Iterable[str]
_PLAN = "for example `PlanOptions(dtype=torch.bfloat16)`, of `quantload.loader.plan`"


def inspect(source: str | Path) -> Source:
    """Open a checkpoint from its headers; `.weights` describes every module.

    Args:
        source: A folder, a GGUF file, or a hub id such as `owner/name@revision`.
    """
    with without_collections():
        return open_source(open_checkpoint(source))


def as_source(name: str, source: str | Path | Source, *, warns: bool = False) -> Source:
    """Return an opened checkpoint: the source itself, or what is opened at a path.

    Args:
        name: What the argument is called, for messages.
        source: What `inspect` returned, or what it takes.
        warns: Log that its tensors have other names here than in its files; nobody else tells.

    Raises:
        WrongType: It is something else, as a loaded model.
        QuantloadError: As `inspect`.
    """
    if isinstance(source, Source):
        return source
    check_source(name, source)
    opened = inspect(source)
    if warns and opened.checkpoint.wrappers:
        found = f"`{opened.checkpoint.wrappers}` taken off the names of its tensors"
        _log.warning("`%s`: %s: it was saved inside of a wrapper", opened.checkpoint.name, found)
    return opened


def facts_of(
    source: Source,
    *,
    trust_remote_code: bool = False,
    meanwhile: Callable[[], None] | None = None,
    ask: Ask | None = None,
) -> ModelFacts:
    """Return kinds of modules, fused groups and ties of a checkpoint, in its own names."""
    return probe_facts(
        source.checkpoint.config,
        source.checkpoint.folder,
        [*(weight.parameter_name for weight in source.weights.values()), *source.plain],
        trust_remote_code=trust_remote_code,
        meanwhile=meanwhile,
        ask=ask,
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
    check_flags(trust_remote_code=trust_remote_code)
    check_type("options", options, (PlanOptions, NoneType), expected="a `PlanOptions`", hint=_PLAN)
    config = QuantConfig.from_options(scheme, rules, group_size=group_size)
    options = options or PlanOptions()
    if isinstance(source, Source):
        return _planned(source, config, options, trust_remote_code=trust_remote_code)
    check_source("source", source)
    with ready_to_probe() as ask:
        opened = inspect(source)
        return _planned(opened, config, options, trust_remote_code=trust_remote_code, ask=ask)


def _planned(
    opened: Source,
    config: QuantConfig,
    options: PlanOptions,
    *,
    trust_remote_code: bool,
    ask: Ask | None = None,
) -> Plan:
    with without_collections():
        opened = select_layers(opened, options.layers)
        writes_config = config.asks_for_codes or opened.reader.cache_scheme
        facts = facts_of(
            opened,
            trust_remote_code=trust_remote_code,
            meanwhile=options.target.prepare if writes_config and ask is None else None,
            ask=ask,
        )
        made = make_plan(opened, config, facts, options)
        written = made.config.get("quantization_config")
        if written is not None and ask is not None:  # the copy has imported most of what it takes
            ask(options.target.check, written)()
        elif written is not None:
            options.target.check(written)
    return replace(made, trust_remote_code=trust_remote_code)


def source_to_load(
    source: str | Path | Source | Plan,
    scheme: str | Scheme | None = None,
    *,
    rules: Rules = (),
    group_size: int | None = None,
    device: torch.device,
    trust_remote_code: bool = False,
) -> Source:
    """Return what a model is loaded from; with a scheme, weights that are quantized when read.

    Args:
        source: What to load; a plan is carried out as it is.
        scheme: As in `plan`.
        rules: As in `plan`.
        group_size: As in `plan`.
        device: Where weights are quantized.
        trust_remote_code: As in `plan`.

    Raises:
        ConfigError: Nothing would be quantized, or a plan comes with a scheme of its own.
    """
    is_asked = scheme is not None or bool(rules) or group_size is not None
    if isinstance(source, Plan):
        if is_asked:
            raise ConfigError(
                "a plan has its schemes: `scheme`, `rules` and `group_size` cannot change it",
                hint="give them to `quantload.plan`",
            )
        return quantized_view(source, device=device)
    opened = as_source("source", source)
    if not is_asked:
        return opened
    config = QuantConfig.from_options(scheme, rules, group_size=group_size)
    if config.default in (DENSE, SAME) or (config.default is None and not config.rules):
        raise ConfigError(
            f"`scheme = {scheme}` quantizes nothing while a model is loaded, expected a scheme of "
            "codes, for example `FP8_DYNAMIC`",
            hint="leave `scheme` out to load weights as they are stored; the rule `*=dense` "
            "dequantizes all of them",
        )
    made = plan(
        opened, scheme, rules=rules, group_size=group_size, trust_remote_code=trust_remote_code
    )
    return quantized_view(made, device=device)


__all__ = ["Rules", "as_source", "facts_of", "inspect", "plan", "source_to_load"]
