"""AWQ's tensors, against packers that set field by field what the specification says."""

import numpy as np
import pytest
import torch
from int_packing import awq_tensors, memory_checkpoint, random_parts, values_of

from quantload.errors import FormatMismatch, MissingTensor, NonFiniteWeight
from quantload.loader.formats.awq_layout import AWQ_LEAVES, AwqLayout, awq_weight, decode_awq
from quantload.loader.formats.module_leaves import by_module


def described(parts, layout):
    checkpoint = memory_checkpoint({f"a.{leaf}": t for leaf, t in parts.items()}, {})
    return awq_weight(by_module(checkpoint, AWQ_LEAVES)["a"], layout, decided_by="the test")


def decoded(parts, layout, **options):
    weight = described(parts, layout)
    return decode_awq(parts, weight, layout, checkpoint_name="memory", **options)


def in_order(columns, group_size):
    return np.arange(columns) // (columns if group_size == -1 else group_size)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "columns", "group_size"), [(32, 64, 32), (8, 48, 16), (40, 24, -1), (16, 130, 65)]
)
def test_gemm(bits, dtype, rows, columns, group_size):
    groups = in_order(columns, group_size)
    parts = random_parts(rows, columns, groups[-1] + 1, bits, seed=bits, dtype=dtype)
    layout = AwqLayout(bits=bits, group_size=group_size, symmetric=False)
    found = decoded(awq_tensors(*parts, bits=bits), layout)
    assert found.inner is None
    assert torch.equal(found.dequantize(), values_of(*parts, groups, dtype))


@pytest.mark.parametrize(
    ("columns", "group_size", "padded"),
    [(64, 32, 8), (64, 32, 32), (64, 64, 8), (64, 64, 16), (128, 128, 8), (1152, 128, 16),
     (64, -1, 8), (128, 16, 8)],
)  # fmt: skip
def test_gemv(columns, group_size, padded):
    groups = in_order(columns, group_size)
    parts = random_parts(24, columns, groups[-1] + 1, 4)
    layout = AwqLayout(bits=4, group_size=group_size, symmetric=False, kind="gemv")
    tensors = awq_tensors(*parts, bits=4, kind="gemv", padded_groups=padded)
    found = decoded(tensors, layout)
    assert torch.equal(found.dequantize(), values_of(*parts, groups, torch.float16))


@pytest.mark.parametrize(
    ("leaf", "dtype"),
    [
        ("qzeros", torch.float16),
        ("scaled_zeros", torch.float16),
        ("scaled_zeros", torch.bfloat16),
    ],
)
@pytest.mark.parametrize(
    ("rows", "columns", "group_size", "padded"),
    [(8, 64, 64, 8), (4, 128, 32, 32), (12, 192, 64, 16), (4, 128, 128, 8), (16, 64, -1, 8)],
)
def test_gemv_fast(rows, columns, group_size, padded, leaf, dtype):
    groups = in_order(columns, group_size)
    fields, zeros, scales = random_parts(rows, columns, groups[-1] + 1, 4, dtype=dtype)
    layout = AwqLayout(bits=4, group_size=group_size, symmetric=False, kind="gemv_fast")
    tensors = awq_tensors(fields, zeros, scales, bits=4, kind="gemv_fast", padded_groups=padded)
    tensors[leaf] = tensors.pop("qzeros").to(dtype)
    found = decoded(tensors, layout)
    offsets = tensors[leaf][: groups[-1] + 1].T.double()
    exact = torch.tensor(fields).double() * scales.double()[:, groups] + offsets[:, groups]
    assert torch.equal(found.dequantize(), exact.float().to(dtype))  # exact in float32
    assert described(tensors, layout).dtype is dtype


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("stored", [True, False])
def test_without_zero_points(bits, stored):
    fields, _, scales = random_parts(32, 64, 2, bits)
    middle = np.full((32, 2), 1 << (bits - 1))
    layout = AwqLayout(bits=bits, group_size=32, symmetric=True)
    tensors = awq_tensors(fields, middle if stored else None, scales, bits=bits)
    found = decoded(tensors, layout)
    assert found.zero is None
    expected = values_of(fields, middle, scales, in_order(64, 32), torch.float16)
    assert torch.equal(found.dequantize(), expected)
    middle[3, 1] += 1
    with pytest.raises(FormatMismatch, match="the config says that there are none"):
        decoded(awq_tensors(fields, middle, scales, bits=bits), layout)


