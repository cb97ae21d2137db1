"""Attention of one token a row: against float64 over the cache that it leaves."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

B, LENGTH = 2, 48
POSITIONS = (0, 47)


def normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def turned(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Turn the first R columns of [H, D] by tables [R]."""
    width = len(cos)
    part, rest = x[:, :width], x[:, width:]
    if interleaved:
        other = torch.stack((-part[:, 1::2], part[:, 0::2]), -1).flatten(-2)
    else:
        other = torch.cat((-part[:, width // 2 :], part[:, : width // 2]), -1)
    return torch.cat((part * cos + other * sin, rest), -1)


class Case:
    """Random inputs of one call and what must come of it."""

    def __init__(
        self, device, *, heads=4, kv=2, width=16, rotary=16, dtype=torch.float32, norms=False,
        cache_dtype=None, scales=(1.0, 1.0), **rule,
    ):  # fmt: skip
        from quantload.runtime.kernels.add_norm import NormWeight
        from quantload.runtime.kernels.decode_attention import HeadRule

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, device=device).to(dtype)

        qkv = random(B, (heads + 2 * kv) * width)
        self.parts = qkv.split([heads * width, kv * width, kv * width], dim=-1)
        self.q, self.k, self.v = self.parts
        self.cos, self.sin = random(LENGTH, rotary), random(LENGTH, rotary)
        kept = (random(B, kv, LENGTH, width) for _ in range(2))
        self.keys, self.values = (x.to(cache_dtype or dtype) for x in kept)
        self.before = self.keys.clone(), self.values.clone()
        self.positions = torch.tensor(POSITIONS, device=device)
        self.locks = torch.zeros(B * kv, dtype=torch.int32, device=device)
        self.scales, weights = scales, (random(width), random(width))
        made = [NormWeight(w, 1e-5, late=False, offset=False) if norms else None for w in weights]
        self.rule = HeadRule(
            heads=heads, kv_heads=kv, width=width, scale=0.3, q_norm=made[0], k_norm=made[1], **rule
        )

    def run(self, **settings: int) -> Tensor:
        from quantload.runtime.kernels.decode_attention import decode_attention

        return decode_attention(
            self.q, self.k, self.v, self.rule, rotary=(self.cos, self.sin),
            cache=(self.keys, self.values), positions=self.positions, locks=self.locks,
            scales=self.scales, settings=settings or None,
        )  # fmt: skip

    def expected(self, *, kept: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Return the result and the caches, in float64; with the new codes that were `kept`."""
        rule, dtype = self.rule, self.keys.dtype
        keys, values = (x.double() for x in self.before)
        results = []
        for b, now in enumerate(POSITIONS):
            cos, sin = self.cos[now].double(), self.sin[now].double()
            heads = [x[b].double().unflatten(0, (-1, rule.width)) for x in self.parts]
            for i, norm in enumerate((rule.q_norm, rule.k_norm)):
                weight = None if norm is None else norm.weight.double()
                heads[i] = normed(heads[i], weight, 1e-5)
                heads[i] = turned(heads[i], cos, sin, interleaved=rule.interleaved)
            keys[b, :, now] = (heads[1] / self.scales[0]).to(self.q.dtype).to(dtype).double()
            values[b, :, now] = (heads[2] / self.scales[1]).to(dtype).double()
            if kept:
                keys[b, :, now] = self.keys[b, :, now].double()
                values[b, :, now] = self.values[b, :, now].double()
            first = max(0, now + 1 - rule.window) if rule.window else 0
            ratio = rule.heads // rule.kv_heads
            k = keys[b, :, first : now + 1].repeat_interleave(ratio, 0) * self.scales[0]
            v = values[b, :, first : now + 1].repeat_interleave(ratio, 0) * self.scales[1]
            scores = (k @ heads[0][:, :, None])[..., 0] * rule.scale
            if rule.softcap:
                scores = rule.softcap * (scores / rule.softcap).tanh()
            if rule.sinks is not None:
                scores = torch.cat((scores, rule.sinks.double()[:, None]), -1)
            weights = scores.softmax(-1)[:, : k.shape[1]]
            results.append((weights[:, None] @ v).flatten())
        return torch.stack(results), keys, values


def check(case: Case, tolerance: float = 2e-5, **settings: int) -> None:
    result = case.run(**settings)
    expected, keys, values = case.expected()
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(case.keys.double(), keys, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(case.values.double(), values, rtol=tolerance, atol=tolerance)
    assert not case.locks.any()


@pytest.mark.parametrize("splits", [1, 4])
def test_result_and_cache_are_their_definition(splits: int, kernel_device: torch.device) -> None:
    check(Case(kernel_device), splits=splits, block=16, warps=4, stages=2)


@pytest.mark.parametrize(
    "options",
    [
        {"norms": True, "heads": 6, "kv": 2},
        {"rotary": 8, "interleaved": True},
        {"rotary": 12, "width": 24, "heads": 3, "kv": 3},
        {"rotary": 0, "window": 7},
        {"softcap": 2.0, "window": 20},
    ],
    ids=str,
)
def test_variants_of_heads(options: dict, kernel_device: torch.device) -> None:
    check(Case(kernel_device, **options), splits=2, block=16, warps=4, stages=2)


@pytest.mark.parametrize("splits", [1, 4])
def test_sinks_take_weight(splits: int, kernel_device: torch.device) -> None:
    sinks = torch.randn(4, device=kernel_device)
    check(Case(kernel_device, sinks=sinks), splits=splits, block=16, warps=4, stages=2)


def test_half_precision_rounds_as_the_models_do(kernel_device: torch.device) -> None:
    check(Case(kernel_device, dtype=torch.float16), 4e-3, splits=2, block=32, warps=4, stages=2)


def test_codes_in_the_cache(kernel_device: torch.device) -> None:
    case = Case(
        kernel_device, dtype=torch.float16, cache_dtype=torch.float8_e4m3fn, scales=(0.5, 0.25)
    )
    result = case.run(splits=2, block=32, warps=4, stages=2)
    keys, values = case.expected()[1:]
    expected = case.expected(kept=True)[0]
    torch.testing.assert_close(result.double(), expected, rtol=4e-3, atol=4e-3)
    for found, wanted in ((case.keys, keys), (case.values, values)):
        torch.testing.assert_close(found.double(), wanted, rtol=0.13, atol=0.005)  # one code off


def test_the_same_result_whatever_the_settings_and_twice(kernel_device: torch.device) -> None:
    case = Case(kernel_device)
    settings = {"splits": 4, "block": 16, "warps": 4, "stages": 2}
    first = case.run(**settings)
    assert torch.equal(first, case.run(**settings))
    torch.testing.assert_close(first, case.run(), rtol=2e-5, atol=2e-5)
    larger = case.run(**settings, least=2)
    torch.testing.assert_close(first, larger, rtol=2e-5, atol=2e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN in the interpreter
def test_one_row_that_is_not_finite_spoils_no_other(kernel_device: torch.device) -> None:
    case = Case(kernel_device)
    case.q[1, 3] = float("nan")
    result = case.run(splits=2, block=16, warps=4, stages=2)
    assert result[1, : case.rule.width].isnan().all()
    assert result[0].isfinite().all()


def test_blocks_fit_the_cards_memory() -> None:
    from quantload.runtime.kernels.decode_attention import _fitted

    wide = {"splits": 1, "block": 128, "warps": 4, "stages": 3}
    assert _fitted(wide, 256, 232448) == wide  # 128 columns of bfloat16 on sm_90
    assert _fitted(wide, 256, 101376)["stages"] == 2  # on sm_89
    for width, memory in ((512, 101376), (1024, 232448), (1024, 101376)):
        found = _fitted(wide, width, memory)
        assert 2 * (found["stages"] - 1) * found["block"] * width < memory
        assert found["block"] >= 16


def test_refusals() -> None:
    from quantload.runtime.kernels.decode_attention import HeadRule, candidates, why_not

    rule = HeadRule(heads=4, kv_heads=2, width=512, scale=1.0)
    assert "wider" in str(why_not(rule, torch.bfloat16))
    assert "expected" in str(why_not(HeadRule(heads=4, kv_heads=2, width=8, scale=1.0), torch.int8))
    assert "evenly" in str(
        why_not(HeadRule(heads=4, kv_heads=3, width=8, scale=1.0), torch.float16)
    )
    assert all(c["splits"] == 1 or c["splits"] * c["block"] < 256
               for c in itertools.islice(candidates(1, 8, 128), 100))  # fmt: skip
