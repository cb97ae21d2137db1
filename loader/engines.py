"""The engines that `doctor` knows, each in one version."""

from __future__ import annotations

from quantload.loader.engine_sglang import SGLANG
from quantload.loader.engine_transformers import TRANSFORMERS
from quantload.loader.engine_vllm import VLLM

ENGINES = {engine.name: engine for engine in (VLLM, SGLANG, TRANSFORMERS)}
__all__ = ["ENGINES"]
