"""Kernels that start while the one before still runs, and fetch weights that are needed next.

A kernel launched with `launch_pdl` may start as soon as every program of the kernel before it has
called `let_next_start` or has ended. What the one before writes is there only after
`wait_for_previous`; as every kernel waits, so is then what all before that one wrote. Three rules
keep that right:

    what an earlier kernel of the chain writes is read after the wait
    nothing is written before the wait: an earlier kernel may still read it
    every program waits, also one that has nothing to do: the next kernel counts on it

Inside a CUDA graph the gap between two small kernels, near a microsecond, vanishes that way.

While a small kernel runs, the memory is idle. `fetch_ahead` lets programs that have nothing else to
do bring the weights of the next product into the L2 cache, after the wait: before it, the memory
still works for the product in front. They touch no results.

Source: CUDA C++ Programming Guide, programmatic dependent launch; PTX ISA 8.x,
`cp.async.bulk.prefetch.L2` (sm_90).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

__all__ = [
    "INTERPRETED",
    "LARGEST",
    "SMALLEST",
    "SUM",
    "Ahead",
    "ahead_of",
    "fetch_ahead",
    "launches_early",
    "let_next_start",
    "let_product_start",
    "wait_for_previous",
    "wait_for_product",
]

INTERPRETED = bool(triton.knobs.runtime.interpret)
# What `tl.reduce` combines by; named as they are, the interpreter reduces at once and not in pairs.
SUM = tl.standard._sum_combine
LARGEST, SMALLEST = tl.standard._elementwise_max, tl.standard._elementwise_min
# When a kernel lets the next one start: at its "start", after its "wait", or at its end ("never").
PRODUCTS, SMALL = tl.constexpr("start"), tl.constexpr("start")
_PIECE = 1024  # bytes that one thread asks for
AHEAD_BYTES = 8 << 20  # most that is fetched while one kernel runs


@dataclass(frozen=True)
class Ahead:
    """Memory that is fetched into the L2 cache, and by how many programs.

    Args:
        start: Tensor whose first bytes are fetched.
        pieces: Number of pieces of 1 KiB.
        programs: Programs that do it.
    """

    start: Tensor
    pieces: int
    programs: int


def launches_early(device: torch.device) -> bool:
    """True if kernels on `device` may start before the one before has ended."""
    return device.type == "cuda" and not INTERPRETED and _major(device.index) >= 9


@functools.cache
def _major(index: int | None) -> int:
    return torch.cuda.get_device_capability(index)[0]


def ahead_of(weights: Tensor | None, device: torch.device, warps: int) -> Ahead | None:
    """Return what programs of `warps` warps fetch of the weights of the next product, or None."""
    if weights is None or weights.device != device or not launches_early(device):
        return None
    pieces = min(weights.numel() * weights.element_size(), AHEAD_BYTES) // _PIECE
    if not pieces or not weights.is_contiguous() or weights.data_ptr() % 16:
        return None
    return Ahead(weights, pieces, triton.cdiv(pieces, 32 * warps))


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    """Of a product: allow the next kernel to start, when this one starts."""
    if EARLY and PRODUCTS == "start":
        cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """Of a product: wait until the kernel before has ended and what it wrote is there."""
    if EARLY:
        cuda.gdc_wait()
        if PRODUCTS == "wait":
            cuda.gdc_launch_dependents()


@triton.jit
def let_product_start(EARLY: tl.constexpr):
    """Of a small kernel: allow the product behind it to start, when this one starts."""
    if EARLY and SMALL == "start":
        cuda.gdc_launch_dependents()


@triton.jit
def wait_for_product(EARLY: tl.constexpr):
    """Of a small kernel: wait until the kernel before has ended and what it wrote is there."""
    if EARLY:
        cuda.gdc_wait()
        if SMALL == "wait":
            cuda.gdc_launch_dependents()


@triton.jit
def fetch_ahead(start, pieces, index, WARPS: tl.constexpr):
    """Ask for the share of program `index`, of WARPS warps, of the memory that is needed next."""
    piece = index * 32 * WARPS + tl.arange(0, 32 * WARPS)
    place = start.to(tl.int64) + tl.minimum(piece, pieces - 1).to(tl.int64) * 1024
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], 1024; mov.u32 $0, 0;",
        "=r,l", args=[place], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
