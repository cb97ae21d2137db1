"""Conversion on a GPU, from the page cache, against the copy from host to device.

    python benchmarks/bench_convert_gpu.py FOLDER [--gb 8] [--workers 1 4 8 16] [--rounds 3]

Writes a model with `synthetic_models.py` if FOLDER has none, then prints for each scheme and number
of workers: seconds, GB of input a second, the part of the copy, and what the cores allow. Limits
are measured in the same process: a page-locked copy to the device; and, by a thread on each core,
the same bytes read from the page cache, bytes written to new files, and sha256. A conversion reads
its input, writes its output and hashes it, and these three share the cores: `cores` is the rate at
which all of them would be busy with nothing else.

The output is removed before each run; what lies on a disk is written back by the system while the
next runs. Fused groups are taken from names: planning is not measured.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from synthetic_models import write_model

from quantload.loader.convert import run_plan
from quantload.loader.formats import open_source
from quantload.loader.open import open_checkpoint
from quantload.loader.plan import Plan, PlanOptions, make_plan
from quantload.loader.workers import Resources
from quantload.mappers.facts import facts_from_names
from quantload.progress import Silent
from quantload.quant.rules import QuantConfig

GB = 1e9
COPY, PIECE = 1 << 26, 1 << 22
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
    host = torch.empty(COPY, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(COPY, dtype=torch.uint8, device="cuda")
    device.copy_(host)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(total // COPY):
        device.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    return total // COPY * COPY / GB / (time.perf_counter() - start)


def read_limit(files: list[Path], threads: int) -> float:
    """GB a second from the page cache into buffers that are used again."""
    pieces = [(f, at) for f in files for at in range(0, f.stat().st_size, PIECE)]
    buffers = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(threads)]
    opened = {file: os.open(file, os.O_RDONLY) for file in files}

    def read(number: int) -> None:
        buffer = buffers[number].numpy().data
        for file, position in pieces[number::threads]:
            os.preadv(opened[file], [buffer], position)

    seconds = in_threads(threads, read)
    for descriptor in opened.values():
        os.close(descriptor)
    return sum(f.stat().st_size for f in files) / GB / seconds


def write_limit(folder: Path, total: int, threads: int) -> float:
    """GB a second into new files, one a thread."""
    each, data = total // threads // PIECE + 1, bytes(PIECE)

    def write(number: int) -> None:
        with (folder / f"write-{number}").open("wb", buffering=0) as file:
            for _ in range(each):
                file.write(data)

    seconds = in_threads(threads, write)
    for file in folder.glob("write-*"):
        file.unlink()
    return each * threads * PIECE / GB / seconds


def digest_limit(total: int, threads: int) -> float:
    """GB a second of sha256, one stream a thread."""
    each, data = total // threads // PIECE + 1, bytes(PIECE)

    def digest(_: int) -> None:
        found = hashlib.sha256()
        for _ in range(each):
            found.update(data)

    return each * threads * PIECE / GB / in_threads(threads, digest)


def plan_of(source: Path, scheme: str, max_shard_bytes: int) -> Plan:
    opened = open_source(open_checkpoint(source))
    facts = facts_from_names(opened.weights, tied_head=False)
    config = QuantConfig.from_options(scheme, (), group_size=None)
    return make_plan(opened, config, facts, PlanOptions(max_shard_bytes=max_shard_bytes))


def seconds_of(plan: Plan, out: Path, workers: int) -> float:
    shutil.rmtree(out, ignore_errors=True)
    resources = Resources(workers=workers, device=torch.device("cuda"))
    start = time.perf_counter()
    run_plan(plan, out, Silent(), resources)
    return time.perf_counter() - start


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
    source, out = arguments.folder / "source", arguments.folder / "out"
    if not source.exists():
        write_model(source, shape="llama", gb=arguments.gb, shard_gb=arguments.shard_gb)
    files = sorted(source.glob("*.safetensors"))
    total = sum(file.stat().st_size for file in files)
    for file in files:
        with file.open("rb") as stream:
            while stream.read(PIECE):
                pass
    limit = copy_limit(total)
    print(f"{total / GB:.1f} GB; copy to the device {limit:.1f} GB/s", flush=True)
    threads = len(os.sched_getaffinity(0))
    read = read_limit(files, threads)
    write = write_limit(arguments.folder, total // 2, threads)
    digest = digest_limit(total // 2, threads)
    print(f"{threads} cores: read {read:.1f}, write {write:.1f}, sha256 {digest:.1f} GB/s", end="")
    print(f"; one core: sha256 {digest_limit(total // 16, 1):.2f} GB/s", flush=True)
    print(f"{'scheme':12} workers {'s':>6} {'GB/s':>6} {'written':>8} of the copy {'cores':>6}")
    for scheme in arguments.schemes:
        plan = plan_of(source, scheme, int(arguments.max_shard_size * GB))
        written = sum(file.num_bytes for file in plan.files)
        for workers in arguments.workers:
            seconds = [seconds_of(plan, out, workers) for _ in range(arguments.rounds + 1)]
            median = statistics.median(seconds[1:])  # the first loads kernels
            rate, cores = (
                total / median,
                total / (total / read + written / write + written / digest),
            )
            print(
                f"{scheme:12} {workers:7} {median:6.2f} {rate / GB:6.2f} {written / GB:8.2f} "
                f"{rate / GB / limit:11.2f} {cores:6.1f}",
                flush=True,
            )
    shutil.rmtree(out, ignore_errors=True)


if __name__ == "__main__":
    main()
