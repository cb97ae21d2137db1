"""Run every kernel of the table on small ragged shapes, once each, under a tool that watches it.

    compute-sanitizer --tool memcheck python tests/helpers/run_kernels.py [SCHEME ...]
    compute-sanitizer --tool racecheck python tests/helpers/run_kernels.py W4A16

Results are not looked at here; `test_kernels_any_shape.py` does that.
"""

import sys

import torch

from quantload.quant.rtn import quantize_rtn
from quantload.quant.scheme import PRESETS, parse_scheme
from quantload.runtime.gemm import KERNELS, usable_input

SHAPES = ((33, 72), (77, 1000), (256, 2048))
TOKENS = (1, 7, 17, 65, 130, 1030)


def run(name, shapes=SHAPES, tokens=TOKENS):
    """Run all rows that serve a scheme; returns how many calls there were."""
    scheme, device, calls = parse_scheme(name), torch.device("cuda"), 0
    input, _ = usable_input(scheme.input)
    if input is not None and not input.dynamic:
        input = None
    for n, k in shapes:
        dense = torch.randn(-(-n // 128) * 128, -(-k // 128) * 128, dtype=torch.bfloat16)
        weight = quantize_rtn(dense, scheme.weight).rows(0, n).columns(0, k).to(device)
        for row in KERNELS[:-1]:
            if row.why_not(weight, input, device=device, dtype=torch.bfloat16) is not None:
                continue
            packed = row.pack(weight, input, device=device, dtype=torch.bfloat16)
            for m in tokens:
                packed(torch.randn(m, k, device=device, dtype=torch.bfloat16))
                calls += 1
    torch.cuda.synchronize()
    return calls


if __name__ == "__main__":
    names = sys.argv[1:] or [name for name, scheme in PRESETS.items() if scheme.weight is not None]
    with torch.no_grad():
        for scheme_name in names:
            sys.stdout.write(f"{scheme_name}: {run(scheme_name)} calls\n")
            sys.stdout.flush()
