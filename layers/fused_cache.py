"""Static keys and values of a fused decoder, and the tables of its rotary embeddings.

Keys and values of a layer are [B, KV, L, D]: a head's keys lie in one piece, as they are read.
They are in the model's dtype, or e4m3 codes with one scale a layer. What they hold past a row's
length is never read, so forgetting takes nothing.

Rotary tables come from the model's own modules, for all positions of the cache at once.

Letters: B rows, KV key heads, L length, D head size, R rotary columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantload.errors import ConfigError
from quantload.layers.fused_layer import KeptHeads

if TYPE_CHECKING:
    from quantload.runtime.kernels.decode_attention import HeadRule


@dataclass(frozen=True)
class Rotary:
    """A call that makes cosines and sines, as a model's forward made it.

    Args:
        module: What was called.
        args: Its arguments; the positions are the integer tensor among them and `kwargs`.
        kwargs: See `args`.
        doubled: The tables are half as wide as what they turn.
    """

    module: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    doubled: bool = False

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [len(positions), R]."""

        def put(value: Any) -> Any:  # noqa: ANN401 - any argument
            is_places = isinstance(value, Tensor) and not value.is_floating_point()
            return positions[None] if is_places else value

        with torch.no_grad():
            found = self.module(
                *map(put, self.args), **{key: put(value) for key, value in self.kwargs.items()}
            )
        cos, sin = (table.reshape(len(positions), -1).contiguous() for table in found)
        return cos, sin

    def whole(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the tables of positions 0 to length - 1.

        Raises:
            ConfigError: They are other ones when fewer positions are asked for.
        """
        tables = self.tables(torch.arange(length, device=device))
        for place in {0, length - 1}:
            alone = self.tables(torch.tensor([place], device=device))
            if not all(torch.equal(t[place], a[0]) for t, a in zip(tables, alone, strict=True)):
                raise ConfigError(
                    f"rotary embeddings of position {place} depend on how many others there are, "
                    f"found at a length of {length}",
                    hint="a shorter cache, or the model's own forward",
                )
        return twice(tables) if self.doubled else tables


def twice(tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return tables [L, 2R] of which both halves are the given ones."""
    cos, sin = (torch.cat((table, table), -1) for table in tables)
    return cos, sin


class FusedCache:
    """What a fused decoder keeps of a batch.

    Args:
        layers: Of each layer.
        windows: Positions that a token of each layer sees; 0 is all.
    """

    def __init__(self, layers: Sequence[KeptHeads], windows: Sequence[int]) -> None:
        self.layers, self._windows = layers, windows

    @property
    def batch(self) -> int:
        """B, the number of rows."""
        return len(self.layers[0].keys)

    @property
    def length(self) -> int:
        """The most tokens a row can hold."""
        return self.layers[0].keys.shape[2]

    @property
    def num_bytes(self) -> int:
        """What it takes of the device's memory, without the tables, in bytes."""
        return sum(2 * kept.keys.nbytes for kept in self.layers)

    def bytes_read(self, keys: int) -> int:
        """Return the fewest bytes of it that a step reads when each row holds `keys` tokens."""
        seen = (min(keys, window) if window else keys for window in self._windows)
        rows = zip(self.layers, seen, strict=True)
        return sum(2 * kept.keys[:, :, :1].nbytes * count for kept, count in rows)

    def reset(self) -> None:
        """Forget all tokens: nothing past a row's length is read."""

    def write_prompts(self, layer: int, rows: slice, keys: Tensor, values: Tensor) -> None:
        """Keep keys and values [b, KV, T, D] of prompts, from position 0 on."""
        kept = self.layers[layer]
        pairs = ((kept.keys, keys), (kept.values, values))
        for scale, (store, new) in zip(kept.scales, pairs, strict=True):
            new = new if scale == 1.0 else new.float() / scale
            if store.dtype == torch.float8_e4m3fn:
                new = new.clamp(-448, 448)
            store[rows, :, : new.shape[2]] = new.to(store.dtype)


def new_fused_cache(
    rules: Sequence[HeadRule],
    tables: Sequence[tuple[Tensor, Tensor]],
    batch: int,
    length: int,
    *,
    dtype: torch.dtype,
    scales: Sequence[tuple[float, float]],
) -> FusedCache:
    """Return an empty cache.

    Args:
        rules: Of each layer.
        tables: Rotary tables of each layer, [L, R].
        batch: B.
        length: L.
        dtype: dtype of keys and values.
        scales: Multipliers of codes, of each layer.
    """
    device = tables[0][0].device
    most = max(rule.kv_heads for rule in rules)
    locks = torch.zeros(batch * most, dtype=torch.int32, device=device)
    layers = []
    for rule, rotary, pair in zip(rules, tables, scales, strict=True):
        shape = (batch, rule.kv_heads, length, rule.width)
        keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        layers.append(KeptHeads(keys, values, pair, rotary, locks))
    return FusedCache(layers, [rule.window for rule in rules])


__all__ = ["FusedCache", "Rotary", "new_fused_cache", "twice"]
