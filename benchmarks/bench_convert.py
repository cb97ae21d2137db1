"""Conversion of whole checkpoints on the CPU, beside `cp` and other converters; peak memory.

    python benchmarks/bench_convert.py WORK [--gb 8] [--shape llama] [--shard-gb 5] [--rounds 3]
        [--llm-compressor PYTHON] [--auto-round PYTHON] [--compressed-tensors PYTHON] [--peer-gb 1]
    python benchmarks/bench_convert.py WORK --memory-only [--sizes 2 8 16] [--shards 1 5]

WORK is a folder for the models (made if absent, kept) and outputs (removed); PYTHON an interpreter
of an environment that holds the tool. The first form runs the user's command in a process of its
own, in random order within a round. The page cache is warmed with the source before each run; the
output is removed and the disk synchronized after it. Other converters run with a model of
`--peer-gb`, beside `cp` and quantload with the same model. The second form converts models of every
size, shape and shard size, and reports anonymous memory above that after imports and plan.

The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

from convert_with import anonymous_memory
from synthetic_models import GB, MODELS, write_model

SCRIPT = str(Path(__file__).with_name("convert_with.py"))
POLL_SECONDS = 0.005
PIECE = 16 << 20
MB = 1e6
COPY, SYNCED = "cp -r", "cp -r and sync"
OURS, VERIFIED = "quantload", "quantload, verified"
DEQUANTIZE = "to bfloat16"
PEERS = {
    "llm-compressor": ("W4A16", "FP8_DYNAMIC", "W8A8"),
    "auto-round": ("W4A16",),
    "compressed-tensors": (DEQUANTIZE,),
}


@dataclass(frozen=True)
class Job:
    """What is run.

    Args:
        tool: Row of the table.
        scheme: What the model is converted to.
        command: Without the output folder, which stands in it as "OUTPUT".
    """

    tool: str
    scheme: str
    command: tuple[str, ...]


@dataclass
class Run:
    """What one process took: seconds, bytes."""

    seconds: float
    cpu_seconds: float
    peak: int
    anonymous: int
    above_plan: int = 0


@dataclass
class Series:
    """Runs of a job, and the start-up of its tool: what no amount of weights changes."""

    job: Job
    gb: float
    startup: Run
    runs: list[Run] = field(default_factory=list)

    def rate(self, number: int) -> float:
        """GB of source per second of a run, without start-up."""
        return self.gb / max(self.runs[number].seconds - self.startup.seconds, 0.001)

    @property
    def median_rate(self) -> float:
        return statistics.median(map(self.rate, range(len(self.runs))))

    @property
    def cpu_per_gb(self) -> float:
        taken = statistics.median(run.cpu_seconds for run in self.runs)
        return (taken - self.startup.cpu_seconds) / self.gb


def timed(command: list[str], log: Path, environment: dict[str, str] | None = None) -> Run:
    """Run a process to its end, and watch its memory.

    CPU seconds and peak are those of the process and of all that it waited for.
    """
    with log.open("w") as output:
        start = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment or dict(os.environ)
        )
        most = 0
        while True:
            found, status, usage = os.wait4(process.pid, os.WNOHANG)
            if found:
                break
            most = max(most, anonymous_memory(process.pid))
            time.sleep(POLL_SECONDS)
        seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    text = log.read_text()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{text[-3000:]}")
    planned = [int(line.split()[1]) for line in text.splitlines() if line.startswith("planned ")]
    above = most - planned[0] if planned else 0
    peak = usage.ru_maxrss * 1024
    return Run(seconds, usage.ru_utime + usage.ru_stime, peak, most, above)


def warm(folder: Path) -> None:
    """Read a model, so that it lies in the page cache."""
    piece = bytearray(PIECE)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(piece):
                pass


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


class Bench:
    """A folder for models and outputs."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.work.mkdir(parents=True, exist_ok=True)
        self._startups: dict[str, Run] = {}

    def model(self, shape: str, gb: float, shard_gb: float) -> Path:
        folder = self.work / f"{shape}-{gb:g}GB-shards-of-{shard_gb:g}GB"
        if folder.exists():
            return folder
        return write_model(folder, shape=shape, gb=gb, shard_gb=shard_gb)

    def quantized(self, source: Path) -> Path:
        folder = self.work / f"{source.name}-W4A16"
        if not folder.exists():
            timed([*_ours(source, "W4A16", folder), "--no-verify"], self.work / "log")
        return folder

    def startup(self, job: Job) -> Run:
        """What imports take, once they are in the page cache: the least of three.

        Of quantload, also the plan: it is what imports most.
        """
        if job.tool in (COPY, SYNCED):
            return Run(0.0, 0.0, 0, 0)
        python = job.command[0]
        imports = [python, SCRIPT, job.tool]
        if job.tool in (OURS, VERIFIED):
            imports = [python, SCRIPT, OURS, job.command[4], "", job.command[7]]
        key = " ".join(imports)
        if key not in self._startups:
            tries = [timed(imports, self.work / "log") for _ in range(3)]
            self._startups[key] = min(tries, key=lambda run: run.seconds)
        return self._startups[key]

    def run(self, job: Job, source: Path) -> Run:
        output = self.work / "output"
        self.clear(output)
        warm(source)
        command = [str(output) if word == "OUTPUT" else word for word in job.command]
        done = timed(command, self.work / "log")
        self.clear(output)
        return done

    @staticmethod
    def clear(output: Path) -> None:
        shutil.rmtree(output, ignore_errors=True)
        os.sync()

    def rounds(self, jobs: dict[Job, Path], rounds: int) -> list[Series]:
        """Run jobs, each with its source; every round in another order."""
        series = {
            job: Series(job, size_of(src) / GB, self.startup(job)) for job, src in jobs.items()
        }
        order, shuffle = list(jobs), random.Random(0).shuffle
        for number in range(rounds):
            shuffle(order)
            for job in order:
                done = self.run(job, jobs[job])
                series[job].runs.append(done)
                _say(f"round {number + 1}: {job.scheme} {job.tool}: {done.seconds:.2f} s")
        return list(series.values())


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _ours(source: Path, scheme: str, output: Path | str = "OUTPUT") -> tuple[str, ...]:
    scheme = "dense" if scheme == DEQUANTIZE else scheme
    command = ("-m", "quantload", "convert", str(source), str(output), "--scheme", scheme, "-q")
    return (sys.executable, *command)


