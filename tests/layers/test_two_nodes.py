"""A model shared by two nodes gives the logits and the text of one process.

The nodes are two agents of `torchrun` on this machine, which find each other as on two machines.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import node_rank
import pytest
import torch
from rank_encodings import write_encoded

from quantload import api

NODES, EACH = 2, 2  # processes of a node


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_nodes(*arguments: str) -> None:
    """Start an agent for each node, and wait for all; a node that fails fails the test."""
    port = free_port()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    agents = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run"),
                *(f"--nnodes={NODES}", f"--node-rank={node}", f"--nproc-per-node={EACH}"),
                *("--master-addr=127.0.0.1", f"--master-port={port}"),
                *(str(Path(node_rank.__file__)), *arguments),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(NODES)
    ]
    try:
        said = [agent.communicate(timeout=240)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0] * NODES, "\n".join(said)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "encoding", "tp", "pp"),
    [
        ("mixtral", "W4A16:g32 act-order", 2, 2),  # a stage on each node
        ("deepseek_v3", "FP8_BLOCK", 4, 1),  # ranks of one layer on both
    ],
)
def test_two_nodes(tmp_path: Path, model_type: str, encoding: str, tp: int, pp: int) -> None:
    folder = write_encoded(model_type, encoding, tmp_path)
    alone = api.load(folder, device="cpu", quantize_inputs=False)
    with torch.no_grad():
        expected = alone(node_rank.tokens()).logits
        text = alone.generate(node_rank.tokens()[:1], **node_rank.GREEDY)
    output = tmp_path / "found"
    output.mkdir()
    run_nodes(str(folder), str(output), str(tp), str(pp))
    found = [torch.load(output / f"{rank}.pt") for rank in range(NODES * EACH)]
    assert [rank["node"] for rank in found] == [0, 0, 1, 1]
    assert [rank["place"] for rank in found] == [(s, t) for s in range(pp) for t in range(tp)]
    whole = sum(t.nbytes for t in (*alone.parameters(), *alone.buffers()))
    for rank in found:
        assert (rank["logits"] - expected).norm() <= 1e-5 * expected.norm()
        assert torch.equal(rank["text"], text)
        assert rank["bytes"] < 0.6 * whole
