"""Throughput of quantizing and packing on one CPU core, beside compressed-tensors' own functions.

    python benchmarks/bench_quantize.py [SCHEME ...] [--rounds 5] [--mb 75] [--chunk-kb 512]

Both sides turn the same bfloat16 weights into the tensors of a compressed-tensors checkpoint, and
their bytes are compared first. Ours works on chunks of rows, as the converter does: compiled loops,
and without them. Theirs takes whole weights, as it does in use: minimum and maximum,
`calculate_qparams` and `compress`.

Each call is timed between two copies of 64 MB, in random order, several times over. GB/s are bytes
of bfloat16 input; `of memcpy` is CPU seconds of the copy for as many bytes by CPU seconds of the
method, which other work on the machine moves little. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from quantload.loader.formats.compressed_tensors_config import build_config
from quantload.loader.formats.compressed_tensors_encode import encode
from quantload.quant import compiled
from quantload.quant.rtn import quantize_rtn
from quantload.quant.scales import shared_range
from quantload.quant.scheme import PRESETS, Scheme

SHAPES = [(8192, 2048), (2048, 8192), (2048, 2048), (512, 2048)]
SCHEMES = ["W4A16", "W4A16_ASYM", "W3A16", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "MXFP4"]
CPU = "cpu"
Leaves = dict[str, Tensor]


class Copy:
    """A copy of 64 MB between resident buffers, which every method is compared with."""

    def __init__(self) -> None:
        self.source = np.ones(64 << 20, np.uint8)
        self.target = np.ones_like(self.source)

    def seconds_per_byte(self) -> float:
        start = time.process_time()
        np.copyto(self.target, self.source)
        return (time.process_time() - start) / self.source.size


def ours(weight: Tensor, scheme: Scheme, chunk: int) -> list[Leaves]:
    """The tensors of each chunk of rows."""
    assert scheme.weight is not None
    shared = shared_range(weight) if scheme.weight.shares_range else None
    multiple = scheme.weight.block_of(*weight.shape)[0] if scheme.weight.block else 1
    step = max(1, chunk // (2 * weight.shape[1] * multiple)) * multiple
    done = []
    for start in range(0, weight.shape[0], step):
        rows = weight[start : start + step]
        done.append(encode(quantize_rtn(rows, scheme.weight, shared=shared), scheme))
    return done


def theirs(scheme: Scheme) -> Callable[[Tensor], Leaves]:
    """What compressed-tensors makes of a weight."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationConfig
        from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

        config = build_config({"m": scheme}, [])
        (group,) = QuantizationConfig.model_validate(config).config_groups.values()
    args, compressor = group.weights, BaseCompressor.get_value_from_registry(group.format)

    def run(weight: Tensor) -> Leaves:
        low, high = extremes(weight, args)
        state = {"weight": weight}
        if scheme.weight.scale == "e4m3":
            state["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
        scale, zero = calculate_qparams(low, high, args, state.get("weight_global_scale"))
        state["weight_scale"] = scale
        if not args.symmetric:
            state["weight_zero_point"] = zero
        return compressor.compress(state, group)

    return run


def extremes(weight: Tensor, args: object) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of each group, row or block, as an observer gives them."""
    if args.strategy == "block":
        height, width = args.block_structure
        blocks = weight.unflatten(1, (-1, width)).unflatten(0, (-1, height))
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    size = args.group_size if "group" in args.strategy else weight.shape[1]
    groups = weight.unflatten(1, (-1, size))
    return groups.amin(-1), groups.amax(-1)


def differing(mine: list[Leaves], other: Leaves) -> list[str]:
    """Names of tensors whose bytes differ; a number for the whole tensor is in every chunk."""
    names = []
    for name in ("weight", "weight_packed", "weight_scale", "weight_global_scale"):
        if name in mine[0]:
            parts = [leaves[name] for leaves in mine]
            joined = parts[0] if parts[0].numel() == 1 else torch.cat(parts)
            same = [x.contiguous().reshape(-1).view(torch.uint8) for x in (joined, other[name])]
            names += [] if torch.equal(*same) else [name]
    return names


def measure(
    methods: dict[str, Callable[[], object]], size: int, rounds: int, copy: Copy
) -> dict[str, dict[str, float]]:
    """Median and best GB/s, and median share of memcpy, of each method."""
    order = random.Random(0)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
    for _ in range(rounds):
        names = list(methods)
        order.shuffle(names)
        for name in names:
            before = copy.seconds_per_byte()
            start, start_cpu = time.perf_counter(), time.process_time()
            methods[name]()
            cpu, wall = time.process_time() - start_cpu, time.perf_counter() - start
            memcpy = (before + copy.seconds_per_byte()) / 2
            taken[name].append((size / wall / 1e9, memcpy * size / cpu, size / cpu / 1e9))
    result = {}
    for name, runs in taken.items():
        wall, share, cpu = (list(column) for column in zip(*runs, strict=True))
        result[name] = {
            "GB/s": statistics.median(wall),
            "best GB/s": max(wall),
            "GB per CPU second": statistics.median(cpu),
            "of memcpy": statistics.median(share),
        }
    return result


def without_loops(work: Callable[[], object]) -> object:
    """Work as where numba is missing."""
    kept, compiled._modules = compiled._modules, lambda: None
    try:
        return work()
    finally:
        compiled._modules = kept


def bench(name: str, weights: list[Tensor], options: argparse.Namespace, copy: Copy) -> list[dict]:
    scheme, chunk = PRESETS[name], options.chunk_kb << 10
    reference = theirs(scheme)
    wrong = differing(ours(weights[-1], scheme, chunk), reference(weights[-1]))

    def mine() -> None:
        for weight in weights:
            ours(weight, scheme, chunk)

    methods = {
        "compiled loops": mine,
        "PyTorch alone": lambda: without_loops(mine),
        "compressed-tensors": lambda: [reference(weight) for weight in weights],
    }
    mine()
    rows = measure(methods, sum(w.nbytes for w in weights), options.rounds, copy)
    peer = rows["compressed-tensors"]["of memcpy"]
    return [
        {"scheme": name, "method": method, "differing": wrong, "times": row["of memcpy"] / peer}
        | row
        for method, row in rows.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("schemes", nargs="*", default=SCHEMES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mb", type=int, default=75)
    parser.add_argument("--chunk-kb", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not compiled.start():
        print("numba cannot be used: the first two rows are the same")
    generator, weights = torch.Generator().manual_seed(0), []
    while sum(w.nbytes for w in weights) < options.mb * 1e6:
        shape = SHAPES[len(weights) % len(SHAPES)]
        weights.append((torch.randn(shape, generator=generator) * 0.02).to(torch.bfloat16))
    copy, rows = Copy(), []
    print("| scheme | method | GB/s | best | per CPU second | of memcpy | times the peer |")
    print("|---|---|---|---|---|---|---|")
    for name in options.schemes:
        for row in bench(name, weights, options, copy):
            rows.append(row)
            print(
                f"| {name} | {row['method']} | {row['GB/s']:.2f} | {row['best GB/s']:.2f} | "
                f"{row['GB per CPU second']:.2f} | {row['of memcpy']:.3f} | {row['times']:.1f} |"
            )
            if row["differing"]:
                print(f"| {name} | BYTES DIFFER: {row['differing']} |")
    environment = {"torch": torch.__version__, "processor": platform.processor(), **vars(options)}
    print(json.dumps({"environment": environment, "rows": rows}))
    return int(any(row["differing"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
