"""NaN and infinity in what a format stores: refused when a weight is decoded."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quantload.errors import NonFiniteWeight
from quantload.quant.chunks import row_chunks

# Bits that say "NaN" or "infinity" in one byte: (mask, smallest value that is one).
_SPECIAL = {
    torch.float8_e4m3fn: (0x7F, 0x7F),
    torch.float8_e5m2: (0x7F, 0x7C),
    torch.float8_e8m0fnu: (0xFF, 0xFF),
}


def refuse_nonfinite(tensor: Tensor, name: str, checkpoint_name: str) -> None:
    """Refuse a tensor that holds NaN or infinity; integers have neither.

    Args:
        tensor: Codes or scales, of any shape and dtype.
        name: Name of the tensor, for the message.
        checkpoint_name: For the message.

    Raises:
        NonFiniteWeight: It does.
    """
    if is_finite(tensor):
        return
    raise _nonfinite(name, checkpoint_name)


def _nonfinite(name: str, checkpoint_name: str) -> NonFiniteWeight:
    return NonFiniteWeight(
        f"tensor `{name}` holds NaN or infinity, in `{checkpoint_name}`",
        hint="the file is damaged, or the tool that wrote it met an overflow",
    )


def is_finite(tensor: Tensor) -> bool:
    """True if no element is NaN or infinity.

    Least and largest element tell: NaN is both. That takes 0.2 to 0.35 s a GB on one core, a tenth
    of `isfinite`.
    """
    if not tensor.numel():
        return True
    if tensor.dtype in _SPECIAL:
        return _has_no_special(tensor)
    if not tensor.dtype.is_floating_point:
        return True
    low, high = torch.stack(tensor.aminmax()).tolist()  # one wait for a GPU, not two
    return math.isfinite(low) and math.isfinite(high)


def _has_no_special(tensor: Tensor) -> bool:
    mask, special = _SPECIAL[tensor.dtype]
    flat = tensor.reshape(1, -1) if tensor.ndim < 2 else tensor.flatten(1)
    chunks = (
        flat[start:stop] for start, stop in row_chunks((flat.shape[0], flat.shape[1]), flat.device)
    )
    return not any(bool(((c.view(torch.uint8) & mask) >= special).any()) for c in chunks)


class FiniteChecks:
    """Checks many tensors; those on a GPU all at once, since each answer would have to wait.

    Args:
        checkpoint_name: For messages.
    """

    def __init__(self, checkpoint_name: str) -> None:
        self._checkpoint_name = checkpoint_name
        self._pending: list[tuple[str, Tensor]] = []

    def add(self, tensor: Tensor, name: str) -> None:
        """Check a tensor, or begin to.

        Raises:
            NonFiniteWeight: It holds NaN or infinity.
        """
        if tensor.device.type == "cpu" or tensor.dtype in _SPECIAL:
            refuse_nonfinite(tensor, name, self._checkpoint_name)
        elif tensor.dtype.is_floating_point and tensor.numel():
            ends = torch.stack(tensor.aminmax())
            self._pending.append((name, ends.isfinite().all()))

    def finish(self) -> None:
        """Wait for all answers.

        Raises:
            NonFiniteWeight: One of the tensors holds NaN or infinity.
        """
        if not self._pending:
            return
        names, flags = zip(*self._pending, strict=True)
        self._pending = []
        for name, is_sound in zip(names, torch.stack(flags).tolist(), strict=True):
            if not is_sound:
                raise _nonfinite(name, self._checkpoint_name)
