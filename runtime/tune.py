"""Tuning: launch settings are tried on this card, checked, timed, and the fastest ones kept.

For each scheme, shape and number of tokens a layer of random numbers is made as a loaded model has
it. The kernels that a call asks launch settings for are found by asking; what their families offer
is tried one by one. A setting whose result is off, or that does not compile, is left out. The best
few and the kernel's own rule are then timed in turns, and a setting is kept only if it wins by more
than `_WORTHWHILE`.

With `workers`, processes beside this one compile all settings of a call first, each its share; they
fill Triton's cache on disk, where this process finds what they made.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from quantload.errors import ConfigError, listed
from quantload.quant.activation import fake_quantize
from quantload.quant.qtensor import QuantTensor
from quantload.quant.rtn import quantize_rtn
from quantload.quant.scheme import Scheme
from quantload.runtime import launch_settings
from quantload.runtime.gemm import choose
from quantload.runtime.launch_settings import CardLimits, Settings, Table, trying
from quantload.runtime.timing import Graph, capture, copies, in_turns

__all__ = ["FAMILIES", "Tuned", "measure_limits", "read_own_table", "tune", "write_own_table"]

FAMILIES = {
    "byte": "quantload.runtime.kernels.byte_settings",
    "nibble": "quantload.runtime.kernels.nibble_plan",
    "pairs": "quantload.runtime.kernels.nibble_rounded_settings",
    "rounded": "quantload.runtime.kernels.rounded_settings",
}
"""First word of a kernel's name -> module with `candidates(m, n, k)`."""

_WORTHWHILE = 0.99  # of the rule's time
_FINALISTS = 4
_CHECKED_ROWS = 64
_TOLERANCE = 2.0**-6  # of the relative error; inputs that are rounded have the reference's codes

Timer = Callable[[Sequence[Callable[[int], object]], int, int], list[float]]
"""(calls that take the number of a copy, copies, rounds) -> microseconds of each."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What was found for one kernel, shape and number of tokens.

    Args:
        kernel: Name under which the settings are kept.
        scheme: Of the layer.
        shape: (N, K).
        tokens: M.
        settings: The fastest; None if the kernel's own rule was not beaten.
        us: Their time, or the rule's.
        rule_us: The time of the rule.
        tried: How many settings ran and were right.
        failed: How many did not compile, did not fit, or were wrong.
        complete: False if the time was up before all were tried.
    """

    kernel: str
    scheme: str
    shape: tuple[int, int]
    tokens: int
    settings: Settings | None
    us: float
    rule_us: float
    tried: int
    failed: int
    complete: bool = True

    @property
    def gain(self) -> float:
        """Share of the rule's time that is saved."""
        return 1 - self.us / self.rule_us


def tune(  # noqa: PLR0913 - a keyword for each choice of the user
    layers: Sequence[tuple[Scheme, int, int]],
    tokens: Sequence[int],
    *,
    device: torch.device,
    table: Table,
    seconds: float = float("inf"),
    again: bool = False,
    workers: int = 0,
    timer: Timer | None = None,
) -> Iterator[Tuned]:
    """Try the settings of each layer's kernel; put the fastest into `table`, and yield them.

    Args:
        layers: (scheme, N, K) of each.
        tokens: Numbers of tokens.
        device: The card.
        table: Entries that it has are not measured again.
        seconds: No setting is tried after this time.
        again: Measure also what the table has.
        workers: Processes that compile ahead.
        timer: Measures; None is the card's clock.
    """
    stop = time.monotonic() + seconds
    with _compilers(workers) as compile_ahead:
        for scheme, n, k in layers:
            layer = None
            for m in tokens:
                if time.monotonic() > stop:
                    return
                layer = layer or _Layer.made(scheme, n, k, device)
                kernel = layer.kernel_for(m)
                if kernel is None or (
                    not again and m in table.us.get(kernel, {}).get(f"{n}x{k}", {})
                ):
                    continue
                compile_ahead(_Job(scheme, n, k, m, kernel, device))
                found = layer.tune(kernel, m, stop, timer or graph_times)
                if found.settings is not None or found.complete:
                    table.add(kernel, f"{n}x{k}", m, found.settings, found.us)
                yield found


