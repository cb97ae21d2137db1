"""Conversion with 1, 2 and 4 threads, and with 1, 2 and 4 processes: seconds, and equal bytes.

    python benchmarks/bench_workers.py WORK [--gb 2] [--schemes W4A16 FP8_DYNAMIC] [--rounds 3]

Threads are `quantload convert --workers N`, processes `torchrun --nproc-per-node N -m quantload
convert --workers 1`. Rounds are interleaved; a row has the median of the seconds that writing took,
as the command prints it (start-up is left out: every process imports and plans for itself), its
ratio to one thread, and whether the digest of the folder is that of one thread.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from synthetic_models import write_model

KINDS = [("threads", 1), ("threads", 2), ("threads", 4), ("processes", 2), ("processes", 4)]


def digest(folder: Path) -> str:
    """Return sha256 over names and contents of all files."""
    total = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            total.update(file.name.encode())
            with file.open("rb") as opened:
                total.update(hashlib.file_digest(opened, "sha256").digest())
    return total.hexdigest()


def convert(source: Path, output: Path, scheme: str, kind: str, count: int) -> float:
    """Convert once; returns the seconds that writing took."""
    shutil.rmtree(output, ignore_errors=True)
    options = ["convert", str(source), str(output), "--scheme", scheme, "--no-verify", "--json"]
    command = [sys.executable, "-m", "quantload", *options, "--workers", str(count)]
    if kind == "processes":
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(count), "-m", "quantload"]
        command = [sys.executable, *launch, *options, "--workers", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return float(json.loads(done.stdout[done.stdout.index("{") :])["summary"]["seconds"])


def main() -> None:
    """Make a model, convert it in every way, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--schemes", nargs="+", default=["W4A16", "FP8_DYNAMIC"])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    source = write_model(options.work / "model", shape="llama", gb=options.gb, shard_gb=0.5)
    print("| scheme | | seconds | times one thread | equal bytes |\n|---|---|---|---|---|")
    for scheme in options.schemes:
        seconds: dict[tuple[str, int], list[float]] = {kind: [] for kind in KINDS}
        digests: dict[tuple[str, int], str] = {}
        for _ in range(options.rounds):
            for kind, count in KINDS:
                output = options.work / "output"
                seconds[kind, count].append(convert(source, output, scheme, kind, count))
                digests[kind, count] = digest(output)
        one = statistics.median(seconds[KINDS[0]])
        for kind, count in KINDS:
            median = statistics.median(seconds[kind, count])
            same = "yes" if digests[kind, count] == digests[KINDS[0]] else "NO"
            print(f"| {scheme} | {count} {kind} | {median:.2f} | {one / median:.2f} | {same} |")
    shutil.rmtree(options.work / "model")
    shutil.rmtree(options.work / "output", ignore_errors=True)


if __name__ == "__main__":
    main()
