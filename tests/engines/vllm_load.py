"""Runs inside the environment that holds vLLM: load folders, print one JSON object for each.

Usage: python vllm_load.py FOLDER...

Each folder is loaded in a process of its own, forked after vLLM is imported: weights are read and
made ready for the kernels, no prompt is run.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import (
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model


def load(folder: str) -> None:
    """Build the model of a folder and load its weights, as a worker of the CPU build does."""
    torch.accelerator.empty_cache = lambda: None  # as the runner of the CPU build replaces it
    arguments = EngineArgs(
        model=folder,
        dtype="bfloat16",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=64,
    )
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        place = f"tcp://127.0.0.1:{20000 + os.getpid() % 30000}"
        init_distributed_environment(1, 0, place, 0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)
        get_model(vllm_config=config)


def outcome(folder: str) -> dict[str, object]:
    """Load a folder in this process and say how that went."""
    try:
        load(folder)
    except Exception as error:  # noqa: BLE001 - whatever vLLM raises is the result
        return {"loaded": False, "error": f"{type(error).__name__}: {error}"[:2000]}
    return {"loaded": True, "error": ""}


def main() -> None:
    """Print one line for each folder."""
    for folder in sys.argv[1:]:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            sys.stdout.write("\n" + json.dumps(outcome(folder)) + "\n")
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
