"""GEMM with weights of nibbles: y = x @ W^T + bias, by the number of tokens one of three kernels.

    "decode"   few tokens: plain loads, any card, any shape; see `nibble_decode`
    "mid"      more tokens on sm_90: tiles by the copy engine; see `nibble_mid`
    "dense"    many tokens: the weight is dequantized into scratch memory, and cuBLAS multiplies

Which one, and its tiles, comes from measured launch settings, else from `Plan.by_rule`.

Error: values of codes are exact in x's dtype, sums are float32. Scales meet sums; where they meet
values ("dense", and plans that say so) each product is rounded to x's dtype, as a dequantized
weight is. Letters: M tokens, N output features, K input features.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from quantload.errors import ShapeError
from quantload.runtime.kernels.dependent_launch import launches_early
from quantload.runtime.kernels.nibble_decode import decode_kernel
from quantload.runtime.kernels.nibble_dense import dense_kernel, gather_kernel
from quantload.runtime.kernels.nibble_gemv import gemv_kernel
from quantload.runtime.kernels.nibble_layout import INTERPRETED
from quantload.runtime.kernels.nibble_mid import mid_kernel
from quantload.runtime.kernels.nibble_parallel import parallel_kernel
from quantload.runtime.kernels.nibble_plan import (
    Plan,
    by_rule,
    card_of,
    fitted,
    overlaps,
    plan_for,
    without_copy_engine,
)
from quantload.runtime.kernels.nibble_weight import NibbleWeight
from quantload.runtime.kernels.split_locks import split_locks

__all__ = ["kernels_for", "nibble_linear", "run", "weight_values"]

_DENSE_ELEMENTS = 1 << 27  # of a dequantized part: 256 MiB
_SHARED_TILES = 2048  # of more the last round is a small part


def nibble_linear(x: Tensor, weight: NibbleWeight, bias: Tensor | None = None) -> Tensor:
    """Return x @ W^T + bias.

    Args:
        x: [..., K] of the weight's dtype (in the interpreter also float32).
        weight: W, on x's device.
        bias: [N] float, or None.

    Returns:
        [..., N] in x's dtype.

    Raises:
        ShapeError: x is not K wide.
    """
    if x.shape[-1] != weight.features:
        raise ShapeError(
            f"input has `{x.shape[-1]}` features, the weight expects `{weight.features}`"
        )
    y: Tensor = _gemm(
        x.reshape(-1, weight.features),
        weight.words,
        weight.scale,
        weight.zero,
        weight.offset,
        weight.outer,
        weight.columns,
        weight.table,
        bias,
        weight.form,
        weight.kind,
        weight.group,
    )
    return y.reshape(*x.shape[:-1], weight.rows)


@torch.library.custom_op("quantload::nibble_gemm", mutates_args=())
def _gemm(
    x: Tensor,
    words: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    offset: Tensor | None,
    outer: Tensor | None,
    columns: Tensor | None,
    table: Tensor | None,
    bias: Tensor | None,
    form: str,
    kind: str,
    group: int,
) -> Tensor:
    """Multiply x [M, K] with the parts of a `NibbleWeight`; returns [M, N] in x's dtype."""
    weight = NibbleWeight(
        words, scale, zero, offset, outer, columns, table, form, kind, x.shape[1], group, x.dtype
    )
    if x.shape[0] == 0:
        return x.new_empty(0, weight.rows)
    return run(x, weight, bias, plan_for(weight, x.shape[0], x.device))


@_gemm.register_fake
def _(x: Tensor, words: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], words.shape[1])


def kernels_for(weight: NibbleWeight, tokens: int) -> tuple[str, ...]:
    """Return the names of the device functions that a product with `tokens` tokens launches."""
    plan = plan_for(weight, tokens, weight.words.device)
    width = weight.features if weight.columns is None else weight.columns.shape[0]
    is_aligned = width * weight.dtype.itemsize % 16 == 0
    path = _served(plan, weight, tokens, weight.words.device, is_aligned=is_aligned).path
    names = ("gather_kernel",) if weight.columns is not None else ()
    if path == "dense":
        return (*names, "dense_kernel", "cuBLAS")
    return (*names, f"{path}_kernel")


