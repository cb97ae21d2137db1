"""The streamed product of one token and e4m3 codes: source and PTX, carried out on the CPU."""

import pytest
import simt_shared
import torch

# kernel files are imported as those tests do that interpret them
pytestmark = pytest.mark.usefixtures("kernel_device")
E4M3 = torch.float8_e4m3fn


class Case:
    """A weight, what it meets, and what must come of it in float64."""

    def __init__(self, n, k):
        self.n, self.k, self.blocks = n, k, k // 128
        self.codes, self.scales = torch.randn(n, k).to(E4M3), torch.rand(n) * 0.1
        self.x, self.hidden, self.weight, self.bias = (
            torch.randn(i).bfloat16() for i in (k, n, n, n)
        )
        self.squares, self.x_scale = torch.rand(k // 16), torch.tensor([0.3])
        self.peaks = self.x.float().abs().reshape(-1, 32).amax(1)

    def product(self, *, values=True):
        scale = (self.peaks.max() / 448).double() if values else self.x_scale.double()
        x = self.x.double() / scale if values else self.x.double()
        return self.codes.double() @ x.to(E4M3).double() * self.scales.double() * scale

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
        values=True,
        **epilogue,
    ):
        from quantload.runtime.kernels.rounded_stream import shared_bytes

        kernel, machine = simt_shared.load(
            "rounded_stream", "rounded_stream", "warp_streams", "stream_epilogues", late=late
        )
        x = self.x if values else self.x.to(E4M3).view(torch.int32)
        x, x_scale, peaks_in, squares_in, codes, w_scale, hidden, weight = map(
            machine.put,
            (x, self.x_scale, self.peaks, self.squares, self.codes, self.scales, self.hidden,
             self.weight),
        )  # fmt: skip
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
        layout = {
            "blocks": self.blocks,
            "units": units,
            "tiles": tiles,
            "slots": slots,
            "beside": beside,
        }
        all_units = self.n // (16 * tiles)
        machine.run(
            kernel, -(-all_units // units), x, x_scale, peaks_in, squares_in, codes, w_scale,
            machine.put(self.bias) if bias else None, out, hidden, weight, scaled, squares, peaks,
            torch.tensor(self.k), self.blocks, all_units, self.n // 2, self.k, 1e-5,
            UNITS=units, J=-(-self.blocks // beside), JX=-(-self.blocks // warps),
            R=tiles, S=slots, WK=beside,
            PEAKS_IN=len(self.peaks) if values else 0, LATE=False, EARLY=False, num_warps=warps,
            EVEN=self.blocks % beside == 0,
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


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize(
    ("n", "settings"),
    [
        (32, {"warps": 1, "beside": 1, "bias": True}),
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
def test_product(n, settings, values):
    case = Case(n, 512)
    bias = case.bias.double() * settings.get("bias", False)
    close(case.run(**settings, values=values)[0], case.product(values=values) + bias)


def test_blocks_that_warps_do_not_share_evenly():
    case = Case(16, 384)
    case.codes[:, -128:] = (case.codes[:, -128:].float() * 8).to(E4M3)  # they are there once
    close(case.run(warps=2)[0], case.product())


@pytest.mark.parametrize("bias", [False, True])
def test_gated_unit(bias):
    case = Case(64, 256)
    product = case.product() + case.bias.double() * bias
    gate, up = (part.bfloat16().double() for part in product.chunk(2))
    expected = (gate * gate.sigmoid()).bfloat16().double() * up
    found, *_, peaks = case.run(tiles=2, warps=2, beside=1, GLU=True, bias=bias)
    close(found, expected)
    assert torch.equal(peaks, found.float().abs().reshape(-1, 16).amax(1))


@pytest.mark.parametrize("offset", [False, True])
def test_sum_with_the_stream_and_norm_behind_a_product(offset):
    case = Case(32, 512)
    hidden, scaled, squares, peaks = case.run(RESIDUAL=True, tiles=2, OFFSET=offset)
    close(hidden, case.hidden.double() + case.product())
    close(scaled, hidden.double() * (case.weight.double() + offset))
    close(squares, hidden.double().reshape(-1, 16).square().sum(1), 1e-6)
    assert torch.equal(peaks, scaled.float().abs().reshape(-1, 16).amax(1))
    rms = (case.squares.double().sum() / case.k + 1e-5).sqrt()
    close(case.run(NORMED=True)[0], case.product() / rms)


def test_zeros_and_what_is_not_finite():
    case = Case(16, 256)
    case.x.zero_(), case.peaks.zero_()
    assert not case.run()[0].any()
    case.peaks[3] = float("inf")
    assert case.run()[0].isnan().all()
