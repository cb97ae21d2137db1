"""Settings and refusals of the products of one token; on a card, results against float64."""

from dataclasses import replace

import pytest
import torch

E4M3 = torch.float8_e4m3fn
SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (96, 768), (32, 256))
on_card = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card"),
]


def nibbles(n=64, k=512):
    from quantload.runtime.kernels.nibble_weight import NibbleWeight

    words = torch.zeros(k // 256, n, 64, dtype=torch.int16)
    scale = torch.zeros(k // 256, n, dtype=torch.int32)
    none = (None,) * 5
    return NibbleWeight(words, scale, *none, "int", "bf16", k, 128, torch.bfloat16)


def test_refusals(kernel_device):
    from quantload.runtime.kernels.one_token import why_not
    from quantload.runtime.kernels.rounded_weight import PackedRounded

    weight = nibbles()
    if not torch.cuda.is_available():
        assert why_not(weight) == "a weight on cpu"
    for change in ({"form": "uint"}, {"kind": "fp16"}, {"group": 64}, {"features": 511},
                   {"outer": torch.ones(64)}, {"dtype": torch.float16},
                   {"columns": torch.arange(512)}):  # fmt: skip
        assert why_not(replace(weight, **change)) not in ("", "a weight on cpu"), change
    codes = PackedRounded(torch.zeros(64, 256, dtype=E4M3), torch.ones(64), None, 0, 1, False)
    for change in ({"codes": torch.zeros(64, 256, dtype=torch.int8)}, {"group": 128},
                   {"codes": torch.zeros(48, 256, dtype=E4M3)}):  # fmt: skip
        assert why_not(replace(codes, **change)) not in ("", "a weight on cpu"), change
    assert "Tensor" in why_not(torch.zeros(2))


@pytest.mark.parametrize("nibble", [True, False])
def test_settings_share_rows_out_and_fit(kernel_device, nibble):
    from quantload.runtime.kernels import nibble_stream, rounded_stream
    from quantload.runtime.kernels.one_token import candidates, rule

    bytes_of = (nibble_stream if nibble else rounded_stream).shared_bytes
    for rows, features in SHAPES:
        for glu in (False, True):
            blocks = features // (256 if nibble else 128)
            asked = {"glu": glu, "nibbles": nibble}
            made = [rule(rows, features, 132, **asked), *candidates(rows, features, **asked)]
            for s in made:
                units = -(-rows // (16 * s["tiles"] * 132 * s["each"]))
                layout = {k: s[k] for k in ("tiles", "slots", "warps", "beside")}
                assert bytes_of(blocks=blocks, units=units, **layout) + 1024 <= 232448
                assert rows % (16 * s["tiles"]) == 0
                assert s["warps"] % s["beside"] == 0
                assert not glu or s["tiles"] == 2
    large = rule(28672, 4096, 132, glu=True, nibbles=nibble)
    assert large["kb"] > 114, "two of its programs do not fit a processor"


class Card:
    """A weight on the card, what it meets, and what must come of it in float64."""

    def __init__(self, n, k, *, nibble):
        from quantload.runtime.kernels.nibble_layout import pack_nibbles
        from quantload.runtime.kernels.one_token import Waiting
        from quantload.runtime.kernels.rounded_weight import PackedRounded

        self.nibble = nibble
        if nibble:
            codes = torch.randint(16, (n, k), dtype=torch.uint8, device="cuda")
            scales = (torch.rand(n, k // 128, device="cuda") * 0.02 + 0.001).bfloat16()
            raw = scales.view(torch.int16).reshape(n, -1, 2).transpose(0, 1).contiguous()
            words = pack_nibbles(codes, columns=64, fill=8)
            scale = raw.view(torch.int32)[..., 0].contiguous()
            self.weight = replace(nibbles(n, k), words=words, scale=scale)
            self.dense = (codes.double() - 8) * scales.double().repeat_interleave(128, 1)
        else:
            codes, scale = torch.randn(n, k, device="cuda").to(E4M3), torch.rand(n, device="cuda")
            self.weight = PackedRounded(codes, scale * 0.1, None, 0, 1, False)
            self.dense = codes.double() * scale.double()[:, None] * 0.1
        self.stream = torch.randn(1, k, device="cuda").bfloat16()
        values = (self.stream.float() * 0.7).bfloat16()
        peaks = values.float().abs().reshape(-1, 16).amax(1)
        squares = self.stream.float().reshape(-1, 16).square().sum(1)
        sums = values.float().reshape(-1, 16).sum(1)
        self.x = Waiting(values, peaks, sums, self.stream, squares, 1e-5)
        self.hidden = torch.randn(1, n, device="cuda").bfloat16()
        self.bias = torch.randn(n, device="cuda").bfloat16()

    def product(self):
        x = self.x.values[0].double()
        if not self.nibble:  # any rounding of what lies between two codes may be found
            scale = self.x.peaks.max().double() / 448
            x = (x.float() * (448.0 / self.x.peaks.max())).to(E4M3).double() * scale
        rms = (self.stream.double().square().mean() + 1e-5).sqrt()
        return self.dense @ x / rms + self.bias.double()


def close(found, expected, error=6e-3):
    assert float((found.double() - expected).norm() / expected.norm()) <= error


def poison(*sizes):
    """Fill memory that is free with NaN."""
    for size in sizes:
        torch.full((1, size), float("nan"), device="cuda", dtype=torch.bfloat16)
        torch.full((size // 16,), float("nan"), device="cuda")


@pytest.mark.parametrize("nibble", [True, False])
@pytest.mark.parametrize(("n", "k"), SHAPES)
class TestOnTheCard:
    pytestmark = on_card

    def test_product(self, n, k, nibble, kernel_device):
        from quantload.runtime.kernels.one_token import product

        card = Card(n, k, nibble=nibble)
        poison(n, n)
        found = product(card.weight, card.x, card.bias)
        close(found[0], card.product())
        assert torch.equal(found, product(card.weight, card.x, card.bias))
        itself = product(card.weight, replace(card.x, sums=None), card.bias)
        close(itself, found.double(), 2e-3)

    def test_gated(self, n, k, nibble, kernel_device):
        from quantload.runtime.kernels.one_token import gated_product

        card = Card(n, k, nibble=nibble)
        poison(n, n)
        found = gated_product(card.weight, card.x, card.bias, peaks=True)
        gate, up = (part.bfloat16().double() for part in card.product().chunk(2))
        close(found.values[0], (gate * gate.sigmoid()).bfloat16().double() * up)
        assert torch.equal(found.peaks, found.values.float().abs().reshape(-1, 16).amax(1))

    def test_added(self, n, k, nibble, kernel_device):
        from quantload.runtime.kernels.add_norm import NormWeight
        from quantload.runtime.kernels.one_token import added_product

        card = Card(n, k, nibble=nibble)
        norm = NormWeight(torch.rand(n, device="cuda").bfloat16(), 1e-5, late=True, offset=False)
        poison(n, n)
        found = added_product(card.weight, card.x, card.bias, card.hidden, norm, peaks=True)
        close(found.hidden[0], card.hidden[0].double() + card.product())
        close(found.values[0], found.hidden[0].double() * norm.weight.double())
        close(found.squares, found.hidden.double().reshape(-1, 16).square().sum(1), 1e-6)
        assert torch.equal(found.peaks, found.values.float().abs().reshape(-1, 16).amax(1))
        told = added_product(card.weight, card.x, card.bias, card.hidden, norm, peaks=False)
        assert told.peaks is None
        assert torch.equal(told.values, found.values)
        close(told.sums, found.values.double().reshape(-1, 16).sum(1), 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
def test_graphs_and_compiled_code(kernel_device):
    from quantload.runtime.kernels.one_token import product

    card = Card(4096, 4096, nibble=True)
    expected = product(card.weight, card.x, card.bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = product(card.weight, card.x, card.bias)
    found.fill_(float("nan"))
    graph.replay()
    assert torch.equal(found, expected)
    compiled = torch.compile(lambda: product(card.weight, card.x, card.bias), fullgraph=True)
    assert torch.equal(compiled(), expected)
