"""What decoding asks of a model: prefill the prompts, then one token for each row a step.

`runtime.generate` runs anything that fits these two protocols; it knows no model library. Letters:
B rows (sequences of one batch), T tokens of the longest prompt, V size of the vocabulary.

Rows and padding: prompts of unequal lengths come padded on the RIGHT, `ids[b, :lengths[b]]` is the
prompt of row b, and what follows is any valid id that must not show in the results of the row. The
token at index i of a row is at position i, so row b's first step is at position `lengths[b]`. A
model whose cache wants padding on the left moves the rows itself. All rows of a batch are stepped
together, positions go up by one a step, and `positions[b]` of a call is the number of tokens that
row b has in the cache; a step writes its token there before it attends, and sees positions
0..positions[b]. Rows that are done, or that only fill a batch up, are stepped on with any id; their
results are not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class CacheScales:
    """Fixed scales of a quantized KV cache: stored code = round(value / scale).

    Args:
        keys: [layers] float32, multiplier of the codes of each layer's keys.
        values: [layers] float32, the same for its values.
    """

    keys: Tensor
    values: Tensor


class StepCache(Protocol):
    """What a model keeps of a batch between steps, at addresses that never change.

    Its size is fixed by `new_cache`. (A cache that grows says so through the model's
    `why_not_captured`; it is run without graphs.)
    """

    @property
    def batch(self) -> int:
        """B, the number of rows."""

    @property
    def length(self) -> int:
        """The most tokens a row can hold, prompt and new ones together."""

    @property
    def num_bytes(self) -> int:
        """What it takes of the device's memory, in bytes."""

    def bytes_read(self, keys: int) -> int:
        """Return the fewest bytes of it that a step reads when each row holds `keys` tokens."""

    def reset(self) -> None:
        """Forget all tokens, in place, so that another `prefill` can follow."""


class StepModel(Protocol):
    """A causal language model, as decoding sees it.

    All tensors are on `device`. `prefill` may use the host freely. `step` has fixed shapes for a
    cache, reads its arguments only on the device, never waits for the device, and allocates
    nothing that outlives it but its result: a CUDA graph of it, captured with static `tokens` and
    `positions`, is right for all later values in these. Before it is captured, a step is run a few
    times on the capturing cache (kernels are compiled and tuned then), with positions 0.
    """

    @property
    def device(self) -> torch.device:
        """Where the model lives."""

    @property
    def vocab_size(self) -> int:
        """V."""

    @property
    def why_not_captured(self) -> str:
        """Why a step cannot be captured in a CUDA graph, for people; "" if it can."""

    @property
    def captures_prompts(self) -> bool:
        """True if a prefill, too, waits for nothing: it may be captured for one shape of `ids`."""

    def new_cache(
        self,
        batch: int,
        length: int,
        dtype: torch.dtype | None = None,
        *,
        scales: CacheScales | None = None,
    ) -> StepCache:
        """Return an empty cache.

        Args:
            batch: B, at least 1.
            length: The most tokens a row will hold.
            dtype: dtype of keys and values; None is the model's. float8_e4m3fn stores codes.
            scales: Scales of the codes; None takes the checkpoint's.

        Raises:
            ConfigError: The model cannot keep its cache in that dtype, or has no scales for it.
        """

    def prefill(self, ids: Tensor, lengths: Tensor, cache: StepCache) -> Tensor:
        """Run the prompts into an empty cache.

        Args:
            ids: [B, T] int64, padded on the right.
            lengths: [B] int64, tokens of each row, at least 1.
            cache: From `new_cache` of this model with B rows, empty.

        Returns:
            [B, V] float, the logits after the last token of each row.
        """

    def step(self, tokens: Tensor, positions: Tensor, cache: StepCache) -> Tensor:
        """Run one token of each row.

        Args:
            tokens: [B] int64.
            positions: [B] int64, the place of each token in its row; below `cache.length`.
            cache: The cache that `prefill` or the last step left.

        Returns:
            [B, V] float, the logits after these tokens.
        """


__all__ = ["CacheScales", "StepCache", "StepModel"]
