"""The walk of `doctor`: rules of the loader, with what a probe of the model knows."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from quantload.arguments import check_flags
from quantload.layers.facts import probe_facts
from quantload.layers.placement import place_names
from quantload.loader.doctor import Diagnosis, engine_named, examine
from quantload.loader.engine_facts import Device
from quantload.loader.source import Source
from quantload.mappers.facts import ModelFacts
from quantload.mappers.placement import Placement


def doctor(
    checkpoint: str | Path,
    engine: str,
    *,
    device: Device = "cuda",
    parts: int = 1,
    trust_remote_code: bool = False,
) -> Diagnosis:
    """Say whether an engine would load a checkpoint, without running the engine.

    Args:
        checkpoint: A folder, a GGUF file or a hub id.
        engine: "vllm", "sglang" or "transformers".
        device: Whose kernels count: "cuda", or "cpu" for vLLM's CPU build.
        parts: Devices of a tensor-parallel run.
        trust_remote_code: Run modelling code that comes with the checkpoint, to learn its names.

    Raises:
        SourceNotFound: There is nothing of this name.
        ConfigError: No such engine, device or number of devices.
    """
    check_flags(trust_remote_code=trust_remote_code)
    return examine(
        checkpoint,
        engine_named(engine),
        facts_of=partial(_facts_of, trust_remote_code=trust_remote_code),
        place=partial(_place, trust_remote_code=trust_remote_code),
        device=device,
        parts=parts,
    )


def _names(source: Source) -> list[str]:
    return [*(weight.parameter_name for weight in source.weights.values()), *source.plain]


def _facts_of(source: Source, *, trust_remote_code: bool) -> ModelFacts:
    found = source.checkpoint
    return probe_facts(
        found.config, found.folder, _names(source), trust_remote_code=trust_remote_code
    )


def _place(source: Source, *, trust_remote_code: bool) -> Placement:
    found = source.checkpoint
    return place_names(
        found.config, found.folder, _names(source), trust_remote_code=trust_remote_code
    )


__all__ = ["doctor"]