def run(x: Tensor, weight: NibbleWeight, bias: Tensor | None, plan: Plan) -> Tensor:
    """Multiply as `plan` says; x is [M, K], M at least 1."""
    x = x if x.stride(1) == 1 else x.contiguous()
    with torch.cuda.device_of(x):
        if weight.columns is not None:
            x = _in_packed_order(x, weight.columns)
        if INTERPRETED and x.dtype == torch.bfloat16:
            # NOTE: the interpreter holds bfloat16 as raw integers, and would multiply those
            return _launch(x.float(), weight, bias, plan).to(x.dtype)
        return _launch(x, weight, bias, plan)


def _in_packed_order(x: Tensor, columns: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], columns.shape[0])
    gather_kernel[(x.shape[0], triton.cdiv(out.shape[1], 1024))](
        x, columns, out, out.shape[1], x.stride(0), BLOCK=1024
    )
    return out


def _launch(x: Tensor, weight: NibbleWeight, bias: Tensor | None, plan: Plan) -> Tensor:
    plan = _served(plan, weight, x.shape[0], x.device, is_aligned=_is_aligned(x))
    if plan.path == "dense":
        return _dense(x, weight, bias)
    out = x.new_empty(x.shape[0], weight.rows)
    _LAUNCHES[plan.path](x, weight, bias, plan, out)
    return out


def _served(
    plan: Plan, weight: NibbleWeight, tokens: int, device: torch.device, *, is_aligned: bool
) -> Plan:
    """Return the plan, or the nearest one whose kernel can read the weight and the inputs."""
    if plan.path == "gemv" and weight.is_folded:
        return fitted(by_rule(tokens, _shape(weight), card_of(device), plain=True), weight)
    if plan.path == "overlap" and not overlaps(weight):
        plan = replace(plan, path="mid", after=False)
    if plan.path == "wide" and not overlaps(weight):
        plan = Plan(
            "mid", rows=128, tokens=128, warps=8, stages=3, step=64, after=False, swizzle=8
        )  # fmt: skip
    if plan.path in ("mid", "overlap", "wide") and not is_aligned:
        return fitted(without_copy_engine(tokens, _shape(weight), card_of(device)), weight)
    return plan


def _shape(weight: NibbleWeight) -> tuple[int, int, int]:
    blocks, rows, columns = weight.words.shape
    return blocks, rows, columns


def _is_aligned(x: Tensor) -> bool:
    """True if the copy engine can read x."""
    return x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0


