"""Time the experts of a block, whole: routing order, both products, activation, weighted sum.

    python benchmarks/bench_moe.py [--configs qwen3-30b-a3b] [--formats W4A16] [--tokens 1,4,16]
                                   [--peers FILE.py] [--seconds S] [--out FILE.json]
    python benchmarks/bench_moe.py --table FILE.json

Every call has its own random routing, so that its experts are not in the L2. Every result is
compared with a float64 block on dequantized weights before it is timed. A file of peers has

    contestants(fmt, up, down, calls) -> iterable of (name, run)

with `up` and `down` lists of `QuantTensor` by expert (rows of gate before those of up), `calls` a
list of (x [T, H], index [T, k], weights [T, k]), and run(i) the result [T, H] of the i-th call.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from gemm_table import best
from torch import Tensor, nn

from quantload.layers.experts import FusedExperts
from quantload.layers.experts_proof import fused_experts
from quantload.quant.qtensor import QuantTensor
from quantload.quant.rtn import quantize_rtn
from quantload.quant.scheme import parse_scheme
from quantload.runtime.launch_settings import card_limits
from quantload.runtime.timing import ROTATED_BYTES, capture, in_turns

ROUTINGS = 16
CHECKED_TOKENS = 8
FORMATS = ("W4A16", "MXFP4A16", "NVFP4A16", "FP8_DYNAMIC", "FP8_BLOCK")
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)
Call = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Config:
    """A block: E experts, k of them for a token, widths H and I."""

    experts: int
    chosen: int
    hidden: int
    inner: int


CONFIGS = {
    "qwen3-30b-a3b": Config(128, 8, 2048, 768),
    "deepseek-like": Config(256, 8, 7168, 2048),
    "mixtral-8x7b": Config(8, 2, 4096, 14336),
}


def random_experts(fmt: str, config: Config) -> tuple[list[QuantTensor], list[QuantTensor]]:
    """Random weights of gate and up [2I, H], and of down [H, I], of each expert."""
    scheme = parse_scheme(fmt).weight
    assert scheme is not None, fmt
    generator = torch.Generator("cuda").manual_seed(1)

    def weights(n: int, k: int) -> list[QuantTensor]:
        made = []
        for _ in range(config.experts):
            dense = torch.randn(n, k, generator=generator, device="cuda", dtype=torch.bfloat16)
            made.append(quantize_rtn(dense * 0.02, scheme))
        return made

    return (
        weights(2 * config.inner, config.hidden),
        weights(config.hidden, config.inner),
    )


def our_block(
    fmt: str, config: Config, up: list[QuantTensor], down: list[QuantTensor]
) -> FusedExperts:
    """The block that a loaded model has in the place of its own."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    described = SimpleNamespace(
        num_experts=config.experts,
        hidden_size=config.hidden,
        moe_intermediate_size=config.inner,
        hidden_act="silu",
        _experts_implementation="eager",
    )
    with torch.device("meta"):
        module = Qwen3MoeExperts(described)
    scheme = parse_scheme(fmt)
    names = {(leaf, slot): scheme for leaf, parts in (("gate_up_proj", 2), ("down_proj", 1))
             for slot in range(parts * config.experts)}  # fmt: skip
    block = fused_experts(module, schemes=names, dtype=torch.bfloat16, prefix="experts")
    assert isinstance(block, FusedExperts), block
    for expert, (rows, weight) in enumerate(zip(up, down, strict=True)):
        block.receive("gate_up_proj", 2 * expert, rows.rows(0, config.inner))
        block.receive("gate_up_proj", 2 * expert + 1, rows.rows(config.inner, 2 * config.inner))
        block.receive("down_proj", expert, weight)
    block.finish(torch.device("cuda"))
    return block.eval()


