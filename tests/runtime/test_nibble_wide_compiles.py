"""The kernel of hundreds of tokens compiles for sm_90 with products that run beside unpacking."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HELPERS = Path(__file__).parent.parent / "helpers"
SCRIPT = """
import json, subprocess, sys, torch
sys.path[:0] = sys.argv[1:2]
from pretended_card import CUDA, on_card, pretended_card
from triton.backends.nvidia.compiler import get_ptxas
from quantload.quant.rtn import quantize_rtn
from quantload.quant.scheme import parse_scheme

found = []
with pretended_card(90) as compiled:
    from quantload.runtime.kernels.nibble import run
    from quantload.runtime.kernels.nibble_plan import Plan
    from quantload.runtime.kernels.nibble_weight import pack

    weight = quantize_rtn(torch.randn(400, 1024).bfloat16(), parse_scheme(sys.argv[2]).weight)
    part = pack(weight, dtype=torch.bfloat16, device=CUDA)
    run(on_card(torch.randn(200, 1024).bfloat16()), part, None, Plan("wide", **eval(sys.argv[3])))
for kernel in compiled:
    ptx = sys.argv[4] + "/kernel.ptx"
    with open(ptx, "w") as file:
        file.write(kernel.asm["ptx"])
    command = [get_ptxas(90).path, "-v", "--gpu-name", "sm_90a", ptx, "-o", ptx + ".cubin"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found.append([kernel.metadata.name, kernel.metadata.shared, said])
print(json.dumps(found))
"""
PLANS = (
    {"rows": 256, "tokens": 128, "stages": 4},
    {"rows": 256, "tokens": 128, "stages": 4, "shared": 1},
    {"rows": 128, "tokens": 128, "stages": 2, "step": 64, "shared": 1},
    {"rows": 128, "tokens": 64, "stages": 4, "step": 64},
    {"rows": 256, "tokens": 32, "stages": 5},
    {"rows": 128, "tokens": 32, "stages": 8, "shared": 1},
)


@pytest.mark.parametrize(
    "plan", PLANS, ids=("persistent", "shared", "narrow", "64", "32", "32-shared")
)
@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM"])
def test_products_are_not_serialized(scheme, plan, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", SCRIPT, str(HELPERS), scheme, repr(plan), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    ((name, shared, said),) = json.loads(done.stdout.splitlines()[-1])
    assert name == "wide_kernel"
    assert shared <= 232_448
    assert "C75" not in said, said
