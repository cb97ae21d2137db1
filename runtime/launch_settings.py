"""Launch settings of kernels: what was measured on a card, else the kernel's own rule.

A file for each card, `tuned/NVIDIA_H200.json`, holds for each kernel, shape and number of tokens the
fastest settings that were found:

    {"card": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0",
     "kernels": {"nibble int4 g128": {"6144x4096": {"1": {"rows": 64, "splits": 4}, ...}}}}

Shapes are N x K of a weight. The settings of the fewest measured tokens that hold the asked-for ones
serve; a shape, kernel or card that was not measured has none, and the kernel's rule decides.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib import resources

import torch

__all__ = ["Settings", "find"]

Settings = Mapping[str, int]
_Table = Mapping[str, Mapping[str, Mapping[str, Settings]]]


def find(kernel: str, device: torch.device, *, m: int, n: int, k: int) -> Settings | None:
    """Return the measured settings of a kernel on the card of `device`, or None.

    Args:
        kernel: Name of the kernel and of what its code is specialised for.
        device: Where it runs; other devices than CUDA's have no settings.
        m: Tokens.
        n: Output features.
        k: Input features.
    """
    if device.type != "cuda":
        return None
    return _find(kernel, torch.cuda.get_device_name(device), m, n, k)


@functools.lru_cache(maxsize=4096)
def _find(kernel: str, card: str, m: int, n: int, k: int) -> Settings | None:
    measured = _table(card).get(kernel, {}).get(f"{n}x{k}", {})
    buckets = sorted(int(tokens) for tokens in measured)
    if not buckets:
        return None
    bucket = next((tokens for tokens in buckets if tokens >= m), buckets[-1])
    return measured[str(bucket)]


@functools.cache
def _table(card: str) -> _Table:
    file = resources.files("quantload.runtime") / "tuned" / f"{card.replace(' ', '_')}.json"
    if not file.is_file():
        return {}
    kernels: _Table = json.loads(file.read_text())["kernels"]
    return kernels
