"""How kernels are timed here: CUDA graphs over rotating copies, replayed in turns, medians.

Each contestant is captured as one CUDA graph of many calls that go round copies of its weight, at
least `ROTATED_BYTES` of them, so that none is in the L2 when its turn comes. The graphs of all
contestants of a cell are then replayed in turns: clocks and heat are the same for all of them.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

ROTATED_BYTES = 200e6  # more than three times the L2 of an H200 (60 MB)
GRAPH_US = 1200.0  # of calls in one graph, about
CALLS = (4, 200)  # fewest and most calls in one graph
ROUNDS = 9

Call = Callable[[int], object]  # the i-th copy's call


@dataclass(frozen=True)
class Time:
    """Microseconds of one call: median, lowest and highest of the replays."""

    us: float
    low: float
    high: float


def n_copies(size: int) -> int:
    """Return how many copies of a weight of `size` bytes are rotated."""
    return max(2, min(96, math.ceil(ROTATED_BYTES / max(1, size))))


def copies(state: object, size: int) -> list[object]:
    """Return a state and copies of it, as many as `n_copies` says."""
    return [state, *(copy.deepcopy(state) for _ in range(n_copies(size) - 1))]


def capture(call: Call, count: int, least: int) -> tuple[torch.cuda.CUDAGraph, int]:
    """Capture calls in a graph; return it and how many calls it holds.

    Args:
        call: Called with 0, 1, 2, ...; copy `i % count` serves.
        count: How many copies there are.
        least: Calls that the graph must hold, so that all copies have their turn.
    """
    call(0)
    torch.cuda.synchronize()
    start, stop = _events()
    start.record()
    for i in range(3):
        call(i % count)
    stop.record()
    torch.cuda.synchronize()
    eager_us = start.elapsed_time(stop) * 1e3 / 3  # of slow launches: too long, so fewer calls
    calls = max(least, min(CALLS[1], max(CALLS[0], int(GRAPH_US / max(eager_us, 2.5)))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i % count)
    return graph, calls


def in_turns(
    graphs: Sequence[tuple[torch.cuda.CUDAGraph, int]], rounds: int = ROUNDS
) -> list[Time]:
    """Replay graphs in turns; return the time of one call of each."""
    for graph, _ in graphs:
        graph.replay()
    times: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in graphs]
    for _ in range(rounds):
        for (graph, _), events in zip(graphs, times, strict=True):
            start, stop = _events()
            start.record()
            graph.replay()
            stop.record()
            events.append((start, stop))
    torch.cuda.synchronize()
    result = []
    for (_, calls), events in zip(graphs, times, strict=True):
        us = sorted(a.elapsed_time(b) * 1e3 / calls for a, b in events)
        result.append(Time(statistics.median(us), us[0], us[-1]))
    return result


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
