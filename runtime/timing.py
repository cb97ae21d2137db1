"""How kernels are timed: CUDA graphs over rotating copies, replayed in turns, medians.

A contestant is captured as one CUDA graph of many calls that go round copies of its weight, at
least `ROTATED_BYTES` of them, so that none is in the L2 when its turn comes. The graphs of all
contestants are then replayed in turns: clocks and heat are the same for all of them.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

__all__ = ["Graph", "Time", "capture", "copies", "in_turns", "n_copies"]

ROTATED_BYTES = 200e6  # more than three times the L2 of an H200 (60 MB)
_GRAPH_US = 1200.0  # of calls in one graph, about
_CALLS = (4, 200)  # fewest and most calls in one graph
_LEAST_US = 2.5

_State = TypeVar("_State")


@dataclass(frozen=True)
class Time:
    """Microseconds of one call.

    Args:
        us: Median of the replays.
        low: Of the fastest.
        high: Of the slowest.
    """

    us: float
    low: float
    high: float


@dataclass(frozen=True)
class Graph:
    """A captured CUDA graph of several calls.

    Args:
        graph: The graph.
        calls: How many calls it holds.
    """

    graph: torch.cuda.CUDAGraph
    calls: int


def n_copies(size: int) -> int:
    """Return how many copies of a weight of `size` bytes are rotated."""
    return max(2, min(96, math.ceil(ROTATED_BYTES / max(1, size))))


def copies(state: _State, size: int) -> list[_State]:
    """Return a state of `size` bytes and copies of it, as many as `n_copies` says."""
    return [state, *(copy.deepcopy(state) for _ in range(n_copies(size) - 1))]


def capture(call: Callable[[int], object], count: int, *, least: int = 1) -> Graph:
    """Capture calls in a graph.

    Args:
        call: Called with the numbers of the copies, 0 to `count` - 1, again and again.
        count: How many copies there are.
        least: Calls that the graph must hold, so that every copy has its turn.
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
    calls = min(_CALLS[1], max(_CALLS[0], int(_GRAPH_US / max(eager_us, _LEAST_US))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(max(least, calls)):
            call(i % count)
    return Graph(graph, max(least, calls))


def in_turns(graphs: Sequence[Graph], *, rounds: int = 9) -> list[Time]:
    """Replay graphs in turns; return the time of one call of each.

    Args:
        graphs: From `capture`.
        rounds: How often each is replayed, after one replay that is not timed.
    """
    for graph in graphs:
        graph.graph.replay()
    events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in graphs]
    for _ in range(rounds):
        for graph, of_graph in zip(graphs, events, strict=True):
            start, stop = _events()
            start.record()
            graph.graph.replay()
            stop.record()
            of_graph.append((start, stop))
    torch.cuda.synchronize()
    times = []
    for graph, of_graph in zip(graphs, events, strict=True):
        us = sorted(start.elapsed_time(stop) * 1e3 / graph.calls for start, stop in of_graph)
        times.append(Time(statistics.median(us), us[0], us[-1]))
    return times


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, stop = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    return start, stop
