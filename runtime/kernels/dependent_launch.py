"""Kernels that start while the one before still runs.

A kernel launched with `launch_pdl` may start as soon as every program of the kernel before it has
called `let_next_start` or has ended. What the one before writes is there only after
`wait_for_previous`; as every kernel waits, so is then what all before that one wrote. Three rules
keep that right:

    what an earlier kernel of the chain writes is read after the wait
    nothing is written before the wait: an earlier kernel may still read it
    every program waits, also one that has nothing to do: the next kernel counts on it

Inside a CUDA graph the gap between two small kernels, near a microsecond, vanishes that way.

Source: CUDA C++ Programming Guide, programmatic dependent launch.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

__all__ = [
    "INTERPRETED",
    "LARGEST",
    "SUM",
    "launches_early",
    "let_next_start",
    "processors",
    "wait_for_previous",
]

INTERPRETED = bool(triton.knobs.runtime.interpret)
# What `tl.reduce` combines by; named as they are, the interpreter reduces at once and not in pairs.
SUM = tl.standard._sum_combine
LARGEST = tl.standard._elementwise_max


def launches_early(device: torch.device) -> bool:
    """True if kernels on `device` may start before the one before has ended."""
    return device.type == "cuda" and not INTERPRETED and _major(device.index) >= 9


@functools.cache
def processors(device: torch.device) -> int:
    """Return the number of a card's processors, 1 for the interpreter."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _major(index: int | None) -> int:
    return torch.cuda.get_device_capability(index)[0]


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    """Allow the next kernel to start."""
    if EARLY:
        cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """Wait until the kernel before has ended and what it wrote is there."""
    if EARLY:
        cuda.gdc_wait()
