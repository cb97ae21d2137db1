"""Would this engine load this checkpoint? An offline check of what the engine demands.

Nothing of the engine is run or imported: rules restate what its sources accept, each with the file
that says so (`loader/engine_*.py`). Everything but scales is decided from headers and configs.

    open_source -> Subject -> RULES -> [Finding] -> Diagnosis

A checkpoint that quantload cannot open is an error as well, unless only the format is one that it
does not read and the engine knows: then its tensors are not checked, which is a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from quantload.arguments import check_counts, check_source, check_type
from quantload.errors import (
    ConfigError,
    QuantloadError,
    UnknownFormat,
    UnsupportedVariant,
    listed,
)
from quantload.loader import (
    doctor_config,
    doctor_files,
    doctor_fused,
    doctor_layers,
    doctor_names,
    doctor_parallel,
    doctor_scales,
    doctor_transformers,
)
from quantload.loader.doctor_subject import Finding, Subject
from quantload.loader.engine_facts import Device, Engine
from quantload.loader.engines import ENGINES
from quantload.loader.formats import open_source
from quantload.loader.formats.dense import DenseReader
from quantload.loader.open import open_checkpoint
from quantload.loader.source import Source
from quantload.mappers.facts import ModelFacts
from quantload.mappers.placement import Placement

Rule = Callable[[Subject], Iterator[Finding]]
_WITHOUT_TENSORS: tuple[Rule, ...] = (
    *doctor_files.RULES,
    *doctor_config.RULES,
    *doctor_transformers.CONFIG_RULES,
)
RULES: tuple[Rule, ...] = (
    *doctor_files.RULES,
    *doctor_config.RULES,
    *doctor_layers.RULES,
    *doctor_fused.RULES,
    *doctor_parallel.RULES,
    *doctor_scales.RULES,
    *doctor_transformers.RULES,
    *doctor_names.RULES,
)


@dataclass(frozen=True)
class Diagnosis:
    """What was found.

    Args:
        name: The checkpoint, as the user called it.
        engine: The engine.
        device: Whose kernels count.
        parts: Number of devices.
        findings: Errors first.
    """

    name: str
    engine: Engine
    device: Device
    parts: int
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Findings for which it will not load, or will compute wrong values."""
        return tuple(finding for finding in self.findings if finding.level == "error")

    @property
    def passed(self) -> bool:
        """True without errors."""
        return not self.errors


def engine_named(name: str) -> Engine:
    """Return an engine.

    Raises:
        ConfigError: None of this name is known.
    """
    known = f"one of {listed(ENGINES)}"
    check_type("engine", name, str, expected=known)
    if name not in ENGINES:
        raise ConfigError(
            f"unknown engine: `{name}`, expected {known}",
            hint=f"did you mean `{name.lower()}`?" if name.lower() in ENGINES else "",
        )
    return ENGINES[name]


def examine(
    name: str | Path,
    engine: Engine,
    *,
    facts_of: Callable[[Source], ModelFacts],
    place: Callable[[Source], Placement],
    device: Device = "cuda",
    parts: int = 1,
) -> Diagnosis:
    """Check a checkpoint against what an engine demands.

    Args:
        name: A folder, a GGUF file or a hub id.
        engine: From `engine_named`.
        facts_of: Tells kinds and fused groups of the modules of a checkpoint.
        place: Tells names that do not fit its model.
        device: Whose kernels count: "cuda" or "cpu".
        parts: Devices of a tensor-parallel run.

    Raises:
        SourceNotFound: There is nothing of this name.
        ConfigError: There are not that many devices, or no kernels of the device are known.
    """
    check_source("checkpoint", name)
    check_counts(1, parts=parts)
    if engine.devices and device not in engine.devices:
        raise ConfigError(
            f"kernels of {engine.title} on `{device}` are not known, expected "
            f"{listed(engine.devices)}"
        )
    checkpoint = open_checkpoint(name)
    try:
        source = open_source(checkpoint)
    except QuantloadError as error:
        unread = Source(checkpoint, "unread", DenseReader(checkpoint), {}, checkpoint.tensors)
        nothing = ModelFacts(kinds={}), Placement()
        subject = Subject(checkpoint, unread, *nothing, engine, device, parts)
        findings = [*_of_rules(subject, _WITHOUT_TENSORS), _about_reading(error, subject)]
    else:
        names = facts_of(source), place(source)
        subject = Subject(checkpoint, source, *names, engine, device, parts)
        findings = [*_of_rules(subject, RULES)]
    return Diagnosis(str(name), engine, device, parts, in_order(findings))


def _of_rules(subject: Subject, rules: Iterable[Rule]) -> Iterator[Finding]:
    for rule in rules:
        yield from rule(subject)


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings with errors first, otherwise as the rules found them."""
    return tuple(sorted(findings, key=lambda finding: finding.level != "error"))


def _about_reading(error: QuantloadError, subject: Subject) -> Finding:
    method, engine = subject.method_name, subject.engine
    if isinstance(error, UnknownFormat | UnsupportedVariant):
        return Finding(
            rule="not-checked",
            level="warning",
            found=error.message,
            expected=f"tensors of `{method}` that quantload reads: they were not checked",
            hint=f"only {engine.title} itself can tell",
            source="quantload, reading the checkpoint",
        )
    return Finding(
        rule="checkpoint",
        level="error",
        found=error.message,
        expected="config and tensors that agree, and are all there",
        hint=error.hint,
        source="quantload, reading the checkpoint",
    )


__all__ = ["RULES", "Diagnosis", "Finding", "engine_named", "examine"]
