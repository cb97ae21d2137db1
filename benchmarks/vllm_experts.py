"""Peers of bench_moe.py: vLLM's Marlin kernels for experts, and humming's products.

    VLLM_FOLDER=.../site-packages/vllm python benchmarks/bench_moe.py --peers \
        benchmarks/vllm_experts.py --formats W4A16,MXFP4A16,NVFP4A16

`vllm-marlin` launches what vLLM 0.33 launches for a block with Marlin: pairs sorted by expert, the
product of gate and up, SiLU-and-multiply, the product of down, which multiplies by the router's
weights, and the sum over the experts of a token. `humming` is humming's two grouped products
(indexed, with the tiles of its own heuristics, which is what vLLM takes) between the same
kernels for order and activation, and quantload's weighted sum, which like vLLM's after humming is
one launch in Triton; its products of FP8 round their inputs themselves. vLLM's Python is not run:
two compiled libraries and `scalar_type.py` are loaded from `VLLM_FOLDER`.

Formats: W4A16, MXFP4A16, NVFP4A16; humming also FP8_DYNAMIC and FP8_BLOCK.

Source: vLLM 0.33.0, model_executor/layers/fused_moe/experts/marlin_moe.py, quantization/utils/
marlin_utils_fp4.py; humming-kernels 0.1.20, humming/layer.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
import vllm_kernels
from torch import Tensor

from quantload.quant.qtensor import QuantTensor
from quantload.runtime.kernels.route import weighted_sum

Call = tuple[Tensor, Tensor, Tensor]
Weights = Sequence[QuantTensor]
MARLIN_ROWS = (8, 16, 32, 48, 64)  # pairs of a block of Marlin's
MARLIN_FORMATS = ("W4A16", "MXFP4A16", "NVFP4A16")


@cache
def moe_ops() -> Any:
    """Return the operators of vLLM's library for experts."""
    torch.ops.load_library(str(vllm_kernels.folder() / "_moe_C_stable_libtorch.abi3.so"))
    return torch.ops._moe_C


# -- order, activation, sum ------------------------------------------------------------------------