def random_calls(config: Config, tokens: int) -> list[Call]:
    """Tokens with as many routings as a graph takes."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    calls = []
    for _ in range(ROUTINGS):
        x = torch.randn(tokens, config.hidden, generator=generator, device="cuda")
        scores = torch.randn(tokens, config.experts, generator=generator, device="cuda")
        weights, index = scores.softmax(-1).topk(config.chosen, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).bfloat16()
        calls.append((x.bfloat16(), index, weights))
    return calls


def exact_block(up: list[QuantTensor], down: list[QuantTensor], call: Call) -> Tensor:
    """The first tokens of a block in float64, inputs not rounded."""
    x, index, weights = (part[:CHECKED_TOKENS] for part in call)
    result = torch.zeros(x.shape, dtype=torch.float64, device=x.device)

    def values(weight: QuantTensor) -> Tensor:
        evaluation = replace(weight.evaluation, dtype=torch.float64, result=None, scale=None)
        return replace(weight, evaluation=evaluation).dequantize()

    for token, choice in ((t, j) for t in range(len(x)) for j in range(index.shape[1])):
        expert = int(index[token, choice])
        gate, value = (values(up[expert]) @ x[token].double()).chunk(2)
        inner = nn.functional.silu(gate) * value
        result[token] += weights[token, choice].double() * (values(down[expert]) @ inner)
    return result


def weight_bytes(weights: list[QuantTensor]) -> int:
    """Bytes of one expert's weight as its format stores it."""
    parts = weights[0].tensors()
    codes = parts.pop("codes").numel() * weights[0].grid.bits // 8
    return codes + sum(part.nbytes for part in parts.values())


def limit_us(config: Config, call: Call, size: int, compute: str) -> tuple[float | None, int]:
    """Return the time of reading the experts that are hit, or of computing; and how many are."""
    hit, tokens = int(call[1].unique().numel()), len(call[0])
    limits = card_limits(torch.device("cuda"))
    if limits is None:
        return None, hit
    read = (hit * size + 4 * tokens * config.hidden) / limits.read_gb_s / 1e3
    operations = 6 * tokens * config.chosen * config.hidden * config.inner
    rate = limits.tflops.get(compute)
    return max(read, operations / rate / 1e6 if rate else 0.0), hit


def contestants(
    fmt: str, config: Config, options: argparse.Namespace, failed: list[dict[str, Any]]
) -> tuple[Any, Callable[[list[Call]], Iterator[tuple[str, Callable[[int], Tensor]]]]]:
    """Return the experts, and what yields (name, run) for given calls."""
    up, down = random_experts(fmt, config)
    size = weight_bytes(up) + weight_bytes(down)
    block = our_block(fmt, config, up, down)
    n_blocks = max(1, math.ceil(ROTATED_BYTES / (size * config.experts)))
    blocks = [block, *(our_block(fmt, config, up, down) for _ in range(n_blocks - 1))]
    print(fmt, {leaf: [k.name for (_, k, _) in c.reports] for leaf, c in block.choices.items()})
    peers = None
    if options.peers:
        spec = importlib.util.spec_from_file_location("moe_peers", options.peers)
        assert spec is not None and spec.loader is not None, options.peers  # noqa: PT018
        peers = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(peers)

    def offered(calls: list[Call]) -> Iterator[tuple[str, Callable[[int], Tensor]]]:
        yield "ours", lambda i: blocks[i % n_blocks](*calls[i % len(calls)])
        if peers is None:
            return
        try:
            yield from peers.contestants(fmt, up, down, calls)
        except Exception as error:  # noqa: BLE001 - a peer that fails is a hole in the table
            failed.append({"fmt": fmt, "error": f"{type(error).__name__}: {str(error)[:300]}"})
            print("FAIL", failed[-1], flush=True)

    return (up, down, size), offered


