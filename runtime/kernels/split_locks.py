"""Counters with which the programs of one output tile find out who is last.

A program that has written its part of a sum adds one to the tile's counter; the one that finds all
others done adds the parts up in their order and sets the counter back to zero. So counters are zero
between launches, and no launch has to clear them. Two launches that may run at the same time must
not share counters:

* launches on one stream run one after the other, so each stream has its own;
* graphs captured on one stream may be replayed on several, so each capture has its own.

They are few, and the launches of a stream share them, so they stay in the L2 cache: a counter that
has to come from memory costs a small kernel a tenth of its time.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.cuda import is_current_stream_capturing  # the real one: `runtime.prompt_graphs`

__all__ = ["prepare", "split_locks"]

_COUNTERS = 1 << 22  # 16 MiB on a device, of 256 streams and captures
_A_STREAM = 1 << 14


class _Arena:
    def __init__(self, device: torch.device) -> None:
        self.counters = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
        self.used = 0
        self.of_stream: dict[tuple[int, int], Tensor] = {}

    def take(self, count: int) -> Tensor | None:
        start, self.used = self.used, self.used + count
        if self.used > _COUNTERS:
            self.used = start
            return None
        return self.counters[start : start + count]

    def shared_by(self, capture: int, stream: int) -> Tensor:
        key = (capture, stream)
        if key not in self.of_stream:
            taken = self.take(_A_STREAM)
            if taken is None:
                # NOTE: cleared on the stream that uses it; in a capture it is cleared at replay
                return torch.zeros(_A_STREAM, dtype=torch.int32, device=self.counters.device)
            self.of_stream[key] = taken
        return self.of_stream[key]


_arenas: dict[torch.device, _Arena] = {}


def prepare(device: torch.device) -> None:
    """Make the counters of a device; outside of any capture, before the first `split_locks`."""
    if device.type != "cuda":
        return
    index: int | None = device.index
    device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
    if device not in _arenas:
        _arenas[device] = _Arena(device)
        torch.cuda.synchronize(device)  # cleared before any other stream counts


def split_locks(device: torch.device, count: int) -> Tensor:
    """Return at least `count` int32 counters, zero, for one launch on the current stream.

    Args:
        device: With its index, as tensors have it.
        count: At most 16384.
    """
    assert count <= _A_STREAM, f"{count} counters, at most {_A_STREAM}"
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    if device not in _arenas:
        prepare(device)
    arena = _arenas[device]
    stream = torch.cuda.current_stream(device).cuda_stream
    if not is_current_stream_capturing():
        return arena.shared_by(0, stream)
    capture = _capture_of(stream)
    if capture:
        return arena.shared_by(capture, stream)
    taken = arena.take(count + -count % 32)  # whole cache lines
    if taken is None:
        return torch.zeros(count, dtype=torch.int32, device=device)  # cleared at each replay
    return taken


def _capture_of(stream: int) -> int:
    """Return the number of the capture that a stream is in, 0 if it is not known."""
    ask = _driver()
    state, number = ctypes.c_int(0), ctypes.c_uint64(0)
    failed = ask is None or ask(ctypes.c_void_p(stream), ctypes.byref(state), ctypes.byref(number))
    return 0 if failed else number.value


@functools.cache
def _driver() -> Callable[..., int] | None:
    """The driver's question for the capture of a stream (CUDA Driver API, stream management)."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        ask: Callable[..., int] = driver.cuStreamGetCaptureInfo
    except (OSError, AttributeError):
        return None
    return ask
