"""A model on several GPUs against the same model on one: equal logits, memory, time a token.

    python benchmarks/synthetic_models.py /dev/shm/llama --gb 8
    python benchmarks/bench_parallel.py /dev/shm/llama --reference /dev/shm/one.pt
    torchrun --nproc-per-node 2 benchmarks/bench_parallel.py /dev/shm/llama --tp 2 \
        --reference /dev/shm/one.pt
    torchrun --nproc-per-node 2 benchmarks/bench_parallel.py /dev/shm/llama --pp 2 \
        --reference /dev/shm/one.pt

The first run, of one process, writes its logits; the others compare theirs with them and print one
line: relative difference of the logits of 256 tokens, bytes on the fullest GPU, seconds to load,
milliseconds of the forward of 2,048 tokens and of one decoded token (transformers' own `generate`,
eager, batch 1: its Python takes most of that). Medians of 5; all processes run alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import quantload
from quantload.runtime.parallel import Parallel

LONG, SHORT, NEW = 2048, 256, 16


def milliseconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Median time of `work`, which ends with what the device was given."""
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])  # the first one compiles


def main() -> None:
    """Load, compare, time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--reference", type=Path, required=True)
    options = parser.parse_args()
    parallel = Parallel.from_environment(options.tp, options.pp, device="cuda")
    start = time.perf_counter()
    model = quantload.load(options.model, parallel=parallel, dtype=options.dtype)
    torch.cuda.synchronize()
    seconds, held = time.perf_counter() - start, torch.cuda.memory_allocated()
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (1, LONG), generator=generator).to(parallel.device)
    with torch.inference_mode():
        logits = model(ids[:, :SHORT]).logits.float().cpu()
        prefill = milliseconds(lambda: model(ids, logits_to_keep=1))
        settings = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW}
        few = milliseconds(lambda: model.generate(ids[:, :SHORT], **settings), 3)
        settings |= {"max_new_tokens": 2 * NEW, "min_new_tokens": 2 * NEW}
        many = milliseconds(lambda: model.generate(ids[:, :SHORT], **settings), 3)
    difference = "-"
    if parallel.size == 1:
        torch.save(logits, options.reference)
    else:
        one = torch.load(options.reference)
        difference = f"{float((logits - one).norm() / one.norm()):.2e}"
    fullest = max(parallel.exchange(held))
    if parallel.rank == 0:
        print(
            f"tp {options.tp} pp {options.pp} {options.dtype}: logits differ {difference}, "
            f"{fullest / 1e9:.2f} GB on the fullest GPU, load {seconds:.1f} s, "
            f"prefill {LONG} {prefill:.1f} ms, token {(many - few) / NEW:.1f} ms"
        )
    if parallel.size > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