# -- compiling ahead -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    """A call whose settings are tried."""

    scheme: Scheme
    n: int
    k: int
    m: int
    kernel: str
    device: torch.device


@contextlib.contextmanager
def _compilers(workers: int) -> Iterator[Callable[[_Job], int]]:
    """Yield what compiles the settings of a call in processes, and returns how many there were."""
    if not workers:
        yield lambda job: 0
        return
    context = multiprocessing.get_context("spawn")  # CUDA does not outlive a fork
    with futures.ProcessPoolExecutor(workers, mp_context=context) as pool:

        def compile_ahead(job: _Job) -> int:
            parts = [pool.submit(_compile_part, job, part, workers) for part in range(workers)]
            return sum(part.result() for part in parts)

        yield compile_ahead


def _compile_part(job: _Job, part: int, parts: int) -> int:
    """Run every `parts`-th setting of a call once, in a process of its own."""
    layer, done = _layer_of(job.scheme, job.n, job.k, job.device), 0
    x = layer.input(job.m)
    settings = itertools.islice(_candidates(job.kernel, job.m, job.n, job.k), part, None, parts)
    for one in settings:
        with contextlib.suppress(Exception):  # the process that times it counts it as failed
            layer.call(job.kernel, one, x)(0)
            done += 1
    return done


@functools.lru_cache(maxsize=1)
def _layer_of(scheme: Scheme, n: int, k: int, device: torch.device) -> _Layer:
    return _Layer.made(scheme, n, k, device, rotated=False)


# -- one layer -------------------------------------------------------------------------------------


@dataclass
class _Layer:
    """A packed layer of random numbers, and copies of it."""

    scheme: Scheme
    weight: QuantTensor
    packed: list[nn.Module]
    dtype: torch.dtype = torch.bfloat16
    values: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.values = self.weight.dequantize(torch.float32)

    @classmethod
    def made(
        cls, scheme: Scheme, n: int, k: int, device: torch.device, *, rotated: bool = True
    ) -> _Layer:
        assert scheme.weight is not None, f"{scheme} is full precision"
        generator = torch.Generator(device).manual_seed(0)
        dense = torch.randn(n, k, generator=generator, device=device, dtype=torch.bfloat16)
        weight = quantize_rtn(dense * 0.02, scheme.weight)
        del dense
        given = scheme.input if scheme.input is None or scheme.input.dynamic else None
        row = choose(weight, given, device=device, dtype=torch.bfloat16).kernel
        packed = row.pack(weight, given, device=device, dtype=torch.bfloat16)
        size = sum(buffer.nbytes for buffer in packed.buffers())
        return cls(scheme, weight, copies(packed, size) if rotated else [packed])

    def kernel_for(self, m: int) -> str | None:
        """Name of the kernel whose settings a call with m tokens asks for, if it can be tuned."""
        x = self.input(m)
        with trying() as trial, torch.no_grad():
            self.packed[0](x)
        names = {name for name, *_ in trial.asked if name.partition(" ")[0] in FAMILIES}
        return names.pop() if len(names) == 1 else None

    def tune(self, kernel: str, m: int, stop: float, timer: Timer) -> Tuned:
        n, k = self.weight.shape
        x = self.input(m)
        exact = self._exact(x)
        rule_us = timer([self.call(kernel, None, x)], len(self.packed), 3)[0]
        times: list[tuple[float, Settings]] = []
        failed, complete = 0, True
        for settings in _candidates(kernel, m, n, k):
            if time.monotonic() > stop:
                complete = False
                break
            us = self._try(kernel, settings, x, exact, timer)
            if us is None:
                failed += 1
            else:
                times.append((us, settings))
        best = [s for us, s in sorted(times, key=lambda t: t[0])[:_FINALISTS] if us < rule_us * 1.1]
        calls = [self.call(kernel, settings, x) for settings in (None, *best)]
        rule_us, *finals = timer(calls, len(self.packed), 9)
        us, place = min(((us, i) for i, us in enumerate(finals)), default=(rule_us, 0))
        wins = us <= rule_us * _WORTHWHILE
        return Tuned(
            kernel=kernel, scheme=str(self.scheme), shape=(n, k), tokens=m,
            settings=best[place] if wins else None, us=us if wins else rule_us,
            rule_us=rule_us, tried=len(times), failed=failed, complete=complete,
        )  # fmt: skip

    def _try(
        self, kernel: str, settings: Settings, x: Tensor, exact: Tensor, timer: Timer
    ) -> float | None:
        """Return the time of a call; None if the settings do not work, or the result is off."""
        call = self.call(kernel, settings, x)
        try:
            y = call(0)
            rows = y[: len(exact)].float()
            if not bool((rows - exact).norm() <= _TOLERANCE * exact.norm()):
                return None
            return timer([call], len(self.packed), 3)[0]
        except Exception:  # noqa: BLE001 - Triton has many ways to say that settings do not fit
            return None

    def call(self, kernel: str, settings: Settings | None, x: Tensor) -> Callable[[int], Tensor]:
        def call(copy: int) -> Tensor:
            with trying(kernel, settings), torch.no_grad():
                return self.packed[copy](x)  # type: ignore[no-any-return]

        return call

    def input(self, m: int) -> Tensor:
        n_columns, device = self.weight.shape[1], self.weight.device
        generator = torch.Generator(device).manual_seed(m)
        return torch.randn(m, n_columns, generator=generator, device=device, dtype=self.dtype)

    def _exact(self, x: Tensor) -> Tensor:
        x = x[:_CHECKED_ROWS]
        given = self.scheme.input
        if given is not None and given.dynamic and given.granularity != "tensor":
            x = fake_quantize(x, given)
        return x.float() @ self.values.T


