"""Words of four codes: where each code lies, and what it becomes in a kernel."""

import pytest
import torch

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def random_codes(*shape):
    return torch.randint(
        0, 16, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )


@pytest.fixture
def layout(kernel_device):
    from quantload.runtime.kernels import nibble_layout

    return nibble_layout


@pytest.mark.parametrize("columns", [16, 64])
def test_a_code_lies_where_the_formula_says(layout, columns):
    codes = random_codes(3, 4 * columns * 2)
    words = layout.pack_nibbles(codes, columns=columns)
    assert words.shape == (2, 3, columns)
    assert words.dtype == torch.int16
    for block, slot, row, i in [(0, 0, 0, 0), (1, 3, 2, columns - 1), (1, 1, 0, 5), (0, 2, 1, 7)]:
        code = codes[row, (4 * block + slot) * columns + i]
        assert (int(words[block, row, i]) >> 4 * slot) & 15 == int(code)


def test_packing_is_undone_also_where_columns_are_missing_and_over_experts(layout):
    codes = random_codes(2, 5, 100)
    words = layout.pack_nibbles(codes, columns=32, fill=8)
    assert words.shape == (2, 1, 5, 32)
    assert torch.equal(layout.unpack_nibbles(words, 100), codes)
    assert (layout.unpack_nibbles(words, 128)[..., 100:] == 8).all()


FORMS = ("int", "uint", "zero", "e2m1", "table")


@pytest.mark.parametrize("form", FORMS)
def test_words_become_values(layout, kernel_device, form):
    # in the interpreter bfloat16 is held as raw integers
    dtypes = [torch.bfloat16, torch.float16] if kernel_device.type == "cuda" else [torch.float32]
    for dtype in dtypes:
        check_values(layout, kernel_device, form, dtype)


def check_values(layout, device, form, dtype):
    import triton
    import triton.language as tl

    global unpack4, table_registers
    unpack4, table_registers = layout.unpack4, layout.table_registers

    @triton.jit
    def kernel(words, zero, table, out, FORM: tl.constexpr, INTERPRETED: tl.constexpr):
        n = tl.arange(0, 16)[:, None]
        i = tl.arange(0, 16)[None, :]
        registers = table_registers(table, FORM, INTERPRETED)
        tile = tl.load(words + n * 16 + i)
        z = tl.load(zero + n)
        zeros = (z, z + 1, z + 2, z + 3)
        a, b, c, d = unpack4(tile, zeros, registers, FORM, out.dtype.element_ty, INTERPRETED)
        out += n * 64 + i
        tl.store(out, a)
        tl.store(out + 16, b)
        tl.store(out + 32, c)
        tl.store(out + 48, d)

    codes = random_codes(16, 64)
    codes[0], codes[1] = (
        torch.arange(64) % 16,
        (torch.arange(64) // 4) % 16,
    )  # each code in each slot
    zero = torch.arange(0, 61, 4, dtype=torch.uint8)
    of_slot = torch.arange(4).repeat_interleave(16)
    nf4 = torch.linspace(-1, 1.3, 16)
    half = torch.bfloat16 if dtype == torch.float32 else dtype
    expected = {
        "int": codes.double() - 8,
        "uint": codes.double(),
        "zero": codes.double() - zero.double()[:, None] - of_slot,
        "e2m1": torch.tensor(E2M1).double()[codes.long()],
        "table": nf4.to(half).double()[codes.long()],
    }[form]
    out = torch.full((16, 64), float("nan"), dtype=dtype, device=device)
    kernel[(1,)](
        layout.pack_nibbles(codes, columns=16).to(device),
        zero.to(device),
        layout.lookup_table(nf4, half).to(device),
        out,
        FORM=form,
        INTERPRETED=layout.INTERPRETED,
    )
    assert torch.equal(out.double().cpu(), expected), form


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_words_become_values_on_the_card(layout, form):
    for dtype in (torch.bfloat16, torch.float16):
        check_values(layout, torch.device("cuda"), form, dtype)
