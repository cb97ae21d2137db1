"""The memo of a stack: shared only where sharing is right."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

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
        self._products: list[None] = []  # appending is safe in threads, adding is not
        self.stack.gemm.register_forward_hook(self._count)
        share_within(self, self.stack)

    def _count(self, *_: object) -> None:
        self._products.append(None)

    @property
    def products(self) -> int:
        return len(self._products)

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


def test_views_and_hooks_are_copied_with_their_stack() -> None:
    block, x = Block(), torch.randn(3, 8)
    twin = copy.deepcopy(block)
    assert twin.one._stack is twin.stack
    hooks = [*twin._forward_pre_hooks.values(), *twin._forward_hooks.values()]
    assert [hook.__self__ for hook in hooks] == [twin.stack] * 2
    twin.stack.gemm.weight.zero_()
    assert torch.equal(twin(x), block.weights[1].expand(3, -1))
    assert torch.equal(block(x), block.expected(x))
    assert not twin.stack._memos


def test_a_copy_does_not_take_the_memo() -> None:
    class Copying(Block):
        def forward(self, x: Tensor, write: bool = False) -> Tensor:
            self.one(x)
            self.twin = [copy.deepcopy(self.stack)]
            return self.two(x)

    block = Copying()
    block(torch.randn(3, 8))
    assert not block.twin[0]._memos


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_shared_outside_the_forward_of_the_parent(mode: Callable[[], object]) -> None:
    block = Block(proven=True)
    with mode():  # type: ignore[attr-defined]
        x = torch.randn(3, 8)
        block(x)
        first = block.one(x)
        before = block.expected(x)[:, :4]
        x.data.mul_(2)
        assert torch.equal(first, before)
        assert torch.equal(block.two(x), block.expected(x)[:, 4:])


def test_gradients_are_taken_twice_outside_the_forward_of_the_parent() -> None:
    block, x = Block(), torch.randn(3, 8, requires_grad=True)
    for member in (block.one, block.two):  # a shared graph would be freed by the first
        member(x).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, block.weights[0].sum(0).expand(3, -1), atol=1e-6)


class Switching(Block):
    """Calls its first member without gradients."""

    def forward(self, x: Tensor, write: bool = False) -> Tensor:
        with torch.no_grad():
            self.one(x)
        return self.two(x)


def test_a_result_without_gradient_is_not_shared_with_grad_mode() -> None:
    block, x = Switching(), torch.randn(3, 8, requires_grad=True)
    assert block(x).requires_grad
    assert block.products == 2


def test_an_input_that_comes_to_need_a_gradient_is_computed_again() -> None:
    class Late(Block):
        def forward(self, x: Tensor, write: bool = False) -> Tensor:
            self.one(x)
            x.requires_grad_()
            return self.two(x)

    assert Late()(torch.randn(3, 8)).requires_grad


def test_threads_get_their_own_results() -> None:
    block, threads, rounds = Block(proven=True), 8, 200
    inputs = torch.randn(threads, rounds, 3, 8)
    expected = block.expected(inputs)
    together = threading.Barrier(threads)

    def wrong(thread: int) -> int:
        together.wait()
        with torch.inference_mode(thread % 2 == 0), torch.no_grad():
            results = [block(inputs[thread, i].clone()) for i in range(rounds)]
        return sum(
            not torch.allclose(result, expected[thread, i], atol=1e-6)
            for i, result in enumerate(results)
        )

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(threads) as pool:
            assert sum(pool.map(wrong, range(threads))) == 0
    finally:
        sys.setswitchinterval(interval)
    assert block.products == threads * rounds
    assert not block.stack._memos
