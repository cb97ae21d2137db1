"""Launch settings of weights that are unpacked in registers: what rule and offers keep to."""

import pytest
import torch

from quantload.runtime.kernels.pairs_settings import fits, hopper_candidates, hopper_rule

SHARED, PROCESSORS = 232_448, 132
SHAPES = ((16, 64), (4096, 1024), (6144, 4096), (4096, 14336), (57344, 8192), (128256, 4100))


@pytest.mark.parametrize("sums", [0, 1, 2])
@pytest.mark.parametrize("x_bytes", [1, 2])
@pytest.mark.parametrize("columns", [16, 32, 64, 128])
def test_the_rule_fits_every_shape(columns, x_bytes, sums):
    for n, k in SHAPES:
        for m in (1, 2, 16, 33, 64, 65, 200, 600):
            found = hopper_rule(
                m, n, k, columns=columns, processors=PROCESSORS, shared=SHARED, x_bytes=x_bytes,
                sums=sums,
            )  # fmt: skip
            assert fits(found, columns, SHARED, x_bytes), (m, n, k, found)
            assert 1 <= found["splits"] <= max(1, -(-k // (2 * columns))), (m, n, k, found)
            assert found["columns"] <= columns
            assert columns % found["columns"] == 0
            assert found["rows"] % (16 * found["warps"]) == 0  # a warp of wgmma has 16 rows
            assert found["tokens"] >= min(m, 64)
            # sums that a thread holds: with the operands they must fit into 255 registers
            held = found["rows"] * found["tokens"] * (1 + sums) // (32 * found["warps"])
            assert held <= 192, (m, n, k, found)


@pytest.mark.parametrize("m", [1, 16, 64, 256])
def test_offers_fit_and_differ(m):
    offers = list(hopper_candidates(m, 6144, 4096, 128, 2))
    assert len(offers) > 10
    assert len({tuple(sorted(offer.items())) for offer in offers}) == len(offers)
    assert all(fits(offer, 128, SHARED, 2) for offer in offers)


def test_columns_of_a_slice():
    from quantload.runtime.kernels.byte_layout import slice_columns as of_bytes
    from quantload.runtime.kernels.nibble_rounded_layout import slice_columns as of_nibbles

    assert [of_bytes(4096, group) for group in (0, 256, 128, 64, 96, 16)] == [
        128,
        128,
        64,
        64,
        32,
        16,
    ]
    assert [of_nibbles(4096, group) for group in (0, 128, 64, 96)] == [128, 128, 64, 32]
    assert of_bytes(4224, 0) == of_nibbles(4224, 0) == 64  # padded less than with 128


def test_settings_of_another_card_do_not_serve():
    """What was measured for a wider ring than a card holds leaves the choice to the rule."""
    from quantload.runtime import launch_settings
    from quantload.runtime.kernels import byte_settings

    large = {"rows": 128, "tokens": 128, "warps": 8, "stages": 8, "splits": 1, "step": 64}
    with launch_settings.trying("byte int channel", large):
        device = torch.device("cpu")
        found = byte_settings.settings_for("int", 0, device, 100, 512, 1024, 64)
        assert dict(found) == large  # of the interpreter, which holds anything
        small = dict(large, step=128)
    with launch_settings.trying("byte int channel", small):
        found = byte_settings.settings_for("int", 0, device, 100, 512, 1024, 64)
        assert found["step"] == 64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_inputs_are_laid_out_for_the_copy_engine(dtype):
    """Values stay, zeros follow them; rows start at multiples of 16 bytes."""
    from quantload.runtime.kernels.pairs_hopper import _for_tma

    wide = torch.arange(7 * 80).remainder(100).reshape(7, 80).to(dtype)
    cuts = (wide, wide[:, :65], wide[:, 3:67], wide[:, ::2], wide[:1].expand(4, 80), wide.t())
    for x in cuts:
        found = _for_tma(x)
        k = x.shape[1]
        assert torch.equal(found[:, :k].float(), x.float())
        assert not found[:, k:].float().any()
        assert found.stride(1) == 1
        assert found.stride(0) >= found.shape[1]
        assert found.stride(0) * found.element_size() % 16 == 0
        assert found.data_ptr() % 16 == 0
    assert _for_tma(wide) is wide
