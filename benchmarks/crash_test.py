"""Kill conversions at random moments, run them again until they are done, compare the outputs.

    python benchmarks/crash_test.py --kills 100

Every process of a run kills itself with SIGKILL, inside a write, after a random number of bytes of
weights, or at a random step of the end (side files, the mark that the output is complete, the
rename, the removal of what is left). The same conversion is then started again, and may be killed
again. The digest of the finished folder (sha256 over names and contents of all files) has to be
that of a run that nobody disturbed, with one thread.

Processes are forked from one that has everything imported and planned: to start the interpreter
would take most of the time. Kills are spread over schemes, threads and processes.
"""

import argparse
import hashlib
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from quantload import api
from quantload.errors import QuantloadError
from quantload.loader.convert import run_plan
from quantload.loader.plan import Plan, PlanOptions
from quantload.loader.ranks import Ranks
from quantload.loader.workers import Resources
from quantload.progress import Silent

SCHEMES = {
    "W4A16": ("W4A16", ()),
    "W4A16_ASYM": ("W4A16_ASYM", ()),
    "W8A8": ("W8A8", ()),
    "FP8_DYNAMIC": ("FP8_DYNAMIC", ()),
    "FP8_BLOCK": ("FP8_BLOCK", ()),
    "NVFP4A16": ("NVFP4A16", ()),
    "mixed": ("W4A16", ("*.mlp.=FP8_DYNAMIC", "model.layers.1.=NVFP4A16", "*.o_proj=keep")),
}
WORKERS = ((1, 1), (2, 1), (4, 1), (2, 2))  # threads of a process, processes
END_STEPS = ("write_text", "rename", "unlink", "glob", "rmdir", "exists")


@dataclass(frozen=True)
class Kill:
    """When a process kills itself.

    Args:
        bytes_written: After so many bytes of weights; None does not count them.
        end_step: At this call of `END_STEPS` from the side files on; 0 is never.
    """

    bytes_written: int | None = None
    end_step: int = 0