def test_divisors_of_the_input():
    groups = in_order(64, 32)
    parts = random_parts(16, 64, 2, 4)
    inner = torch.rand(64).half() + 0.5
    layout = AwqLayout(bits=4, group_size=32, symmetric=False)
    found = decoded(awq_tensors(*parts, bits=4), layout, inner=inner)
    assert torch.equal(found.inner, inner)
    assert torch.equal(found.dequantize(), values_of(*parts, groups, torch.float16) / inner)


# -- headers -------------------------------------------------------------------------------------

GEMM = AwqLayout(bits=4, group_size=32, symmetric=False)
GEMV = AwqLayout(bits=4, group_size=32, symmetric=False, kind="gemv")
FAST = AwqLayout(bits=4, group_size=32, symmetric=False, kind="gemv_fast")
PARTS = random_parts(32, 64, 2, 4)
SOUND = {
    "gemm": awq_tensors(*PARTS, bits=4),
    "gemv": awq_tensors(*PARTS, bits=4, kind="gemv", padded_groups=32),
    "gemv_fast": awq_tensors(*PARTS, bits=4, kind="gemv_fast", padded_groups=32),
}


@pytest.mark.parametrize(
    ("layout", "scheme"), [(GEMM, "W4A16_ASYM:g32"), (GEMV, "W4A16_ASYM:g32"), (FAST, "uint4:g32")]
)
def test_what_headers_say(layout, scheme):
    weight = described(SOUND[layout.kind], layout)
    assert weight.shape == (32, 64)
    assert str(weight.scheme) == scheme
    assert weight.leaves.keys() == {"qweight", "qzeros", "scales"}
    assert weight.encoding.startswith(f"AWQ {layout.kind}")


