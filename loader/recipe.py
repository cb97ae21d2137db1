"""What an output was made from, in words that hold on any machine: source, options, command.

Everything here follows from the plan alone: no paths, times, hosts or numbers of workers, so that
the same conversion describes itself with the same bytes wherever it runs.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch

from quantload.errors import ConfigError
from quantload.loader.formats.target import Target
from quantload.loader.hub import hub_origin
from quantload.loader.plan import Plan, PlanOptions
from quantload.loader.stats import InputStatistics
from quantload.quant.rules import KEEP
from quantload.quant.scheme import Scheme, parse_scheme

OUTPUT = "OUTPUT"  # stands for the folder that is written
_FLAGS = {"max_shard_bytes": "max-shard-size", "target": "format"}  # others are called as the field


def source_name(plan: Plan) -> str:
    """Return OWNER/NAME@COMMIT of what comes from the hub, else the name of the folder or file."""
    checkpoint = plan.source.checkpoint
    origin = hub_origin(checkpoint.folder)
    if checkpoint.gguf_file is not None:
        return checkpoint.gguf_file.name
    return "@".join(origin) if origin else checkpoint.folder.resolve().name


def source_description(plan: Plan) -> dict[str, Any]:
    """Return what identifies the source of a plan, for machines: digests of what is read of it."""
    checkpoint = plan.source.checkpoint
    origin = hub_origin(checkpoint.folder)
    return {
        "name": source_name(plan),
        "repository": origin[0] if origin else None,
        "revision": origin[1] if origin else None,
        "format": plan.source.format_name,
        "config_sha256": _digest(checkpoint.config),
        "headers_sha256": _digest(
            {n: [str(t.dtype), t.shape, t.block_type] for n, t in checkpoint.tensors.items()}
        ),
        "tensors": len(checkpoint.tensors),
    }


def _digest(content: object) -> str:
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def decisions(plan: Plan) -> dict[str, Any]:
    """Return the rules and options of a plan, for machines."""
    return {
        "scheme": _scheme_text(plan.asked.default),
        "rules": [f"{rule.pattern} = {_scheme_text(rule.scheme)}" for rule in plan.asked.rules],
        "options": {f.name: _plain(getattr(plan.options, f.name)) for f in fields(plan.options)},
        "trust_remote_code": plan.trust_remote_code,
    }


def command_line(plan: Plan) -> str | None:
    """Return the command that makes the same bytes from the same source.

    Returns:
        None if a scheme was given as an object that has no name on the command line.
    """
    schemes = [plan.asked.default, *(rule.scheme for rule in plan.asked.rules)]
    if not all(scheme is None or _has_name(scheme) for scheme in schemes):
        return None
    return shlex.join(["quantload", "convert", source_name(plan), OUTPUT, *_arguments(plan)])


def _arguments(plan: Plan) -> Iterator[str]:
    if plan.asked.default is not None or not plan.asked.rules:
        yield from ("--scheme", _scheme_text(plan.asked.default))
    for rule in plan.asked.rules:
        yield from ("--rule", f"{rule.pattern}={_scheme_text(rule.scheme)}")
    usual = PlanOptions()
    for option in fields(plan.options):
        value = getattr(plan.options, option.name)
        if value == getattr(usual, option.name):
            continue
        if isinstance(value, InputStatistics):
            yield from _statistics(value)
            continue
        yield f"--{option_name(option.name)}"
        if value is not True:
            yield str(_plain(value))
    if plan.trust_remote_code:
        yield "--trust-remote-code"


def _statistics(stats: InputStatistics) -> Iterator[str]:
    if stats.file is not None:
        yield from ("--stats", stats.file.name)
    if stats.stated is not None:
        yield from ("--input-absmax", f"{stats.stated:g}")


def option_name(field: str) -> str:
    """Return what the command line calls a field of `PlanOptions`, without dashes."""
    return _FLAGS.get(field, field.replace("_", "-"))


def _plain(value: object) -> Any:  # noqa: ANN401 - whatever JSON holds
    """Return the value of an option as JSON holds it and the command line spells it."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Target):
        return value.name
    if isinstance(value, InputStatistics):
        file = value.file and value.file.name
        return {"file": file, "sha256": value.sha256, "stated": value.stated}
    assert value is None or isinstance(value, bool | int | float | str), f"no text for {value!r}"
    return value


def _scheme_text(scheme: Scheme | None) -> str:
    return KEEP if scheme is None else str(scheme)


def _has_name(scheme: Scheme) -> bool:
    try:
        return parse_scheme(str(scheme)) == scheme
    except ConfigError:
        return False
