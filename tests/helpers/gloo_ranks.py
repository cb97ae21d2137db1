"""Run a function in several processes that are connected by gloo, as `torchrun` starts them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as processes


def run_in_processes(size: int, work: Callable[..., None], *args: Any) -> None:
    """Call work(*args) in each; an error of one is raised here."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes.spawn(_start, args=(size, port, work, args), nprocs=size)


def _start(rank: int, size: int, port: int, work: Callable[..., None], args: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    work(*args)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
