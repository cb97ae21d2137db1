"""Conversion on a GPU, from the page cache, against the copy from host to device.

    python benchmarks/bench_convert_gpu.py FOLDER [--gb 8] [--workers 1 4 8 16] [--rounds 3]

Writes a model with `synthetic_models.py` if FOLDER has none, then prints for each scheme and number
of workers: seconds, GB of input a second, and the part of the limit. The limits are measured in the
same process: a page-locked copy to the device, the same bytes read from the page cache by as many
threads, and written to new files by as many threads. The output is removed before each run; what
lies on a disk is written back by the system while the next runs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from synthetic_models import write_model

from quantload import api
from quantload.loader.workers import Resources

GB = 1e9
PIECE = 1 << 26
SCHEMES = ("W4A16", "W8A8", "FP8_DYNAMIC", "NVFP4A16", "MXFP4")


def in_threads(count: int, do: Callable[[int], None]) -> float:
    threads = [threading.Thread(target=do, args=(number,)) for number in range(count)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def copy_limit(total: int) -> float:
    """GB a second of page-locked copies to the device."""
    host = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(PIECE, dtype=torch.uint8, device="cuda")
    device.copy_(host)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(total // PIECE):
        device.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    return total // PIECE * PIECE / GB / (time.perf_counter() - start)


def read_limit(files: list[Path], threads: int) -> float:
    """GB a second from the page cache into buffers that are used again."""
    pieces = [(f, at) for f in files for at in range(0, f.stat().st_size, PIECE)]

    def read(number: int) -> None:
        buffer = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True).numpy().data
        for file, position in pieces[number::threads]:
            descriptor = os.open(file, os.O_RDONLY)
            os.preadv(descriptor, [buffer], position)
            os.close(descriptor)

    return sum(f.stat().st_size for f in files) / GB / in_threads(threads, read)


def write_limit(folder: Path, total: int, threads: int) -> float:
    """GB a second into new files, one a thread."""
    each = total // threads // PIECE + 1

    def write(number: int) -> None:
        data = bytes(PIECE)
        with (folder / f"write-{number}").open("wb", buffering=0) as file:
            for _ in range(each):
                file.write(data)

    seconds = in_threads(threads, write)
    for file in folder.glob("write-*"):
        file.unlink()
    return each * threads * PIECE / GB / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gb", type=float, default=8.0)
    parser.add_argument("--shard-gb", type=float, default=1.0)
    parser.add_argument("--max-shard-size", type=float, default=5.0)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    source = arguments.folder / "source"
    if not source.exists():
        write_model(source, shape="llama", gb=arguments.gb, shard_gb=arguments.shard_gb)
    files = sorted(source.glob("*.safetensors"))
    total = sum(file.stat().st_size for file in files)
    for file in files:
        file.read_bytes()
    limit = copy_limit(total)
    print(f"{total / GB:.1f} GB; copy to the device {limit:.1f} GB/s", flush=True)
    for threads in arguments.workers:
        read = read_limit(files, threads)
        write = write_limit(arguments.folder, total // 4, threads)
        print(f"{threads} threads: read {read:.1f} GB/s, write {write:.1f} GB/s", flush=True)
    print(f"{'scheme':12} workers {'s':>6} {'GB/s':>6} of the copy")
    for scheme in arguments.schemes:
        plan = api.plan(
            source,
            scheme,
            options=api.PlanOptions(max_shard_bytes=int(arguments.max_shard_size * GB)),
        )
        for workers in arguments.workers:
            seconds = []
            for _ in range(arguments.rounds + 1):
                out = arguments.folder / "out"
                shutil.rmtree(out, ignore_errors=True)
                start = time.perf_counter()
                api.execute(
                    plan,
                    out,
                    verify_output=False,
                    resources=Resources(workers=workers, device=torch.device("cuda")),
                )
                seconds.append(time.perf_counter() - start)
            shutil.rmtree(out, ignore_errors=True)
            median = statistics.median(seconds[1:])  # the first loads kernels
            rate = total / GB / median
            print(
                f"{scheme:12} {workers:7} {median:6.2f} {rate:6.2f} {rate / limit:.2f}", flush=True
            )


if __name__ == "__main__":
    main()