def _copies(source: Path, scheme: str) -> dict[Job, Path]:
    """A copy as it comes, and one that is on the disk when it ends, as an output of ours is."""
    synced = ("sh", "-c", 'cp -r "$0" "$1" && sync "$1"/*', str(source), "OUTPUT")
    jobs = [Job(COPY, scheme, ("cp", "-r", str(source), "OUTPUT")), Job(SYNCED, scheme, synced)]
    return dict.fromkeys(jobs, source)


def own_jobs(source: Path, schemes: list[str]) -> dict[Job, Path]:
    jobs = _copies(source, "any")
    for scheme in schemes:
        command = _ours(source, scheme)
        jobs[Job(OURS, scheme, (*command, "--no-verify"))] = source
        jobs[Job(VERIFIED, scheme, command)] = source
    return jobs


def peer_jobs(
    bench: Bench, source: Path, schemes: list[str], pythons: dict[str, str]
) -> dict[Job, Path]:
    """Other converters, and ours for each scheme that one of them has."""
    jobs: dict[Job, Path] = {}
    for scheme in [*schemes, DEQUANTIZE]:
        able = [tool for tool in pythons if scheme in PEERS[tool]]
        if not able:
            continue
        of_scheme = bench.quantized(source) if scheme == DEQUANTIZE else source
        jobs |= _copies(of_scheme, scheme)
        jobs[Job(OURS, scheme, (*_ours(of_scheme, scheme), "--no-verify"))] = of_scheme
        for tool in able:
            command = (pythons[tool], SCRIPT, tool, str(of_scheme), "OUTPUT", scheme)
            jobs[Job(tool, scheme, command)] = of_scheme
    return jobs


def _of(one: Series, other: Series) -> float:
    """Median over rounds of the rate of one by that of the other in the same round."""
    pairs = range(len(one.runs))
    return statistics.median(one.rate(number) / other.rate(number) for number in pairs)


def _median(runs: list[Run], attribute: str) -> float:
    return statistics.median(getattr(run, attribute) for run in runs)


