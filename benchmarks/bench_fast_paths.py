"""Time the kernels of norms and gated linear units against torch's operations, on one GPU.

    python benchmarks/bench_fast_paths.py

Before anything is timed, bits are compared with torch's, over all inputs where these can be tried.
Each time is that of a CUDA graph of calls on different tensors, see README.md here. The last line
is one JSON object with every row.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable

import torch
import triton
from torch import Tensor

from quantload.layers.attend import attend
from quantload.layers.fast_norm import NormFormula
from quantload.runtime.kernels.glu import ACTIVATIONS, glu, is_exact
from quantload.runtime.kernels.rms_norm import rms_norm

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ROTATED_BYTES = 200e6  # more than three times the L2 of an H200 (60 MB)
DEVICE = torch.device("cuda")
EPS = 1e-5


def time_us(calls: list[Callable[[], object]]) -> float:
    """Median us of one call; `calls` do the same on different tensors, in one CUDA graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(7):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / len(calls))
    return statistics.median(times)


def rotated(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Tensors of random numbers, more than the cache holds but at most 64."""
    one = torch.randn(shape, device=DEVICE).to(dtype)
    count = max(2, min(64, int(ROTATED_BYTES / one.nbytes)))
    return [one.clone() for _ in range(count)]


def own_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Return the norm as Llama's code in transformers orders its operations."""
    y = x.to(F32)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * y.to(x.dtype)


def norms(width: int, tokens: int) -> dict[str, object]:
    """Compare and time the ways to a norm of [tokens, width] in bfloat16."""
    xs, weight = rotated((tokens, width), BF16), torch.randn(width, device=DEVICE).to(BF16)
    formula = NormFormula("weight", EPS, late=True, offset=False)
    kernels = {
        "own forward": lambda x: own_norm(x, weight),
        "in place": lambda x: formula.run(x, weight),
        "kernel after torch's mean": lambda x: rms_norm(
            x,
            weight,
            EPS,
            late=True,
            offset=False,
            variance=x.float().pow(2).mean(-1, keepdim=True),
        ),
        "kernel": lambda x: rms_norm(x, weight, EPS, late=True, offset=False),
    }
    expected = own_norm(xs[0], weight)
    row: dict[str, object] = {"what": "rms norm", "shape": [tokens, width]}
    for name, run in kernels.items():
        row[f"{name}: share of equal bits"] = float((run(xs[0]) == expected).float().mean())
        row[f"{name}: us"] = time_us([lambda x=x, run=run: run(x) for x in xs])
    return row


def units(width: int, tokens: int) -> dict[str, object]:
    """Compare and time the ways to silu(gate) * up of [tokens, 2 * width] in bfloat16."""
    xs = rotated((tokens, 2 * width), BF16)
    silu = ACTIVATIONS["silu"]
    ways = {
        "own forward": lambda x: silu(x[:, :width]) * x[:, width:],
        "in place": lambda x: silu(x[:, :width]).mul_(x[:, width:]),
        "kernel": lambda x: glu(x[:, :width], x[:, width:], "silu"),
    }
    expected = ways["own forward"](xs[0])
    row: dict[str, object] = {"what": "silu(gate) * up", "shape": [tokens, width]}
    for name, run in ways.items():
        row[f"{name}: share of equal bits"] = float((run(xs[0]) == expected).float().mean())
        row[f"{name}: us"] = time_us([lambda x=x, run=run: run(x) for x in xs])
    return row


def exactness() -> dict[str, object]:
    """Try every input: of the activations in 16 bits, of silu in float32, of the inverse root."""
    row: dict[str, object] = {
        f"{name} {dtype}": is_exact(name, dtype, DEVICE)
        for name in ACTIVATIONS
        for dtype in (BF16, F16)
    }
    step, one = 1 << 26, torch.ones(1, device=DEVICE)
    wrong = dict.fromkeys(ACTIVATIONS, 0)
    roots = 0
    for start in range(-(1 << 31), 1 << 31, step):
        bits = torch.arange(start, start + step, device=DEVICE).to(torch.int32)
        x = bits.view(F32).view(1 << 13, -1)
        for name, function in ACTIVATIONS.items():
            two = function(x)
            same = (glu(x, torch.ones_like(x), name) == two) | two.isnan()
            wrong[name] += int((~same).sum())
        if 0 <= start < 0x7F800000:
            mean = x.reshape(-1, 1)[: min(step, 0x7F800000 - start)]
            mean = mean[mean[:, 0] >= torch.finfo(F32).tiny]
            found = rms_norm(
                torch.ones_like(mean), one, 0.0, late=False, offset=False, variance=mean
            )
            roots += int((found != torch.rsqrt(mean)).sum())
    row |= {f"{name} float32: unequal of 2^32": count for name, count in wrong.items()}
    return row | {"rsqrt of normal float32: unequal": roots}


def attention() -> dict[str, object]:
    """Hold attention on the GPU against float64 on the CPU: largest error relative to the norm."""
    row: dict[str, object] = {}
    sinks = torch.randn(8)
    features: dict[str, dict[str, object]] = {
        "plain": {},
        "not causal": {"is_causal": False},
        "window": {"sliding_window": 9},
        "soft cap": {"softcap": 2.0},
        "sinks": {"sinks": sinks},
        "mask": {"mask": torch.rand(2, 1, 33, 40) > 0.2},
    }
    for dtype in (F32, BF16):
        for rows in (33, 1):
            for value in (64, 48):
                query = torch.randn(2, 8, rows, 64).to(dtype)
                key = torch.randn(2, 2, 40, 64).to(dtype)
                values = torch.randn(2, 2, 40, value).to(dtype)
                for name, options in features.items():
                    cut = {k: v[..., :rows, :] if k == "mask" else v for k, v in options.items()}
                    wide = {
                        k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
                        for k, v in cut.items()
                    }
                    there = {
                        k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in cut.items()
                    }
                    expected = attend(query.double(), key.double(), values.double(), **wide)
                    found = attend(*(x.to(DEVICE) for x in (query, key, values)), **there)
                    error = float((found.cpu().double() - expected).norm() / expected.norm())
                    place = f"{name} {str(dtype).removeprefix('torch.')}"
                    row[place] = max(error, float(row.get(place, 0.0)))  # type: ignore[arg-type]
    return row


def main() -> None:
    """Print every row, then all as one JSON object."""
    torch.manual_seed(0)
    rows: list[dict[str, object]] = [{"what": "attention", **attention()}]
    rows.append({"what": "exactness", **exactness()})
    rows += [norms(width, tokens) for width in (128, 4096, 8192) for tokens in (1, 32, 8192)]
    rows += [units(width, tokens) for width in (14336, 28672) for tokens in (1, 32, 4096)]
    for row in rows:
        print(json.dumps(row))
    device = torch.cuda.get_device_name()
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    print(json.dumps({"device": device, **versions, "rows": rows}))


if __name__ == "__main__":
    main()
