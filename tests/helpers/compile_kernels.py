"""Compile what calls of quantized layers launch, for a card that is not here; prints JSON.

    python tests/helpers/compile_kernels.py 90 W4A16:1,64 FP8_DYNAMIC:16 float16/W8A16:1

A process of its own, since kernels that were imported for Triton's interpreter cannot be compiled.
"""

import json
import sys

import torch
from pretended_card import CUDA, SHARED, on_card, pretended_card

from quantload.layers.kernel_facts import packed_in
from quantload.layers.linear import QuantLinear
from quantload.quant.activation import with_input_scale
from quantload.quant.rtn import quantize_rtn
from quantload.quant.scheme import parse_scheme

N, K = 512, 1024


def built(kernels):
    return [
        {"name": k.name, "shared": k.metadata.shared, "bytes": len(k.asm["cubin"])} for k in kernels
    ]


def layer(name, dtype):
    """A layer as a loaded model has it, packed for the pretended card."""
    scheme = parse_scheme(name)
    generator = torch.Generator().manual_seed(0)
    weight = quantize_rtn(torch.randn(N, K, generator=generator).to(dtype), scheme.weight)
    if scheme.input is not None and scheme.input.needs_scale:
        weight = with_input_scale(weight, scheme.input, absmax=4.0)
    made = QuantLinear(K, N, bias=False, scheme=scheme, dtype=dtype, prefix=name)
    made.receive("weight", 0, weight)
    made.finish(CUDA)
    return made


def calls(name, tokens, dtype, capability):
    """What a layer's calls compile, and what it says that they launch."""
    with pretended_card(capability) as compiled:
        made = layer(name, dtype)
        packed, rows = packed_in(made.gemm), []
        for m in tokens:
            start = len(compiled)
            with torch.no_grad():
                y = made(on_card(torch.randn(m, K).to(dtype)))
            assert y.shape == (m, N)
            told = packed.kernels_for(m) if hasattr(packed, "kernels_for") else ()
            rows.append({"tokens": m, "built": built(compiled[start:]), "told": list(told)})
        return {
            "scheme": name,
            "dtype": str(dtype),
            "kernel": made.kernel.name,
            "refused": made.kernel.refused,
            "calls": rows,
            "shared": SHARED[capability],
        }


def main():
    capability, *asked = sys.argv[1:]
    results = []
    for text in asked:
        dtype, _, rest = text.rpartition("/")
        name, _, tokens = rest.rpartition(":")
        numbers = [int(m) for m in tokens.split(",")]
        dtype = getattr(torch, dtype or "bfloat16")
        results.append(calls(name, numbers, dtype, int(capability)))
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
