"""A real vLLM (CPU build) loads what `convert` writes and continues prompts sensibly.

Opt-in: `pytest -m vllm`, with QUANTLOAD_VLLM_PYTHON naming the interpreter of an environment that
holds vLLM; docs/engines.md says how to make one.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from pathlib import Path

import pytest
from smollm2 import smollm2_file

from quantload import api

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SCHEMES = ["W4A16", "W4A16:g64", "W4A16_ASYM:g64", "W8A8", "FP8_DYNAMIC"]
PROMPTS = [
    "The capital of France is",
    "Water is made of hydrogen and",
    "def add(a, b):\n    return",
]
NEW_TOKENS = 12
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_INT4_W4A8": "0",  # the default computes int4 layers with 8-bit activations
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture(scope="session")
def vllm_python() -> str:
    python = os.environ.get("QUANTLOAD_VLLM_PYTHON")
    if not python:
        pytest.skip("QUANTLOAD_VLLM_PYTHON does not name an interpreter with vLLM")
    return python


def own_texts(folder):
    model, tokenizer = api.load(folder, device="cpu"), api.load_tokenizer(folder)
    return [api.generate(model, tokenizer, p, max_new_tokens=NEW_TOKENS) for p in PROMPTS]


def shared_start(one, two):
    pairs = zip(one, two, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_vllm_continues_prompts(vllm_python, tmp_path, scheme):
    """It knows the capital, and starts most texts as quantload does with the same checkpoint.

    Not all: both run in bfloat16, and a model of this size has close calls.
    """
    folder = tmp_path / "model"
    api.convert(smollm2_file(), folder, scheme)
    script = Path(__file__).parent / "vllm_generate.py"
    done = subprocess.run(
        [vllm_python, str(script), str(folder), str(NEW_TOKENS), json.dumps(PROMPTS)],
        capture_output=True,
        text=True,
        env={**os.environ, **ENVIRONMENT},
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    texts = json.loads(done.stdout.strip().splitlines()[-1])
    own = own_texts(folder)
    assert "Paris" in texts[0], texts
    alike = [shared_start(text, mine) >= 4 for text, mine in zip(texts, own, strict=True)]
    assert sum(alike) >= 2, (texts, own)