def measure(
    name: str,
    fmt: str,
    options: argparse.Namespace,
    stop: float,
    found: dict[str, list[dict[str, Any]]],
) -> None:
    """Check and time all contestants of a format for each number of tokens; put them in `found`."""
    config, rows, failed = CONFIGS[name], found["rows"], found["failed"]
    (up, down, size), offered = contestants(fmt, config, options, failed)
    compute = "fp8" if fmt.startswith("FP8") else "bf16"
    for tokens in (int(part) for part in options.tokens.split(",")):
        if time.monotonic() > stop:
            break
        calls = random_calls(config, tokens)
        exact = exact_block(up, down, calls[0])
        graphs, ready, held = [], [], []
        for who, run in offered(calls):
            try:
                y = run(0)[:CHECKED_TOKENS].double()
                error = float((y - exact).norm() / exact.norm())
                graphs.append(capture(run, len(calls), least=len(calls)))
                ready.append((who, error))
                held.append(run)  # and the memory that its graph reads, locks among it
            except Exception as problem:  # noqa: BLE001 - as above
                failed.append({"fmt": fmt, "m": tokens, "name": who, "error": str(problem)[:300]})
                print("FAIL", failed[-1], flush=True)
                torch.cuda.synchronize()
            if time.monotonic() > stop:
                break
        limit, hit = limit_us(config, calls[0], size, compute)
        for (who, error), took in zip(ready, in_turns(graphs), strict=True):
            row = {
                "config": name, "fmt": fmt, "m": tokens, "name": who, "us": took.us,
                "low": took.low, "high": took.high, "limit_us": limit, "experts": hit,
                "error": error, "ok": error < (0.08 if compute == "fp8" else 0.02),
            }  # fmt: skip
            rows.append(row)
            shown = {key: value for key, value in row.items() if key not in ("low", "high")}
            print(shown, flush=True)
        if options.out:
            Path(options.out).write_text(json.dumps(found))


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return a table a block: ours, share of the limit, and the best other one."""
    tables = []
    for name in dict.fromkeys(row["config"] for row in rows):
        held = [row for row in rows if row["config"] == name]
        tokens = sorted({row["m"] for row in held})
        lines = [f"**{name}**: us of the whole block, share of the limit; best other one", ""]
        lines += ["| format | " + " | ".join(f"{m} tokens" for m in tokens) + " |"]
        lines += ["|---" * (len(tokens) + 1) + "|"]
        for fmt in dict.fromkeys(row["fmt"] for row in held):
            cells = [[r for r in held if r["fmt"] == fmt and r["m"] == m] for m in tokens]
            ours = [best(r for r in cell if r["name"] == "ours") for cell in cells]
            others = [best(r for r in cell if r["name"] != "ours") for cell in cells]
            lines.append(f"| {fmt} | " + " | ".join(map(_told, ours)) + " |")
            if any(others):
                shown = (f"{r['us']:.1f} {r['name']}" if r else "" for r in others)
                lines.append("| *best other* | " + " | ".join(shown) + " |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def _told(row: Any) -> str:
    if row is None:
        return ""
    share = f" ({100 * row['limit_us'] / row['us']:.0f} %)" if row["limit_us"] else ""
    return f"{row['us']:.1f}{share}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configs", default="qwen3-30b-a3b,deepseek-like")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--peers", default="", help="file of peers, see above")
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing after it")
    parser.add_argument("--out", default="", help="JSON file of all rows")
    parser.add_argument("--table", default="", help="print the tables of such a file instead")
    options = parser.parse_args()
    if options.table:
        print(markdown(json.loads(Path(options.table).read_text())["rows"]))
        return 0
    started = time.monotonic()
    environment = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    found: dict[str, Any] = {"environment": environment, "rows": [], "failed": []}
    with torch.no_grad():
        for name in options.configs.split(","):
            for fmt in options.formats.split(","):
                if time.monotonic() - started < options.seconds:
                    measure(name, fmt, options, started + options.seconds, found)
                    torch.cuda.empty_cache()
    rows = found["rows"]
    print(markdown(rows))
    return int(any(not row["ok"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
