"""What the rules of `doctor` look at, and what they find."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from quantload.loader.checkpoint import Checkpoint
from quantload.loader.engine_facts import Device, Engine, Method, family_of
from quantload.loader.formats.detect import method_of
from quantload.loader.source import Source, SourceWeight
from quantload.mappers.facts import ModelFacts
from quantload.mappers.placement import Placement
from quantload.quant.scheme import Scheme

Level = Literal["error", "warning"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that an engine demands and a checkpoint does not have.

    Args:
        rule: Name of the rule: "kernel", "fused-scheme", ...
        level: "error": it will not load, or will compute wrong values; "warning": it loads, but
            slowly, less exactly, or only with something else installed.
        layer: Module, or "" for the whole checkpoint.
        found: What the checkpoint has.
        expected: What the engine wants.
        hint: A way out, "" if there is none.
        source: Engine, version and file that say so.
    """

    rule: str
    level: Level
    layer: str = ""
    found: str
    expected: str
    hint: str = ""
    source: str


@dataclass(frozen=True)
class Subject:
    """A checkpoint, the engine that shall load it, and where.

    Args:
        checkpoint: The checkpoint as it is stored.
        source: The same as its format reads it: names may be others, and configs.
        facts: Kinds and fused groups of its modules.
        placement: Names that do not fit the model.
        engine: The engine.
        device: Whose kernels count.
        parts: Number of devices of a tensor-parallel run.
    """

    checkpoint: Checkpoint
    source: Source
    facts: ModelFacts
    placement: Placement
    engine: Engine
    device: Device
    parts: int

    @cached_property
    def text_config(self) -> Mapping[str, Any]:
        """The config of the language model: `text_config`, or the config itself."""
        config = self.checkpoint.config
        inner = config.get("text_config")
        return inner if isinstance(inner, Mapping) else config

    @cached_property
    def method_name(self) -> str:
        """`quant_method` of the config in lower case, with `-` for `_`; "" in full precision."""
        if self.checkpoint.gguf_file is not None:
            return "gguf"
        if self.checkpoint.quantization_config is None:
            return self.source.format_name if self.source.is_quantized else ""
        is_elsewhere = self.checkpoint.quantization_config_file != "config.json"
        if is_elsewhere and self.source.weights and not self.source.is_quantized:
            return ""  # a side file of another export
        return (method_of(self.checkpoint) or "").replace("_", "-")

    @cached_property
    def method(self) -> Method | None:
        """What the engine makes of that method; None if it does not know it."""
        if self.method_name == "gguf" and self.checkpoint.gguf_file is None:
            return None  # blocks of GGUF in safetensors: nobody but their producer reads them
        methods = {name.replace("_", "-"): row for name, row in self.engine.methods.items()}
        return methods.get(self.method_name)

    @property
    def quantization(self) -> Mapping[str, Any]:
        """The quantization config, {} if there is none."""
        return self.checkpoint.quantization_config or {}

    def quantized(self) -> Iterator[tuple[SourceWeight, Scheme, str]]:
        """Yield every quantized weight with its scheme and family."""
        for weight in self.source.weights.values():
            if weight.scheme is not None and weight.scheme.weight is not None:
                yield weight, weight.scheme, family_of(weight.scheme)

    def cite(self, file: str) -> str:
        """Return a source: "vLLM 0.32.0, config/model.py"."""
        return f"{self.engine.title} {self.engine.version}, {file}"

    def source_of(self, rule: str) -> str:
        """Return the source of a rule that is the engine's own, whatever the method."""
        return self.cite(self.engine.sources.get(rule, self.engine.methods_source))

    def is_expert(self, weight: SourceWeight) -> bool:
        """True for weights of routed experts."""
        return bool(weight.experts) or ".experts." in f"{weight.module}."
