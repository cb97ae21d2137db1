"""What `doctor` says of a checkpoint is what a real vLLM (CPU build) does with it.

Opt-in, as tests/engines/test_vllm.py. Broken checkpoints are broken in one way each, and fail.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import served
import torch

from quantload import doctor

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def keep_k_proj(content, made):
    module = "model.layers.0.self_attn.k_proj"
    rows, columns = made[f"{module}.weight_shape"].tolist()
    for name in [n for n in made if n.startswith(f"{module}.")]:
        del made[name]
    made[f"{module}.weight"] = torch.randn(rows, columns).bfloat16()
    content["quantization_config"]["ignore"].append(module)


def without_norm(content, made):
    del content["quantization_config"]
    for name in [n for n in made if n.endswith(("_packed", "_scale", "_shape"))]:
        if name.endswith("_shape"):
            shape = made[name].tolist()
            made[name.replace("weight_shape", "weight")] = torch.randn(shape).bfloat16()
        del made[name]
    del made["model.norm.weight"]


def with_extra(content, made):
    made["model.extra"] = torch.ones(3)


def quantized_head(content, made):
    content["quantization_config"]["ignore"] = []
    rows, columns = made.pop("lm_head.weight").shape
    generator = torch.Generator().manual_seed(2)
    for leaf, tensor in served.tensors_of("W4A16", rows, columns, generator).items():
        made[f"lm_head.{leaf}"] = tensor


def wide_scales(content, made):
    for name in [n for n in made if n.endswith("weight_packed")]:
        made[name] = torch.cat([made[name], made[name]], dim=1)


def group_order(content, made):
    weights = content["quantization_config"]["config_groups"]["group_0"]["weights"]
    content["quantization_config"]["config_groups"]["group_0"]["weights"] = {
        **weights,
        "actorder": "group",
    }
    for name in [n for n in made if n.endswith("weight_shape")]:
        columns = torch.arange(int(made[name][1]), dtype=torch.int32)
        made[name.replace("weight_shape", "weight_g_idx")] = columns // 32


# Name, scheme, what is changed, sizes.
CASES = [
    ("W4A16", "W4A16", None, {}),
    ("W4A16_ASYM", "W4A16_ASYM", None, {}),
    ("W8A8", "W8A8", None, {}),
    ("FP8_DYNAMIC", "FP8_DYNAMIC", None, {}),
    ("FP8", "FP8", None, {}),
    ("W8A16", "W8A16", None, {}),
    ("NVFP4A16", "NVFP4A16", None, {}),
    ("mixed q/k/v", "W4A16", keep_k_proj, {}),
    ("no norm", "W4A16", without_norm, {}),
    ("extra tensor", "W4A16", with_extra, {}),
    ("head without target", "W4A16", quantized_head, {"vocabulary": 128}),
    ("codes of another width", "W4A16", wide_scales, {}),
    ("act-order", "W4A16", group_order, {}),
    ("blocks cut", "FP8_BLOCK", None, {"hidden": 96}),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """{name: (folder, whether vLLM loaded it, what it said)}, of all cases in one process."""
    python = os.environ.get("QUANTLOAD_VLLM_PYTHON")
    if not python:
        pytest.skip("QUANTLOAD_VLLM_PYTHON does not name an interpreter with vLLM")
    base = tmp_path_factory.mktemp("doctor")
    folders = [
        served.llama(base / str(number), kind, change=change, **sizes)
        for number, (_, kind, change, sizes) in enumerate(CASES)
    ]
    script = Path(__file__).parent / "vllm_load.py"
    done = subprocess.run(
        [python, str(script), *map(str, folders)],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
        env={**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(CASES), done.stderr[-3000:]
    names = (name for name, *_ in CASES)
    return {
        name: (folder, line["loaded"], line["error"])
        for name, folder, line in zip(names, folders, lines, strict=True)
    }


@pytest.mark.parametrize("name", [name for name, *_ in CASES])
def test_doctor_agrees_with_vllm(outcomes, name):
    folder, loaded, error = outcomes[name]
    diagnosis = doctor(folder, "vllm", device="cpu")
    assert diagnosis.passed is loaded, (error, diagnosis.findings)


def test_both_answers_occur(outcomes):
    assert {loaded for _, loaded, _ in outcomes.values()} == {True, False}
