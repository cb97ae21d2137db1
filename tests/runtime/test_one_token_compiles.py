"""What a decode step of one row launches compiles for sm_90, without a card."""

import json
import os
import subprocess
import sys
from pathlib import Path

HELPERS = Path(__file__).parent.parent / "helpers"
SCRIPT = """
import json, sys, torch
sys.path[:0] = sys.argv[1:2]
from pretended_card import on_card, pretended_card
from quantload.runtime.kernels import one_token
from quantload.runtime.kernels.add_norm import NormWeight
from quantload.runtime.kernels.decode_attention import HeadRule, decode_attention
from quantload.runtime.kernels.nibble_weight import NibbleWeight
from quantload.runtime.kernels.rounded_weight import PackedRounded

def zeros(*shape, dtype=torch.bfloat16):
    return on_card(torch.zeros(shape, dtype=dtype))

def floats(n):
    return zeros(n, dtype=torch.float32)

n = k = 1024
words, scale = zeros(k // 256, n, 64, dtype=torch.int16), zeros(k // 256, n, dtype=torch.int32)
none = (None,) * 5
nibbles = NibbleWeight(words, scale, *none, "int", "bf16", k, 128, torch.bfloat16)
codes = PackedRounded(zeros(n, k, dtype=torch.float8_e4m3fn), floats(n), None, 0, 1, False)
norm = NormWeight(zeros(k), 1e-5, late=True, offset=False)
with pretended_card(90) as compiled:
    for weight, peaks in ((nibbles, False), (codes, True)):
        x = one_token.Waiting(zeros(1, k), floats(k // 16), floats(k // 16))
        x = one_token.added_product(
            weight, x, None, zeros(1, n), norm, peaks=peaks
        )
        one_token.gated_product(weight, x, None, peaks=peaks)
    rule = HeadRule(heads=8, kv_heads=2, width=128, scale=0.1)
    q, k, v = zeros(1, 1536).split([1024, 256, 256], -1)
    cache = zeros(1, 2, 256, 128), zeros(1, 2, 256, 128)
    for told in ({"sums": floats(64)}, {"peaks": floats(2)}):
        decode_attention(
            q, k, v, rule, rotary=(zeros(256, 128), zeros(256, 128)), cache=cache,
            positions=zeros(1, dtype=torch.int64), locks=zeros(2, dtype=torch.int32), **told,
        )
print(json.dumps([kernel.metadata.name for kernel in compiled]))
"""


def test_every_launch_compiles():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", SCRIPT, str(HELPERS)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [
        *("nibble_stream", "nibble_stream", "rounded_stream", "rounded_stream"),
        *("attention_of_warps", "attention_of_warps"),
    ]
