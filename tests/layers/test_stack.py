"""The memo of a stack: shared only where sharing is right."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from quantload.layers.stack import LinearStack, StackView, share_within
from quantload.quant.scheme import DENSE

CPU = torch.device("cpu")


class Block(nn.Module):
    """Two members that read x; in between something may happen."""

    def __init__(self, *, proven: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stack = LinearStack(
            8, [4, 6], bias=True, scheme=DENSE, dtype=torch.float32, prefix="stack", proven=proven
        )
        self.weights = torch.randn(10, 8), torch.randn(10)
        for leaf, whole in zip(("weight", "bias"), self.weights, strict=True):
            for slot, part in enumerate(whole.split([4, 6])):
                self.stack.receive(leaf, slot, part)
        self.stack.finish(CPU)
        self.one, self.two = StackView(self.stack, 0), StackView(self.stack, 1)
        self.products = 0
        self.stack.gemm.register_forward_hook(self._count)
        share_within(self, self.stack)

    def _count(self, *_: object) -> None:
        self.products += 1

    def expected(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, *self.weights)

    def forward(self, x: Tensor, write: bool = False) -> Tensor:
        first = self.one(x)
        if write:
            x.mul_(2)
        return torch.cat([first, self.two(x)], dim=-1)


def test_one_product_for_one_input() -> None:
    block, x = Block(), torch.randn(3, 8)
    assert torch.equal(block(x), block.expected(x))
    assert block.products == 1


def test_a_write_between_members_is_seen() -> None:
    block, x = Block(proven=True), torch.randn(3, 8)
    before = block.expected(x)[:, :4]
    result = block(x, write=True)
    assert torch.equal(result, torch.cat([before, block.expected(x)[:, 4:]], dim=-1))
    assert block.products == 2


@pytest.mark.parametrize(("proven", "products"), [(True, 1), (False, 2)])
def test_inference_tensors_are_shared_only_if_proven(proven: bool, products: int) -> None:
    block = Block(proven=proven)
    with torch.inference_mode():
        x = torch.randn(3, 8)
        result = block(x)
    assert torch.equal(result, block.expected(x))
    assert block.products == products


def test_an_unproven_write_in_inference_mode_is_right() -> None:
    block = Block()
    with torch.inference_mode():
        x = torch.randn(3, 8)
        before = block.expected(x)[:, :4]
        result = block(x, write=True)
        assert torch.equal(result, torch.cat([before, block.expected(x)[:, 4:]], dim=-1))


def test_a_slice_is_handed_out_once() -> None:
    block, x = Block(), torch.randn(3, 8)
    first, again = block.one(x), block.one(x)
    assert first.data_ptr() != again.data_ptr()
    assert torch.equal(first, again)
    assert block.products == 2


def test_equal_values_of_another_object_are_computed_again() -> None:
    block, x = Block(), torch.randn(3, 8)
    block.one(x)
    block.two(x.clone())
    assert block.products == 2


def test_nothing_is_kept_after_the_parent_returns() -> None:
    class Partial(Block):
        def forward(self, x: Tensor, write: bool = False) -> Tensor:
            del write
            return self.one(x)

    block, x = Partial(), torch.randn(3, 8)
    block(x)
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None


def test_nothing_is_kept_after_an_exception() -> None:
    class Failing(Block):
        def forward(self, x: Tensor, write: bool = False) -> Tensor:
            self.one(x)
            raise RuntimeError("out of memory")

    block, x = Failing(), torch.randn(3, 8)
    with pytest.raises(RuntimeError, match="out of memory"):
        block(x)
    assert not block.stack._memos


def test_views_are_copied_with_their_stack() -> None:
    import copy

    block, x = Block(), torch.randn(3, 8)
    twin = copy.deepcopy(block)
    assert twin.one._stack is twin.stack
    assert torch.equal(twin(x), block(x))
