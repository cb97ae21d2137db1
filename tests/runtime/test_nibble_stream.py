"""The streamed product of one token and nibbles: its source and PTX, carried out on the CPU."""

import pytest
import simt_shared
import torch

# kernel files are imported as those tests do that interpret them
pytestmark = pytest.mark.usefixtures("kernel_device")


class Case:
    """A weight, what it meets, and what must come of it in float64."""

    def __init__(self, n, k):
        self.n, self.k, self.blocks = n, k, k // 256
        self.codes = torch.randint(16, (n, k), dtype=torch.uint8)
        self.scales = (torch.rand(n, k // 128) * 0.1 + 0.01).bfloat16()
        self.x, self.hidden, self.weight, self.bias = (
            torch.randn(i).bfloat16() for i in (k, n, n, n)
        )
        self.squares = torch.rand(k // 16)

    @property
    def product(self):
        scales = self.scales.double().repeat_interleave(128, 1)
        return ((self.codes.double() - 8) * scales) @ self.x.double()

    def run(
        self,
        *,
        tiles=1,
        slots=2,
        warps=2,
        units=2,
        beside=2,
        late=False,
        bias=False,
        told=False,
        **epilogue,
    ):
        from quantload.runtime.kernels.nibble_layout import pack_nibbles
        from quantload.runtime.kernels.nibble_stream import shared_bytes

        kernel, machine = simt_shared.load(
            "nibble_stream",
            "nibble_stream",
            "warp_streams",
            "stream_epilogues",
            "nibble_fragments",
            late=late,
        )
        raw = self.scales.view(torch.int16).reshape(self.n, -1, 2).transpose(0, 1).contiguous()
        words = pack_nibbles(self.codes, columns=64, fill=8)
        x, words, scale = map(machine.put, (self.x, words, raw.view(torch.int32)[..., 0]))
        sums = machine.put(self.x.float().reshape(-1, 16).sum(1)) if told else None
        hidden, weight, squares_in = map(machine.put, (self.hidden, self.weight, self.squares))
        poison = torch.full((self.n,), float("nan"))
        out, scaled = machine.put(poison.bfloat16()), machine.put(poison.bfloat16())
        squares, peaks = (machine.put(poison[: self.n // 16]) for _ in range(2))
        asked = {
            "GLU": False,
            "RESIDUAL": False,
            "OFFSET": False,
            "NORMED": False,
            "PEAKS": True,
        } | epilogue
        all_units = self.n // (16 * tiles)
        layout = {
            "blocks": self.blocks,
            "units": units,
            "tiles": tiles,
            "slots": slots,
            "beside": beside,
        }
        bias = machine.put(self.bias) if bias else None
        machine.run(
            kernel, -(-all_units // units), x, sums, words, scale, bias, out, squares_in, hidden,
            weight, scaled, squares, peaks,
            self.n, self.blocks, all_units, self.n // 2, self.k, 1e-5,
            UNITS=units, J=-(-self.blocks // beside), JX=-(-self.blocks // warps),
            R=tiles, S=slots, WK=beside,
            EVEN=self.blocks % beside == 0, LATE=False, EARLY=False, num_warps=warps,
            TILES_IN=max(32, 1 << (self.k // 16 - 1).bit_length()),
            SIZE=-(-shared_bytes(**layout, warps=warps) // 1024) + 1, **asked,
        )  # fmt: skip
        assert machine.worst_banks == 1
        count = self.n // 2 if asked["GLU"] else self.n
        results = (
            (out, count),
            (scaled, self.n),
            (squares, self.n // 16),
            (peaks, count // 16),
        )
        return [machine.get(*part) for part in results]


def close(found, expected, error=4e-3):
    assert float((found.double() - expected).norm() / expected.norm()) <= error


@pytest.mark.parametrize(
    ("n", "settings"),
    [
        (32, {"warps": 1, "beside": 1, "bias": True}),
        (32, {"told": True}),
        (64, {"tiles": 2, "slots": 1, "warps": 2, "units": 2, "late": True}),
        (80, {"warps": 4, "units": 3, "slots": 3, "late": True}),
        (
            48,
            {
                "tiles": 3,
                "slots": 3,
                "warps": 2,
                "beside": 1,
                "units": 1,
                "late": True,
                "bias": True,
            },
        ),
    ],
)
def test_product(n, settings):
    case = Case(n, 512)
    bias = case.bias.double() * settings.get("bias", False)
    close(case.run(**settings)[0], case.product + bias)


def test_blocks_that_warps_do_not_share_evenly():
    case = Case(16, 768)
    case.x[-256:] *= 100  # the last block is there once
    close(case.run(warps=2)[0], case.product)


@pytest.mark.parametrize("bias", [False, True])
def test_gated_unit(bias):
    case = Case(64, 256)
    product = case.product + case.bias.double() * bias
    gate, up = (part.bfloat16().double() for part in product.chunk(2))
    expected = (gate * gate.sigmoid()).bfloat16().double() * up
    found, *_, peaks = case.run(tiles=2, warps=2, beside=1, GLU=True, bias=bias)
    close(found, expected)
    assert torch.equal(peaks, found.float().abs().reshape(-1, 16).amax(1))


@pytest.mark.parametrize("offset", [False, True])
def test_sum_with_the_stream_and_norm_behind_a_product(offset):
    case = Case(32, 512)
    hidden, scaled, squares, peaks = case.run(RESIDUAL=True, tiles=2, OFFSET=offset)
    close(hidden, case.hidden.double() + case.product)
    close(scaled, hidden.double() * (case.weight.double() + offset))
    close(squares, hidden.double().reshape(-1, 16).square().sum(1), 1e-6)
    assert torch.equal(peaks, scaled.float().abs().reshape(-1, 16).amax(1))
    rms = (case.squares.double().sum() / case.k + 1e-5).sqrt()
    close(case.run(NORMED=True)[0], case.product / rms)


def test_equal_numbers_leave_no_excess():
    """128 + code is up to 30 times as large as what is asked for."""
    case = Case(16, 512)
    case.x.fill_(1.0)
    close(case.run()[0], case.product.bfloat16().double(), 1e-6)


def test_what_is_not_finite_stays_in_its_row():
    case = Case(16, 256)
    case.scales[5] = float("nan")
    found = case.run(warps=1, beside=1)[0]
    assert found.isnan().nonzero().flatten().tolist() == [5]
