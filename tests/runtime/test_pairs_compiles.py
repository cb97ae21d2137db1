"""Every kind of weight that `pairs_hopper` unpacks compiles for sm_90, without a card."""

import json
import os
import subprocess
import sys
from pathlib import Path

HELPERS = Path(__file__).parent.parent / "helpers"
SCRIPT = """
import json, sys, torch
sys.path[:0] = sys.argv[1:3]
from pretended_card import CUDA, on_card, pretended_card
import test_byte_gemm as cases
from quantload.runtime.byte_gemm import ByteGemm

found = {}
for name in ("int8-g32-zero", "int8-channel-zero", "e4m3-mx", "e5m2-channel", "int6-g48"):
    for dtype in (torch.bfloat16, torch.float16):
        with pretended_card(90) as compiled:
            weight = cases.make_weight(cases.CASES[name], 256, 512)
            row = ByteGemm()
            assert row.why_not(weight, None, device=CUDA, dtype=dtype) is None
            module = row.pack(weight, None, device=CUDA, dtype=dtype)
            with torch.no_grad():
                module(on_card(torch.randn(3, 512).to(dtype)))
            found[f"{name} {dtype}"] = [kernel.metadata.name for kernel in compiled]
print(json.dumps(found))
"""


def test_every_kind_compiles():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", SCRIPT, str(HELPERS), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 10
    assert all(names == ["pairs_gemm_hopper"] for names in found.values()), found
