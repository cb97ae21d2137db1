"""Attention of one new token a row over a static cache, from the product of q, k and v on.

    q, k    norm of each head, where the model has one; rotary, at the row's position
    cache   keys[b, :, position], values[b, :, position] = k, v
    out     softmax(scale * q @ keys^T) @ values over positions 0..position, or a window of them

in one launch. Heads that share keys are one tile, so that keys and values are read once. The keys
of a row are cut into SPLITS pieces of whole blocks, as many as its length asks for; the last
program of a head to finish adds the pieces up, in their order: the result is the same every time.
The new token's own key and value are taken from registers, rounded as the cache holds them. The
first block of keys and values is loaded before the kernel in front has ended.

Roundings are those of the model's own code: rotary rounds both products and their sum to x's dtype;
scores, softmax and sums are float32; weights are rounded to the values' dtype for their product.

Grid: B * KV * SPLITS programs, and some that fetch the weights of the next product. Masked: heads
past G, columns past D, keys past the length. Limit: memory, at small batches latency.

Letters: B rows, H query heads, KV key heads, G = H / KV, D head size, R rotary columns, L length.

Source: https://arxiv.org/abs/2307.08691 (sums that are rescaled); split keys as in flash-decoding,
https://pytorch.org/blog/flash-decoding/.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from quantload.runtime.kernels.add_norm import NormWeight
from quantload.runtime.kernels.dependent_launch import (
    INTERPRETED,
    LARGEST,
    SUM,
    ahead_of,
    fetch_ahead,
    launches_early,
    let_product_start,
    wait_for_product,
)
from quantload.runtime.kernels.quantize import e4m3_bits

__all__ = ["HeadRule", "candidates", "decode_attention", "why_not"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WIDEST = 256
_ROWS = 16  # fewest rows of a matrix product
_SUMMED = 4096  # partial results that a program holds while it adds up, elements
_INTERPRETED = tl.constexpr(INTERPRETED)
_TILES = (  # keys of a block, warps, blocks in flight
    (32, 1, 2), (32, 2, 2), (64, 2, 2), (64, 4, 2), (64, 4, 3), (128, 4, 2), (128, 8, 2),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HeadRule:
    """What a layer does with its heads.

    Args:
        heads: H.
        kv_heads: KV.
        width: D.
        scale: Factor of the scores.
        interleaved: Rotary turns neighbours (2i, 2i + 1), not halves (i, i + R/2).
        window: A token sees that many positions, its own included; 0 is all.
        softcap: Bound of the scores; 0 is none.
        sinks: [H] logits that take weight and have no value.
        q_norm: Norm of each query head, before rotary.
        k_norm: Norm of each key head.
    """

    heads: int
    kv_heads: int
    width: int
    scale: float
    interleaved: bool = False
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    q_norm: NormWeight | None = None
    k_norm: NormWeight | None = None


def why_not(rule: HeadRule, dtype: torch.dtype) -> str | None:
    """Say why the kernel does not serve heads, or None."""
    if dtype not in _DTYPES:
        return f"heads of {dtype}, expected one of {', '.join(map(str, _DTYPES))}"
    if rule.width > _WIDEST:
        return f"heads of {rule.width} columns are wider than {_WIDEST}"
    if rule.heads % rule.kv_heads:
        return f"{rule.heads} query heads do not share {rule.kv_heads} key heads evenly"
    norms = (rule.q_norm, rule.k_norm)
    if all(norms) and len({(n.eps, n.late, n.offset) for n in norms if n}) > 1:
        return "queries and keys have norms of unlike formulas"
    if any(norms) and not all(norms):
        return "only one of queries and keys has a norm"
    return None


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: HeadRule,
    *,
    rotary: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    positions: Tensor,
    locks: Tensor,
    scales: tuple[float, float] = (1.0, 1.0),
    settings: Mapping[str, int] | None = None,
    ahead: Tensor | None = None,
) -> Tensor:
    """Write k and v of one token a row to the cache and return its attention.

    Args:
        q: [B, H * D] before norm and rotary; rows may be parts of wider ones.
        k: [B, KV * D], likewise.
        v: [B, KV * D].
        rule: What the layer does with its heads; `why_not` has no objection.
        rotary: Cosines and sines [L, R] of every position, in q's dtype; [L, 0] turns nothing.
        cache: Keys and values [B, KV, L, D], in q's dtype or float8_e4m3fn codes.
        positions: [B] integers below L, the place of the new token; may be read before the kernel
            before this one has ended, so no kernel that starts dependents early may write it.
        locks: [B * KV] or more int32 zeros; zeros again afterwards.
        scales: Multipliers of the codes of keys and values.
        settings: splits, block, warps, stages; None takes the kernel's rule.
        ahead: Weight of the next product, fetched into the cache meanwhile.

    Returns:
        [B, H * D].
    """
    chosen = settings or _rule(len(q), rule.kv_heads, cache[0].shape[2], q.device)
    norm = rule.q_norm or _NO_NORM
    out: Tensor = _attention(
        q, k, v, *rotary, *cache, positions, locks,
        None if rule.q_norm is None else rule.q_norm.weight,
        None if rule.k_norm is None else rule.k_norm.weight, norm.eps, norm.late, norm.offset,
        rule.sinks, ahead, [rule.heads, rule.kv_heads, rule.width, rule.window],
        [rule.scale, rule.softcap, *scales], rule.interleaved,
        [chosen["splits"], chosen["block"], chosen["warps"], chosen["stages"]],
    )  # fmt: skip
    return out


_NO_NORM = NormWeight(torch.empty(0), 0.0, late=False, offset=False)


def candidates(batch: int, kv_heads: int, length: int) -> Iterator[Mapping[str, int]]:
    """Yield launch settings to be measured."""
    for splits in (1, 2, 4, 8, 16, 32, 64):
        for block, warps, stages in _TILES:
            small = splits == 1 or (splits // 2) * block < length
            if small and batch * kv_heads * splits <= 4096:
                yield {"splits": splits, "block": block, "warps": warps, "stages": stages}


def _rule(batch: int, kv_heads: int, length: int, device: torch.device) -> Mapping[str, int]:
    """Return settings that fill the card once, and never more splits than blocks of keys."""
    wanted = max(1, 2 * _processors(device) // (batch * kv_heads))
    most = max(1, length // 64)
    splits = min(1 << (wanted.bit_length() - 1), 1 << (most.bit_length() - 1), 64)
    return {"splits": splits, "block": 64, "warps": 4, "stages": 2}


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # the interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count


@torch.library.custom_op("quantload::decode_attention", mutates_args=("keys", "values", "locks"))
def _attention(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor,
    positions: Tensor, locks: Tensor, q_weight: Tensor | None, k_weight: Tensor | None,
    eps: float, late: bool, offset: bool, sinks: Tensor | None, ahead: Tensor | None,
    sizes: list[int], factors: list[float], interleaved: bool, settings: list[int],
) -> Tensor:  # fmt: skip
    heads, kv_heads, width, window = sizes
    splits, block, warps, stages = settings
    out = torch.empty(len(q), heads * width, dtype=q.dtype, device=q.device)
    if not len(q):
        return out
    assert locks.numel() >= len(q) * kv_heads, f"{locks.numel()} locks"
    assert keys.stride() == values.stride(), "keys and values lie alike"
    q, k, v = (x if x.stride(1) == 1 else x.contiguous() for x in (q, k, v))
    group, pieces = heads // kv_heads, len(q) * kv_heads * splits
    part = torch.empty(pieces * group * (width + 2) * (splits > 1), device=q.device)
    early, next_up = launches_early(q.device), ahead_of(ahead, q.device, warps)
    programs = next_up.programs if next_up else 0
    columns = triton.next_power_of_2(width)
    filled = triton.next_power_of_2(group)
    with torch.cuda.device_of(q):
        _decode_attention_kernel[(pieces + programs,)](
            q, k, v, cos, sin, keys, values, positions, locks,
            q if q_weight is None else q_weight, k if k_weight is None else k_weight,
            q if sinks is None else sinks, out, part, part[pieces * group * width :],
            next_up.start if next_up else q, next_up.pieces if next_up else 0, pieces,
            q.stride(0), k.stride(0), v.stride(0), keys.stride(0), keys.stride(1), keys.stride(2),
            kv_heads, window, eps, *factors,
            G=group, D=width, R=cos.shape[1], FILLED=filled, ROWS=max(filled, _ROWS),
            COLUMNS=columns, SPLITS=splits, BLOCK=block, STAGES=stages,
            SUMMED=max(1, min(splits, _SUMMED // (filled * columns))),
            NORM=q_weight is not None, LATE=late, OFFSET=offset, INTERLEAVED=interleaved,
            WINDOW=window > 0, CAPPED=factors[1] > 0, SINKS=sinks is not None,
            CODES=keys.dtype == torch.float8_e4m3fn,
            AHEAD=next_up is not None, EARLY=early, INTERPRETED=_INTERPRETED, WARPS=warps,
            num_warps=warps, **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    return out


@_attention.register_fake
def _(q, k, v, cos, sin, keys, values, positions, locks, *rest):
    sizes = rest[-4]
    return q.new_empty(len(q), sizes[0] * sizes[2])


@triton.jit
def _norm_of(x, w, r, DTYPE: tl.constexpr, LATE: tl.constexpr, OFFSET: tl.constexpr):
    x = x * r
    if LATE:
        x = x.to(DTYPE).to(tl.float32)
    if OFFSET:
        w = 1.0 + w
    return (x * w).to(DTYPE).to(tl.float32)


@triton.jit
def _prepared(
    base, row_starts, row_mask, cos, sin, weight, eps,
    D: tl.constexpr, R: tl.constexpr, COLUMNS: tl.constexpr, NORM: tl.constexpr,
    LATE: tl.constexpr, OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Return heads [rows, COLUMNS] after norm and rotary, float32 with values of their dtype."""
    d = tl.arange(0, COLUMNS)
    mask = row_mask[:, None] & (d < D)[None, :]
    stored = tl.load(base + row_starts[:, None] + d[None, :], mask=mask, other=0.0)
    x = stored.to(tl.float32)
    if NORM:
        r = tl.rsqrt(tl.reduce(x * x, 1, SUM) / D + eps)[:, None]
        w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        x = _norm_of(x, w, r, stored.dtype, LATE, OFFSET)
    if R > 0:
        turned = d < R
        if INTERLEAVED:
            partner = tl.where(turned, d ^ 1, d)
            sign = tl.where(d % 2 == 0, -1.0, 1.0)
        else:
            partner = tl.where(turned, tl.where(d < R // 2, d + R // 2, d - R // 2), d)
            sign = tl.where(d < R // 2, -1.0, 1.0)
        y = tl.load(base + row_starts[:, None] + partner[None, :], mask=mask, other=0.0)
        y = y.to(tl.float32)
        if NORM:
            v = tl.load(weight + partner, mask=d < D, other=0.0).to(tl.float32)[None, :]
            y = _norm_of(y, v, r, stored.dtype, LATE, OFFSET)
        c = tl.load(cos + d, mask=turned, other=1.0).to(tl.float32)[None, :]
        s = tl.load(sin + d, mask=turned, other=0.0).to(tl.float32)[None, :]
        one = (x * c).to(stored.dtype).to(tl.float32)
        two = (y * sign[None, :] * s).to(stored.dtype).to(tl.float32)
        x = tl.where(turned[None, :], (one + two).to(stored.dtype).to(tl.float32), x)
    return x


@triton.jit
def _kept(x, scale, DTYPE: tl.constexpr, CODES: tl.constexpr):
    """Return float32 numbers as the cache keeps them."""
    if CODES:
        x = x / scale
        x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
        return e4m3_bits(x).to(tl.float8e4nv, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def _block_of(
    base, at, now, high, place_stride,
    D: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Load what the cache holds of positions `at` on, below `high` and before the new one."""
    n, d = at + tl.arange(0, BLOCK), tl.arange(0, COLUMNS)
    there = (n < high) & (n < now)
    place = base + n.to(tl.int64)[:, None] * place_stride + d[None, :]
    return tl.load(place, mask=there[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _capped(scores, softcap, CAPPED: tl.constexpr, INTERPRETED: tl.constexpr):
    if CAPPED:
        if INTERPRETED:  # which has no device library
            power = tl.exp(-2.0 * tl.abs(scores / softcap))
            size = (1.0 - power) / (1.0 + power)
            scores = softcap * tl.where(scores < 0, -size, size)
        else:
            scores = softcap * libdevice.tanh(scores / softcap)
    return scores


@triton.jit
def _with_block(
    m, total, acc, query, kt, vt, new_key, new_value, at, now, high, scale, softcap,
    BLOCK: tl.constexpr, CAPPED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Add a block of keys to largest scores, sums of weights and sums of values."""
    n = at + tl.arange(0, BLOCK)
    is_new = (n == now)[:, None]
    kt = tl.where(is_new, new_key, kt).to(query.dtype)
    vt = tl.where(is_new, new_value, vt).to(query.dtype)
    scores = tl.dot(query, tl.trans(kt), input_precision="ieee") * scale
    scores = _capped(scores, softcap, CAPPED, INTERPRETED)
    scores = tl.where((n < high)[None, :], scores, float("-inf"))
    higher = tl.maximum(m, tl.reduce(scores, 1, LARGEST))
    weights = tl.exp(scores - higher[:, None])
    shrink = tl.exp(m - higher)
    total = total * shrink + tl.reduce(weights, 1, SUM)
    acc = tl.dot(weights.to(query.dtype), vt, acc * shrink[:, None], input_precision="ieee")
    return higher, total, acc


@triton.jit
def _decode_attention_kernel(
    q, k, v, cos, sin, keys, values, positions, locks, q_weight, k_weight, sinks, out,
    part, stats, ahead, ahead_pieces, programs,
    q_stride, k_stride, v_stride, row_stride, head_stride, place_stride,
    kv_heads, window, eps, scale, softcap, k_scale, v_scale,
    G: tl.constexpr, D: tl.constexpr, R: tl.constexpr, FILLED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    SUMMED: tl.constexpr, NORM: tl.constexpr, LATE: tl.constexpr, OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    CODES: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr, INTERPRETED: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    let_product_start(EARLY)
    # programs that only fetch take the place of the first row, and have no keys
    busy = program < programs
    place = tl.where(busy, program, 0)
    split, pair = place % SPLITS, place // SPLITS
    b, h = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)
    # neither a length nor what the cache holds of earlier steps is an earlier kernel's result
    now = tl.load(positions + b).to(tl.int32)
    first = tl.maximum(now - window + 1, 0) if WINDOW else now * 0
    count = now - first + 1
    size = (count + SPLITS * BLOCK - 1) // (SPLITS * BLOCK) * BLOCK  # keys of a split
    active = (count + size - 1) // size
    busy = busy & (split < active)
    low = first + split * size
    high = tl.where(busy, tl.minimum(low + size, now + 1), low)
    d, g = tl.arange(0, COLUMNS), tl.arange(0, ROWS)
    inside = d < D
    start = b * row_stride + h * head_stride
    kt = _block_of(keys + start, low, now, high, place_stride, D, BLOCK, COLUMNS)
    vt = _block_of(values + start, low, now, high, place_stride, D, BLOCK, COLUMNS)
    wait_for_product(EARLY)
    if AHEAD:  # noqa: SIM102 - AHEAD is known when this is compiled
        if program >= programs:
            fetch_ahead(ahead, ahead_pieces, program - programs, WARPS)

    cos += now.to(tl.int64) * R
    sin += now.to(tl.int64) * R
    one = tl.arange(0, 1)
    asked = _prepared(
        q, b * q_stride + (h * G + g) * D, g < G, cos, sin, q_weight, eps,
        D, R, COLUMNS, NORM, LATE, OFFSET, INTERLEAVED,
    )  # fmt: skip
    query = asked.to(q.dtype.element_ty)
    new_key = _prepared(
        k, b * k_stride + h * D + one, one < 1, cos, sin, k_weight, eps,
        D, R, COLUMNS, NORM, LATE, OFFSET, INTERLEAVED,
    )  # fmt: skip
    new_key = _kept(new_key, k_scale, keys.dtype.element_ty, CODES)
    new_value = tl.load(v + b * v_stride + h * D + d, mask=inside, other=0.0).to(tl.float32)
    new_value = _kept(new_value[None, :], v_scale, values.dtype.element_ty, CODES)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.full((ROWS,), 0.0, tl.float32)
    acc = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    if busy:
        m, total, acc = _with_block(
            m, total, acc, query, kt, vt, new_key, new_value, low, now, high,
            scale * k_scale, softcap, BLOCK, CAPPED, INTERPRETED,
        )  # fmt: skip
    for at in tl.range(low + BLOCK, high, BLOCK, num_stages=STAGES):
        more_k = _block_of(keys + start, at, now, high, place_stride, D, BLOCK, COLUMNS)
        more_v = _block_of(values + start, at, now, high, place_stride, D, BLOCK, COLUMNS)
        m, total, acc = _with_block(
            m, total, acc, query, more_k, more_v, new_key, new_value, at, now, high,
            scale * k_scale, softcap, BLOCK, CAPPED, INTERPRETED,
        )  # fmt: skip
    if busy & (high > now):  # the piece of the new token
        spot_of_new = start + now.to(tl.int64) * place_stride + d
        tl.store(keys + spot_of_new[None, :], new_key, mask=inside[None, :])
        tl.store(values + spot_of_new[None, :], new_value, mask=inside[None, :])

    to = out + (b * kv_heads + h) * G * D
    if busy & (active == 1):
        if SINKS:
            sink = tl.load(sinks + h * G + g, mask=g < G, other=0.0).to(tl.float32)
            higher = tl.maximum(m, sink)
            shrink = tl.exp(m - higher)
            total = total * shrink + tl.exp(sink - higher)
            acc = acc * shrink[:, None]
        result = acc * v_scale / total[:, None]
        whole = (g < G)[:, None] & inside[None, :]
        tl.store(to + g[:, None] * D + d[None, :], result.to(out.dtype.element_ty), mask=whole)
    elif busy:
        spot = pair.to(tl.int64) * SPLITS
        base = (spot + split) * G
        whole = (g < G)[:, None] & inside[None, :]
        tl.store(part + (base + g)[:, None] * D + d[None, :], acc, mask=whole)
        tl.store(stats + (base + g) * 2, m, mask=g < G)
        tl.store(stats + (base + g) * 2 + 1, total, mask=g < G)
        tl.debug_barrier()
        arrived = tl.atomic_add(locks + pair, 1, sem="acq_rel")
        if arrived == active - 1:
            tl.debug_barrier()
            tl.store(locks + pair, 0)
            _add_up(
                part, stats, sinks + h * G, to, spot, active, v_scale,
                G, D, FILLED, COLUMNS, SPLITS, SUMMED, SINKS,
            )  # fmt: skip


@triton.jit
def _add_up(
    part, stats, sinks, to, spot, active, v_scale,
    G: tl.constexpr, D: tl.constexpr, FILLED: tl.constexpr, COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr, SUMMED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Add the pieces of one head's keys up, in their order."""
    s, g, d = tl.arange(0, SPLITS), tl.arange(0, FILLED), tl.arange(0, COLUMNS)
    at = (spot + s)[:, None] * G + g[None, :]
    there = (s < active)[:, None] & (g < G)[None, :]
    m = tl.load(stats + at * 2, mask=there, other=float("-inf"))
    total = tl.load(stats + at * 2 + 1, mask=there, other=0.0)
    highest = tl.reduce(m, 0, LARGEST)
    if SINKS:
        sink = tl.load(sinks + g, mask=g < G, other=0.0).to(tl.float32)
        highest = tl.maximum(highest, sink)
    highest = tl.where(g < G, highest, 0.0)
    sums = tl.reduce(total * tl.exp(m - highest[None, :]), 0, SUM)
    if SINKS:
        sums += tl.exp(sink - highest)
    acc = tl.full((FILLED, COLUMNS), 0.0, tl.float32)
    for begin in tl.range(0, active, SUMMED):
        i = begin + tl.arange(0, SUMMED)
        rows = (spot + i)[:, None] * G + g[None, :]
        real = (i < active)[:, None] & (g < G)[None, :]
        weight = tl.load(stats + rows * 2, mask=real, other=float("-inf"))
        weight = tl.exp(weight - highest[None, :])
        near = real[:, :, None] & (d < D)[None, None, :]
        parts = tl.load(part + rows[:, :, None] * D + d[None, None, :], mask=near, other=0.0)
        acc += tl.reduce(parts * weight[:, :, None], 0, SUM)
    sums = tl.where(g < G, sums, 1.0)
    result = acc * v_scale / sums[:, None]
    inside = (g < G)[:, None] & (d < D)[None, :]
    tl.store(to + g[:, None] * D + d[None, :], result.to(to.dtype.element_ty), mask=inside)