@pytest.mark.parametrize(
    ("layout", "change", "error", "message"),
    [
        (GEMM, {"qweight": None}, MissingTensor, r"`a.qweight` is missing"),
        (GEMM, {"scales": None}, MissingTensor, r"`a.scales` is missing"),
        (GEMM, {"qzeros": None}, MissingTensor, r"`a.qzeros` is missing"),
        (FAST, {"qzeros": None}, MissingTensor, r"`a.qzeros` is missing"),
        (GEMM, {"weight": torch.ones(2)}, FormatMismatch, "has both `weight` and `qweight`"),
        (GEMM, {"qweight": lambda t: t.short()}, FormatMismatch, "is `torch.int16`"),
        (FAST, {"qweight": lambda t: t.int()}, FormatMismatch, "is `torch.int32`"),
        (GEMM, {"qweight": lambda t: t[:-1]}, FormatMismatch, "63 input features"),
        (GEMM, {"qweight": lambda t: t[:32]}, FormatMismatch, r"expected `\(1, 32\)`"),
        (GEMM, {"qweight": lambda t: t[:, :-1]}, FormatMismatch, r"expected `\(64, 4\)`"),
        (GEMM, {"qweight": lambda t: t.T}, FormatMismatch, "4 input features"),
        (GEMM, {"qweight": lambda t: t[None]}, FormatMismatch, "expected two dimensions"),
        (GEMM, {"scales": lambda t: t[None]}, FormatMismatch, "expected two dimensions"),
        (GEMM, {"scales": lambda t: t[:1]}, FormatMismatch, r"expected `\(2, 32\)`"),
        (GEMM, {"scales": lambda t: t[:, :-1]}, FormatMismatch, "31 output features"),
        (GEMM, {"scales": lambda t: t[:, :0]}, FormatMismatch, "expected two dimensions"),
        (GEMM, {"qzeros": lambda t: t[:, :-1]}, FormatMismatch, r"expected `\(2, 4\)`"),
        (GEMM, {"qzeros": lambda t: t.float()}, FormatMismatch, "is `torch.float32`"),
        (GEMM, {"scaled_zeros": torch.ones(2, 32)}, FormatMismatch, "scaled_zeros` has no place"),
        (FAST, {"scaled_zeros": torch.ones(32, 32)}, FormatMismatch, "has no place"),
        (GEMV, {"qweight": lambda t: t[:, :-1]}, FormatMismatch, "56 input features"),
        (GEMV, {"scales": lambda t: t[:, :-1]}, FormatMismatch, r"a.scales` has shape"),
        (GEMV, {"scales": lambda t: t[:-1]}, FormatMismatch, r"a.scales` has shape"),
        (GEMV, {"qzeros": lambda t: t[:, :-1]}, FormatMismatch, r"expected `\(32, 4\)`"),
        (FAST, {"qweight": lambda t: t[:-1]}, FormatMismatch, r"a.scales` has shape"),
        (FAST, {"qweight": lambda t: t[:, :-32]}, FormatMismatch, "expected a multiple of 64"),
        (FAST, {"qzeros": lambda t: t[:-1]}, FormatMismatch, r"expected `\(32, 32\)`"),
        (FAST, {"scales": lambda t: t.T[:16]}, FormatMismatch, r"a.scales` has shape"),
    ],
)  # fmt: skip
def test_headers_that_do_not_fit(layout, change, error, message):
    parts = dict(SOUND[layout.kind])
    for leaf, made in change.items():
        if made is None:
            del parts[leaf]
        else:
            parts[leaf] = made(parts[leaf]) if callable(made) else made
    with pytest.raises(error, match=message) as caught:
        described(parts, layout)
    assert "memory" in str(caught.value)


@pytest.mark.parametrize("layout", [GEMV, FAST])
def test_other_kinds_have_4_bits(layout):
    wrong = AwqLayout(bits=8, group_size=32, symmetric=False, kind=layout.kind)
    with pytest.raises(FormatMismatch, match="has 8 bits, expected one of 4"):
        described(SOUND[layout.kind], wrong)


@pytest.mark.parametrize("kind", ["gemv", "gemv_fast"])
def test_one_kind_is_never_read_as_another(kind):
    for other in {"gemm", "gemv", "gemv_fast"} - {kind}:
        layout = AwqLayout(bits=4, group_size=32, symmetric=False, kind=kind)
        with pytest.raises(FormatMismatch):
            described(SOUND[other], layout)


@pytest.mark.parametrize("layout", [GEMM, GEMV, FAST])
@pytest.mark.parametrize("leaf", ["scales", "qzeros"])
def test_values_that_are_no_numbers(layout, leaf):
    parts = {name: tensor.clone() for name, tensor in SOUND[layout.kind].items()}
    if parts[leaf].dtype.is_floating_point:
        parts[leaf][0, 0] = float("inf")
        with pytest.raises(NonFiniteWeight, match=rf"tensor `a.{leaf}` holds NaN or infinity"):
            decoded(parts, layout)
        parts[leaf].zero_()
        with pytest.raises(FormatMismatch, match=rf"tensor `a.{leaf}` is all zero"):
            decoded(parts, layout)
    parts["scales"].zero_()
    with pytest.raises(FormatMismatch, match=r"tensor `a.scales` is all zero"):
        decoded(parts, layout)


@pytest.mark.parametrize("layout", [GEMV, FAST])
def test_scales_of_groups_that_are_not_there(layout):
    parts = {name: tensor.clone() for name, tensor in SOUND[layout.kind].items()}
    parts["scales"][(5, 2) if layout.kind == "gemv" else (2, 5)] = 0.01
    with pytest.raises(FormatMismatch, match="has scales of more than 2 groups"):
        decoded(parts, layout)