def _candidates(kernel: str, m: int, n: int, k: int) -> Iterator[Settings]:
    name, *special = kernel.split()
    family = importlib.import_module(FAMILIES[name])
    if name == "rounded":  # its kernels differ by what codes are, and by what shares a scale
        group = int(special[1].removeprefix("g")) if len(special) > 1 else 0
        yield from family.candidates(m, n, k, floats=special[0] != "int8", group=group)
    elif name == "byte":
        yield from family.candidates(m, n, k, grouped=special[-1] == "groups")
    else:
        yield from family.candidates(m, n, k)


def graph_times(
    calls: Sequence[Callable[[int], object]], n_copies: int, rounds: int
) -> list[float]:
    """Return the microseconds of each call, captured in graphs that go round the copies."""
    graphs: list[Graph] = [capture(call, n_copies, least=n_copies) for call in calls]
    return [measured.us for measured in in_turns(graphs, rounds=rounds)]


# -- the card, and its table -----------------------------------------------------------------------


def measure_limits(device: torch.device) -> CardLimits:
    """Return what a card reaches: reading 1 GiB, and a product of 8192 x 8192 matrices."""
    from quantload.runtime.kernels.read_rate import read_rate

    x = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    product = capture(lambda _: x @ x, 1)
    us = in_turns([product])[0].low
    tflops = {"bf16": round(2 * 8192**3 / us / 1e6, 1)}
    return CardLimits(round(read_rate(device) / 1e9, 1), tflops)


def read_own_table(card: str) -> Table:
    """Return the user's own table of a card; an empty one if there is none.

    Raises:
        ConfigError: It is damaged.
    """
    path = launch_settings.user_table(card)
    if not path.is_file():
        return Table(card)
    return launch_settings.read_table(path)


def write_own_table(table: Table) -> Path:
    """Write the user's own table of a card, in one step, and return where it is."""
    path = launch_settings.user_table(table.card)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(table.as_text(), encoding="utf-8")
    unfinished.replace(path)
    launch_settings.forget()
    return path


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """Return the shapes of "6144x4096,4096x4096".

    Raises:
        ConfigError: Something else stands there.
    """
    shapes = []
    for part in (part.strip() for part in text.split(",") if part.strip()):
        n, _, k = part.partition("x")
        if not (n.isdecimal() and k.isdecimal() and int(n) and int(k)):
            raise ConfigError(f"{listed([part])} is no shape, expected NxK such as `6144x4096`")
        shapes.append((int(n), int(k)))
    return shapes
