"""What memory a backward pass over the blocks of a model takes: told before it starts."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from quantload.accuracy.streaming import StreamedModel
from quantload.accuracy.streaming_load import OUTSIDE, block_of
from quantload.errors import ConfigError

_LOGITS = 6  # tensors [T, V] in float32 at a time: logits, probabilities, gradients, their copies
_WIDTHS = 64  # of activations that autograd keeps for each token of a block, in hidden sizes
_GIB = 1 << 30


def scoring_bytes(
    model: StreamedModel, *, candidates: int, num_tokens: int, batch_tokens: int
) -> tuple[int, int]:
    """Estimate what `gradient_scores` takes, from headers.

    Args:
        model: The reference, not loaded.
        candidates: How many schemes lie beside it.
        num_tokens: Tokens of all sequences.
        batch_tokens: Tokens that go through a block at a time.

    Returns:
        Bytes on the device, and bytes of hidden states that wait on the CPU.
    """
    config = model.model.config.get_text_config()
    hidden = int(getattr(config, "hidden_size", 0) or 0)
    vocabulary = int(getattr(config, "vocab_size", 0) or 0)
    each = next((p.dtype.itemsize for p in model.model.parameters()), 4)
    elements: dict[int, int] = {}
    for job in model.jobs:
        number = 0 if model.cut is None else block_of(job.target.module, model.cut)
        elements[number] = elements.get(number, 0) + math.prod(job.shape) * job.slots
    largest = max((n for number, n in elements.items() if number != OUTSIDE), default=0)
    device = each * (largest * (1 + candidates) + batch_tokens * hidden * _WIDTHS)
    device += 4 * _LOGITS * batch_tokens * vocabulary
    return device, each * num_tokens * hidden * (model.num_blocks + 1)


def check_memory(model: StreamedModel, needed: tuple[int, int]) -> None:
    """Refuse what cannot fit.

    Raises:
        ConfigError: The device, or the machine, has less memory free.
    """
    device, host = needed
    if model.device.type == "cuda":
        _check(device, torch.cuda.mem_get_info(model.device)[0], str(model.device))
        _check(host, available_bytes(), "this machine")
    else:
        _check(device + host, available_bytes(), "this machine")


def _check(needed: int, available: int | None, where: str) -> None:
    if available is not None and needed > available:
        raise ConfigError(
            f"scoring takes about {needed / _GIB:.1f} GiB, and {available / _GIB:.1f} GiB of "
            f"{where} are free",
            hint="run in bfloat16 (`--dtype`), on fewer tokens (`--max-tokens`), or score by "
            "weights alone (`--no-data`)",
        )


def available_bytes() -> int | None:
    """Return the bytes that this machine can still give to a process; None if it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return next((int(kibibytes) * 1024 for kibibytes in found), None)


__all__ = ["available_bytes", "check_memory", "scoring_bytes"]
