"""What GPTQ and AWQ have in common: schemes, groups, signs."""

import pytest
import torch

from quantload.loader.formats.int_fields import group_count, int_scheme, signed


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({}, "W4A16:g32"),
        ({"group_size": 128}, "W4A16"),
        ({"symmetric": False}, "W4A16_ASYM:g32"),
        ({"bits": 8, "group_size": 128}, "W8A16"),
        ({"bits": 3}, "W3A16:g32"),
        ({"group_size": -1}, "W4A16:channel"),
        ({"group_size": 512}, "W4A16:channel"),
        ({"is_signed": False, "symmetric": False}, "uint4:g32"),
    ],
)
def test_schemes(values, name):
    scheme = int_scheme(
        **{"bits": 4, "group_size": 32, "columns": 256, "symmetric": True, **values}
    )
    assert str(scheme) == name
    assert scheme.weight.symmetric is values.get("symmetric", True)


def test_a_scheme_knows_that_columns_have_numbers():
    scheme = int_scheme(bits=4, group_size=32, columns=64, symmetric=True, act_order=True)
    assert scheme.weight.act_order
    assert scheme != int_scheme(bits=4, group_size=32, columns=64, symmetric=True)


@pytest.mark.parametrize(
    ("group_size", "columns", "count"), [(32, 64, 2), (32, 65, 3), (-1, 65, 1), (128, 65, 1)]
)
def test_group_counts(group_size, columns, count):
    assert group_count(group_size, columns) == count


@pytest.mark.parametrize("bits", range(2, 9))
def test_signed_fields(bits):
    fields = torch.arange(1 << bits).to(torch.uint8)
    assert torch.equal(signed(fields, bits).int(), fields.int() - (1 << (bits - 1)))
