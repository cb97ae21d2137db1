"""minmax and search: squared error and KL of a real model, and what the search costs.

The model is that of `bench_smollm2`. Plain transformers runs it in float32, with the dequantized
weights in place and inputs in full precision, so that the difference is that of the weights alone.
Usage:

    python benchmarks/bench_observers.py --speed
    python benchmarks/bench_observers.py TOKEN_IDS.json [--sequences 16] [--schemes W4A16 ...]

`search + E[x^2]` is the search with a `--stats` file of mean squares. No token is judged with
statistics that it is part of: those of the first half of the sequences serve the second half, and
the other way round.

`--speed` searches a random weight in one thread, in loops and in PyTorch, and counts CPU time of
the thread: bytes are those of the bfloat16 weight. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from bench_smollm2 import source_file
from safetensors.torch import save_file
from torch import Tensor, nn

from quantload import api
from quantload.loader.plan import Plan, PlanOptions
from quantload.loader.row_reader import RowReader
from quantload.loader.stats import InputStatistics, read_stats
from quantload.loader.tasks import sharing
from quantload.loader.weight_rows import WeightRows
from quantload.quant import compiled
from quantload.quant.rtn import quantize_rtn
from quantload.quant.scheme import parse_scheme
from quantload.quant.search import search_scales

SCHEMES = ["W4A16", "W3A16", "NVFP4A16", "MXFP4A16"]
TIMED = ["W4A16", "W4A16_ASYM", "W4A16:channel", "NVFP4A16", "MXFP4A16"]
WEIGHED = "search + E[x^2]"
CPU = torch.device("cpu")


# -- speed -----------------------------------------------------------------------------------------


def seconds_of(weight: Tensor, scheme: str, *, loops: bool, importance: Tensor | None) -> float:
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
            search_scales(weight, quantized, weight_scheme, importance=importance)
            found.append(time.thread_time() - started)
    finally:
        compiled.search_blocks = search_blocks
    return min(found[1:])


def measure_speed() -> list[dict]:
    """Print and return a row for each scheme."""
    torch.set_num_threads(1)
    compiled.start()
    weight = (torch.randn(1024, 4096, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    importance = torch.rand(4096, generator=torch.Generator().manual_seed(1)) ** 4
    cases = (
        ("loops", True, weight, None),
        ("weighed", True, weight, importance),
        ("torch", False, weight[:128], None),
    )
    rows = []
    for scheme in TIMED:
        row: dict = {"scheme": scheme}
        for name, loops, part, counts in cases:
            seconds = seconds_of(part, scheme, loops=loops, importance=counts)
            row[name] = part.nbytes / seconds / 1e9
        rows.append(row)
        print(
            f"{scheme:16} loops {row['loops']:.3f} GB/s, weighed {row['weighed']:.3f} GB/s, "
            f"PyTorch {row['torch']:.4f} GB/s"
        )
    return rows


# -- the reference ---------------------------------------------------------------------------------


class MeanSquares:
    """Sums up x^2 of the inputs of linear layers while a model runs; a context manager."""

    def __init__(self, model: nn.Module) -> None:
        self._sums: dict[str, Tensor] = {}
        self._tokens = 0
        self._hooks = [
            layer.register_forward_pre_hook(self._hook(name))
            for name, layer in model.named_modules()
            if isinstance(layer, nn.Linear)
        ]

    def _hook(self, name: str):
        def add(_, inputs):
            squares = inputs[0].flatten(0, -2).double().square().sum(dim=0)
            self._sums[name] = self._sums.get(name, 0) + squares

        return add

    def __enter__(self) -> MeanSquares:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def count(self, tokens: int) -> None:
        """Say how many tokens went through the model."""
        self._tokens += tokens

    def save(self, file: Path) -> InputStatistics:
        """Write a `--stats` file, and read it as `convert` does."""
        made = {
            f"{name}.input_mean_square": (sums / self._tokens).float()
            for name, sums in self._sums.items()
        }
        save_file(made, file)
        return read_stats(file)


@dataclass
class Half:
    """Half of the sequences.

    Args:
        sequences: [T] int64 each.
        log_p: [S, T, V] float32, log probabilities of the reference; a file that is mapped.
        statistics: Of the inputs of the other half.
    """

    sequences: list[Tensor]
    log_p: Tensor
    statistics: InputStatistics | None = None


@torch.no_grad()
def run_reference(model: nn.Module, sequences: list[list[int]], folder: Path) -> list[Half]:
    """Run the model in full precision; statistics are collected on the way."""
    middle = len(sequences) // 2
    halves, files = [], []
    for name, part in (("first", sequences[:middle]), ("second", sequences[middle:])):
        tokens = [torch.tensor(ids) for ids in part]
        shape = (len(part), len(part[0]), model.config.vocab_size)
        size = shape[0] * shape[1] * shape[2]
        log_p = torch.from_file(str(folder / name), shared=True, size=size).view(shape)
        with MeanSquares(model) as squares:
            for number, ids in enumerate(tokens):
                logits = model(ids[None], use_cache=False).logits[0]
                log_p[number] = torch.log_softmax(logits, dim=-1)
                squares.count(len(ids))
        files.append(squares.save(folder / f"{name}.safetensors"))
        halves.append(Half(tokens, log_p))
    halves[0].statistics, halves[1].statistics = files[1], files[0]
    return halves


# -- divergence ------------------------------------------------------------------------------------


def quantized_weights(plan: Plan) -> Iterator[tuple[str, Tensor]]:
    """Yield module and dequantized weight [N, K] of what a conversion would write."""
    weights = WeightRows(plan, RowReader(CPU))
    for rows in sharing(plan):
        quantized = [row for row in rows if row.scheme is not None]
        shared = weights.shared_range(rows) if quantized else None
        for row in quantized:
            pieces = weights.rows(row, step=weights.step_of(row))
            found = [weights.quantize(part, row, shared).dequantize() for _, part in pieces]
            yield row.module, torch.cat(found)
    weights.reader.close()


@torch.no_grad()
def put_weights(model: nn.Module, original: dict[str, Tensor], plan: Plan) -> tuple[float, int]:
    """Put quantized weights into the model.

    Returns:
        Mean over layers of |error| / |weight| (Frobenius norms), and the number of layers.
    """
    relative = []
    for name, weight in quantized_weights(plan):
        before = original[name].float()
        relative.append(float((weight.float() - before).norm() / before.norm()))
        model.get_submodule(name).weight.copy_(weight)
    return sum(relative) / len(relative), len(relative)


@torch.no_grad()
def kl_of(model: nn.Module, half: Half) -> Tensor:
    """KL(reference || model) of every position of half of the sequences, in nats, float64."""
    found = []
    for ids, log_p in zip(half.sequences, half.log_p, strict=True):
        log_q = torch.log_softmax(model(ids[None], use_cache=False).logits[0], dim=-1)
        terms = log_q.sub_(log_p).neg_().mul_(log_p.exp())
        found.append(terms.sum(dim=-1, dtype=torch.float64))
    return torch.cat(found)


def measure_observer(
    model: nn.Module,
    original: dict[str, Tensor],
    dense: Path,
    halves: list[Half],
    scheme: str,
    observer: str,
) -> tuple[dict, Tensor]:
    """Quantize and judge; with statistics once for each half."""
    kl, errors, seconds = [], [], 0.0
    stats = [half.statistics if observer == WEIGHED else None for half in halves]
    for half, known in zip(halves, stats, strict=True):
        if known is not None or not errors:
            options = PlanOptions(observer=observer.split()[0], stats=known)
            started = time.perf_counter()
            plan = api.plan(dense, scheme, options=options)
            error, layers = put_weights(model, original, plan)
            seconds += time.perf_counter() - started
            errors.append(error)
            weighed = sum(row.mean_square is not None for row in plan.rows)
            assert weighed == (layers if known else 0), "statistics of all layers, or of none"
        kl.append(kl_of(model, half))
    row = {
        "scheme": scheme,
        "observer": observer,
        "layers": layers,
        "seconds": seconds / len(errors),
        "relative_error": sum(errors) / len(errors),
    }
    return row, torch.cat(kl)


def measure_model(schemes: list[str], sequences: list[list[int]]) -> list[dict]:
    """Print and return a row for each scheme and observer."""
    from transformers import AutoModelForCausalLM

    rows = []
    with tempfile.TemporaryDirectory() as name:
        dense = Path(name) / "dense"
        api.convert(source_file(), dense, "dense", verify_output=False)
        model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()
        original = {
            module: layer.weight.bfloat16()
            for module, layer in model.named_modules()
            if isinstance(layer, nn.Linear)
        }
        halves = run_reference(model, sequences, Path(name))
        first, second = (len(half.sequences) for half in halves)
        print(
            f"{first} + {second} sequences; {WEIGHED}: the first {first} are judged with "
            f"statistics of the last {second}, and the other way round",
            flush=True,
        )
        for scheme in schemes:
            against = torch.zeros(())
            for observer in ("minmax", "search", WEIGHED):
                row, kl = measure_observer(model, original, dense, halves, scheme, observer)
                against = kl if observer == "minmax" else against
                rows.append(row | _summary(kl, kl - against))
                _print(rows[-1])
    return rows


def _summary(kl: Tensor, less: Tensor) -> dict:
    return {
        "kl_mean": float(kl.mean()),
        "kl_standard_error": float(kl.std() / kl.numel() ** 0.5),
        "kl_median": float(kl.median()),
        "kl_against_minmax": float(less.mean()),
        "kl_against_minmax_standard_error": float(less.std() / kl.numel() ** 0.5),
        "tokens": kl.numel(),
    }


def _print(row: dict) -> None:
    print(
        f"{row['scheme']:10} {row['observer']:15} {row['seconds']:6.1f} s  relative error "
        f"{row['relative_error']:.4f}  KL {row['kl_mean']:.4f} "
        f"+- {row['kl_standard_error']:.4f}, against minmax {row['kl_against_minmax']:+.4f} "
        f"+- {row['kl_against_minmax_standard_error']:.4f}",
        flush=True,
    )


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
    if arguments.sequences < 2:
        parser.error("expected at least 2 sequences: statistics come from others")
    started, rows = time.process_time(), measure_speed() if arguments.speed else []
    if arguments.token_ids is not None:
        content = json.loads(arguments.token_ids.read_text())
        sequences = content["ids"] if isinstance(content, dict) else content
        rows += measure_model(arguments.schemes, sequences[: arguments.sequences])
    found = {"benchmark": "observers", "torch": torch.__version__, "rows": rows}
    print(json.dumps(found | {"cpu_seconds": time.process_time() - started}))


if __name__ == "__main__":
    main()
