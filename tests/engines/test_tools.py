"""Other tools dequantize what is written in their formats to the same weights, bit for bit.

Opt-in: `pytest -m tools`, with QUANTLOAD_GPTQMODEL_PYTHON, QUANTLOAD_AUTOAWQ_PYTHON,
QUANTLOAD_MODELOPT_PYTHON and QUANTLOAD_ACCELERATE_PYTHON (transformers with accelerate) naming the
interpreters of environments that hold them. Tried with GPTQModel 7.7.0, AutoAWQ 0.2.9, ModelOpt
0.47.0 and transformers 5.24.0.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_checkpoints
import torch
from safetensors.torch import load_file
from written import write_model

from quantload.loader.formats.targets import target_named
from quantload.quant.qtensor import Evaluation
from quantload.quant.scheme import parse_scheme

pytestmark = [pytest.mark.tools, pytest.mark.slow]

KEPT = ("lm_head", "1.mlp.down_proj")
GPTQ = ["W4A16:g64", "W4A16_ASYM:g64", "W8A16:g64", "W3A16:g64", "W2A16:g64", "W4A16:channel"]
AWQ = ["W4A16:g64", "W4A16_ASYM:g64", "W4A16_ASYM:channel"]
MODELOPT = [
    *("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP8", "NVFP4", "NVFP4A16"),
    *("W4A16:g64", "W4A16:channel", "W8A16:channel"),
]


def check(tool, script, format_name, schemes, tmp_path, *, dtype=None):
    """Write a model in each scheme, and have one process of the tool dequantize them all.

    Args:
        tool: Part of the name of the variable that names its interpreter.
        script: What it runs.
        format_name: As in `--format`.
        schemes: To be tried.
        tmp_path: A folder.
        dtype: In which the tool evaluates weights; None takes that of the format.
    """
    python = os.environ.get(f"QUANTLOAD_{tool}_PYTHON")
    if not python:
        pytest.skip(f"QUANTLOAD_{tool}_PYTHON does not name an interpreter")
    base = tiny_checkpoints.llama(tmp_path / "base", hidden=128, intermediate=256)
    made = {}
    for number, scheme in enumerate(schemes):
        folder = tmp_path / f"{format_name}-{number}"
        target = target_named(format_name)
        made[folder] = write_model(folder, base, target, parse_scheme(scheme), kept=KEPT)
    done = subprocess.run(
        [python, str(Path(__file__).parent / script), *map(str, made)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for folder, tensors in made.items():
        found = load_file(f"{folder}.safetensors")
        assert tensors.keys() <= found.keys()
        for module, tensor in tensors.items():
            evaluated = replace(tensor, evaluation=Evaluation(dtype)) if dtype else tensor
            expected = evaluated.dequantize()
            assert torch.equal(found[module], expected), (folder.name, module)


def test_gptqmodel_reads_gptq(tmp_path):
    check(*("GPTQMODEL", "gptqmodel_dequantize.py", "gptq", GPTQ, tmp_path), dtype=torch.bfloat16)


def test_gptqmodel_reads_awq(tmp_path):
    check(*("GPTQMODEL", "gptqmodel_dequantize.py", "awq", AWQ, tmp_path), dtype=torch.bfloat16)


def test_autoawq_reads_awq(tmp_path):
    check("AUTOAWQ", "autoawq_dequantize.py", "awq", AWQ, tmp_path)


def test_modelopt_reads_modelopt(tmp_path):
    check("MODELOPT", "modelopt_dequantize.py", "modelopt", MODELOPT, tmp_path)


def test_transformers_reads_fp8(tmp_path):
    check("ACCELERATE", "transformers_dequantize.py", "fp8", ["FP8_BLOCK"], tmp_path)
