"""Attention on plain tensors: grouped heads, windows, soft caps, sinks, masks of any kind.

    scores = scaling * query @ key^T                     [T, S]
    scores = softcap * tanh(scores / softcap)            if there is a soft cap
    scores = scores + mask, or -inf where it says no     causal, sliding window, additive
    output = softmax(scores) @ value                     a sink adds exp(sink) to the sum

Query head h reads key head h // (H / KV). How many query heads share a key head is read from the
shapes of the tensors. That stays right where a rank holds some heads only and key heads are
repeated over ranks, while what a config or a module says of it does not.

Without soft cap and sinks, torch's `scaled_dot_product_attention` computes it. With them, the
scores are made in slices of queries, in float32, so that memory stays bounded.

Letters: B batch, H query heads, KV key heads, T queries, S keys, D head size of queries and keys,
V head size of values.

Source: grouped heads https://arxiv.org/abs/2305.13245; soft cap https://arxiv.org/abs/2408.00118;
sinks https://arxiv.org/abs/2309.17453, as a learned logit of each head in gpt-oss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from quantload.errors import ShapeError

_SCORES = 1 << 26  # scores that are held at once, 256 MiB in float32
_FLASH_HEAD = 256  # widest head of torch's flash kernels on CUDA


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Which keys a query sees, and how its scores become weights.

    Args:
        scaling: Factor of the scores; None is D ** -0.5.
        is_causal: A query sees no key after its own position.
        offset: Position of the first query among the keys; None is S - T, so that the last query
            stands at the last key.
        sliding_window: A query sees keys nearer than this: `position - key < window`, and where it
            is not causal also `key - position < window`.
        softcap: Bound of the scores.
        sinks: [H], or [B, H, T, 1] where every query has its own: logits that take weight from the
            keys and have no value.
        mask: bool (True sees) or additive, broadcast to [B, H, T, S].
        bias: Additive, broadcast to [B, H, T, S].
        dropout: Share of the weights that is dropped.
    """

    scaling: float | None = None
    is_causal: bool = True
    offset: int | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    mask: Tensor | None = None
    bias: Tensor | None = None
    dropout: float = 0.0


