"""minmax and search: squared error and KL of a real model, and what the search costs.

The model is that of `bench_smollm2`; outputs run in float32, with inputs in full precision, so that
the difference is that of the weights alone. Usage:

    python benchmarks/bench_observers.py --speed
    python benchmarks/bench_observers.py TOKEN_IDS.json [--sequences 16] [--schemes W4A16 ...]

`--speed` searches a random weight in one thread, in loops and in PyTorch, and counts CPU time of
the thread: bytes are those of the bfloat16 weight. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from bench_smollm2 import kl_of, source_file
from torch import Tensor

from quantload import api
from quantload.loader.plan import PlanOptions
from quantload.quant import compiled
from quantload.quant.rtn import quantize_rtn
from quantload.quant.scheme import parse_scheme
from quantload.quant.search import search_scales

SCHEMES = ["W4A16", "W3A16", "NVFP4A16", "MXFP4"]
TIMED = ["W4A16", "W4A16_ASYM", "W4A16:channel", "NVFP4A16", "MXFP4A16"]


# -- speed -----------------------------------------------------------------------------------------


def seconds_of(weight: Tensor, scheme: str, *, loops: bool) -> float:
    """CPU seconds of this thread for one search, the best of three."""
    found, search_blocks = [], compiled.search_blocks
    weight_scheme = parse_scheme(scheme).weight
    assert weight_scheme is not None
    if not loops:
        compiled.search_blocks = lambda *_, **__: None
    try:
        for _ in range(4):  # the first compiles
            quantized = quantize_rtn(weight, weight_scheme)
            started = time.thread_time()
            search_scales(weight, quantized, weight_scheme)
            found.append(time.thread_time() - started)
    finally:
        compiled.search_blocks = search_blocks
    return min(found[1:])


def measure_speed() -> list[dict]:
    """Print and return a row for each scheme."""
    torch.set_num_threads(1)
    compiled.start()
    weight = (torch.randn(1024, 4096, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    rows = []
    for scheme in TIMED:
        row = {"scheme": scheme}
        for name, loops, part in (("loops", True, weight), ("torch", False, weight[:128])):
            row[name] = part.nbytes / seconds_of(part, scheme, loops=loops) / 1e9
        rows.append(row)
        print(f"{scheme:16} loops {row['loops']:.3f} GB/s, PyTorch {row['torch']:.4f} GB/s")
    return rows


# -- divergence ------------------------------------------------------------------------------------


@torch.no_grad()
def measure_model(schemes: list[str], sequences: list[list[int]]) -> list[dict]:
    """Print and return a row for each scheme and observer."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        api.convert(source_file(), base / "dense", "dense", verify_output=False)
        reference = api.load(base / "dense", device="cpu", dtype=torch.float32)
        for scheme in schemes:
            kls = {}
            for observer in ("minmax", "search"):
                folder = base / f"{scheme.replace(':', '-')}-{observer}"
                started = time.perf_counter()
                done = api.convert(
                    source_file(), folder, scheme, options=PlanOptions(observer=observer)
                )
                seconds = time.perf_counter() - started
                assert done.report is not None
                assert done.report.passed, done.report.failures()
                candidate = api.load(
                    folder, device="cpu", dtype=torch.float32, quantize_inputs=False
                )
                kls[observer] = kl = kl_of(reference, candidate, sequences)
                less = (kl - kls["minmax"]).double()
                quantized = [layer for layer in done.report.layers if layer.scheme != "dense"]
                row = {
                    "scheme": scheme,
                    "observer": observer,
                    "seconds": seconds,
                    "relative_error": sum(layer.relative for layer in quantized) / len(quantized),
                    "kl_mean": float(kl.mean()),
                    "kl_standard_error": float(kl.std() / kl.numel() ** 0.5),
                    "kl_median": float(kl.median()),
                    "kl_against_minmax": float(less.mean()),
                    "kl_against_minmax_standard_error": float(less.std() / kl.numel() ** 0.5),
                    "tokens": kl.numel(),
                }
                rows.append(row)
                print(
                    f"{scheme:16} {observer:7} {seconds:6.1f} s  relative error "
                    f"{row['relative_error']:.4f}  KL {row['kl_mean']:.4f} "
                    f"+- {row['kl_standard_error']:.4f}, against minmax "
                    f"{row['kl_against_minmax']:+.4f} "
                    f"+- {row['kl_against_minmax_standard_error']:.4f}",
                    flush=True,
                )
    return rows


def main() -> None:
    """Measure speed, or the model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("token_ids", type=Path, nargs="?")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--schemes", nargs="*", default=SCHEMES)
    arguments = parser.parse_args()
    if not arguments.speed and arguments.token_ids is None:
        parser.error("expected TOKEN_IDS.json or --speed")
    rows = measure_speed() if arguments.speed else []
    if arguments.token_ids is not None:
        content = json.loads(arguments.token_ids.read_text())
        sequences = content["ids"] if isinstance(content, dict) else content
        rows += measure_model(arguments.schemes, sequences[: arguments.sequences])
    print(json.dumps({"benchmark": "observers", "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
