"""Which rows of a fused layer a member is."""

import torch
from torch import nn

from quantload.layers.placement import fused_rows
from quantload.layers.stack import LinearStack, StackView
from quantload.quant.scheme import parse_scheme


def block(*schemes):
    """A module with a stack of three members, [10, 32] in all."""
    stack = LinearStack(
        32,
        [4, 2, 4],
        bias=False,
        scheme=[parse_scheme(name) for name in schemes],
        dtype=torch.float32,
        prefix="block.stack",
    )
    made = nn.ModuleDict({"stack": stack})
    for slot, name in enumerate("qkv"):
        made[name] = StackView(stack, slot)
    return nn.ModuleDict({"block": made})


def test_rows_follow_one_another():
    found = fused_rows(block("W8A16:channel", "W8A16:channel", "W8A16:channel"))
    assert {name: rows.rows for name, rows in found.items()} == {
        "block.q": (0, 4),
        "block.k": (4, 6),
        "block.v": (6, 10),
    }
    assert str(found["block.k"]) == "rows 4..6 of block.stack 10x32, slot 1 of 3"


def test_members_of_unlike_schemes_say_so():
    found = fused_rows(block("W8A16:channel", "W4A16:g32", "W8A16:channel"))
    assert found["block.q"].rows == (0, 4)
    assert str(found["block.q"]).endswith(
        "not one product: schemes differ: W8A16:channel and W4A16:g32"
    )
