"""Attention of one new token a row over a static cache, from the product of q, k and v on.

    q, k    norm of each head, where the model has one; rotary, at the row's position
    cache   keys[b, :, position], values[b, :, position] = k, v
    out     softmax(scale * q @ keys^T) @ values over positions 0..position, or a window of them

in one launch. Heads that share keys are one tile, so that keys and values are read once. The keys
of a row are cut into SPLITS pieces of whole blocks, as many as its length asks for; the last
program of a head to finish adds the pieces up, in their order: the result is the same every time.
The new token's own key and value are taken from registers, rounded as the cache holds them.

Few rows of the plainest heads go to `decode_attention_warps.py`, which has fewer instructions.

Roundings are those of the model's own code: rotary rounds both products and their sum to x's dtype;
scores, softmax and sums are float32; weights are rounded to the values' dtype for their product.

Grid: B * KV * SPLITS programs. Masked: heads past G, columns past D, keys past the length. Limit:
memory, at small batches latency.

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

from quantload.runtime.kernels import decode_attention_warps as warps_kernel
from quantload.runtime.kernels.add_norm import NormWeight
from quantload.runtime.kernels.decode_heads import (
    capped,
    fetch_keys,
    kept,
    prepared,
    store_piece,
)
from quantload.runtime.kernels.dependent_launch import (
    INTERPRETED,
    LARGEST,
    SUM,
    launches_early,
    let_next_start,
    processors,
    wait_for_previous,
)

__all__ = ["HeadRule", "candidates", "decode_attention", "why_not", "writes_parts"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WIDEST = 256
_ROWS = 16  # fewest rows and columns of a matrix product
_SUMMED = 4096  # partial results that a program holds while it adds up, elements
_INTERPRETED = tl.constexpr(INTERPRETED)
_BESIDES = 24 << 10  # bytes of shared memory besides blocks of keys and values
_SETTINGS = ("splits", "block", "warps", "stages", "least")
_FEW = 64  # pairs of a row and a key head up to which fewer instructions count
_TILES = (  # keys of a block, warps, blocks in flight
    (32, 1, 3), (32, 2, 3), (32, 4, 3), (64, 2, 3), (64, 4, 3), (64, 8, 3), (64, 4, 2), (128, 4, 3),
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
    peaks: Tensor | None = None,
    sums: Tensor | None = None,
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
        settings: splits, block, warps, stages and, 1 without, least blocks of a split; only splits
            and warps for the kernel of `decode_attention_warps.py`, if it serves. None takes the
            kernel's rule.
        peaks: [B * KV] float32 to be written the largest magnitude of what each key head's queries
            get; `writes_parts` is true.
        sums: [B * H * D / 16] float32 to be written sums of each 16 results; likewise.

    Returns:
        [B, H * D].
    """
    told = peaks is not None or sums is not None
    chosen = settings or _chosen(q, rule, rotary, cache, always=told)
    norm = rule.q_norm or _NO_NORM
    out: Tensor = _attention(
        q, k, v, *rotary, *cache, positions, locks,
        None if rule.q_norm is None else rule.q_norm.weight,
        None if rule.k_norm is None else rule.k_norm.weight, norm.eps, norm.late, norm.offset,
        rule.sinks, [rule.heads, rule.kv_heads, rule.width, rule.window],
        [rule.scale, rule.softcap, *scales], rule.interleaved,
        [(_UNSAID | dict(chosen))[name] for name in _SETTINGS], peaks, sums,
    )  # fmt: skip
    return out


def writes_parts(
    q: Tensor, rule: HeadRule, rotary: tuple[Tensor, Tensor], cache: tuple[Tensor, Tensor]
) -> bool:
    """True if `decode_attention` can be given `peaks` or `sums`; arguments as there."""
    plain = rule.q_norm is None and rule.sinks is None and not rule.softcap
    return not INTERPRETED and warps_kernel.serves(
        [rule.heads, rule.kv_heads, rule.width, rule.window],
        plain=plain, interleaved=rule.interleaved, rotary=rotary[0], keys=cache[0], q=q,
    )  # fmt: skip


def _chosen(
    q: Tensor,
    rule: HeadRule,
    rotary: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    *,
    always: bool,
) -> Mapping[str, int]:
    """Return the rule's settings of the kernel that is faster, or `always` of that of warps."""
    pairs, length = len(q) * rule.kv_heads, cache[0].shape[2]
    if (always or pairs <= _FEW) and writes_parts(q, rule, rotary, cache):
        return warps_kernel.settings_for(pairs, length)
    return _fitted(
        _rule(len(q), rule.kv_heads, length, q.device),
        max(triton.next_power_of_2(rule.width), _ROWS) * cache[0].element_size(),
        _shared_memory(q.device),
    )


_UNSAID = {"block": 0, "stages": 0, "least": 1}  # no block: the kernel of warps
_NO_NORM = NormWeight(torch.empty(0), 0.0, late=False, offset=False)


