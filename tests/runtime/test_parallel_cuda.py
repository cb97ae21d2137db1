"""Two processes with a GPU each, connected by NCCL."""

import pytest
import torch
from exchanges import assert_exchanges_tensors, assert_passes_on
from gloo_ranks import run_in_processes

from quantload.errors import ConfigError
from quantload.runtime.parallel import Parallel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="wants two CUDA devices"),
]


def test_two_gpus() -> None:
    run_in_processes(2, _two)


def _two() -> None:
    for tp in (2, 1):
        parallel = Parallel.from_environment(tp=tp, pp=2 // tp, device="cuda")
        assert parallel.device == torch.device("cuda", parallel.rank)
        with torch.inference_mode():
            assert_exchanges_tensors(parallel)
        with torch.no_grad():
            assert_passes_on(parallel)
        assert parallel.exchange(parallel.rank) == [0, 1]
    with pytest.raises(ConfigError, match="the process group uses `nccl`, expected `gloo`"):
        Parallel.from_environment(device="cpu")