def synthetic(folder: Path, *, layers: int, hidden: int, shards: int) -> Path:
    """Write a llama of random bfloat16 weights."""
    import json

    folder.mkdir(parents=True)
    inner, rows = hidden * 11 // 4 // 128 * 128, {"q": hidden, "k": hidden // 4, "v": hidden // 4}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": hidden // 8,
        "vocab_size": 1024,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).mul_(0.02).bfloat16()

    made = {"model.embed_tokens.weight": weight(1024, hidden)}
    for number in range(layers):
        layer = f"model.layers.{number}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            made[f"{layer}.{norm}.weight"] = weight(hidden)
        for name, size in rows.items():
            made[f"{layer}.self_attn.{name}_proj.weight"] = weight(size, hidden)
        made[f"{layer}.self_attn.o_proj.weight"] = weight(hidden, hidden)
        for name in ("gate", "up"):
            made[f"{layer}.mlp.{name}_proj.weight"] = weight(inner, hidden)
        made[f"{layer}.mlp.down_proj.weight"] = weight(hidden, inner)
    made |= {"model.norm.weight": weight(hidden), "lm_head.weight": weight(1024, hidden)}
    names, weight_map = list(made), {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = names[number * len(names) // shards : (number + 1) * len(names) // shards]
        save_file({name: made[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)
    return folder


def digest(folder: Path) -> str:
    """Return one digest of names and contents of all files."""
    total = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        total.update(file.relative_to(folder).as_posix().encode() + b"\0")
        total.update(hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()


# -- processes that die ----------------------------------------------------------------------------


def arm(kill: Kill) -> None:
    """Make this process kill itself at that moment."""
    if kill.bytes_written is not None:
        _arm_writes(kill.bytes_written)
    if kill.end_step:
        _arm_end(kill.end_step)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _arm_writes(limit: int) -> None:
    pwrite, written = os.pwrite, [0]

    def dying(file: int, data: memoryview, position: int) -> int:
        left = limit - written[0]
        if left < len(data):  # dies with a part of it on the disk
            pwrite(file, data[: max(0, left)], position)
            _die()
        written[0] += len(data)
        return pwrite(file, data, position)

    os.pwrite = dying


def _arm_end(step: int) -> None:
    from quantload.loader import convert

    write_side_files, count = convert._write_side_files, [0]

    def counted(name: str) -> None:
        usual = getattr(Path, name)

        def dying(*arguments: object, **options: object) -> object:
            count[0] += 1
            if count[0] == step:
                _die()
            return usual(*arguments, **options)

        setattr(Path, name, dying)

    def at_the_end(*arguments: object, **options: object) -> None:
        for name in END_STEPS:
            counted(name)
        write_side_files(*arguments, **options)

    convert._write_side_files = at_the_end


def _child(plan: Plan, output: Path, threads: int, environment: dict[str, str], kill: Kill) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        sys.stderr = nowhere
        arm(kill)
        try:
            ranks = Ranks.from_environment()
            run_plan(plan, output, Silent(), Resources(workers=threads), ranks)
        except QuantloadError as error:
            print(error, file=sys.__stderr__ if "is not empty" in str(error) else nowhere)
            os._exit(2)
    os._exit(0)


def run(plan: Plan, output: Path, *, threads: int, processes: int, kills: list[Kill]) -> list[int]:
    """Run a conversion; returns the exit status of each process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    running = []
    for rank in range(processes):
        environment = (
            {}
            if processes == 1
            else {
                **{"RANK": str(rank), "WORLD_SIZE": str(processes)},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            }
        )
        arguments = (plan, output, threads, environment, kills[rank])
        running.append(multiprocessing.get_context("fork").Process(target=_child, args=arguments))
        running[-1].start()
    for process in running:
        process.join()
    return [process.exitcode for process in running]


# -- the test --------------------------------------------------------------------------------------


@dataclass
class Found:
    """What became of one conversion that was killed at least once.

    Args:
        kills: How often it was killed.
        is_same: Its digest is that of the undisturbed one, and nothing is left beside it.
        places: How often it was killed among the weights, and at the end.
    """

    kills: int
    is_same: bool
    places: Counter


def disturbed(
    plan: Plan, output: Path, expected: str, *, threads: int, processes: int, dice: random.Random
) -> Found:
    """Kill a conversion at random moments until it is done in spite of that."""
    places: Counter = Counter()
    while True:
        one = dice.randrange(processes)
        kills = [Kill()] * processes
        if not places or dice.random() < 0.5:
            at_end = dice.random() < 0.25
            share = plan.output_bytes // processes
            if processes > 1:
                share = share * 3 // 4  # some write less than others
            kill = Kill(end_step=dice.randint(1, 18)) if at_end else Kill(dice.randrange(share))
            kills[0 if at_end else one] = kill
        ended = run(plan, output, threads=threads, processes=processes, kills=kills)
        was_killed = -signal.SIGKILL in ended
        if was_killed:
            places["end" if any(kill.end_step for kill in kills) else "weights"] += 1
        is_there = output.is_dir() and any(output.iterdir())
        left = output.with_name(f".{output.name}.unfinished")
        if not was_killed and set(ended) != {0}:
            raise RuntimeError(f"ended with {ended}, expected 0")
        names = {path.name for path in left.iterdir()} if left.is_dir() else set()
        if is_there and (not was_killed or names <= {"lock"}):  # killed as its very last act
            is_same = digest(output) == expected and (was_killed or not left.exists())
            return Found(places.total(), is_same, places)
        if is_there and "finished" not in names:
            return Found(places.total(), is_same=False, places=places)  # half of it has the name


def main() -> None:
    """Run the test and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    dice, started = random.Random(asked.seed), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        source = synthetic(root / "in", layers=asked.layers, hidden=asked.hidden, shards=3)
        size = sum(file.stat().st_size for file in source.iterdir())
        print(f"{size / 1e6:.0f} MB source, seed {asked.seed}")
        plans, expected = {}, {}
        options = PlanOptions(max_shard_bytes=size // 12)
        for name, (scheme, rules) in SCHEMES.items():
            plans[name] = api.plan(source, scheme, rules=rules, options=options)
            alone = run_plan(plans[name], root / name, Silent(), Resources(workers=1))
            expected[name] = digest(alone)
        rows: dict[tuple[str, int, int], list[Found]] = {}
        number = 0
        while sum(found.kills for row in rows.values() for found in row) < asked.kills:
            name = list(SCHEMES)[number % len(SCHEMES)]
            threads, processes = WORKERS[number % len(WORKERS)]
            output = root / f"out-{number}"
            found = disturbed(
                plans[name],
                output,
                expected[name],
                threads=threads,
                processes=processes,
                dice=dice,
            )
            rows.setdefault((name, threads, processes), []).append(found)
            number += 1
            for file in sorted(output.rglob("*"), reverse=True):
                file.unlink() if file.is_file() else file.rmdir()
        _show(rows)
    print(f"{time.perf_counter() - started:.0f} s")
    sys.exit(not all(found.is_same for row in rows.values() for found in row))


def _show(rows: dict[tuple[str, int, int], list[Found]]) -> None:
    print(f"{'scheme':<12} threads processes outputs kills among weights at end identical")
    for (name, threads, processes), row in sorted(rows.items()):
        kills = sum((found.places for found in row), Counter())
        same = sum(found.is_same for found in row)
        print(
            f"{name:<12} {threads:>7} {processes:>9} {len(row):>7} {kills.total():>5} "
            f"{kills['weights']:>13} {kills['end']:>6} {same:>9}"
        )
    found = [found for row in rows.values() for found in row]
    kills, same = sum(f.kills for f in found), sum(f.is_same for f in found)
    print(f"{kills} kills, {same} of {len(found)} digests identical")


if __name__ == "__main__":
    main()