def candidates(batch: int, kv_heads: int, length: int) -> Iterator[Mapping[str, int]]:
    """Yield launch settings to be measured."""
    for splits in (1, 2, 4, 8, 16, 32, 64):
        for block, warps, stages in _TILES:
            small = splits == 1 or (splits // 2) * block < length
            if small and batch * kv_heads * splits <= 4096:
                yield {"splits": splits, "block": block, "warps": warps, "stages": stages}


def _rule(batch: int, kv_heads: int, length: int, device: torch.device) -> Mapping[str, int]:
    """Return settings that were fast on an H200: many programs for few heads, else whole heads."""
    pairs, most = batch * kv_heads, max(1, length // 64)
    if pairs < 64:
        splits = min(_power_of_two(2 * processors(device) // pairs), _power_of_two(most), 32)
        return {"splits": splits, "block": 64, "warps": 2, "stages": 3}
    splits = min(_power_of_two(processors(device) // pairs), _power_of_two(most))
    return {"splits": splits, "block": 128, "warps": 4, "stages": 3}


def _fitted(settings: Mapping[str, int], width: int, memory: int) -> Mapping[str, int]:
    """Return settings whose blocks of keys and values, `width` bytes a key, fit shared memory."""
    block, stages = settings["block"], settings["stages"]
    while 2 * max(stages - 1, 1) * block * width + _BESIDES > memory and block > _ROWS:
        block, stages = (block, 2) if stages > 2 else (block // 2, stages)
    return {**settings, "block": block, "stages": stages}


@functools.cache
def _shared_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return 1 << 17
    found = torch.cuda.get_device_capability(device)
    if found[0] in (9, 10):
        return 232448
    return 166912 if found == (8, 0) else 101376  # of a program, by the CUDA programming guide


def _power_of_two(number: int) -> int:
    """Return the largest power of two up to a number, at least 1."""
    return 1 << (max(number, 1).bit_length() - 1)


@torch.library.custom_op(
    "quantload::decode_attention", mutates_args=("keys", "values", "locks", "peaks", "sums")
)
def _attention(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor,
    positions: Tensor, locks: Tensor, q_weight: Tensor | None, k_weight: Tensor | None,
    eps: float, late: bool, offset: bool, sinks: Tensor | None,
    sizes: list[int], factors: list[float], interleaved: bool, settings: list[int],
    peaks: Tensor | None, sums: Tensor | None,
) -> Tensor:  # fmt: skip
    heads, kv_heads, width, window = sizes
    splits, block, warps, stages, least = settings
    out = torch.empty(len(q), heads * width, dtype=q.dtype, device=q.device)
    if not len(q):
        return out
    assert locks.numel() >= len(q) * kv_heads, f"{locks.numel()} locks"
    assert keys.stride() == values.stride(), "keys and values lie alike"
    q, k, v = (x if x.stride(1) == 1 else x.contiguous() for x in (q, k, v))
    group, pieces = heads // kv_heads, len(q) * kv_heads * splits
    if not block:
        with torch.cuda.device_of(q):
            warps_kernel.launch(
                q, k, v, cos, sin, keys, values, positions, locks, out, peaks, sums,
                group=group, scale=factors[0], splits=splits, warps=warps,
            )  # fmt: skip
        return out
    assert peaks is sums is None, "this kernel tells nothing of parts"
    part = torch.empty(pieces * group * (width + 2) * (splits > 1), device=q.device)
    early = launches_early(q.device)
    columns = max(triton.next_power_of_2(width), _ROWS)
    filled = triton.next_power_of_2(group)
    with torch.cuda.device_of(q):
        _decode_attention_kernel[(pieces,)](
            q, k, v, cos, sin, keys, values, positions, locks,
            q if q_weight is None else q_weight, k if k_weight is None else k_weight,
            q if sinks is None else sinks, out, part, part[pieces * group * width :],
            q.stride(0), k.stride(0), v.stride(0), keys.stride(0), keys.stride(1), keys.stride(2),
            kv_heads, window, least, eps, *factors,
            G=group, D=width, R=cos.shape[1], FILLED=filled, ROWS=max(filled, _ROWS),
            COLUMNS=columns, SPLITS=splits, BLOCK=block, STAGES=stages,
            SUMMED=max(1, min(splits, _SUMMED // (filled * columns))),
            NORM=q_weight is not None, LATE=late, OFFSET=offset, INTERLEAVED=interleaved,
            WINDOW=window > 0, CAPPED=factors[1] > 0, SINKS=sinks is not None,
            CODES=keys.dtype == torch.float8_e4m3fn,
            EARLY=early, INTERPRETED=_INTERPRETED,
            num_warps=warps, **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    return out


@_attention.register_fake
def _(q, k, v, cos, sin, keys, values, positions, locks, *rest):
    sizes = rest[-6]
    return q.new_empty(len(q), sizes[0] * sizes[2])


@triton.jit(do_not_specialize=["least"])
def _decode_attention_kernel(
    q, k, v, cos, sin, keys, values, positions, locks, q_weight, k_weight, sinks, out,
    part, stats,
    q_stride, k_stride, v_stride, row_stride, head_stride, place_stride,
    kv_heads, window, least, eps, scale, softcap, k_scale, v_scale,
    G: tl.constexpr, D: tl.constexpr, R: tl.constexpr, FILLED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    SUMMED: tl.constexpr, NORM: tl.constexpr, LATE: tl.constexpr, OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    CODES: tl.constexpr,
    EARLY: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    let_next_start(EARLY)
    split, pair = program % SPLITS, program // SPLITS
    b, h = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)
    # neither a length nor what the cache holds of earlier steps is an earlier kernel's result
    now = tl.load(positions + b).to(tl.int32)
    first = tl.maximum(now - window + 1, 0) if WINDOW else now * 0
    size = (now - first + SPLITS * BLOCK - 1) // (SPLITS * BLOCK)
    size = tl.maximum(size, least) * BLOCK  # keys of a split
    active = tl.maximum((now - first + size - 1) // tl.maximum(size, 1), 1)
    busy = split < active
    low = first + split * size
    high = tl.where(busy, tl.minimum(low + size, now), low)
    d = tl.arange(0, COLUMNS)
    inside = d < D
    start = b * row_stride + h * head_stride
    if EARLY:  # what the cache holds is nobody's result: it is asked for before the wait
        BYTES: tl.constexpr = keys.dtype.element_ty.primitive_bitwidth // 8
        LINES: tl.constexpr = BLOCK * COLUMNS * BYTES // 128
        size_of = (high - low) * D * BYTES
        fetch_keys(keys + start + low.to(tl.int64) * place_stride, size_of, LINES)
        fetch_keys(values + start + low.to(tl.int64) * place_stride, size_of, LINES)
    wait_for_previous(EARLY)

    cos += now.to(tl.int64) * R
    sin += now.to(tl.int64) * R
    r = tl.arange(0, FILLED)
    asked = prepared(
        q, b * q_stride + (h * G + r) * D, r < G, cos, sin, q_weight, eps,
        D, R, COLUMNS, NORM, LATE, OFFSET, INTERLEAVED,
    )  # fmt: skip
    # as many rows as a product takes: the others are the same again
    asked = tl.broadcast_to(asked[None, :, :], (ROWS // FILLED, FILLED, COLUMNS))
    asked = tl.reshape(asked, (ROWS, COLUMNS))
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.full((ROWS,), 0.0, tl.float32)
    acc = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    if busy & (split == 0):  # the new token
        one = tl.arange(0, 1)
        new = prepared(
            k, b * k_stride + h * D + one, one < 1, cos, sin, k_weight, eps,
            D, R, COLUMNS, NORM, LATE, OFFSET, INTERLEAVED,
        )  # fmt: skip
        key = kept(tl.reduce(new, 0, SUM), k_scale, keys.dtype.element_ty, CODES)
        new_value = tl.load(v + b * v_stride + h * D + d, mask=inside, other=0.0).to(tl.float32)
        value = kept(new_value, v_scale, values.dtype.element_ty, CODES)
        tl.store(keys + start + now.to(tl.int64) * place_stride + d, key, mask=inside)
        tl.store(values + start + now.to(tl.int64) * place_stride + d, value, mask=inside)
        scores = tl.reduce(asked * key.to(tl.float32)[None, :], 1, SUM) * (scale * k_scale)
        m = capped(scores, softcap, CAPPED, INTERPRETED)
        total += 1.0
        acc += value.to(tl.float32)[None, :]
    query = asked.to(q.dtype.element_ty)
    for at in tl.range(low, high, BLOCK, num_stages=STAGES):
        n = at + tl.arange(0, BLOCK)
        seen = n < high
        there = start + n.to(tl.int64) * place_stride
        near = seen[:, None] & inside[None, :]
        kt = tl.load(keys + there[:, None] + d[None, :], mask=near, other=0.0)
        vt = tl.load(values + there[:, None] + d[None, :], mask=near, other=0.0)
        if CODES:  # not at once: before sm_90 there is no instruction for that
            kt, vt = kt.to(tl.float32), vt.to(tl.float32)
        kt, vt = kt.to(query.dtype), vt.to(query.dtype)
        scores = tl.dot(query, tl.trans(kt), input_precision="ieee") * (scale * k_scale)
        scores = capped(scores, softcap, CAPPED, INTERPRETED)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(m, tl.reduce(scores, 1, LARGEST))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(m - higher)
        total = total * shrink + tl.reduce(weights, 1, SUM)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(query.dtype), vt, acc, input_precision="ieee")
        m = higher

    store_piece(
        out, part, stats, locks, sinks, m, total, acc, busy, b, h, pair, split, active, kv_heads,
        v_scale, G, D, FILLED, ROWS, COLUMNS, SPLITS, SUMMED, SINKS,
    )  # fmt: skip
