"""Processes that exchange tensors: four of them, connected in every way that four can be."""

import pytest
import torch
import torch.distributed as dist
from exchanges import assert_adds_in_float32, assert_exchanges_tensors, assert_passes_on
from gloo_ranks import run_in_processes

from quantload.errors import ConfigError
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
            assert_exchanges_tensors(parallel)
        with torch.no_grad():
            assert_adds_in_float32(parallel)
            assert_passes_on(parallel)
        assert parallel.exchange({"rank": parallel.rank}) == [{"rank": r} for r in range(4)]
    with pytest.raises(ConfigError, match="the process group uses `gloo`, expected `nccl`"):
        _with_group_for_cuda()


def _with_group_for_cuda() -> None:
    from quantload.runtime import parallel

    parallel._connect(torch.device("cuda", 0))


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
