"""What a converter to GGUF did to a tensor, and how it is undone when the tensor is read.

    interleaved_q, _k   rows of each head in the order of Meta's rotary embedding
    ungrouped_qkv       all rows of q, of k, of v; the model has them group by group of heads
    tiled_qkv, ...      value heads v0k0 v0k1 v1k0 v1k1; the model has v0k0 v1k0 v0k1 v1k1
    plus_one            norms that the model adds 1 to
    minus_exp           -exp(x)
    transposed          the model stores [K, N]

Rows are moved as a whole, whether they are floats or blocks, so this is exact. So is a change of
columns as long as blocks stay whole; where they do not, it is made on the decoded weight.

Letters: E experts, N rows, D size of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quantload.loader.checkpoint import Checkpoint, TensorEntry, read_entry

Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class GgufEntry(TensorEntry):
    """A tensor of a GGUF file under its Hugging Face name.

    Args:
        experts: E, if it is the weights [E * N, K] of E experts in one parameter.
        is_transposed: True if the parameter has input features first: [K, N], [E, K, N].
        parts: Tensors whose rows alternate in it, if it is stored in several.
        steps: Changes to the stored rows, in this order.
        late_steps: Changes that cut through blocks, to be made on the decoded weight.
    """

    experts: int = 0
    is_transposed: bool = False
    parts: tuple[TensorEntry, ...] = ()
    steps: tuple[Step, ...] = ()
    late_steps: tuple[Step, ...] = ()

    @property
    def is_contiguous(self) -> bool:
        """True if the file holds the elements themselves, one after the other, unchanged."""
        is_changed = self.parts or self.steps or self.late_steps
        is_other = self.experts or self.is_transposed
        return super().is_contiguous and not is_changed and not is_other


@dataclass(frozen=True)
class GgufCheckpoint(Checkpoint):
    """A checkpoint in GGUF files: tensors are read in the form that transformers has them."""

    def read(self, tensor_name: str) -> Tensor:
        """Read one tensor, see `Checkpoint.read`; rows and values are those of transformers."""
        entry = self.tensors.get(tensor_name)
        if not isinstance(entry, GgufEntry):
            return super().read(tensor_name)
        if entry.parts:
            stored = alternate([read_entry(part) for part in entry.parts]).reshape(entry.shape)
        else:
            stored = super().read(tensor_name)
        for step in entry.steps:
            stored = step(stored)
        return stored


def alternate(parts: Sequence[Tensor]) -> Tensor:
    """Return rows [P * N, ...] that come from P tensors [N, ...] in turn."""
    return torch.stack(list(parts), dim=1).flatten(0, 1)


def group_qkv(stored: Tensor, *, heads: int, kv_heads: int) -> Tensor:
    """Put rows q | k | v into groups: the q heads that share a key, the key, the value.

    Args:
        stored: [(heads + 2 * kv_heads) * D, ...], any dtype.
        heads: Heads of q.
        kv_heads: Heads of k and of v.
    """
    head = stored.shape[0] // (heads + 2 * kv_heads)
    parts = torch.split(stored, [heads * head, kv_heads * head, kv_heads * head])
    grouped = [part.reshape(kv_heads, -1, *stored.shape[1:]) for part in parts]
    return torch.cat(grouped, dim=1).reshape(stored.shape)


def group_values(stored: Tensor, *, key_heads: int, value_heads: int, first: int = 0) -> Tensor:
    """Put tiled value heads into groups by key head.

    Args:
        stored: [first + value_heads * D, ...], any dtype.
        key_heads: Key heads; each belongs to value_heads / key_heads value heads.
        value_heads: Value heads.
        first: Rows before the value heads, which stay.
    """
    tail = stored[first:]
    tiled = tail.reshape(value_heads // key_heads, key_heads, -1, *stored.shape[1:])
    return torch.cat((stored[:first], tiled.transpose(0, 1).reshape(tail.shape)))


def group_value_columns(stored: Tensor, *, key_heads: int, value_heads: int) -> Tensor:
    """Do the same to columns [N, value_heads * D]: floats, or whole blocks in bytes."""
    tiled = stored.reshape(stored.shape[0], value_heads // key_heads, key_heads, -1)
    return tiled.transpose(1, 2).reshape(stored.shape)


def minus_one(stored: Tensor) -> Tensor:
    """Return x - 1, computed in float32 as transformers does."""
    return (stored.float() - 1).to(stored.dtype)


def log_negated(stored: Tensor) -> Tensor:
    """Return log(-x), computed in float32 by NumPy as transformers does."""
    return torch.from_numpy(np.log(-stored.float().numpy())).to(stored.dtype)
