"""What processes exchange, checked in each of them."""

import pytest
import torch

from quantload.errors import ModelError
from quantload.runtime.parallel import Parallel


def assert_exchanges_tensors(parallel: Parallel) -> None:
    """Exchange tensors between the processes that share layers."""
    t, n, place = parallel.tp_rank, parallel.tp_size, parallel.device
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        plain = torch.arange(6, device=place).reshape(2, 3)
        x, extra = plain.to(dtype) + 10 * t, 10 * sum(range(n))
        total = plain * n + extra
        assert parallel.all_reduce(x.clone()).tolist() == total.tolist()
        assert parallel.all_reduce(x.t().clone().t()).tolist() == total.tolist()
        assert parallel.all_reduce(x.clone().t()).tolist() == total.t().tolist()
        assert parallel.all_reduce_max(x.clone()).tolist() == (plain + 10 * (n - 1)).tolist()
        for dim in (0, 1, -1, -2):
            found = parallel.all_gather(x, dim)
            assert found.dtype == dtype
            assert torch.equal(found, torch.cat([plain.to(dtype) + 10 * r for r in range(n)], dim))


def assert_adds_in_float32(parallel: Parallel) -> None:
    """On the CPU they are added in float32: 256 + 1 + 1 + 1 is 256 step by step in bfloat16."""
    x = torch.tensor([256.0 if parallel.tp_rank == 0 else 1.0], dtype=torch.bfloat16)
    expected = torch.tensor(255.0 + parallel.tp_size).bfloat16()
    assert parallel.all_reduce(x).item() == expected.item()


def assert_passes_on(parallel: Parallel) -> None:
    """Exchange tensors between stages."""
    p, n, place = parallel.pp_rank, parallel.pp_size, parallel.device
    assert place is not None
    assert parallel.is_first_stage == (p == 0)
    assert parallel.is_last_stage == (p == n - 1)
    x = torch.full((2, 3), float(parallel.tp_rank), dtype=torch.bfloat16, device=place)
    if not parallel.is_first_stage:
        x = parallel.receive((2, 3), dtype=torch.bfloat16, device=place)
    parallel.send((x + 1).t().contiguous().t())
    assert x.tolist() == [[parallel.tp_rank + p] * 3] * 2
    x = torch.full((3,), p * 10 + parallel.tp_rank, device=place)
    assert parallel.broadcast(x.clone(), -1).tolist() == [(n - 1) * 10 + parallel.tp_rank] * 3
    assert parallel.broadcast(x, 0).tolist() == [parallel.tp_rank] * 3
    if parallel.is_first_stage:
        with pytest.raises(ModelError, match="the first stage receives nothing"):
            parallel.receive((1,), dtype=torch.float32, device=place)
    with torch.enable_grad():
        needy = torch.ones(2, requires_grad=True)
        if parallel.tp_size > 1:
            with pytest.raises(ModelError, match="an input needs a gradient"):
                parallel.all_reduce(needy)
            with pytest.raises(ModelError, match="an input needs a gradient"):
                parallel.all_gather(needy)