def print_table(series: list[Series]) -> None:
    print(
        "| scheme | tool | seconds | start-up | GB/s | of cp | of cp and sync "
        "| quantload is faster | CPU s/GB | quantload needs less CPU | peak MB | anonymous MB |"
    )
    print(f"|{'---|' * 12}")
    found = {(one.job.tool, one.job.scheme): one for one in series}
    for one in sorted(series, key=lambda one: (one.job.scheme, one.job.tool)):
        scheme = one.job.scheme
        copies = [found.get((tool, scheme)) or found[tool, "any"] for tool in (COPY, SYNCED)]
        ours = found.get((OURS, scheme))
        is_peer = ours is not None and one.job.tool in PEERS
        cells = [
            scheme,
            one.job.tool,
            f"{_median(one.runs, 'seconds'):.2f}",
            f"{one.startup.seconds:.2f}",
            f"{one.median_rate:.3f}",
            *(f"{_of(one, copy):.3f}" for copy in copies),
            f"{_of(ours, one):.1f}x" if is_peer else "",
            f"{one.cpu_per_gb:.2f}",
            f"{one.cpu_per_gb / ours.cpu_per_gb:.1f}x" if is_peer else "",
            f"{_median(one.runs, 'peak') / MB:.0f}",
            f"{_median(one.runs, 'anonymous') / MB:.0f}",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


def measure_speed(bench: Bench, options: argparse.Namespace) -> dict:
    """Two tables: ours and `cp` with the large model; all converters with the small one."""
    found = []
    if options.gb:
        source = bench.model(options.shape, options.gb, options.shard_gb)
        found.append(bench.rounds(own_jobs(source, options.schemes), options.rounds))
    named = {tool: getattr(options, tool.replace("-", "_")) for tool in PEERS}
    pythons = {tool: python for tool, python in named.items() if python}
    if pythons:
        source = bench.model(options.shape, options.peer_gb, options.shard_gb)
        jobs = peer_jobs(bench, source, options.schemes, pythons)
        found.append(bench.rounds(jobs, options.peer_rounds))
    for series in found:
        print(f"\n{options.shape}, source of {series[0].gb:.2f} GB\n")
        print_table(series)
    return {"tables": [[asdict(one) for one in series] for series in found]}


def measure_memory(bench: Bench, options: argparse.Namespace) -> dict:
    """Anonymous memory above that after imports and plan, one row for each model and scheme."""
    print(
        "| shape | GB | shards of GB | scheme | budget | above plan MB | anonymous MB | peak MB |"
    )
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    kinds = [(h, s, g) for h in options.shapes for s in options.shards for g in options.sizes]
    for shape, shard_gb, gb in kinds:
        source = bench.model(shape, gb, shard_gb)
        for scheme in options.schemes:
            words = (SCRIPT, "quantload", str(source), "OUTPUT", scheme, options.memory)
            run = bench.run(Job(OURS, scheme, (sys.executable, *words)), source)
            sizes = [run.above_plan, run.anonymous, run.peak]
            cells = [shape, f"{gb:g}", f"{shard_gb:g}", scheme, options.memory]
            cells += [f"{size / MB:.0f}" for size in sizes]
            print(f"| {' | '.join(cells)} |", flush=True)
            rows.append(
                {"shape": shape, "gb": gb, "shard_gb": shard_gb, "scheme": scheme} | asdict(run)
            )
        if not options.keep:
            shutil.rmtree(source)
    return {"memory": options.memory, "rows": rows}


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--gb", type=float, default=8.0, help="0 leaves the large model out")
    parser.add_argument("--shape", choices=MODELS, default="llama")
    parser.add_argument("--shard-gb", type=float, default=5.0)
    parser.add_argument("--schemes", nargs="+", default=["W4A16", "FP8_DYNAMIC", "W8A8"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-gb", type=float, default=1.0)
    parser.add_argument("--peer-rounds", type=int, default=2)
    for tool in PEERS:
        parser.add_argument(f"--{tool}", metavar="PYTHON")
    parser.add_argument("--memory-only", action="store_true")
    parser.add_argument("--memory", default="1GiB")
    parser.add_argument("--sizes", type=float, nargs="+", default=[2.0, 8.0, 16.0])
    parser.add_argument("--shards", type=float, nargs="+", default=[1.0, 5.0])
    parser.add_argument("--shapes", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--keep", action="store_true", help="keep models of --memory-only")
    return parser.parse_args()


def main() -> None:
    options = read_options()
    bench = Bench(options.work.resolve())
    measure = measure_memory if options.memory_only else measure_speed
    found = measure(bench, options)
    found["environment"] = {
        "cpu": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "torch": version("torch"),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
