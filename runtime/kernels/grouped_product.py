"""Launch of the grouped kernel, its settings, and the routing that its programs read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from quantload.runtime import launch_settings
from quantload.runtime.kernels.dependent_launch import launches_early
from quantload.runtime.kernels.grouped import grouped_kernel
from quantload.runtime.kernels.grouped_layout import GroupedWeight
from quantload.runtime.kernels.route import route

__all__ = ["GatedActivation", "Routing", "candidates", "grouped_product", "routing", "setting_name"]

_INTERPRETED = bool(triton.knobs.runtime.interpret)
_SETTINGS = ("block", "rows", "warps", "stages", "after", "parts", "tiles", "half")
_DEFAULTS = {"half": 0}  # of the others 1
_UNIT = 64  # columns of a slice that make a step worth its costs
_SHARED_BYTES = 220_000
_DIRECT_PAIRS = 64  # up to here each program finds its own pairs
_PARTIAL_PAIRS = 4096  # up to here results of pairs stay in float32 until they are summed


@dataclass(frozen=True, kw_only=True)
class GatedActivation:
    """What makes an expert's inner values of its gate and up, or of its one product.

    Args:
        name: "silu", "gelu", "gelu_tanh", "relu" or "relu2".
        alpha: silu is x * sigmoid(alpha * x).
        gate_limit: Largest gate before the activation.
        act_limit: Largest result of the activation.
        up_limit: Largest |up|.
        shift: Added to up.
    """

    name: str
    alpha: float = 1.0
    gate_limit: float = math.inf
    act_limit: float = math.inf
    up_limit: float = math.inf
    shift: float = 0.0

    @property
    def is_plain(self) -> bool:
        """True if nothing is clamped or shifted."""
        limits = (self.gate_limit, self.act_limit, self.up_limit)
        return all(math.isinf(limit) for limit in limits) and not self.shift


@dataclass(frozen=True, eq=False)
class Routing:
    """Which expert each pair of a token and an expert has.

    Args:
        index: [S] integers, of all experts of the layer.
        first: Number of the first expert here.
        experts: E, experts here.
        block: BM, pairs of a block at most.
        order: [S] of `route`; None where programs find their pairs themselves.
        blocks: [3, blocks] of `route`, or None.
    """

    index: Tensor
    first: int
    experts: int
    block: int
    order: Tensor | None = None
    blocks: Tensor | None = None


# -- settings ------------------------------------------------------------------------------------


def setting_name(weight: GroupedWeight) -> str:
    """Name of the kernel for `launch_settings`: m is pairs, n and k those of an expert."""
    group = "channel" if weight.scale is None else f"g{weight.group}"
    return f"grouped {weight.form} {group} of {weight.experts}"


def _block(pairs: int, experts: int) -> int:
    """Return BM: enough for the pairs of most experts, if they are spread evenly."""
    if pairs <= _DIRECT_PAIRS:
        return 8
    each = pairs / max(1, min(pairs, experts))
    limits = ((8, 3), (16, 10), (32, 24), (64, 100))
    return next((block for block, most in limits if each <= most), 128)


def _rule(block: int, pairs: int, *, is_wide: bool) -> dict[str, int]:
    """Return the settings for blocks of `block` pairs that were the best on an H200.

    Args:
        block: BM.
        pairs: S.
        is_wide: N is larger than K; a program then does two tiles, as one is soon done.
    """
    if pairs <= _DIRECT_PAIRS // 2:
        return {"rows": 32, "warps": 2, "stages": 3, "parts": 2}
    tiles = 2 if is_wide and pairs > _DIRECT_PAIRS else 1
    if block <= 16:
        return {"rows": 64, "warps": 2, "stages": 3, "half": 1, "tiles": tiles}
    if block == 32 and is_wide:
        return {"rows": 64, "warps": 4, "stages": 3, "half": 1, "tiles": tiles}
    if block == 32:
        return {"rows": 128, "warps": 8, "stages": 3, "half": 1}
    if block == 64:
        return {"rows": 64, "warps": 4, "stages": 2, "half": 1}
    return {"rows": 128, "warps": 8, "stages": 2, "half": 1, "after": 0}


def candidates(m: int, n: int, k: int) -> Iterator[dict[str, int]]:
    """Yield settings worth measuring for m pairs, see `_SETTINGS`.

    Args:
        m: S.
        n: N of an expert.
        k: K of an expert.
    """
    shapes = itertools.product((8, 16, 32, 64, 128), (16, 32, 64, 128), (1, 2, 4, 8))
    for block, rows, warps in shapes:
        if (block > 8 and block > m) or rows * warps > 1024 or (block >= 64 and rows < 64):
            continue
        for parts, stages in itertools.product({1, warps}, (2, 3, 4)):
            if parts == 1 and rows < 16 * warps and block < 64:
                continue
            if parts > 1 and (block > 16 or parts * 64 > k):
                continue
            if parts * (rows * 128 + block * 512) * stages > _SHARED_BYTES:
                continue
            for tiles in (1, 2, 4):
                if tiles == 1 or tiles * rows <= n:
                    yield {
                        "block": block, "rows": rows, "warps": warps, "stages": stages,
                        "parts": parts, "tiles": tiles,
                    }  # fmt: skip


def _settings(weight: GroupedWeight, pairs: int, block: int | None) -> dict[str, int]:
    n, k = weight.out_features, weight.in_features
    device = weight.words.device
    found = launch_settings.find(setting_name(weight), device, m=pairs, n=n, k=k)
    if found is not None and (block is None or found.get("block") == block):
        return dict(found)
    block = block or _block(pairs, weight.experts)
    return {"block": block, **_rule(block, pairs, is_wide=n > k)}


def routing(weight: GroupedWeight, index: Tensor, *, first: int = 0) -> Routing:
    """Route pairs to the experts of a weight, and of others with as many experts.

    Args:
        weight: The weight that is multiplied first; it decides how many pairs are a block.
        index: [...] integers, the expert of each pair.
        first: Number of the first expert here.
    """
    index = index.reshape(-1).contiguous()
    pairs, experts = index.shape[0], weight.experts
    block = _settings(weight, pairs, None)["block"]
    if pairs <= _DIRECT_PAIRS:
        return Routing(index, first, experts, block)
    order, blocks = route(index, first=first, experts=experts, block=block)
    return Routing(index, first, experts, block, order, blocks)


# -- launch --------------------------------------------------------------------------------------


@torch.library.custom_op("quantload::grouped_product", mutates_args=())
def _product(
    x: Tensor,
    words: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    outer: Tensor | None,
    bias: Tensor | None,
    table: Tensor | None,
    index: Tensor,
    order: Tensor | None,
    blocks: Tensor | None,
    width: int,
    first: int,
    settings: list[int],
    form: str,
    kind: str,
    group: int,
    rows: str,
    act: str,
    limits: list[float],
    rows_per_input: int,
    routed_before: bool,
    dtype: torch.dtype,
) -> Tensor:
    pairs = index.shape[0]
    out = x.new_empty((pairs, width), dtype=dtype)
    if not pairs:
        return out
    experts, steps, n, columns = words.shape
    block, tile, warps, stages, after, parts, tiles, half = settings
    if block <= 32:  # narrow slices: more of them in a step
        parts *= max(1, _UNIT // columns)
    scale = joined_scales(scale, form, rows=parts * tile, warps=warps)
    slots = 2 if form in ("int8", "e4m3", "e5m2") else 4
    if x.stride(-1) != 1:
        x = x.contiguous()
    early = launches_early(x.device)
    count = pairs if blocks is None else blocks.shape[1]
    look = max(16, triton.next_power_of_2(pairs)) if blocks is None else 0
    alpha, gate_limit, act_limit, up_limit, shift = limits
    is_limited = any(math.isfinite(limit) for limit in limits[1:4]) or shift != 0
    step = slots * columns
    groups, blocks_per_group = block_groups(group, step, steps, x.shape[1])
    with torch.cuda.device_of(x):
        grouped_kernel[(triton.cdiv(n, tile * tiles), count)](
            x, words, scale, zero, outer, bias, table, index,
            index if order is None else order, index if blocks is None else blocks, out,
            pairs, first, experts, n, x.shape[1], steps,
            groups_of_expert(words, scale, zero),
            x.stride(0), width, rows_per_input, blocks_per_group,
            0 if blocks is None else blocks.shape[1],
            alpha, gate_limit, act_limit, up_limit, shift,
            BN=tile, BM=block, C=columns, SP=look, FORM="int" if form == "int8" else form,
            SLOTS=slots, KIND=kind, GROUPS=groups,
            AFTER=bool(after), EVEN=x.shape[1] == steps * step and steps % parts == 0,
            GATED=rows != "plain" and act != "none", ACT=act, ROWS=rows, LIMITED=is_limited,
            EARLY=early, BEFORE=routed_before,
            HALF=bool(half) and blocks is not None and block > 8, PARTS=parts,
            TILES=tiles, STAGES=stages,
            INTERPRETED=_INTERPRETED, num_warps=warps, **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    return out


@_product.register_fake
def _(x: Tensor, *args: object) -> Tensor:
    index, width, dtype = args[6], args[9], args[-1]
    assert isinstance(index, Tensor), "the routing is a tensor"
    return x.new_empty((index.shape[0], width), dtype=dtype)  # type: ignore[call-overload, no-any-return]


def grouped_product(
    x: Tensor,
    weight: GroupedWeight,
    routing: Routing,
    *,
    choices: int = 1,
    activation: GatedActivation | None = None,
    in_float32: bool = False,
    is_second: bool = False,
) -> Tensor:
    """Multiply the row of each pair with the weight of its expert.

    Args:
        x: [S / choices, K] bfloat16: row p // choices is that of pair p.
        weight: W of all experts.
        routing: The expert of each pair.
        choices: Pairs of a row.
        activation: Applied to the product; None gives the product itself.
        in_float32: True for a result in float32.
        is_second: True if x comes from a product with the same routing, which may still run.

    Returns:
        [S, N], or [S, N / 2] with an activation of gate and up; rows of pairs whose expert is not
        here hold anything.
    """
    settings = _settings(weight, routing.index.shape[0], routing.block)
    act = activation or GatedActivation(name="none")
    is_gated = activation is not None and weight.rows != "plain"
    limits = [act.alpha, act.gate_limit, act.act_limit, act.up_limit, act.shift]
    found: Tensor = _product(
        x, weight.words, weight.scale, weight.zero, weight.outer, weight.bias, weight.table,
        routing.index, routing.order, routing.blocks,
        weight.out_features // 2 if is_gated else weight.out_features, routing.first,
        [settings.get(name, _DEFAULTS.get(name, 1)) for name in _SETTINGS],
        weight.form, weight.kind, weight.group, weight.rows, act.name, limits, choices, is_second,
        torch.float32 if in_float32 else x.dtype,
    )  # fmt: skip
    return found


def block_groups(group: int, block: int, blocks: int, features: int) -> tuple[int, int]:
    """Return GROUPS of `grouped_scales`, and blocks that share a row of scales.

    Args:
        group: Columns that share a scale.
        block: Columns of a block.
        blocks: B.
        features: K.
    """
    if group >= features:  # one group a row, however far the last block is padded
        return 4, blocks
    return max(1, min(4, 4 * group // block)), max(1, group // block)


def joined_scales(scale: Tensor | None, form: str, *, rows: int, warps: int) -> Tensor | None:
    """Return the scales of a weight as a kernel loads them, so that each load has 4 bytes or more.

    Only such loads are pipelined. A thread has one scale of MXFP4 if rows are few: then both scales
    of a slice are one integer.

    Args:
        scale: As `GroupedWeight` has it.
        form: Likewise.
        rows: Rows of all parts of a step.
        warps: Of a program.
    """
    if scale is None or form != "fp4_32" or rows >= 32 * warps:
        return scale
    return scale.view(torch.int32)


def groups_of_expert(words: Tensor, scale: Tensor | None, zero: Tensor | None) -> int:
    """Return how many scales, or integers of some, a row of an expert has."""
    experts, _, rows, _ = words.shape
    found = (part.numel() // (experts * rows) for part in (scale, zero) if part is not None)
    return next(found, 0)


def sums_in_float32(pairs: int) -> bool:
    """True if results of so many pairs are kept in float32 until they are summed."""
    return pairs <= _PARTIAL_PAIRS


def kernel_names(pairs: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the device functions of the routing of so many pairs, and of a product."""
    return ("_route_kernel",) if pairs > _DIRECT_PAIRS else (), ("grouped_kernel",)
