"""Every kernel of a layer compiles to machine code for the cards that are served, without one.

The whole way of a call is taken, see `pretended_card.py`; so what a layer says of its launches is
held to what it launches, too.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "helpers" / "compile_kernels.py"
TOKENS = "1,8,16,33,64,130,512,4096"
SCHEMES = (
    *("W4A16", "W4A16:g32", "W4A16:channel", "W4A16_ASYM", "W2A16", "W3A16:g64", "W8A16"),
    *("MXFP4A16", "NVFP4A16", "MXFP8A16", "W8A8", "FP8_DYNAMIC", "FP8", "FP8_BLOCK", "MXFP8"),
    *("W4A8", "W4AFP8", "MXFP4XFP8", "MXFP6A16"),
)


def compiled(capability, *asked):
    """Results of the script."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), str(capability), *asked]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(result):
    for call in result["calls"]:
        where = f"{result['scheme']} {result['dtype']}, {result['kernel']}, M={call['tokens']}"
        for kernel in call["built"]:
            assert kernel["bytes"] > 1000, where
            assert kernel["shared"] <= result["shared"], (where, kernel)
        names = [kernel["name"] for kernel in call["built"]]
        told = [name for name in call["told"] if not name.startswith("cuBLAS")]
        if result["kernel"] == "dequantize and multiply":
            assert names == told == [], where
        else:
            assert call["told"], f"{where}: no kernels are told"
            assert [name for name in names if name in told] == told, (where, names)


@pytest.mark.parametrize(
    ("capability", "asked"),
    [(80, "W4A16:1"), (89, "FP8_DYNAMIC:16"), (90, "W4A16:64")],
)
def test_a_kernel_of_each_card(capability, asked):
    (result,) = compiled(capability, asked)
    assert "triton" in result["kernel"], result
    check(result)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_every_scheme(capability, scheme):
    bfloat16, float16 = compiled(capability, f"{scheme}:{TOKENS}", f"float16/{scheme}:1,64,130")
    check(bfloat16)
    check(float16)
    needs_fp8 = scheme in ("FP8_DYNAMIC", "FP8", "FP8_BLOCK", "MXFP8", "MXFP8A16")
    if bfloat16["kernel"] == "dequantize and multiply":
        allowed = scheme == "MXFP6A16" or (capability == 80 and needs_fp8)
        assert allowed, bfloat16["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["W4A16", "W8A16", "MXFP4A16", "W8A8", "FP8_BLOCK", "W4AFP8"])
def test_ragged_shapes(scheme):
    """Sizes of 1 are constants to Triton, and code that takes them for tensors does not compile."""
    for result in compiled(90, *(f"{scheme}@{s}:1,17,130" for s in ("1x1", "1x4096", "77x1000"))):
        check(result)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["norms", "attention", "rounding", "experts"])
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_what_else_a_model_runs(capability, what):
    (result,) = compiled(capability, what)
    assert result["built"], "nothing was compiled"
    for kernel in result["built"]:
        assert kernel["bytes"] > 1000, kernel
        assert kernel["shared"] <= result["shared"], kernel