def _form(weight: NibbleWeight) -> dict[str, Any]:
    """What kernels are specialised for by a weight."""
    columns = weight.words.shape[2]
    is_whole = weight.group >= weight.features or weight.is_folded
    slices = 4 if is_whole else min(weight.group // columns, 4)
    return {"C": columns, "FORM": weight.form, "KIND": weight.kind, "GROUP_SLICES": slices}


def _blocks_per_group(weight: NibbleWeight) -> int:
    blocks, _, columns = weight.words.shape
    return blocks if weight.group >= weight.features else max(weight.group // (4 * columns), 1)


def _scratch(x: Tensor, plan: Plan, tiles: int) -> tuple[Tensor | None, Tensor | None]:
    """Room for the sums of parts of K, and counters."""
    if plan.splits == 1:
        return None, None
    sums = x.new_empty(tiles * plan.splits * plan.rows * plan.tokens, dtype=torch.float32)
    return sums, split_locks(x.device, tiles)


def _decode(x: Tensor, weight: NibbleWeight, bias: Tensor | None, plan: Plan, out: Tensor) -> None:
    m, n = out.shape
    blocks, _, columns = weight.words.shape
    tiles = triton.cdiv(n, plan.rows) * triton.cdiv(m, plan.tokens)
    early = plan.early and launches_early(x.device)
    words: Any = weight.words
    if plan.tma:
        words = _described(weight.words.view(-1, columns), [plan.rows, columns])
    decode_kernel[(tiles, plan.splits)](
        x, words, weight.scale, weight.zero, weight.offset, weight.outer, weight.table, bias, out,
        *_scratch(x, plan, tiles),
        m, n, x.shape[1], blocks, x.stride(0), plan.splits, _blocks_per_group(weight),
        BN=plan.rows, BM=plan.tokens, **_form(weight), AFTER=plan.after,
        SPLIT=plan.splits > 1, TMA=plan.tma, EVEN_K=x.shape[1] == blocks * 4 * columns,
        TILES=plan.swizzle, EARLY=early, PREFETCH=plan.prefetch if early and not plan.tma else 0,
        STAGES=plan.stages, UNROLL=plan.unroll, INTERPRETED=INTERPRETED.value,
        num_warps=plan.warps, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip


def _mid(x: Tensor, weight: NibbleWeight, bias: Tensor | None, plan: Plan, out: Tensor) -> None:
    m, n = out.shape
    blocks, _, columns = weight.words.shape
    tiles = triton.cdiv(n, plan.rows) * triton.cdiv(m, plan.tokens)
    early = plan.early and launches_early(x.device)
    step = min(plan.step, columns)
    mid_kernel[(tiles, plan.splits)](
        _described(x, [plan.tokens, step]),
        _described(weight.words.view(-1, columns), [plan.rows, step]),
        weight.scale, weight.zero, weight.outer, weight.table, bias, out,
        *_scratch(x, plan, tiles),
        m, n, blocks, plan.splits, _blocks_per_group(weight),
        BN=plan.rows, BM=plan.tokens, STEP=step, **_form(weight), AFTER=plan.after,
        SPLIT=plan.splits > 1, TILES=plan.swizzle, EARLY=early, STAGES=plan.stages,
        num_warps=plan.warps, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip


def _gemv(x: Tensor, weight: NibbleWeight, bias: Tensor | None, plan: Plan, out: Tensor) -> None:
    m, n = out.shape
    blocks, _, columns = weight.words.shape
    early = plan.early and launches_early(x.device)
    even = x.shape[1] == blocks * 4 * columns and blocks % plan.unroll == 0
    gemv_kernel[(triton.cdiv(n, plan.rows), m)](
        x, weight.words, weight.scale, weight.zero, weight.outer, weight.table, bias, out,
        n, x.shape[1], blocks, x.stride(0), _blocks_per_group(weight),
        BN=plan.rows, KB=plan.unroll, **_form(weight), EVEN_K=even, EARLY=early,
        INTERPRETED=INTERPRETED.value, num_warps=plan.warps,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip


def _parallel(
    x: Tensor, weight: NibbleWeight, bias: Tensor | None, plan: Plan, out: Tensor
) -> None:
    m, n = out.shape
    blocks, _, columns = weight.words.shape
    early = plan.early and launches_early(x.device)
    even = x.shape[1] == blocks * 4 * columns and blocks % plan.unroll == 0
    parallel_kernel[(triton.cdiv(n, plan.rows) * triton.cdiv(m, plan.tokens),)](
        x, weight.words, weight.scale, weight.zero, weight.outer, weight.table, bias, out,
        m, n, x.shape[1], blocks, x.stride(0), _blocks_per_group(weight),
        S=plan.unroll, BN=plan.rows, BM=plan.tokens, **_form(weight), AFTER=plan.after,
        EVEN_K=even, EARLY=early, PREFETCH=plan.prefetch if early else 0, STAGES=plan.stages,
        INTERPRETED=INTERPRETED.value, num_warps=plan.warps,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip


def _overlap(x: Tensor, weight: NibbleWeight, bias: Tensor | None, plan: Plan, out: Tensor) -> None:
    from quantload.runtime.kernels.nibble_overlap import described, overlap_kernel

    m, n = out.shape
    blocks, _, columns = weight.words.shape
    tiles = triton.cdiv(n, plan.rows) * triton.cdiv(m, plan.tokens)
    step = min(plan.step, columns)
    programs, partial, locks = tiles, None, None
    if plan.shared and tiles <= _SHARED_TILES:
        steps = tiles * blocks * (columns // step)
        programs = min(plan.shared * card_of(x.device).processors, steps)
        partial = x.new_empty(2 * programs * plan.rows * plan.tokens, dtype=torch.float32)
        locks = split_locks(x.device, tiles)
    overlap_kernel[(programs,)](
        described(x, [plan.tokens, step]),
        described(weight.words.view(-1, columns), [plan.rows, step]),
        weight.scale, weight.zero, weight.outer, bias, out, partial, locks, m, n, blocks,
        BN=plan.rows, BM=plan.tokens, C=columns, STEP=step, STAGES=plan.stages,
        TILES=plan.swizzle, SHARED=locks is not None, FORM=weight.form, num_warps=plan.warps,
    )  # fmt: skip


def _wide(x: Tensor, weight: NibbleWeight, bias: Tensor | None, plan: Plan, out: Tensor) -> None:
    from quantload.runtime.kernels.nibble_wide import launch_wide

    launch_wide(x, weight, bias, out, plan, early=plan.early and launches_early(x.device))


def _described(tensor: Tensor, tile: list[int]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), tile)


_LAUNCHES = {
    "decode": _decode,
    "gemv": _gemv,
    "parallel": _parallel,
    "mid": _mid,
    "overlap": _overlap,
    "wide": _wide,
}


def _dense(x: Tensor, weight: NibbleWeight, bias: Tensor | None) -> Tensor:
    bias = None if bias is None else bias.to(x.dtype)
    step = max(_DENSE_ELEMENTS // x.shape[1], 256) // 256 * 256
    if step >= weight.rows:
        whole = x.new_empty(weight.rows, x.shape[1])
        return torch.nn.functional.linear(x, _dense_rows(weight, 0, weight.rows, whole), bias)
    out = x.new_empty(x.shape[0], weight.rows)
    for start in range(0, weight.rows, step):
        stop = min(start + step, weight.rows)
        part = _dense_rows(weight, start, stop, x.new_empty(stop - start, x.shape[1]))
        of_part = None if bias is None else bias[start:stop]
        out[:, start:stop] = torch.nn.functional.linear(x, part, of_part)
    return out


def _dense_rows(weight: NibbleWeight, start: int, stop: int, out: Tensor) -> Tensor:
    """Write rows start .. stop of W to out [stop - start, K], columns in packed order."""
    blocks, n, _ = weight.words.shape
    tile = min(64, triton.next_power_of_2(max(stop - start, 1)))
    dense_kernel[(blocks, triton.cdiv(stop - start, tile))](
        weight.words, weight.scale, weight.zero, weight.offset, weight.outer, weight.table, out,
        n, out.shape[1], start, stop - start, _blocks_per_group(weight),
        BN=tile, **_form(weight), HALF=weight.dtype == torch.float16,
        INTERPRETED=INTERPRETED.value, num_warps=4,
    )  # fmt: skip
    return out


def weight_values(weight: NibbleWeight, dtype: torch.dtype) -> Tensor:
    """Return W [N, K] in a float dtype."""
    features = weight.features if weight.columns is None else weight.columns.shape[0]
    out = weight.words.new_empty(weight.rows, features, dtype=dtype)
    with torch.cuda.device_of(out):
        _dense_rows(weight, 0, weight.rows, out)
    if weight.columns is None:
        return out
    place = torch.empty(weight.features, dtype=torch.int64, device=out.device)
    used = (weight.columns >= 0).nonzero().flatten()
    place[weight.columns[used].long()] = used
    return out.index_select(1, place)
