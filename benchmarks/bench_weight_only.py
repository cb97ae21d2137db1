"""Time the weight-only kernel against cuBLAS on the full-precision weight, and dequantize + cuBLAS.

    python benchmarks/bench_weight_only.py [--models llama-3-8b] [--schemes W4A16] [--tokens 1 16]

Every result is first compared with a float64 reference. See README.md here for the method.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
import triton
from torch import Tensor

from quantload.quant.qtensor import QuantTensor
from quantload.quant.rtn import quantize_rtn
from quantload.quant.scheme import parse_scheme
from quantload.runtime.kernels.weight_only import PackedWeight, pack, weight_only_linear

READ_LIMIT_GB_S = 4580.0  # read-only Triton kernel, 512 MiB, one H200
ROTATED_BYTES = 200e6  # more than three times the L2 of an H200 (60 MB)
REPLAYS = 7

MODELS = {
    "llama-3-8b": {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
    },
    "smollm2-135m": {"qkv": (960, 576), "gate_up": (3072, 576), "down": (576, 1536)},
}


def time_us(calls: list[Callable[[], object]]) -> float:
    """Median us of one call; `calls` do the same with different weights, in one CUDA graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / len(calls))
    return statistics.median(times)


def n_copies(size: int) -> int:
    return max(2, -(-int(ROTATED_BYTES) // size))


def packed_bytes(packed: PackedWeight) -> int:
    return sum(part.nbytes for part in packed.tensors().values())


def ours(packed: PackedWeight, x: Tensor) -> float:
    copies = [
        replace(packed, **{name: part.clone() for name, part in packed.tensors().items()})
        for _ in range(n_copies(packed_bytes(packed)))
    ]
    return time_us([lambda w=w: weight_only_linear(x, w) for w in copies])


def cublas(weight: Tensor, x: Tensor) -> float:
    copies = [weight.clone() for _ in range(n_copies(weight.nbytes))]
    return time_us([lambda w=w: torch.nn.functional.linear(x, w) for w in copies])


def dequantized(weight: QuantTensor, x: Tensor) -> float:
    copies = [
        replace(weight, codes=weight.codes.clone()) for _ in range(n_copies(weight.codes.nbytes))
    ]
    return time_us(
        [lambda w=w: torch.nn.functional.linear(x, w.dequantize(x.dtype)) for w in copies]
    )


def worst_error(weight: QuantTensor, packed: PackedWeight, x: Tensor) -> float:
    """Largest error as a share of what bfloat16 results and float32 sums allow; above 1: wrong."""
    exact_weight = replace(
        weight, evaluation=replace(weight.evaluation, dtype=torch.float64)
    ).dequantize()
    exact = x.double() @ exact_weight.T
    size = x.double().abs() @ exact_weight.abs().T
    error = (weight_only_linear(x, packed).double() - exact).abs()
    return (error / (2.0**-8 * exact.abs() + 1e-4 * size)).max().item()


def measure(model: str, layer: str, schemes: list[str], tokens: list[int]) -> list[dict]:
    n, k = MODELS[model][layer]
    dense = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02
    inputs = {m: torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for m in tokens}
    rival = {m: cublas(dense, x) for m, x in inputs.items()}
    rows = []
    for name in schemes:
        scheme = parse_scheme(name).fitted(k)
        assert scheme is not None, f"{name} does not fit {k} columns"
        weight = quantize_rtn(dense, scheme.weight)
        packed = pack(weight, device=dense.device)
        for m, x in inputs.items():
            error = worst_error(weight, packed, x)
            us = ours(packed, x)
            rate = packed_bytes(packed) / us / 1e3
            rows.append(
                {
                    "model": model,
                    "layer": layer,
                    "n": n,
                    "k": k,
                    "scheme": str(scheme),
                    "m": m,
                    "us": us,
                    "cublas_us": rival[m],
                    "dequantize_us": dequantized(weight, x),
                    "weight_gb_s": rate,
                    "share_of_read_limit": rate / READ_LIMIT_GB_S,
                    "tflop_s": 2 * m * n * k / us / 1e6,
                    "error": error,
                }
            )
            show(rows[-1])
    return rows


def show(row: dict) -> None:
    shape = f"{row['n']}x{row['k']}"
    print(
        f"{row['model']:13} {row['layer']:8} {shape:11} {row['scheme']:14} {row['m']:5} "
        f"{row['us']:9.2f} {row['cublas_us']:9.2f} {row['dequantize_us']:9.1f} "
        f"{row['weight_gb_s']:7.0f} {row['share_of_read_limit']:6.1%} {row['tflop_s']:7.1f} "
        f"{row['error']:6.2f}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument(
        "--schemes", nargs="+", default=["W4A16", "W4A16_ASYM", "W8A16", "FP8_DYNAMIC"]
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 128, 2048])
    options = parser.parse_args()
    torch.manual_seed(0)
    print(
        f"{'model':13} {'layer':8} {'shape':11} {'scheme':14} {'M':>5} {'us':>9} {'bf16 us':>9} "
        f"{'dequant':>9} {'GB/s':>7} {'limit':>6} {'TFLOP/s':>7} {'error':>6}"
    )
    rows = [
        row
        for model in options.models
        for layer in MODELS[model]
        for row in measure(model, layer, options.schemes, options.tokens)
    ]
    environment = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
    }
    print(json.dumps({"environment": environment, "rows": rows}))
    return int(any(row["error"] > 1 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