class Routing:
    """The pairs of a call in the form of vLLM's kernels.

    Args:
        call: Tokens x [T, H], chosen experts [T, k], weights [T, k].
        experts: Number of experts.
    """

    def __init__(self, call: Call, experts: int) -> None:
        self.x, index, weights = call
        self.ids = index.to(torch.int32).contiguous()
        self.weights = weights.float().contiguous()
        self.experts = experts

    def sorted(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return places of pairs by expert, padded to `rows`; experts of blocks; their number."""
        pairs = self.ids.numel()
        most = min(pairs * rows, pairs + self.experts * (rows - 1))
        empty = torch.empty(most + math.ceil(most / rows) + 1, dtype=torch.int32, device="cuda")
        places, blocks, count = empty.split([most, math.ceil(most / rows), 1])
        moe_ops().moe_align_block_size(
            self.ids, self.experts, rows, places, blocks, count, None, None
        )
        return places, blocks, count

    def summed(self, pairs: Tensor) -> Tensor:
        """Return the sums over a token's pairs [T * k, H]."""
        result = torch.empty_like(self.x)
        moe_ops().moe_sum(pairs.view(*self.ids.shape, -1), result, None, None)
        return result


def activated(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of [pairs, 2 I]."""
    result = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    vllm_kernels.ops().silu_and_mul(result, gate_up)
    return result


# -- Marlin ----------------------------------------------------------------------------------------


class MarlinExperts:
    """Weights of all experts in Marlin's layout, and their grouped product."""

    def __init__(self, fmt: str, weights: Weights) -> None:
        self.n, self.k = weights[0].shape
        words = (_words(weight).contiguous() for weight in weights)
        ops = vllm_kernels.ops()
        packed = [ops.gptq_marlin_repack(word, self.k, self.n, 4, False) for word in words]
        self.packed = torch.stack(packed)
        self.outer: Tensor | None = None
        self.kind = vllm_kernels.code_type("uint4b8" if fmt == "W4A16" else "float4_e2m1f")
        self.scale = torch.stack([_in_marlin_order(weight.scale) for weight in weights])
        if fmt == "MXFP4A16":
            self.scale = _as_bytes_are_read(self.scale).to(torch.float8_e8m0fnu)
        elif fmt == "NVFP4A16":
            self.scale, self.outer = _nvfp4_scales(self.scale, _outer(weights))
        count = vllm_kernels.processors(torch.device("cuda"))
        self.locks = torch.zeros(4 * count, dtype=torch.int32, device="cuda")

    def __call__(
        self, x: Tensor, routing: Routing, order: tuple[Tensor, Tensor, Tensor], rows: int, *,
        weighted: bool,
    ) -> Tensor:  # fmt: skip
        """Return the products [T * k, N]; `weighted`: x has a row a pair, results their weight."""
        pairs = routing.ids.numel()
        chosen = 1 if weighted else routing.ids.shape[1]
        result = torch.empty(pairs, self.n, dtype=x.dtype, device=x.device)
        places, blocks, count = order
        product: Tensor = moe_ops().moe_wna16_marlin_gemm(
            x, result, self.packed, None, self.scale, None, self.outer, None, self.locks,
            places, blocks, count, routing.weights, rows, chosen, weighted, self.kind,
            len(x), self.n, self.k, False, True, False, -1, -1, -1,
        )  # fmt: skip
        return product


def _words(weight: QuantTensor) -> Tensor:
    """Return codes of a weight [N, K] as int32 [K / 8, N], code i of a word at bits 4 * i."""
    codes = weight.codes.to(torch.int32) + (8 if weight.grid.table is None else 0)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=codes.device)
    return (codes.unflatten(1, (-1, 8)) << shifts).sum(-1, dtype=torch.int32).T


def _in_marlin_order(scale: Tensor) -> Tensor:
    """Return scales [N, G] as bfloat16 [G, N], 64 rows of the weight in Marlin's order."""
    n = len(scale)
    order = [i + 8 * j for i in range(8) for j in range(8)]
    return scale.to(torch.bfloat16).T.reshape(-1, 64)[:, order].reshape(-1, n).contiguous()


def _as_bytes_are_read(scale: Tensor) -> Tensor:
    """Return scales in the order in which Marlin turns four bytes into two registers."""
    return scale.reshape(-1, 4)[:, [0, 2, 1, 3]].reshape(scale.shape)


def _outer(weights: Weights) -> Tensor:
    """Return the factor of each expert [E]; NVFP4."""
    found = []
    for weight in weights:
        assert weight.outer is not None, weight
        factor = weight.outer.float().reshape(())
        found.append(1 / factor if weight.evaluation.outer == "scale/" else factor)
    return torch.stack(found)


def _nvfp4_scales(scale: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 scales as Marlin's bytes of five exponent bits, and the factors of experts.

    All scales are moved up by one power of two, so that the first bit of a byte is always set.
    """
    room = float((448 * 2**7 / (scale.float().max() * 2**7)).log2().floor().exp2())
    moved = _as_bytes_are_read(scale).half().float() * max(room, 1.0)
    half = (moved.half() * 2**7).clamp(min=0)
    half[half < 2] = 0
    codes = (half.view(torch.int16) << 1).view(torch.float8_e4m3fn)[..., 1::2].contiguous()
    # a bfloat16 from a 4-bit code is 2^-126 too small, the byte of a scale 2^7 too large
    return codes, outer * 2.0 ** (126 - 7) / max(room, 1.0)


def _marlin(
    up: MarlinExperts, down: MarlinExperts, calls: list[Routing]
) -> Callable[[int], Tensor]:
    pairs = calls[0].ids.numel() / calls[0].experts
    rows = next((size for size in MARLIN_ROWS if pairs / size < 0.9), MARLIN_ROWS[-1])

    def run(i: int) -> Tensor:
        routing = calls[i % len(calls)]
        order = routing.sorted(rows)
        inner = activated(up(routing.x, routing, order, rows, weighted=False))
        return routing.summed(down(inner, routing, order, rows, weighted=True))

    return run


# -- humming ---------------------------------------------------------------------------------------


def _humming_layer(fmt: str, weights: Weights) -> Any:
    """Return humming's layer of all experts."""
    from humming import dtypes
    from humming.config import InputQuantizationMode
    from humming.layer import HummingLayer
    from humming.schema import HummingInputSchema
    from humming.schema.compressed_tensors import CompressedTensorsWeightSchema
    from humming.schema.fp8 import Fp8WeightSchema
    from humming.schema.gptq import GPTQWeightSchema
    from humming.schema.modelopt import ModeloptNvfp4WeightSchema
    from humming.schema.mxfp4 import Mxfp4WeightSchema

    scale = torch.stack([weight.scale for weight in weights])
    inputs = HummingInputSchema(a_dtype=dtypes.bfloat16)
    if fmt in ("FP8_DYNAMIC", "FP8_BLOCK"):
        modes = InputQuantizationMode
        group, mode = (128, modes.DynamicGroup) if fmt == "FP8_BLOCK" else (0, modes.DynamicToken)
        inputs = HummingInputSchema(
            a_dtype=dtypes.float8e4m3, input_scale_group_size=group, input_quant_mode=mode
        )
    if fmt == "W4A16":
        words = torch.stack([_words(weight).contiguous() for weight in weights])
        schema = GPTQWeightSchema(bits=4, group_size=128, sym=True)
        tensors = {"qweight": words, "scales": scale.transpose(1, 2).contiguous()}
    elif fmt == "MXFP4A16":
        schema = Mxfp4WeightSchema()
        tensors = {"weight": _bytes(weights), "weight_scale": scale.view(torch.uint8)}
    elif fmt == "NVFP4A16":
        schema = ModeloptNvfp4WeightSchema()
        tensors = {
            "weight": _bytes(weights), "weight_scale": scale, "weight_scale_2": _outer(weights)
        }  # fmt: skip
    elif fmt == "FP8_DYNAMIC":
        schema = CompressedTensorsWeightSchema(
            format="float-quantized", type="float", num_bits=8, strategy="channel"
        )
        codes = torch.stack([weight.codes for weight in weights])
        tensors = {"weight": codes, "weight_scale": scale.float()}
    else:
        schema = Fp8WeightSchema(weight_block_size=(128, 128))
        codes = torch.stack([weight.codes for weight in weights])
        tensors = {"weight": codes, "weight_scale_inv": scale.float()}
    n, k = weights[0].shape
    layer = HummingLayer(
        shape_n=n, shape_k=k, weight_config=schema, input_config=inputs,
        num_experts=len(weights), torch_dtype=torch.bfloat16,
    ).cuda()  # fmt: skip
    layer.load_from_tensors(tensors)
    layer.transform()
    return layer


def _bytes(weights: Weights) -> Tensor:
    """Return 4-bit codes [E, N, K / 2], the first of two in the low bits."""
    codes = torch.stack([weight.codes for weight in weights])
    return codes[..., ::2] | codes[..., 1::2] << 4


def _humming(layers: Sequence[Any], calls: list[Routing]) -> Callable[[int], Tensor]:
    from humming.tune import get_heuristics_config

    pairs = calls[0].ids.numel()
    indexed = json.dumps({"gemm_type": "indexed"})
    tuned = [
        get_heuristics_config(layer.humming_config, shape_m=pairs, gemm_type="indexed")
        for layer in layers
    ]
    rows = [settings["block_shape"][0] for settings in tuned]

    def product(
        at: int, x: Tensor, routing: Routing, order: tuple[Tensor, Tensor, Tensor]
    ) -> Tensor:
        result: Tensor = layers[at](
            x, sorted_ids=order[0], expert_ids=order[1], num_tokens_padded=order[2],
            top_k=(routing.ids.shape[1], 1)[at], valid_shape_m=pairs, compute_config=indexed,
            tuning_config=json.dumps(tuned[at]),
        )  # fmt: skip
        return result.view(pairs, -1)

    def run(i: int) -> Tensor:
        routing = calls[i % len(calls)]
        order = routing.sorted(rows[0])
        inner = activated(product(0, routing.x, routing, order))
        if rows[1] != rows[0]:
            order = routing.sorted(rows[1])
        found = product(1, inner, routing, order)
        return weighted_sum(
            found, routing.weights, routing.ids, first=0, experts=routing.experts, dtype=found.dtype
        )

    return run


# -- contestants -----------------------------------------------------------------------------------

_prepared: dict[str, Any] = {}  # layouts of the experts that were asked for last


def contestants(
    fmt: str, up: Weights, down: Weights, calls: Sequence[Call]
) -> Iterator[tuple[str, Callable[[int], Tensor]]]:
    """Yield (name, run); see bench_moe.py."""
    if _prepared.get("of") is not up:
        _prepared.clear()
        _prepared["of"] = up
    routings = [Routing(call, len(up)) for call in calls]
    if fmt in MARLIN_FORMATS:
        if "marlin" not in _prepared:
            _prepared["marlin"] = (MarlinExperts(fmt, up), MarlinExperts(fmt, down))
        yield "vllm-marlin", _marlin(*_prepared["marlin"], routings)
    if "humming" not in _prepared:
        _prepared["humming"] = [_humming_layer(fmt, weights) for weights in (up, down)]
    yield "humming", _humming(_prepared["humming"], routings)
