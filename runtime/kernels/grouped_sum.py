"""The last product of experts and the weighted sum over a token's choices, for few or many tokens.

Few tokens: one launch, see `grouped_token`. More: results of pairs, then the sum, see `route`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from quantload.runtime import launch_settings
from quantload.runtime.kernels.dependent_launch import launches_early
from quantload.runtime.kernels.grouped_layout import GroupedWeight
from quantload.runtime.kernels.grouped_product import (
    Routing,
    block_groups,
    grouped_product,
    groups_of_expert,
    joined_scales,
    setting_name,
    sums_in_float32,
)
from quantload.runtime.kernels.grouped_token import grouped_token_kernel
from quantload.runtime.kernels.route import weighted_sum
from quantload.runtime.launch_settings import Settings

__all__ = ["candidates", "grouped_sum", "kernel_names"]

_INTERPRETED = bool(triton.knobs.runtime.interpret)
_FEW_PAIRS = 16  # above, experts that tokens share are read too often
_MOST_CHOICES = 8  # a warp for each
_RULE = {"rows": 16, "stages": 4}  # rows 0: results of pairs, then the sum
_UNIT = 64  # columns of a slice that make a step worth its costs


def _settings(weight: GroupedWeight, pairs: int, choices: int) -> Settings | None:
    """Return the settings of `grouped_token`; None if results of pairs are summed afterwards."""
    if pairs > _FEW_PAIRS or not 1 < choices <= _MOST_CHOICES:
        return None
    name, device = f"{setting_name(weight)}, summed", weight.words.device
    n, k = weight.out_features, weight.in_features
    found = launch_settings.find(name, device, m=pairs, n=n, k=k) or _RULE
    return found if found["rows"] else None


def kernel_names(weight: GroupedWeight, pairs: int, choices: int) -> tuple[str, ...]:
    """Return the device functions that `grouped_sum` launches."""
    if _settings(weight, pairs, choices) is not None:
        return ("grouped_token_kernel",)
    return ("grouped_kernel", "_weighted_sum_kernel")


def candidates(m: int, n: int, k: int) -> Iterator[dict[str, int]]:
    """Yield settings of few tokens worth measuring: rows of a tile (see `_RULE`), and stages.

    Args:
        m: Pairs.
        n: N of an expert.
        k: K of an expert.
    """
    del m, n, k
    for rows, stages in ((0, 0), (16, 2), (16, 3), (16, 4), (32, 2), (32, 3)):
        yield {"rows": rows, "stages": stages}


def grouped_sum(
    x: Tensor, weight: GroupedWeight, routing: Routing, weights: Tensor, *, dtype: torch.dtype
) -> Tensor:
    """Return for each token the weighted sum of its pairs' products with their experts' weights.

    Args:
        x: [S, K] bfloat16, the row of each pair.
        weight: W of all experts.
        routing: The expert of each pair, choices of a token side by side, as a product before this
            one had it.
        weights: [T, k] float.
        dtype: dtype of the result.

    Returns:
        [T, N]; zeros for tokens without an expert here.
    """
    pairs, (tokens, choices) = routing.index.shape[0], weights.shape
    weights = weights.contiguous()
    settings = _settings(weight, pairs, choices)
    if settings is None:
        in_float32 = sums_in_float32(pairs)
        rows = grouped_product(x, weight, routing, in_float32=in_float32, is_second=True)
        index = routing.index.view(tokens, choices)
        return weighted_sum(
            rows, weights, index, first=routing.first, experts=routing.experts, dtype=dtype
        )
    found: Tensor = _sum(
        x, weight.words, weight.scale, weight.zero, weight.outer, weight.bias, weight.table,
        routing.index, weights, weight.out_features, routing.first,
        [settings["rows"], settings["stages"]], weight.form, weight.kind, weight.group, dtype,
    )  # fmt: skip
    return found


@torch.library.custom_op("quantload::grouped_token_sum", mutates_args=())
def _sum(
    x: Tensor,
    words: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    outer: Tensor | None,
    bias: Tensor | None,
    table: Tensor | None,
    index: Tensor,
    weights: Tensor,
    width: int,
    first: int,
    settings: list[int],
    form: str,
    kind: str,
    group: int,
    dtype: torch.dtype,
) -> Tensor:
    tokens, choices = weights.shape
    out = x.new_empty((tokens, width), dtype=dtype)
    if not out.numel():
        return out
    experts, blocks, n, columns = words.shape
    tile, stages = settings
    slots = 2 if form in ("int8", "e4m3", "e5m2") else 4
    early = launches_early(x.device)
    warps = max(2, triton.next_power_of_2(choices))
    units = max(1, _UNIT // columns)
    scale = joined_scales(scale, form, rows=warps * units * tile, warps=warps)
    groups, blocks_per_group = block_groups(group, slots * columns, blocks, x.shape[1])
    x = x if x.stride(1) == 1 else x.contiguous()
    with torch.cuda.device_of(x):
        grouped_token_kernel[(triton.cdiv(n, tile), tokens)](
            x, words, scale, zero, outer, bias, table, index, weights, out,
            choices, first, experts, n, x.shape[1], blocks,
            groups_of_expert(words, scale, zero),
            x.stride(0), blocks_per_group,
            BN=tile, C=columns, FORM="int" if form == "int8" else form, SLOTS=slots, KIND=kind,
            GROUPS=groups, EVEN=x.shape[1] == blocks * slots * columns and blocks % units == 0,
            EARLY=early, PARTS=warps * units, UNITS=units, STAGES=stages,
            INTERPRETED=_INTERPRETED, num_warps=warps,
            **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    return out


@_sum.register_fake
def _(x: Tensor, *args: object) -> Tensor:
    weights, width, dtype = args[7], args[8], args[-1]
    assert isinstance(weights, Tensor), "weights are a tensor"
    return x.new_empty((weights.shape[0], width), dtype=dtype)  # type: ignore[call-overload, no-any-return]