def attend(  # noqa: PLR0913 - a keyword for each feature of attention
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float | None = None,
    is_causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    lengths: Sequence[int] | None = None,
    key_lengths: Sequence[int] | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Return attention of [B, H, T, D], or of flattened [T, H, D] sequences.

    Args:
        query: [B, H, T, D], or [T, H, D].
        key: [B, KV, S, D], or [S, KV, D]; KV divides H. The last query stands at the last key, so
            that keys of a cache come first.
        value: [B, KV, S, V], or [S, KV, V].
        scaling: See `Rule`.
        is_causal: See `Rule`.
        sliding_window: See `Rule`.
        softcap: See `Rule`.
        sinks: [H], see `Rule`.
        mask: bool or additive, broadcast to [B, H, T, S]; on top of causal and window. Only for
            tensors with a batch.
        lengths: Number of queries of each sequence; flattened tensors without it are one sequence,
            or as many as `positions` tells.
        key_lengths: Number of keys of each sequence; None is `lengths`.
        positions: [T] positions of flattened queries; a sequence starts where they do not go on by
            one. Reading them waits for the device.

    Returns:
        [B, H, T, V], or [T, H, V].

    Raises:
        ShapeError: The tensors do not fit each other or the lengths.
    """
    rule = Rule(
        scaling=scaling,
        is_causal=is_causal,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
        mask=mask,
    )
    if query.ndim == 4:
        if lengths is not None or positions is not None or key_lengths is not None:
            raise ShapeError(
                f"lengths or positions with a query of shape `{tuple(query.shape)}`, expected "
                "them with flattened `[T, H, D]`",
                hint="give a `mask`, or flatten batch and sequence",
            )
        return weigh(query, key, value, rule)[0]
    if query.ndim != 3 or mask is not None:
        raise ShapeError(
            f"query of shape `{tuple(query.shape)}`{' with a mask' if mask is not None else ''}, "
            "expected `[B, H, T, D]`, or `[T, H, D]` without a mask"
        )
    if lengths is None:
        lengths = [len(query)] if positions is None else sequence_lengths(positions)
        key_lengths = key_lengths or ([len(key)] if len(lengths) == 1 else None)
    return _flattened(query, key, value, rule, list(lengths), list(key_lengths or lengths))


def sequence_lengths(positions: Tensor) -> list[int]:
    """Return the lengths of the sequences that flattened positions [T] tell.

    A sequence ends where the next position is not the next number.
    """
    starts = (positions.diff() != 1).nonzero().flatten().tolist()
    edges = [-1, *starts, len(positions) - 1]
    return [stop - start for start, stop in pairwise(edges) if stop > start]


def _flattened(
    query: Tensor, key: Tensor, value: Tensor, rule: Rule, lengths: list[int], keys: list[int]
) -> Tensor:
    if sum(lengths) != len(query) or sum(keys) != len(key) or len(lengths) != len(keys):
        raise ShapeError(
            f"lengths `{lengths}` of queries and `{keys}` of keys, expected as many of each, with "
            f"sums `{len(query)}` and `{len(key)}`"
        )
    parts = (torch.split(x, n) for x, n in ((query, lengths), (key, keys), (value, keys)))
    outputs = []
    for one in zip(*parts, strict=True):  # no scores between sequences are computed
        q, k, v = (part.transpose(0, 1)[None] for part in one)
        outputs.append(weigh(q, k, v, rule)[0][0].transpose(0, 1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def weigh(
    query: Tensor, key: Tensor, value: Tensor, rule: Rule, *, with_weights: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return attention [B, H, T, V] and, if asked for, the weights [B, H, T, S].

    Raises:
        ShapeError: The tensors do not fit each other.
    """
    _check(query, key, value, rule)
    if rule.softcap is None and rule.sinks is None and not with_weights:
        return _by_torch(query, key, value, rule), None
    rows = query.shape[2]
    count = query.shape[0] * query.shape[1] * key.shape[2]
    step = max(1, _SCORES // count) if count and not torch.compiler.is_compiling() else rows
    offset = _offset(query, key, rule)
    parts = [
        _by_scores(query[:, :, i : i + step], key, value, _rows(rule, i, step, offset))
        for i in range(0, rows, step)
    ] or [_by_scores(query, key, value, rule)]
    if len(parts) == 1:
        return parts[0][0], parts[0][1] if with_weights else None
    weights = torch.cat([part[1] for part in parts], dim=2) if with_weights else None
    return torch.cat([part[0] for part in parts], dim=2), weights


def _check(query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> None:
    heads, kv_heads = query.shape[1], key.shape[1]
    if (
        key.shape[-1] != query.shape[-1]
        or key.shape[1:3] != value.shape[1:3]
        or heads % max(kv_heads, 1)
    ):
        raise ShapeError(
            f"attention over query `{tuple(query.shape)}`, key `{tuple(key.shape)}` and value "
            f"`{tuple(value.shape)}`, expected `[B, H, T, D]`, `[B, KV, S, D]` and "
            "`[B, KV, S, V]` with KV dividing H"
        )
    mask = rule.mask
    if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
        raise ShapeError(
            f"attention mask of dtype `{mask.dtype}`, expected bool, or floats to be added"
        )
    if rule.sinks is not None and rule.sinks.ndim == 1 and len(rule.sinks) != heads:
        raise ShapeError(
            f"`{len(rule.sinks)}` sinks for `{heads}` heads, expected one for each",
            hint="under tensor parallelism a rank needs the sinks of its own heads",
        )


def _offset(query: Tensor, key: Tensor, rule: Rule) -> int:
    return key.shape[2] - query.shape[2] if rule.offset is None else rule.offset


def _rows(rule: Rule, start: int, count: int, offset: int) -> Rule:
    """Return the rule for `count` of the queries."""

    def cut(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or tensor.ndim < 2 or tensor.shape[-2] == 1:
            return tensor
        return tensor[..., start : start + count, :]

    return Rule(
        scaling=rule.scaling,
        is_causal=rule.is_causal,
        offset=offset + start,
        sliding_window=rule.sliding_window,
        softcap=rule.softcap,
        sinks=cut(rule.sinks),
        mask=cut(rule.mask),
        bias=cut(rule.bias),
        dropout=rule.dropout,
    )


def _seen(query: Tensor, key: Tensor, rule: Rule) -> Tensor | None:
    """Return the bool mask [T, S] of causal order and window; None where all is seen."""
    rows, columns, offset = query.shape[2], key.shape[2], _offset(query, key, rule)
    window = rule.sliding_window
    farthest = max(offset + rows - 1, columns - 1 - offset)  # no two are farther apart
    if window is not None and farthest < window:
        window = None
    if (not rule.is_causal or offset >= columns - 1) and window is None:
        return None
    place = torch.arange(rows, device=query.device)[:, None] + offset
    ahead = place - torch.arange(columns, device=query.device)  # of the key, in positions
    if window is None:
        return ahead >= 0
    if rule.is_causal:
        return (ahead >= 0) & (ahead < window)
    return ahead.abs() < window


# -- torch's kernels -------------------------------------------------------------------------------


def _by_torch(query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
    """Attention without soft cap and sinks."""
    rows, wide = query.shape[2], value.shape[-1]
    causal = _is_plain_causal(query, key, rule)
    seen = None if causal else _seen(query, key, rule)
    mask = _merged(seen, rule.mask, rule.bias, query.dtype)
    ratio = query.shape[1] // key.shape[1]
    options: dict[str, bool] = {}
    shape = query.shape
    if query.is_cuda and mask is None and wide < shape[-1] <= _FLASH_HEAD:
        value = F.pad(value, (0, shape[-1] - wide))  # flash wants equal widths
    if ratio > 1 and rows == 1 and (mask is None or mask.ndim < 4 or mask.shape[1] == 1):
        # one query a head: the heads that share keys become the queries of one head
        query = query.reshape(shape[0], key.shape[1], ratio, shape[-1])
    elif ratio > 1 and _takes_groups(query, value, mask):
        options["enable_gqa"] = True
    elif ratio > 1:
        key, value = _repeated(key, ratio), _repeated(value, ratio)
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=rule.dropout,
        is_causal=causal,
        scale=rule.scaling,
        **options,
    )
    return output[..., :wide].reshape(output.shape[0], shape[1], rows, wide)


def _is_plain_causal(query: Tensor, key: Tensor, rule: Rule) -> bool:
    """True if the only restriction is the order of as many queries as keys."""
    rows, columns = query.shape[2], key.shape[2]
    plain = rule.is_causal and rule.mask is None and rule.bias is None
    wide = rule.sliding_window is None or rule.sliding_window >= rows
    return bool(plain and wide and rows == columns > 1 and _offset(query, key, rule) == 0)


def _takes_groups(query: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """True if torch's kernels for these tensors read grouped heads without a copy of them."""
    if query.device.type == "cpu":
        return True
    same = query.shape[-1] == value.shape[-1] <= _FLASH_HEAD
    half = query.dtype in (torch.float16, torch.bfloat16)
    return query.is_cuda and mask is None and same and half


def _repeated(tensor: Tensor, ratio: int) -> Tensor:
    """Repeat [B, KV, S, D] to [B, KV * ratio, S, D]: query head h reads KV head h // ratio."""
    return tensor.repeat_interleave(ratio, dim=1)


def _merged(
    seen: Tensor | None, mask: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """Return one mask for all: bool where no part is additive."""
    allowed = [part for part in (seen, mask) if part is not None and part.dtype == torch.bool]
    added = [part for part in (mask, bias) if part is not None and part.dtype != torch.bool]
    merged = allowed[0] if allowed else None
    for part in allowed[1:]:
        merged = merged & part if merged is not None else part
    if not added:
        return merged
    total = added[0].to(dtype)
    for part in added[1:]:
        total = total + part.to(dtype)
    if merged is None:
        return total
    return torch.where(merged, total, torch.finfo(dtype).min)


# -- scores ----------------------------------------------------------------------------------------


def _by_scores(query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """Attention by its definition; scores and softmax in float32."""
    batch, heads, rows, width = query.shape
    kv_heads, columns = key.shape[1], key.shape[2]
    ratio = heads // kv_heads
    # the rows of the heads that share keys, one below the other: keys are not repeated
    grouped = query.reshape(batch, kv_heads, ratio * rows, width)
    scores = torch.matmul(grouped, key.transpose(2, 3)).view(batch, heads, rows, columns).float()
    scores = scores * (width**-0.5 if rule.scaling is None else rule.scaling)
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    mask = _merged(_seen(query, key, rule), rule.mask, rule.bias, torch.float32)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(torch.float32).min)
    elif mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, dim=-1)
    if rule.sinks is not None:
        sinks = rule.sinks.float()
        sinks = sinks.view(1, -1, 1, 1) if sinks.ndim == 1 else sinks
        # exp(sink) in the softmax's sum: all weights shrink by one factor
        weights = weights * torch.sigmoid(torch.logsumexp(scores, dim=-1, keepdim=True) - sinks)
    weights = F.dropout(weights.to(value.dtype), rule.dropout)
    output = torch.matmul(weights.view(batch, kv_heads, ratio * rows, columns), value)
    return output.view(batch, heads, rows, value.shape[-1]), weights


def heads_of(tensor: Tensor, heads: Iterable[int]) -> Tensor:
    """Return the entries of some heads of [H] sinks or of a [B, H, T, S] mask."""
    index = torch.as_tensor(list(heads), device=tensor.device)
    return tensor.index_select(0 if tensor.ndim == 1 else 1, index)


__all__ = ["Rule", "attend", "heads_of", "sequence_lengths", "weigh"]
