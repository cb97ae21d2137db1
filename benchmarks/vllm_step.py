"""A peer of bench_decode.py: vLLM's kernels in the order in which its Llama launches them.

    VLLM_FOLDER=.../site-packages/vllm python benchmarks/bench_decode.py --contestants \
        benchmarks/vllm_step.py --schemes W4A16,FP8_DYNAMIC --ways fused --peers ""

This is a step of vLLM's model, not vLLM: no scheduler, no server, no sampler, no Python between
layers. One CUDA graph holds what vLLM 0.33 launches for one token of each sequence: embedding
(torch), then for each block the norm that adds the residual, the product of q, k and v, rotary
embedding, the write to a paged cache (pages of 16 tokens), FlashAttention 3 over the pages with up
to 32 splits and a schedule that is computed once a step, the other products, SiLU-and-multiply;
then the last norm, the head (torch, bfloat16), and torch's argmax of its
logits (vLLM's sampler makes them float32 first). `W4A16` runs with Marlin
(`vllm-marlin`) and with Machete (`vllm-machete`, which vLLM 0.33 takes first on Hopper);
`FP8_DYNAMIC` with CUTLASS (`vllm-cutlass`), norms that write codes (vLLM's fusion pass does that)
and its quantizer by tokens elsewhere. vLLM by default lets Inductor write norms, rotary embedding
and SiLU; here they are its own CUDA kernels.

Where FlashAttention's library does not load, attention is torch's, and the note of a row says so.
Only two compiled libraries and `scalar_type.py` of vLLM's wheel are loaded, from `VLLM_FOLDER` or
where `vllm` is installed. Before anything is timed a model of two layers is compared with
float64 on the same quantized weights (`llama_reference.py`).

Source: vLLM 0.33.0, model_executor/models/llama.py, v1/attention/backends/flash_attn.py,
model_executor/kernels/linear.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import vllm_kernels
from llama_reference import LlamaShape, RandomWeights, exact_step, rotary_angles
from torch import Tensor
from torch.nn import functional

PAGE = 16
MOST_SPLITS = 32  # vLLM's flash_attn_max_num_splits_for_cuda_graph
FORMATS = {"W4A16": "w4a16_g128", "FP8_DYNAMIC": "fp8_ch"}
KINDS = {"W4A16": ("marlin", "machete"), "FP8_DYNAMIC": ("cutlass",)}
# Relative error of the logits. Codes of inputs flip where bfloat16 rounds before they are made: on
# an H200 0.088 and 0.102 were measured; the step emulated in torch, with bfloat16 between its
# kernels, is off by 0.078. Without its rotary embedding a model is off by 0.9.
TOLERANCE = {"W4A16": 2e-2, "FP8_DYNAMIC": 0.15}
SMALL = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2048,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "vocab_size": 1000, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
}  # fmt: skip
SMALL_LENGTHS = (37, 5, 64, 300)
Start = Callable[[int, int, int], Callable[[], object]]


class Model:
    """Weights in the layouts of vLLM's kernels.

    Args:
        weights: Random ones.
        kind: A key of `vllm_kernels.PRODUCTS`.
    """

    def __init__(self, weights: RandomWeights, kind: str) -> None:
        self.shape, device = weights.shape, weights.head.device
        self.rounds_input = kind == "cutlass"
        self.embedding, self.head = weights.embedding, weights.head
        layers = self.shape.layers
        self.norms = [weights.norm(number) for number in range(2 * layers + 1)]
        locks = torch.zeros(4 * vllm_kernels.processors(device), dtype=torch.int32, device=device)
        self.layers: list[dict[str, vllm_kernels.Product]] = []
        for number in range(layers):
            made = weights.layer(number)
            self.layers.append(
                {name: vllm_kernels.PRODUCTS[kind](made[name], locks) for name in made}
            )


# -- a step ----------------------------------------------------------------------------------------


class Step:
    """One token for each of B sequences, again and again.

    Args:
        model: Its weights.
        lengths: Tokens that each sequence has.
        room: The most tokens that a sequence may have.
    """

    def __init__(self, model: Model, lengths: list[int], room: int) -> None:
        self.model, shape, device = model, model.shape, model.head.device
        self.batch, self.pages = len(lengths), math.ceil(room / PAGE)
        order = torch.arange(self.batch, device=device).flip(0)  # row 0 has the last pages
        pages = torch.arange(self.pages, device=device)
        self.table = (order[:, None] * self.pages + pages).to(torch.int32)
        self.first_slots = order * self.pages * PAGE
        size = self.batch * self.pages, PAGE, shape.kv_heads, shape.head_dim
        make = partial(torch.zeros, size, dtype=torch.bfloat16, device=device)
        self.keys = [make() for _ in range(shape.layers)]
        self.values = [make() for _ in range(shape.layers)]
        self.tokens = torch.zeros(self.batch, dtype=torch.int64, device=device)
        self.places = torch.zeros(2, self.batch, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(self.batch, dtype=torch.int32, device=device)
        self.starts = torch.arange(self.batch + 1, dtype=torch.int32, device=device)
        self.one = torch.ones(1, dtype=torch.float32, device=device)
        angles = rotary_angles(shape, torch.arange(self.pages * PAGE, device=device))
        self.turns = torch.cat([angles.cos(), angles.sin()], -1).to(torch.bfloat16)
        self.logits: Tensor | None = None
        self.rewind(lengths)
        self._graph: torch.cuda.CUDAGraph | None = None

    def rewind(self, lengths: list[int]) -> None:
        """Go to where sequences have these many tokens."""
        positions = torch.tensor(lengths, device=self.tokens.device)
        self.places.copy_(torch.stack([positions, self.first_slots + positions]))
        self.lengths.copy_(positions + 1)

    def run(self) -> None:
        """Launch the kernels of a step."""
        model, shape, ops = self.model, self.model.shape, vllm_kernels.ops()
        positions, slots = self.places
        schedule = self._schedule(self.lengths)
        residual = functional.embedding(self.tokens, model.embedding)
        hidden: Tensor | None = None
        for number, layer in enumerate(model.layers):
            read, residual = self._norm(hidden, residual, 2 * number)
            qkv = layer["qkv"](*read)
            sizes = [h * shape.head_dim for h in (shape.heads, shape.kv_heads, shape.kv_heads)]
            q, k, v = qkv.split(sizes, -1)
            ops.rotary_embedding(positions, q, k, shape.head_dim, self.turns, True)
            q, k, v = (part.unflatten(-1, (-1, shape.head_dim)) for part in (q, k, v))
            torch.ops._C_cache_ops.reshape_and_cache_flash(
                k, v, self.keys[number], self.values[number], slots, "auto", self.one, self.one
            )
            seen = self._attention(q, number, schedule)
            hidden = layer["o"](*self._rounded(seen.flatten(1)))
            read, residual = self._norm(hidden, residual, 2 * number + 1)
            both = layer["gate_up"](*read)
            inner = torch.empty_like(both[:, : shape.inner])
            ops.silu_and_mul(inner, both)
            hidden = layer["down"](*self._rounded(inner))
        assert hidden is not None, "a model with layers"
        ops.fused_add_rms_norm(hidden, residual, model.norms[-1], shape.eps)
        self.logits = functional.linear(hidden, model.head)
        self.tokens.copy_(self.logits.argmax(-1))
        self.places.add_(1)
        self.lengths.add_(1)

    def _norm(
        self, hidden: Tensor | None, residual: Tensor, number: int
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return (what the next product reads, residual); the first norm has nothing to add."""
        ops, factors, eps = vllm_kernels.ops(), self.model.norms[number], self.model.shape.eps
        if self.model.rounds_input:
            codes, scales = self._codes(residual)
            source, rest = (residual, None) if hidden is None else (hidden, residual)
            ops.rms_norm_dynamic_per_token_quant(codes, source, factors, scales, eps, None, rest)
            return (codes, scales), residual
        if hidden is None:
            result = torch.empty_like(residual)
            ops.rms_norm(result, residual, factors, eps)
            return (result,), residual
        ops.fused_add_rms_norm(hidden, residual, factors, eps)
        return (hidden,), residual

    def _codes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
        return codes, torch.empty(len(x), 1, dtype=torch.float32, device=x.device)

    def _rounded(self, x: Tensor) -> tuple[Tensor, ...]:
        if not self.model.rounds_input:
            return (x,)
        codes, scales = self._codes(x)
        vllm_kernels.ops().dynamic_per_token_scaled_fp8_quant(codes, x, scales, None)
        return codes, scales

    def _schedule(self, lengths: Tensor) -> Tensor | None:
        if vllm_kernels.flash() is None:
            return None
        shape, room = self.model.shape, self.pages * PAGE
        schedule: Tensor = vllm_kernels.flash().get_scheduler_metadata(
            self.batch, 1, room, shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim,
            torch.bfloat16, lengths, self.starts, None, None, None, None, PAGE, 0, True, -1, -1,
            False, MOST_SPLITS, None, 0,
        )  # fmt: skip
        return schedule

    def _attention(self, q: Tensor, number: int, schedule: Tensor | None) -> Tensor:
        if schedule is None:
            return self._attention_of_torch(q, number)
        result = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        vllm_kernels.flash().fwd(
            q, self.keys[number], self.values[number], None, None, None, result, self.starts,
            None, None, None, self.lengths, 1, self.pages * PAGE, self.table,
            None, None, None, None, None, None, None, None, q.shape[-1] ** -0.5,
            True, -1, -1, 0.0, True, schedule, MOST_SPLITS, None, 0, None, 1, 0, None,
        )  # fmt: skip
        return result

    def _attention_of_torch(self, q: Tensor, number: int) -> Tensor:
        """Attend with torch: heads of a group are queries of its keys, rows stand as pages do."""
        parts = (self.keys[number], self.values[number])
        keys, values = (
            part.view(self.batch, -1, *part.shape[2:]).transpose(1, 2) for part in parts
        )
        places = torch.arange(self.pages * PAGE, device=q.device)
        mask = (places < self.lengths.flip(0)[:, None])[:, None, None]
        grouped = q.unflatten(1, (keys.shape[1], -1)).flip(0)
        seen = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
        return seen.flip(0).flatten(1, 2)

    def capture(self) -> None:
        """Make the step one CUDA graph; afterwards it is to be rewound."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.run()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.run()

    def replay(self) -> None:
        """Run the captured step."""
        assert self._graph is not None, "captured first"
        self._graph.replay()


# -- is it a Llama? --------------------------------------------------------------------------------


def errors(scheme: str, kind: str, device: torch.device, *, graph: bool = True) -> list[float]:
    """Return relative errors of the logits of a small model.

    Returns:
        Of the step, of the same captured, and of the step against a model without rotary
        embedding: the last one must be larger than the tolerance.
    """
    fmt = FORMATS[scheme]
    weights = RandomWeights(LlamaShape.of(SMALL), fmt, device)
    step = Step(Model(weights, kind), list(SMALL_LENGTHS), max(SMALL_LENGTHS) + PAGE)
    keys = [_filled(step, cached) for cached in step.keys]
    values = [_filled(step, cached) for cached in step.values]
    tokens = torch.arange(step.batch, device=device) * 7 + 3
    exact = exact_step(weights, fmt, tokens, keys, values)
    wrong = exact_step(weights, fmt, tokens, keys, values, turns=False)
    found = []
    if graph:
        step.capture()
    for run in (step.run, step.replay) if graph else (step.run,):
        step.tokens.copy_(tokens)
        step.rewind(list(SMALL_LENGTHS))
        run()
        assert step.logits is not None, "it ran"
        found.append(_distance(step.logits, exact))
    return [*found, _distance(step.logits, wrong)]


def _distance(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def _filled(step: Step, cached: Tensor) -> list[Tensor]:
    """Fill a cache with random tokens; return [n, Hkv, D] of each sequence."""
    cached.normal_()
    rows = cached.flatten(0, 1)
    first = step.first_slots.tolist()
    return [
        rows[start : start + length].clone()
        for start, length in zip(first, SMALL_LENGTHS, strict=True)
    ]


# -- the plug-in -----------------------------------------------------------------------------------


def contestants(
    config: Mapping[str, Any], scheme: str
) -> Iterator[tuple[str, Callable[[], tuple[str, Start]]]]:
    """Yield (way, build) of each kind of products; see bench_decode.py."""
    if scheme in FORMATS:
        for kind in KINDS[scheme]:
            yield f"vllm-{kind}", partial(_build, config, scheme, kind)


@torch.no_grad()
def _build(config: Mapping[str, Any], scheme: str, kind: str) -> tuple[str, Start]:
    """Check a small model, build the whole one.

    Raises:
        ValueError: The config is no plain Llama, or the small model is wrong.
    """
    device = torch.device("cuda")
    *right, wrong = errors(scheme, kind, device)
    if not max(right) <= TOLERANCE[scheme] < wrong:
        raise ValueError(f"errors {right}, of a wrong model {wrong}")
    model = Model(RandomWeights(LlamaShape.of(config), FORMATS[scheme], device), kind)
    said = ", ".join(f"{error:.2e}" for error in right)
    attention = "attention by torch" if vllm_kernels.flash() is None else "FlashAttention 3 of vLLM"
    note = f"{attention}; small model against float64: {said} (wrong: {wrong:.2f})"
    return note, partial(_start, model)


@torch.no_grad()
def _start(model: Model, batch: int, length: int, room: int) -> Callable[[], object]:
    step = Step(model, [length] * batch, room)
    for cached in (*step.keys, *step.values):
        cached.normal_()
    step.capture()
    step.rewind([length] * batch)
    return step.replay
