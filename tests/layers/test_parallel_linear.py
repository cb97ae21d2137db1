"""Each parallel layer against `nn.functional.linear` on the whole weight, for 1 to 8 ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gloo_ranks import run_in_processes
from thread_ranks import in_ranks
from torch.nn.functional import linear
from whole_weights import SCHEMES, assert_close, fill, scheme_named, values, whole_weight

from quantload.errors import ConfigError
from quantload.layers.parallel_linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from quantload.layers.stack import StackView
from quantload.quant.region import WHOLE, Region
from quantload.quant.rtn import quantize_rtn
from quantload.quant.scheme import parse_scheme
from quantload.runtime.parallel import Parallel

RANKS = (1, 2, 4, 8)


def options(name: str, *, rounds_inputs: bool = False) -> dict:
    scheme = scheme_named(name)
    if not rounds_inputs:
        scheme = replace(scheme, input=None)
    return {"scheme": scheme, "dtype": torch.float32, "prefix": "block.proj"}


@pytest.mark.parametrize("name", SCHEMES)
def test_columns_of_the_result(name: str) -> None:
    weight, bias, x = whole_weight(328, 256, name), torch.randn(328), torch.randn(3, 256)
    expected = linear(x, values(weight), bias)

    def work(parallel: Parallel) -> tuple[torch.Tensor, torch.Tensor]:
        made = [
            fill(
                ColumnParallelLinear(
                    256, 328, gather_output=gather, parallel=parallel, **options(name)
                ),
                {("weight", 0): weight, ("bias", 0): bias},
            )
            for gather in (False, True)
        ]
        return made[0](x), made[1](x)

    for size in RANKS:
        found = in_ranks(size, work)
        assert_close(torch.cat([part for part, _ in found], -1), expected)
        for _, whole in found:
            assert_close(whole, expected)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("columns", [256, 200])  # 200 is no multiple of any group
def test_rows_of_the_weight(columns: int, name: str) -> None:
    if name == "act-order" and columns == 200:
        columns = 224  # act-order has whole groups; 224 / 8 cuts them
    weight, bias = whole_weight(48, columns, name), torch.randn(48)
    x = torch.randn(2, 3, columns)
    expected = linear(x, values(weight), bias)

    def work(parallel: Parallel) -> list[torch.Tensor]:
        tensors = {("weight", 0): weight, ("bias", 0): bias}
        shared = {"parallel": parallel, **options(name)}
        layer = fill(RowParallelLinear(columns, 48, **shared), tensors)
        split = fill(RowParallelLinear(columns, 48, input_is_parallel=False, **shared), tensors)
        partly = fill(RowParallelLinear(columns, 48, reduce_results=False, **shared), tensors)
        start, stop = layer.columns
        part = x[..., start:stop]
        return [layer(part), split(x), parallel.all_reduce(partly(part))]

    for size in RANKS:
        for results in in_ranks(size, work):
            for found in results:
                assert_close(found, expected)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("is_fused", [False, True])
def test_members_of_unlike_sizes(is_fused: bool, name: str) -> None:
    sizes = (200, 328)
    whole = whole_weight(sum(sizes), 256, name, seed=1)
    members = [whole_weight(rows, 256, name, seed=i) for i, rows in enumerate(sizes)]
    biases, x = [torch.randn(rows) for rows in sizes], torch.randn(3, 256)
    weight = values(whole) if is_fused else torch.cat([values(m) for m in members])
    expected = linear(x, weight, torch.cat(biases)).split(sizes, -1)
    tensors = (
        {("weight", 0): whole, ("bias", 0): torch.cat(biases)}
        if is_fused
        else {
            **{("weight", slot): member for slot, member in enumerate(members)},
            **{("bias", slot): bias for slot, bias in enumerate(biases)},
        }
    )

    def work(parallel: Parallel) -> list[tuple[torch.Tensor, ...]]:
        results = []
        for gather in (False, True):
            layer = MergedColumnParallelLinear(
                256,
                sizes,
                gather_output=gather,
                slots_on_disk=1 if is_fused else None,
                parallel=parallel,
                **options(name),
            )
            fill(layer, tensors)
            results.append(layer(x).split(layer.part_sizes, -1))
            results.append(tuple(StackView(layer, slot)(x) for slot in range(2)))
        return results

    for size in RANKS:
        found = in_ranks(size, work)
        for slot in range(2):
            for way in (0, 1):
                joined = torch.cat([results[way][slot] for results in found], -1)
                assert_close(joined, expected[slot])
            for way in (2, 3):
                for results in found:
                    assert_close(results[way][slot], expected[slot])


def in_heads(x: torch.Tensor, size: int) -> list[torch.Tensor]:
    return list(x.split(size, -1))


@pytest.mark.parametrize("name", ["dense", "W4A16:g32", "FP8_BLOCK"])
@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_heads(kv_heads: int, is_fused: bool, name: str) -> None:
    heads, width, v_width = 8, 12, 10
    sizes = (heads * width, kv_heads * width, kv_heads * v_width)
    whole = whole_weight(sum(sizes), 128, name)
    members = [whole_weight(rows, 128, name, seed=i) for i, rows in enumerate(sizes)]
    biases, x = [torch.randn(rows) for rows in sizes], torch.randn(3, 128)
    weight = values(whole) if is_fused else torch.cat([values(m) for m in members])
    q, k, v = linear(x, weight, torch.cat(biases)).split(sizes, -1)
    tensors = (
        {("weight", 0): whole, ("bias", 0): torch.cat(biases)}
        if is_fused
        else {
            **{("weight", slot): member for slot, member in enumerate(members)},
            **{("bias", slot): bias for slot, bias in enumerate(biases)},
        }
    )

    def work(parallel: Parallel) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, int, int]:
        made = [
            QKVParallelLinear(
                128,
                width,
                heads,
                kv_heads,
                v_head_dim=v_width,
                gather_output=gather,
                slots_on_disk=1 if is_fused else None,
                parallel=parallel,
                **options(name),
            )
            for gather in (False, True)
        ]
        for layer in made:
            fill(layer, tensors)
        first = made[0]
        return first(x).split(first.sizes, -1), made[1](x), first.num_heads, first.num_kv_heads

    for size in RANKS:
        for rank, (parts, gathered, num_heads, num_kv) in enumerate(in_ranks(size, work)):
            assert (num_heads, num_kv) == (heads // size, max(1, kv_heads // size))
            # each query head must meet the key-value head that it meets on one process
            for number in range(num_heads):
                head = rank * num_heads + number
                assert_close(in_heads(parts[0], width)[number], in_heads(q, width)[head])
                group, here = head * kv_heads // heads, number * num_kv // num_heads
                assert_close(in_heads(parts[1], width)[here], in_heads(k, width)[group])
                assert_close(in_heads(parts[2], v_width)[here], in_heads(v, v_width)[group])
            assert_close(gathered, torch.cat([q, k, v], -1))


# -- rounded inputs: as on one process -------------------------------------------------------------

INPUTS = ["W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "W4AFP8:g32", "MXFP8", "W4A8:g32"]


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("columns", [1024, 416])  # 416: groups of inputs lie in several ranks
def test_scales_of_inputs_are_those_of_the_whole_input(columns: int, name: str) -> None:
    weight = whole_weight(48, columns, name)
    x = torch.randn(5, columns) * torch.logspace(-2, 2, columns)
    tensors = {("weight", 0): weight}
    made = {"bias": False, **options(name, rounds_inputs=True)}
    alone = fill(RowParallelLinear(columns, 48, **made), tensors)(x)
    rough = linear(x, values(weight))
    assert (alone - rough).norm() / rough.norm() > 1e-4, "inputs are rounded"

    def work(parallel: Parallel) -> torch.Tensor:
        layer = fill(RowParallelLinear(columns, 48, parallel=parallel, **made), tensors)
        return layer(x[:, layer.columns[0] : layer.columns[1]])

    for size in (2, 4, 8):
        for found in in_ranks(size, work):
            assert_close(found, alone)


def test_kernels_that_round_serve_parts_of_rows_too() -> None:
    """They do not round weights to bfloat16, as the reference does: ranks must not differ in it."""
    made = {"bias": False, "scheme": parse_scheme("W8A8"), "dtype": torch.float32}
    floats = torch.randn(16, 64).bfloat16()
    weight, x = quantize_rtn(floats, parse_scheme("W8A8").weight), torch.randn(3, 64)
    alone = fill(RowParallelLinear(64, 16, **made), {("weight", 0): weight})

    def work(parallel: Parallel) -> tuple[torch.Tensor, torch.Tensor, str]:
        layer = RowParallelLinear(64, 16, parallel=parallel, **made)
        fill(layer, {("weight", 0): weight})
        part = x[:, layer.columns[0] : layer.columns[1]]
        return layer(part), layer(part[:0]), layer.kernel.name

    for found, nothing, kernel in in_ranks(4, work):
        assert kernel == alone.kernel.name == "torch int8 by int8 for CPU"
        assert_close(found, alone(x), limit=1e-6)
        assert nothing.shape == (0, 16)


@pytest.mark.parametrize("granularity", ["tensor", "token"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_other_ranges_of_inputs(granularity: str, symmetric: bool) -> None:
    scheme = parse_scheme("W8A8")
    assert scheme.input is not None
    input = replace(scheme.input, granularity=granularity, symmetric=symmetric)
    weight, x = whole_weight(16, 64, "W8A16:channel"), torch.randn(2, 3, 64) + 0.5
    made = {"bias": False, "scheme": replace(scheme, input=input), "dtype": torch.float32}
    alone = fill(RowParallelLinear(64, 16, **made), {("weight", 0): weight})(x)

    def work(parallel: Parallel) -> tuple[torch.Tensor, torch.Tensor]:
        layer = RowParallelLinear(64, 16, parallel=parallel, **made)
        fill(layer, {("weight", 0): weight})
        start, stop = layer.columns
        return layer(x[..., start:stop]), layer(x[:0, ..., start:stop])

    for found, nothing in in_ranks(4, work):
        assert_close(found, alone)
        assert nothing.shape == (0, 3, 16)


def test_static_inputs_and_factors_of_columns_are_cut() -> None:
    scheme = parse_scheme("FP8")
    plain = whole_weight(16, 64, "FP8_DYNAMIC")
    weight = replace(plain, input_scale=torch.tensor([0.02]), inner=torch.rand(64) + 0.5)
    made = {"bias": False, "scheme": scheme, "dtype": torch.float32}
    x = torch.randn(3, 64)
    alone = fill(RowParallelLinear(64, 16, **made), {("weight", 0): weight})(x)
    scaled = x * weight.inner
    rounded = (scaled / 0.02).clamp(-448, 448).to(torch.float8_e4m3fn).float() * 0.02
    assert_close(alone, linear(rounded, plain.dequantize(torch.float32)), limit=1e-4)

    def work(parallel: Parallel) -> torch.Tensor:
        layer = RowParallelLinear(64, 16, parallel=parallel, **made)
        fill(layer, {("weight", 0): weight})
        return layer(x[:, layer.columns[0] : layer.columns[1]])

    for found in in_ranks(4, work):
        assert_close(found, alone)


# -- members that cannot be one product ------------------------------------------------------------


def test_members_of_unlike_schemes_run_one_by_one() -> None:
    names = ("W4A16:g32", "dense", "FP8_DYNAMIC")
    schemes = [parse_scheme(name) for name in names]
    members = [whole_weight(16, 64, name, seed=i) for i, name in enumerate(names)]
    biases, x = [torch.randn(16) for _ in names], torch.randn(3, 64)
    alone = []
    for member, bias, scheme in zip(members, biases, schemes, strict=True):
        layer = ReplicatedLinear(64, 16, scheme=scheme, dtype=torch.float32)
        alone.append(fill(layer, {("weight", 0): member, ("bias", 0): bias})(x))

    def work(parallel: Parallel) -> tuple[torch.Tensor, torch.Tensor, str]:
        results = []
        for gather in (False, True):
            layer = MergedColumnParallelLinear(
                64,
                [16] * 3,
                gather_output=gather,
                scheme={"block.proj": schemes},
                dtype=torch.float32,
                parallel=parallel,
                prefix="block.proj",
            )
            fill(
                layer,
                {("weight", slot): member for slot, member in enumerate(members)}
                | {("bias", slot): bias for slot, bias in enumerate(biases)},
            )
            results.append(layer(x))
            assert_close(
                torch.cat([StackView(layer, slot)(x) for slot in range(3)], -1), results[-1]
            )
        return results[0], results[1], layer.why_separate

    found = in_ranks(2, work)
    for slot in range(3):
        part = torch.cat([results[0].split(8, -1)[slot] for results in found], -1)
        assert_close(part, alone[slot])
    for _, gathered, why in found:
        assert_close(gathered, torch.cat(alone, -1))
        assert why == "schemes differ: W4A16:g32 and dense"


def test_members_of_unlike_act_orders_run_one_by_one() -> None:
    members = [whole_weight(16, 64, "act-order", seed=i, order=i) for i in range(2)]
    x = torch.randn(3, 64)

    def work(parallel: Parallel) -> torch.Tensor:
        layer = MergedColumnParallelLinear(
            64, [16, 16], bias=False, gather_output=True, parallel=parallel, **options("W4A16:g32")
        )
        fill(layer, {("weight", slot): member for slot, member in enumerate(members)})
        assert "act-orders differ" in layer.why_separate
        return layer(x)

    for found in in_ranks(4, work):
        assert_close(found, torch.cat([linear(x, values(member)) for member in members], -1))


# -- what is said, and what is refused -------------------------------------------------------------


def test_regions_are_those_of_the_rank() -> None:
    parallel = Parallel(tp_rank=2, tp_size=4)
    made = {"parallel": parallel, "dtype": torch.float32, "prefix": "p"}
    column = ColumnParallelLinear(8, 16, **made)
    assert column.awaits() == {("weight", 0): (16, 8), ("bias", 0): (16,)}
    assert column.region("weight", 0) == Region(rows=((8, 12),))
    assert column.region("bias", 0) == Region(rows=((8, 12),))
    row = RowParallelLinear(8, 16, **made)
    assert row.awaits() == {("weight", 0): (16, 8), ("bias", 0): (16,)}
    assert row.region("weight", 0) == Region(columns=(4, 6))
    assert row.region("bias", 0) is None
    merged = MergedColumnParallelLinear(8, [4, 12], slots_on_disk=1, **made)
    assert merged.awaits() == {("weight", 0): (16, 8), ("bias", 0): (16,)}
    assert merged.region("bias", 0) == Region(rows=((2, 3), (10, 13)))
    replicated = ReplicatedLinear(8, 16, **made)
    assert replicated.region("weight", 0) == WHOLE
    alone = RowParallelLinear(8, 16)
    assert alone.region("weight", 0) == alone.region("bias", 0) == WHOLE


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda p: ColumnParallelLinear(8, 18, parallel=p, prefix="a.b"), "the 18 rows of `a.b`"),
        (lambda p: RowParallelLinear(9, 8, parallel=p, prefix="a.b"), "the 9 columns of `a.b`"),
        (
            lambda p: MergedColumnParallelLinear(8, [8, 6], parallel=p, prefix="a.b"),
            "the 6 rows of member 1 of `a.b`",
        ),
        (lambda p: QKVParallelLinear(8, 2, 6, 2, parallel=p, prefix="a"), "the 6 heads of `a`"),
        (
            lambda p: QKVParallelLinear(8, 2, 12, 6, parallel=p, prefix="a"),
            "the 6 key-value heads of `a` cannot be shared by 4 processes",
        ),
    ],
)
def test_what_does_not_divide_is_refused(make, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        make(Parallel(tp_size=4))
    assert "fewer processes" in caught.value.hint


def test_slots_and_schemes_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="`slots_on_disk` of `a` is 2, expected 1 for one tensor"):
        MergedColumnParallelLinear(8, [4, 4, 4], slots_on_disk=2, prefix="a")
    with pytest.raises(ConfigError, match="2 schemes for the 1 tensors of module `a`"):
        ReplicatedLinear(8, 8, scheme=[parse_scheme("W8A8")] * 2, prefix="a")
    layer = fill(ReplicatedLinear(4, 4, bias=False), {("weight", 0): torch.ones(4, 4)})
    with pytest.raises(ConfigError, match="is loaded: its scheme is fixed"):
        layer.set_schemes(parse_scheme("W8A8"))


# -- real processes --------------------------------------------------------------------------------


def test_two_processes() -> None:
    run_in_processes(2, _two)


def _two() -> None:
    parallel = Parallel.from_environment(device="cpu")
    torch.manual_seed(0)
    x = torch.randn(3, 128)
    for name in ("dense", "act-order", "FP8_DYNAMIC"):
        made = options(name, rounds_inputs=True)
        up = {(leaf, slot): t for slot in (0, 1) for leaf, t in _tensors(64, 128, name, slot)}
        down = {(leaf, 0): t for leaf, t in _tensors(48, 64, name, 5)}
        results = []
        with torch.inference_mode():
            for ranks in (Parallel(), parallel):
                first = MergedColumnParallelLinear(128, [64, 64], parallel=ranks, **made)
                last = RowParallelLinear(64, 48, parallel=ranks, **made)
                gate, raised = fill(first, up)(x).chunk(2, -1)
                results.append(fill(last, down)(gate.sigmoid() * raised))
        assert_close(results[1], results[0])


def _tensors(rows: int, columns: int, name: str, seed: int):
    yield "weight", whole_weight(rows, columns, name, seed=seed)
    yield "bias", torch.randn(rows, generator=torch.Generator().manual_seed(seed))
