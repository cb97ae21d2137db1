"""Compile what calls of quantized layers launch, for a card that is not here; prints JSON.

    python tests/helpers/compile_kernels.py 90 W4A16:1,64 FP8_DYNAMIC:16 float16/W8A16@77x1000:1
    python tests/helpers/compile_kernels.py 90 norms attention experts

A process of its own, since kernels that were imported for Triton's interpreter cannot be compiled.
"""

import json
import sys
from types import SimpleNamespace

import torch
from pretended_card import CUDA, SHARED, on_card, pretended_card

from quantload.layers.kernel_facts import packed_in
from quantload.layers.linear import QuantLinear
from quantload.quant.activation import with_input_scale
from quantload.quant.rtn import quantize_rtn
from quantload.quant.scheme import parse_scheme

SHAPE = (512, 1024)


def built(kernels):
    return [
        {"name": k.name, "shared": k.metadata.shared, "bytes": len(k.asm["cubin"])} for k in kernels
    ]


def layer(name, dtype, n, k):
    """A layer [n, k] as a loaded model has it, packed for the pretended card."""
    scheme = parse_scheme(name)
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(-(-n // 128) * 128, -(-k // 128) * 128, generator=generator)
    weight = quantize_rtn(dense.to(dtype), scheme.weight).rows(0, n).columns(0, k)
    if scheme.input is not None and scheme.input.needs_scale:
        weight = with_input_scale(weight, scheme.input, absmax=4.0)
    made = QuantLinear(k, n, bias=False, scheme=scheme, dtype=dtype, prefix=name)
    made.receive("weight", 0, weight)
    made.finish(CUDA)
    return made


def calls(text, capability):
    """What a layer's calls compile, and what it says that they launch."""
    dtype, _, rest = text.rpartition("/")
    rest, _, tokens = rest.rpartition(":")
    name, _, shape = rest.partition("@")
    n, k = map(int, shape.split("x")) if shape else SHAPE
    dtype = getattr(torch, dtype or "bfloat16")
    with pretended_card(capability) as compiled:
        made = layer(name, dtype, n, k)
        packed, rows = packed_in(made.gemm), []
        for m in map(int, tokens.split(",")):
            start = len(compiled)
            with torch.no_grad():
                y = made(on_card(torch.randn(m, k).to(dtype)))
            assert y.shape == (m, n)
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


# -- what else a model runs ------------------------------------------------------------------------


def numbers_on_card(*shape, dtype=torch.bfloat16):
    return on_card(torch.randn(*shape).to(dtype))


def norms():
    from quantload.runtime.kernels.add_norm import NormWeight, add_norm
    from quantload.runtime.kernels.glu import ACTIVATIONS, glu
    from quantload.runtime.kernels.rms_norm import rms_norm

    x, weight = numbers_on_card(4, 2048), numbers_on_card(2048)
    for late in (False, True):
        norm = NormWeight(weight, 1e-6, late, not late)
        add_norm(x, x, norm)
        add_norm(x, x, norm, post=norm)
        rms_norm(x, weight, 1e-6, late=late, offset=not late)
    for activation in ACTIVATIONS:
        glu(x, x, activation)


def attention():
    from quantload.runtime.kernels.add_norm import NormWeight
    from quantload.runtime.kernels.decode_attention import HeadRule, decode_attention

    batch, heads, kv_heads, width, length = 2, 8, 2, 128, 512
    norm = NormWeight(numbers_on_card(width), 1e-6, True, False)
    rules = (
        {},
        {"window": 128, "softcap": 30.0},
        {"q_norm": norm, "k_norm": norm},
        {"interleaved": True, "sinks": numbers_on_card(heads)},
    )
    caches = [torch.bfloat16] + [torch.float8_e4m3fn] * (
        torch.cuda.get_device_capability() >= (8, 9)
    )
    for number, more in enumerate(rules):
        for dtype in caches:
            cache = [
                on_card(torch.zeros(batch, kv_heads, length, width, dtype=dtype)) for _ in range(2)
            ]
            rule = HeadRule(heads=heads, kv_heads=kv_heads, width=width, scale=0.1, **more)
            decode_attention(
                numbers_on_card(batch, heads * width),
                numbers_on_card(batch, kv_heads * width),
                numbers_on_card(batch, kv_heads * width),
                rule,
                rotary=(numbers_on_card(length, width), numbers_on_card(length, width)),
                cache=tuple(cache),
                positions=on_card(torch.full((batch,), 100 + number)),
                locks=on_card(torch.zeros(batch * kv_heads, dtype=torch.int32)),
            )


def rounding():
    from quantload.runtime.kernels.quantize import why_not
    from quantload.runtime.kernels.quantize_rows import quantize_rows

    has_fp8 = torch.cuda.get_device_capability() >= (8, 9)
    for preset in ("W8A8", *(("FP8_DYNAMIC", "FP8_BLOCK", "MXFP8") if has_fp8 else ())):
        scheme = parse_scheme(preset).input
        for width in (512, 20480):
            if why_not(scheme, torch.bfloat16) is None:
                quantize_rows(numbers_on_card(3, width), scheme)


def experts():
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    from quantload.layers.experts_proof import fused_experts

    count, hidden, inner = 4, 256, 128
    described = SimpleNamespace(
        num_experts=count,
        hidden_size=hidden,
        moe_intermediate_size=inner,
        hidden_act="silu",
        _experts_implementation="eager",
    )
    for preset in ("W4A16", "W4A16_ASYM", "MXFP4A16", "NVFP4A16", "W8A16", "FP8_DYNAMIC"):
        scheme = parse_scheme(preset)
        with torch.device("meta"):
            module = Qwen3MoeExperts(described)
        leaves = {"gate_up_proj": (2, inner, hidden), "down_proj": (1, hidden, inner)}
        slots = {
            (leaf, slot): (rows, columns)
            for leaf, (parts, rows, columns) in leaves.items()
            for slot in range(parts * count)
        }
        block = fused_experts(
            module, schemes=dict.fromkeys(slots, scheme), dtype=torch.bfloat16, prefix="experts"
        )
        for (leaf, slot), (rows, columns) in slots.items():
            dense = torch.randn(rows, columns, dtype=torch.bfloat16)
            block.receive(leaf, slot, quantize_rtn(dense, scheme.weight).to(CUDA))
        block.finish(CUDA)
        for tokens in (1, 200):
            index = torch.stack([torch.randperm(count)[:2] for _ in range(tokens)])
            weights = numbers_on_card(tokens, 2)
            block(numbers_on_card(tokens, hidden), on_card(index), weights)


OTHERS = {"norms": norms, "attention": attention, "rounding": rounding, "experts": experts}


def others(name, capability):
    with pretended_card(capability) as compiled, torch.no_grad():
        OTHERS[name]()
        return {"what": name, "built": built(compiled), "shared": SHARED[capability]}


def main():
    capability, *asked = sys.argv[1:]
    results = []
    for text in asked:
        if text in OTHERS:
            results.append(others(text, int(capability)))
            continue
        results.append(calls(text, int(capability)))
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
