"""What `rounded_parts` fetches, read from its compiled form; without a card."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HELPERS = Path(__file__).parent.parent / "helpers"
SCRIPT = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
from pretended_card import on_card, pretended_card
from quantload.runtime.kernels.rounded_parts import launch_parts
from quantload.runtime.kernels.rounded_weight import PackedRounded

settings = {"parts": 48, "stages": 4, "splits": 1, "beside": 0}
found = {}
for m, halves in ((64, 1), (256, 2)):
    with pretended_card(90) as compiled, torch.no_grad():
        codes = on_card(torch.zeros(9000, 1040, dtype=torch.float8_e4m3fn))
        weight = PackedRounded(codes, on_card(torch.ones(71, 9)), None, 128, 128, False)
        x = on_card(torch.zeros(m, 1040, dtype=torch.float8_e4m3fn))
        out = on_card(torch.zeros(m, 9000, dtype=torch.bfloat16))
        settings["halves"] = halves
        launch_parts(x, on_card(torch.ones(m, 9)), weight, None, out, settings)
    (kernel,) = compiled
    found[halves] = kernel.asm["ttgir"]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def compiled():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", SCRIPT, str(HELPERS)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("halves", ["1", "2"])
def test_only_the_first_item_skips_steps(compiled, halves):
    """Steps of a program's first item are asked for in advance; later items fetch all of theirs.

    A count that the loop over items set to zero was compiled as if it kept its first value: the
    steps that nobody asked for were waited for without end.
    """
    fetch = compiled[halves].split("partition1(")[1]
    (item, start), (_, first) = re.findall(r"scf\.for (%\w+) = (%\w+) to", fetch)[-2:]
    (skipped,) = re.findall(rf"{first} = arith\.addi %\w+, (%\w+)", fetch)
    (is_first,) = re.findall(rf"{skipped} = arith\.select (%\w+), %\w+, %c0_i32", fetch)
    assert re.search(rf"{is_first} = arith\.cmpi eq, {item}, {start} ", fetch)
