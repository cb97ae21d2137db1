"""Processes that exchange tensors: four of them, connected in every way that four can be."""

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_in_processes

from quantload.errors import ConfigError, ModelError
from quantload.runtime.parallel import Parallel

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def test_four_processes() -> None:
    run_in_processes(4, _four)  # an assertion that fails there fails here


def _four() -> None:
    with pytest.raises(ConfigError, match="tensor parallel 3 times 1 stages is 3 processes, but 4"):
        Parallel.from_environment(tp=3, device="cpu")
    with pytest.raises(ConfigError, match="8 stages are asked for, but only 4 processes"):
        Parallel.from_environment(pp=8, device="cpu")
    with pytest.raises(ConfigError, match="tensor parallel 1 times 3 stages is 3 processes, but 4"):
        Parallel.from_environment(pp=3, device="cpu")
    for tp, pp in ((4, 1), (2, 2), (1, 4)):
        parallel = Parallel.from_environment(tp=tp if pp == 1 else None, pp=pp, device="cpu")
        assert (parallel.tp_size, parallel.pp_size) == (tp, pp)
        assert parallel.rank == dist.get_rank()
        assert parallel.device == torch.device("cpu")
        with torch.inference_mode():
            _tensors(parallel)
        with torch.no_grad():
            _tensors(parallel)
            _stages(parallel)
        assert parallel.exchange({"rank": parallel.rank}) == [{"rank": r} for r in range(4)]
    with pytest.raises(ConfigError, match="the process group uses `gloo`, expected `nccl`"):
        _with_group_for_cuda()


def _with_group_for_cuda() -> None:
    from quantload.runtime import parallel

    parallel._connect(torch.device("cuda", 0))


def _tensors(parallel: Parallel) -> None:
    t, n = parallel.tp_rank, parallel.tp_size
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        x = torch.arange(6, dtype=dtype).reshape(2, 3) + 10 * t
        total = torch.arange(6).reshape(2, 3) * n + 10 * sum(range(n))
        assert parallel.all_reduce(x.clone()).tolist() == total.tolist()
        assert parallel.all_reduce(x.t().clone().t()).tolist() == total.tolist()
        turned = torch.arange(6).reshape(2, 3).t()
        assert parallel.all_reduce(x.t()).tolist() == (turned * n + 10 * sum(range(n))).tolist()
        x = torch.arange(6, dtype=dtype).reshape(2, 3) + 10 * t
        highest = torch.arange(6).reshape(2, 3) + 10 * (n - 1)
        assert parallel.all_reduce_max(x.clone()).tolist() == highest.tolist()
        for dim in (0, 1, -1, -2):
            parts = [torch.arange(6, dtype=dtype).reshape(2, 3) + 10 * r for r in range(n)]
            found = parallel.all_gather(x, dim)
            assert found.dtype == dtype
            assert torch.equal(found, torch.cat(parts, dim))
    # narrow floats are added in float32: 256 + 1 + 1 + 1 is 256 step by step in bfloat16
    x = torch.tensor([256.0 if t == 0 else 1.0], dtype=torch.bfloat16)
    assert parallel.all_reduce(x).item() == torch.tensor(255.0 + n).bfloat16().item()


def _stages(parallel: Parallel) -> None:
    p, n = parallel.pp_rank, parallel.pp_size
    assert parallel.is_first_stage == (p == 0)
    assert parallel.is_last_stage == (p == n - 1)
    x = torch.full((2, 3), float(parallel.tp_rank), dtype=torch.bfloat16)
    if not parallel.is_first_stage:
        x = parallel.receive((2, 3), dtype=torch.bfloat16, device=torch.device("cpu"))
    parallel.send((x + 1).t().contiguous().t())
    assert torch.equal(x, torch.full((2, 3), parallel.tp_rank + p, dtype=torch.bfloat16))
    x = torch.full((3,), p * 10 + parallel.tp_rank)
    assert parallel.broadcast(x.clone(), -1).tolist() == [(n - 1) * 10 + parallel.tp_rank] * 3
    assert parallel.broadcast(x, 0).tolist() == [parallel.tp_rank] * 3
    if parallel.is_first_stage:
        with pytest.raises(ModelError, match="the first stage receives nothing"):
            parallel.receive((1,), dtype=torch.float32, device=torch.device("cpu"))
    with torch.enable_grad():
        needy = torch.ones(2, requires_grad=True)
        if parallel.tp_size > 1:
            with pytest.raises(ModelError, match="an input needs a gradient"):
                parallel.all_reduce(needy)
            with pytest.raises(ModelError, match="an input needs a gradient"):
                parallel.all_gather(needy)


def test_one_process_exchanges_nothing() -> None:
    parallel = Parallel()
    x = torch.randn(2, 3, requires_grad=True)
    assert parallel.all_reduce(x) is x
    assert parallel.all_reduce_max(x) is x
    assert parallel.all_gather(x, 0) is x
    assert parallel.broadcast(x, 0) is x
    assert parallel.exchange(7) == [7]
    parallel.send(x)
    assert str(parallel) == "one process"
    assert str(Parallel(tp_rank=1, tp_size=2)) == "tensor parallel 1 of 2, stage 0 of 1"


def test_ranks_below_their_size() -> None:
    with pytest.raises(ConfigError, match="`tp_rank` is 2, expected at least 0 and less than"):
        Parallel(tp_rank=2, tp_size=2)
    with pytest.raises(ConfigError, match="`pp_rank` is -1"):
        Parallel(pp_rank=-1)


def test_shares() -> None:
    parallel = Parallel(tp_rank=1, tp_size=4)
    assert parallel.share_of(12, "rows") == (3, 6)
    with pytest.raises(ConfigError, match=r"rows cannot be shared by 4 processes: found 10, expec"):
        parallel.share_of(10, "rows")


def test_a_group_is_needed() -> None:
    with pytest.raises(ConfigError, match="processes are not connected"):
        Parallel(tp_size=2).all_reduce(torch.ones(1))


def test_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    alone = Parallel.from_environment(device="cpu")
    assert (alone.size, alone.device) == (1, torch.device("cpu"))
    with pytest.raises(ConfigError, match="4 processes are asked for, but `torchrun` did not") as e:
        Parallel.from_environment(tp=2, pp=2)
    assert "--nproc-per-node 4" in e.value.hint
    with pytest.raises(ConfigError, match="`tp` is 0, expected at least 1"):
        Parallel.from_environment(tp=0)
    with pytest.raises(ConfigError, match="unknown device: `gpu`"):
        Parallel.from_environment(device="gpu")


def test_damaged_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.setenv(name, "x")
    with pytest.raises(ConfigError, match="`WORLD_SIZE` is `x`, expected a number"):
        Parallel.from_environment()


def test_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(ConfigError, match="no device `cuda:3` here: found 2 CUDA devices") as e:
        Parallel.from_environment(device="cuda")
    assert "one process for each GPU" in e.value.hint
