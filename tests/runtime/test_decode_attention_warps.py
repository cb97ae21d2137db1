"""Attention with keys of its own for each warp: source and PTX carried out on the CPU."""

import pytest
import simt
import torch

D = 128


def turned(x, cos, sin):
    return x * cos + torch.cat((-x[..., 64:], x[..., :64]), -1) * sin


class Case:
    """Random inputs of one call, its results, and what they must be in float64."""

    def __init__(self, *, places, kv, group, length):
        self.places, self.kv, self.group, self.length = places, kv, group, length
        self.rows, self.heads = len(places), kv * group
        self.qkv = torch.randn(self.rows, (self.heads + 2 * kv) * D).bfloat16()
        self.cos, self.sin = (torch.randn(length, D).bfloat16() for _ in range(2))
        shape = (self.rows, kv, length, D)
        self.keys, self.values = (torch.randn(shape).bfloat16() for _ in range(2))
        for b, place in enumerate(places):  # what was never written must not be read
            self.keys[b, :, place:] = self.values[b, :, place:] = float("nan")

    def run(self, *, splits, warps):
        kernel, machine = simt.load(
            "decode_attention_warps", "attention_of_warps", "attention_pieces"
        )
        pairs, stride = self.rows * self.kv, self.qkv.shape[1]
        poison = torch.full((pairs * splits * self.group * D,), float("nan"))
        q, cos, sin, keys, values, places, out, part, stats = map(
            machine.put,
            (self.qkv, self.cos, self.sin, self.keys, self.values, torch.tensor(self.places),
             poison.bfloat16(), poison, poison),
        )  # fmt: skip
        locks = machine.put(torch.zeros(pairs, dtype=torch.int32))
        peaks, sums = machine.put(poison), machine.put(poison)
        k, v = q + self.heads * D, q + (self.heads + self.kv) * D
        machine.run(
            kernel, pairs * splits + 3, q, k, v, cos, sin, keys, values, places, locks, out, part,
            stats, peaks, sums, stride, stride, stride, self.kv * self.length * D,
            self.length * D, D, pairs, self.kv, 0.09,
            G=self.group, SPLITS=splits, EARLY=False, num_warps=warps,
        )  # fmt: skip
        assert not machine.get(locks, pairs).any(), "a lock is left over"
        kept = (machine.get(x, self.keys.numel()).reshape(self.keys.shape) for x in (keys, values))
        found = machine.get(out, self.rows * self.heads * D).reshape(self.rows, self.heads, D)
        told = machine.get(sums, found.numel() // 16)
        expected = found.float().reshape(-1, 16).sum(1)
        assert torch.allclose(told, expected, rtol=1e-5, atol=1e-6)
        return found, machine.get(peaks, pairs), *kept

    def errors(self, found, peaks, keys, values):
        """Yield how far results of each row are off, after looking at cache and peaks."""
        high = found.float().abs().reshape(self.rows * self.kv, -1).amax(1)
        assert torch.equal(peaks, high)
        for b, place in enumerate(self.places):
            q, k, v = self.qkv[b].split([self.heads * D, self.kv * D, self.kv * D])
            own = turned(k.reshape(-1, D), self.cos[place], self.sin[place])  # each step rounds
            assert torch.equal(keys[b, :, place], own)
            cos, sin = self.cos[place].double(), self.sin[place].double()
            q, k = (
                turned(q.double().reshape(-1, D), cos, sin),
                turned(k.double().reshape(-1, D), cos, sin),
            )
            assert float((keys[b, :, place].double() - k).norm() / k.norm()) < 4e-3
            assert torch.equal(values[b, :, place].flatten(), v)
            all_keys = torch.cat((keys[b, :, :place].double(), k[:, None]), 1)
            all_values = values[b, :, : place + 1].double()
            scores = q.unflatten(0, (self.kv, -1)) @ all_keys.mT * 0.09
            expected = (scores.softmax(-1) @ all_values).flatten(0, 1)
            yield float((found[b].double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("case", "splits", "warps"),
    [
        ({"places": (0,), "kv": 2, "group": 4, "length": 160}, 4, 2),
        ({"places": (1, 159), "kv": 2, "group": 4, "length": 160}, 4, 2),
        ({"places": (31, 32), "kv": 1, "group": 4, "length": 224}, 2, 2),
        ({"places": (15, 100), "kv": 1, "group": 8, "length": 160}, 2, 1),
        ({"places": (77,), "kv": 1, "group": 1, "length": 96}, 2, 2),
        ({"places": (16, 65), "kv": 1, "group": 2, "length": 160}, 4, 1),
        ({"places": (300,), "kv": 1, "group": 2, "length": 320}, 32, 1),
    ],
)
def test_result_cache_and_peaks(case, splits, warps, kernel_device):
    case = Case(**case)
    errors = list(case.errors(*case.run(splits=splits, warps=warps)))
    assert len(errors) == len(case.places)
    assert max(errors) < 8e-3


def test_what_is_served(kernel_device):
    from quantload.runtime.kernels.decode_attention_warps import candidates, serves, settings_for

    x = torch.zeros(1, 8 * D, dtype=torch.bfloat16, device="meta")
    given = {
        "plain": True, "interleaved": False, "rotary": x.new_empty(9, D),
        "keys": x.new_empty(1, 2, 9, D), "q": x,
    }  # fmt: skip

    class OnCard:
        dtype, device = torch.bfloat16, torch.device("cuda")

    assert not serves([8, 2, D, 0], **given)
    given["q"] = OnCard
    assert serves([8, 2, D, 0], **given)
    for sizes in ([8, 2, 64, 0], [8, 2, D, 5], [6, 2, D, 0]):
        assert not serves(sizes, **given)
    for change in ({"plain": False}, {"interleaved": True}, {"rotary": x.new_empty(9, 64)},
                   {"keys": x.new_empty(1, 2, 9, D, dtype=torch.float8_e4m3fn)}):  # fmt: skip
        assert not serves([8, 2, D, 0], **{**given, **change})
    assert settings_for(8, 1024) == {"splits": 16, "warps": 4}
    assert settings_for(8, 8192)["splits"] == 16
    assert settings_for(500, 8192)["splits"] == 1
    assert {"splits": 8, "warps": 4} in list(candidates(8, 1024))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
@pytest.mark.parametrize("group", [1, 4, 8])
def test_both_kernels_agree_on_the_card(group, kernel_device):
    from quantload.runtime.kernels.decode_attention import HeadRule, decode_attention

    rows, kv, length = 3, 2, 700
    rule = HeadRule(heads=kv * group, kv_heads=kv, width=D, scale=0.09)
    places = torch.tensor([0, 333, 699], device="cuda")

    def random(*shape):
        return torch.randn(shape, device="cuda").bfloat16()

    q, k, v = random(rows, (group + 2) * kv * D).split([kv * group * D, kv * D, kv * D], -1)
    rotary, cache = (random(length, D), random(length, D)), [random(rows, kv, length, D)] * 2
    results = []
    for settings in ({"splits": 4, "block": 64, "warps": 4, "stages": 3},
                     {"splits": 8, "warps": 4}, {"splits": 1, "warps": 2},
                     {"splits": 32, "warps": 1}, {"splits": 4, "warps": 8}, None):  # fmt: skip
        kept = tuple(x.clone() for x in cache)
        locks = torch.zeros(rows * kv, dtype=torch.int32, device="cuda")
        peaks, sums = None, None
        if settings and "block" not in settings:
            peaks = torch.full((rows * kv,), float("nan"), device="cuda")
            sums = torch.full((rows * kv * group * D // 16,), float("nan"), device="cuda")
        out = decode_attention(
            q, k, v, rule, rotary=rotary, cache=kept, positions=places, locks=locks,
            settings=settings, peaks=peaks, sums=sums,
        )  # fmt: skip
        if peaks is not None:
            assert torch.equal(peaks, out.float().abs().reshape(rows * kv, -1).amax(1))
            expected = out.float().reshape(-1, 16).sum(1)
            assert torch.allclose(sums, expected, rtol=1e-5, atol=1e-6)
        assert not locks.any()
        results.append((out, *kept))
    for found in results[1:]:
        for one, other in zip(found, results[0], strict=True):
            assert float((one.float() - other.float()).norm() / other.float().norm()) < 5e-3
