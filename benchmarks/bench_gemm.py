"""Time quantized linear layers beside other libraries' kernels on one GPU, shape by shape.

    python benchmarks/bench_gemm.py [--formats w4a16_g128,fp8_ch] [--shapes 8b.qkv] [--tokens 1,16]
                                    [--out results/gemm.json] [--harness FOLDER --peers a,b]
    python benchmarks/bench_gemm.py --warm 14 ...          compiles in 14 processes first
    python benchmarks/bench_gemm.py --table results/gemm.json

Contestants: the layer that a loaded model has (`ours+q` rounds its input in the time, `ours` gets
codes), torch's own kernels, and the plug-ins of a harness folder that holds `bench.py` with a list
`REG` and `peers/*.py`. Every result is compared with a float64 product before it is timed. See
README.md here for the method, and docs/kernels.md for results.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import multiprocessing
import queue
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gemm_table
import torch
import triton
from gemm_cells import (
    FORMATS,
    SHAPES,
    TOKENS,
    as_harness_weight,
    dense_weight,
    exact_product,
    our_layer,
    quantized,
    scheme_of,
    weight_bytes,
)
from torch import Tensor, nn

from quantload.layers.kernel_facts import packed_in
from quantload.quant.qtensor import QuantTensor
from quantload.runtime.launch_settings import card_limits, trying
from quantload.runtime.timing import capture, copies, in_turns

CHECKED_ROWS = 256
TOLERANCE = {False: 2e-2, True: 6e-2}  # of the relative error, by whether inputs are rounded


@dataclass(frozen=True)
class Contestant:
    """A kernel of a cell.

    Args:
        name: For the table.
        state: What `run` takes first; it is copied for the rotation.
        run: Maps (state, tokens) to [M, N].
        rounds_input: Whether the rounding of the input is in the time.
        serves: Whether it takes this many tokens.
        finish: Turns what run returned into [M, N] numbers, for the check.
        packed: Our packed weight, which says what a call launches; None of others.
    """

    name: str
    state: object
    run: Callable[[Any, int], Any]
    rounds_input: bool = False
    serves: Callable[[int], bool] = lambda m: True
    finish: Callable[[Any, int, Any], Tensor] = lambda state, m, y: y
    packed: nn.Module | None = None

    def launched(self, m: int) -> dict[str, Any]:
        """Say what a call launches, and under which name its settings are kept."""
        if self.packed is None or not hasattr(self.packed, "kernels_for"):
            return {}
        with trying() as trial:
            kernels = self.packed.kernels_for(m)
        return {"kernels": kernels, "settings": sorted({name for name, *_ in trial.asked})}


@dataclass
class Run:
    """Everything measured, and where it is written; `untimed` runs only compile and check."""

    options: argparse.Namespace
    harness: Any = None
    untimed: bool = False
    started: float = field(default_factory=time.monotonic)
    rows: list[dict[str, Any]] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)

    @property
    def left(self) -> float:
        return self.options.seconds - (time.monotonic() - self.started)

    def save(self) -> None:
        if self.options.out and not self.untimed:
            environment = {
                "card": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "triton": triton.__version__,
                "cuda": torch.version.cuda,
                "seconds": round(time.monotonic() - self.started, 1),
            }
            found = {"environment": environment, "rows": self.rows, "failed": self.failed}
            Path(self.options.out).write_text(json.dumps(found))

    def fail(self, error: Exception, **where: object) -> None:
        said = f"{type(error).__name__}: {str(error)[:300]}"
        self.failed.append({**where, "error": said})
        if self.options.verbose:
            traceback.print_exc()
        print("FAIL", where, said[:200], flush=True)


# -- contestants -----------------------------------------------------------------------------------


def ours(fmt: str, weight: QuantTensor | Tensor, inputs: dict[int, Tensor]) -> Iterator[Contestant]:
    """Yield our layer, and its product alone where it takes codes."""
    if fmt == "bf16":
        yield Contestant("torch.linear", weight, lambda w, m: nn.functional.linear(inputs[m], w))
        return
    layer = our_layer(fmt, weight)
    packed, rounds = packed_in(layer.gemm), scheme_of(fmt).input is not None
    name = "ours+q" if rounds else "ours"
    yield Contestant(
        name, layer, lambda layer, m: layer(inputs[m]), rounds_input=rounds, packed=packed
    )
    scheme = scheme_of(fmt).input
    if scheme is not None and scheme.dynamic and hasattr(packed, "forward_rounded"):
        codes = {m: packed.round_input(x) for m, x in inputs.items()}
        yield Contestant(
            "ours",
            packed,
            lambda packed, m: packed.forward_rounded(*codes[m]),
            packed=packed,
        )


def peers(
    run: Run, fmt: str, weight: QuantTensor | Tensor, inputs: dict[int, Tensor]
) -> Iterator[Contestant]:
    """Yield the plug-ins of the harness that serve a format."""
    only = [part for part in run.options.only.split(",") if part]
    found = [
        row
        for row in (run.harness.REG if run.harness else ())
        if row["fmt"] == fmt and (not only or any(part in row["name"] for part in only))
    ]
    if not found:
        return
    canonical = as_harness_weight(run.harness, fmt, weight)
    acts = {m: run.harness.Acts(x) for m, x in inputs.items()}
    n, k = weight.shape
    for row in found:
        try:
            state = row["prepare"](canonical)
        except Exception as error:  # noqa: BLE001 - a peer that fails is a hole in the table
            run.fail(error, name=row["name"], fmt=fmt, n=n, k=k)
            continue
        finish = row["finish"]
        yield Contestant(
            row["name"],
            state,
            lambda state, m, row=row: row["run"](state, acts[m]),
            rounds_input=row["quant"],
            serves=lambda m, row=row: row["supports"] is None or row["supports"](n, k, m),
            finish=(lambda state, m, y, f=finish: f(state, acts[m], y)) if finish else _as_it_is,
        )


def _as_it_is(state: object, m: int, y: Tensor) -> Tensor:
    return y


# -- one format of one shape -----------------------------------------------------------------------


def measure(run: Run, fmt: str, shape: str, tokens: list[int]) -> None:
    """Check and time every contestant for each number of tokens."""
    n, k = SHAPES[shape]
    device = torch.device("cuda")
    dense = dense_weight(n, k, device)
    weight = dense if fmt == "bf16" else quantized(fmt, dense)
    size = weight_bytes(fmt, weight)
    generator = torch.Generator(device).manual_seed(11)
    x = torch.randn(max(tokens), k, device=device, dtype=torch.bfloat16, generator=generator)
    inputs = {m: x[:m].contiguous() for m in tokens}
    few = x[:CHECKED_ROWS]
    exact = {
        ours: exact_product(fmt, weight, few, torch.bfloat16 if ours else torch.float32)
        for ours in (True, False)
    }
    held = []
    for contestant in (*ours(fmt, weight, inputs), *peers(run, fmt, weight, inputs)):
        try:
            states = [contestant.state] if run.untimed else copies(contestant.state, size)
            held.append((contestant, states))
        except Exception as error:  # noqa: BLE001 - as above
            run.fail(error, name=contestant.name, fmt=fmt, shape=shape)
    for m in tokens:
        if run.left < 3:
            run.failed.append({"fmt": fmt, "shape": shape, "m": m, "error": "no time left"})
            continue
        cell = {"fmt": fmt, "shape": shape, "n": n, "k": k, "m": m}
        _measure_cell(run, cell, held, exact, size)
    run.save()


def attempt(run: Run, fmt: str, shape: str, tokens: list[int]) -> None:
    """Measure a format of a shape; what fails is told and left out."""
    try:
        measure(run, fmt, shape, tokens)
    except Exception as error:  # noqa: BLE001 - a hole in the table, the rest goes on
        run.fail(error, fmt=fmt, shape=shape)
    print(f"[{run.options.seconds - run.left:5.0f} s] {shape} {fmt}", flush=True)


def _measure_cell(
    run: Run,
    cell: dict[str, Any],
    held: list[tuple[Contestant, list[object]]],
    exact: dict[bool, Tensor],
    size: int,
) -> None:
    m, n, k = cell["m"], cell["n"], cell["k"]
    graphs, ready = [], []
    for contestant, states in held:
        if not contestant.serves(m):
            continue
        try:
            ours = contestant.name.startswith("ours")
            error = relative_error(contestant, states[0], m, exact[ours])
            if run.untimed:
                continue
            least = len(states) if m <= CHECKED_ROWS else 2
            call = lambda i, c=contestant, s=states: c.run(s[i], m)  # noqa: E731
            graphs.append(capture(call, len(states), least=least))
            ready.append((contestant, error))
        except Exception as problem:  # noqa: BLE001 - as above
            run.fail(problem, name=contestant.name, **cell)
            torch.cuda.synchronize()
    if run.untimed:
        return
    limit = limit_us(cell["fmt"], size + 2 * m * (n + k), 2 * m * n * k)
    for (contestant, error), took in zip(
        ready, in_turns(graphs, rounds=9 if m <= CHECKED_ROWS else 5), strict=True
    ):
        rounds = FORMATS[cell["fmt"]].rounds_input
        row = {
            **cell,
            "name": contestant.name,
            "us": took.us,
            "low": took.low,
            "high": took.high,
            "limit_us": limit,
            "error": error,
            "ok": error < TOLERANCE[rounds],
            "rounds_input": contestant.rounds_input,
            **contestant.launched(m),
        }
        run.rows.append(row)
        if run.options.verbose or not row["ok"]:
            show(row)


def relative_error(contestant: Contestant, state: object, m: int, exact: Tensor) -> float:
    """Return the relative error of the first rows of a product; infinite where it is not finite."""
    y = contestant.finish(state, m, contestant.run(state, m))
    assert tuple(y.shape) == (m, exact.shape[1]), f"{tuple(y.shape)}"
    if not bool(torch.isfinite(y).all()):
        return float("inf")
    rows = min(m, len(exact))
    return float((y[:rows].double() - exact[:rows]).norm() / exact[:rows].norm())


def limit_us(fmt: str, size: int, operations: int) -> float | None:
    """Return the time in which the card reads and writes, or computes: the longer one."""
    limits = card_limits(torch.device("cuda"))
    if limits is None:
        return None
    compute = limits.tflops.get(FORMATS[fmt].compute)
    return max(size / limits.read_gb_s / 1e3, operations / compute / 1e6 if compute else 0.0)


def warm(options: argparse.Namespace, cells: list[tuple[str, str, list[int]]]) -> None:
    """Compile and check what will be timed, in `--warm` processes, cells in their order."""
    context = multiprocessing.get_context("spawn")
    tasks = context.Queue()
    for fmt, shape, tokens in cells:
        for some in (tokens[::2], tokens[1::2]):
            tasks.put((fmt, shape, some))
    workers = [context.Process(target=_warm, args=(tasks, options)) for _ in range(options.warm)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def _warm(tasks: Any, options: argparse.Namespace) -> None:
    run = Run(options, untimed=True)
    if options.harness:
        run.harness = load_harness(options.harness, options.peers)
    with torch.no_grad(), contextlib.suppress(queue.Empty):
        while True:
            attempt(run, *tasks.get(timeout=1))
            torch.cuda.empty_cache()


def show(row: dict[str, Any]) -> None:
    share = f"{row['limit_us'] / row['us']:6.1%}" if row["limit_us"] else ""
    print(
        f"{row['fmt']:16} {row['shape']:12} M={row['m']:<5} {row['name']:26} {row['us']:9.2f} us "
        f"{share}  error {row['error']:.1e}{'' if row['ok'] else '  WRONG'}",
        flush=True,
    )


def load_harness(folder: str, names: str) -> Any:
    """Import a harness and its plug-ins; what cannot be imported is told and left out."""
    sys.path[:0] = [folder, str(Path(folder) / "peers")]
    harness = importlib.import_module("bench")
    for name in (part for part in names.split(",") if part):
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - a peer that fails is a hole in the table
            print(f"peers `{name}` cannot be imported: {error}", flush=True)
    return harness


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument(
        "--cells",
        action="append",
        metavar="FORMATS:SHAPES:TOKENS",
        help="instead of the three above; repeatable, measured in this order",
    )
    parser.add_argument("--harness", default="", help="folder with bench.py and peers/")
    parser.add_argument("--peers", default="torch_peers", help="modules in peers/")
    parser.add_argument("--only", default="", help="parts of names of peers")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop starting cells after it")
    parser.add_argument("--warm", type=int, default=0, help="processes that compile first")
    parser.add_argument("--out", default="", help="JSON file of all rows")
    parser.add_argument("--table", default="", help="print the tables of such a file instead")
    parser.add_argument("-v", "--verbose", action="store_true")
    return parser.parse_args()


def given_cells(options: argparse.Namespace) -> list[str]:
    """Return FORMATS:SHAPES:TOKENS as they were given."""
    return options.cells or [f"{options.formats}:{options.shapes}:{options.tokens}"]


def main() -> int:
    options = parse()
    if options.table:
        print(gemm_table.markdown(json.loads(Path(options.table).read_text())["rows"]))
        return 0
    run = Run(options)
    if options.harness:
        run.harness = load_harness(options.harness, options.peers)
    cells = [
        (fmt, shape, [int(m) for m in tokens.split(",")])
        for formats, shapes, tokens in (part.split(":") for part in given_cells(options))
        for shape, fmt in itertools.product(shapes.split(","), formats.split(","))
    ]
    if options.warm:
        warm(options, cells)
        run.started = time.monotonic()
    with torch.no_grad(), contextlib.suppress(KeyboardInterrupt):
        for fmt, shape, tokens in cells:
            if run.left > 5:
                attempt(run, fmt, shape, tokens)
    run.save()
    print(gemm_table.markdown(run.rows))
    wrong = [row for row in run.rows if not row["ok"]]
    print(f"{len(run.rows)} rows, {len(wrong)} wrong, {len(run.failed)} failures")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
