"""NaN and infinity in what a format stores: refused when a weight is decoded."""

from __future__ import annotations

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
    raise NonFiniteWeight(
        f"tensor `{name}` holds NaN or infinity, in `{checkpoint_name}`",
        hint="the file is damaged, or the tool that wrote it met an overflow",
    )


def is_finite(tensor: Tensor) -> bool:
    """True if no element is NaN or infinity."""
    flat = tensor.reshape(1, -1) if tensor.ndim < 2 else tensor.flatten(1)
    chunks = (
        flat[start:stop] for start, stop in row_chunks((flat.shape[0], flat.shape[1]), flat.device)
    )
    if tensor.dtype in _SPECIAL:
        mask, special = _SPECIAL[tensor.dtype]
        return not any(bool(((c.view(torch.uint8) & mask) >= special).any()) for c in chunks)
    if not tensor.dtype.is_floating_point:
        return True
    return all(bool(chunk.isfinite().all()) for chunk in chunks)
