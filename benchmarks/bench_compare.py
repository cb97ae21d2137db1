"""Memory and time of `quantload compare` with tokens: large checkpoints, and a real small one.

    python benchmarks/bench_compare.py WORK --gb 8 [--tokens 512] [--only same,w4a16,fp8]
    python benchmarks/bench_compare.py WORK --smollm2 MODEL.gguf --token-ids IDS.json

The large pair has the layers of Llama 3 8B and its vocabulary of 128256 tokens, embedding and head
apart, as many layers as fit the size. `same` is a bfloat16 copy whose weights have noise of a
hundredth of theirs, `w4a16` and `fp8` what `quantload convert` makes of it; each folder is removed
when it has been used. Of SmolLM2-135M the W4A16 conversion is compared with its source in bfloat16.

Each run is the user's command in a process of its own. Every 20 ms the memory of it and its
children is read from /proc: anonymous (what was allocated) and file (pages of libraries and of
mapped files, which the system may drop). What `transformers` needs, both models whole in float32
in one process, is computed from the shapes, not run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from synthetic_models import (
    GB,
    POOL,
    STANDARD_DEVIATION,
    Shapes,
    Weights,
    attention,
    bytes_of,
    mlp,
    write_shapes,
)

MIB = 1 << 20
EVERY = 0.02
VOCABULARY, HIDDEN, INNER, KEYS = 128256, 4096, 14336, 1024
NOISE = 0.01
PAIRS = {"same": None, "w4a16": "W4A16", "fp8": "FP8_DYNAMIC"}


@dataclass(frozen=True)
class Measured:
    """One run.

    Args:
        name: What was compared.
        seconds: From the start of the process to its end.
        cpu: User and system seconds of it and its children.
        peak: Largest resident set at one time, bytes.
        anonymous: Most of it that was allocated, bytes.
        file: Pages of files at that time of the largest resident set, bytes.
    """

    name: str
    seconds: float
    cpu: float
    peak: int
    anonymous: int
    file: int


class NoisyWeights(Weights):
    """The same weights as `Weights`, with noise."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        noise = np.random.default_rng(seed + 1).standard_normal(POOL, dtype=np.float32)
        values = (self._pool.astype(np.uint32) << 16).view(np.float32)
        values = values + noise * np.float32(NOISE * STANDARD_DEVIATION)
        self._pool = ((values.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)


def llama(size: int) -> tuple[Shapes, dict]:
    """Shapes and config of a Llama with the vocabulary of Llama 3, of about so many bytes."""
    layer = attention(HIDDEN, HIDDEN, KEYS) | mlp("mlp", HIDDEN, INNER)
    ends = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    after = {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}
    layers = max(1, round((size - bytes_of(ends) - bytes_of(after)) / bytes_of(layer)))
    for number in range(layers):
        ends |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": INNER,
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    return ends | after, config


def _processes(parent: int) -> Iterator[int]:
    yield parent
    try:
        for task in Path(f"/proc/{parent}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from _processes(int(child))
    except OSError:
        return


def _memory(parent: int) -> tuple[int, int]:
    """Return anonymous and file bytes of a process and its children."""
    anonymous = file = 0
    for process in _processes(parent):
        try:
            lines = Path(f"/proc/{process}/status").read_text().splitlines()
        except OSError:
            continue
        found = dict(line.split(":", 1) for line in lines if line.startswith("Rss"))
        anonymous += int(found.get("RssAnon", "0 kB").split()[0]) * 1024
        pages = (found.get(name, "0 kB").split()[0] for name in ("RssFile", "RssShmem"))
        file += sum(map(int, pages)) * 1024
    return anonymous, file


def measure(name: str, command: list[str], log: Path) -> Measured:
    """Run a command and watch its memory."""
    peak, most, file = 0, 0, 0
    before, started = os.times(), time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            anonymous, pages = _memory(process.pid)
            most = max(most, anonymous)
            if anonymous + pages > peak:
                peak, file = anonymous + pages, pages
            time.sleep(EVERY)
    after = os.times()
    cpu = after.children_user + after.children_system
    cpu -= before.children_user + before.children_system
    if process.returncode not in (0, 1):  # 1: an error exceeds its limit
        sys.exit(f"{' '.join(command)}\n{log.read_text()[-3000:]}")
    return Measured(name, time.perf_counter() - started, cpu, peak, most, file)


def compare(name: str, reference: Path, candidate: Path, tokens: Path, count: int) -> Measured:
    """Run the user's command."""
    command = [sys.executable, "-m", "quantload", "compare", str(reference), str(candidate)]
    command += ["--token-ids", str(tokens), "--max-tokens", str(count), "--device", "cpu"]
    log = tokens.with_name(f"{name}.json")
    found = measure(name, [*command, "--json", "--quiet"], log)
    end = json.loads(log.read_text().splitlines()[-1])["end"]
    print(f"  {name}: KL {end['kl_mean']:.3g} over {end['num_tokens']} tokens", flush=True)
    return found


def convert(source: Path, output: Path, *options: str) -> Path:
    """Convert a checkpoint, if it is not there yet."""
    if not output.is_dir():
        command = [sys.executable, "-m", "quantload", "convert", str(source), str(output)]
        subprocess.run([*command, *options, "--no-verify", "--quiet"], check=True, stdout=-3)
    return output


def large(work: Path, gb: float, count: int, pairs: list[str]) -> list[Measured]:
    """Compare checkpoints of so many GB."""
    shapes, config = llama(int(gb * GB))
    reference = work / "reference"
    if not reference.is_dir():
        write_shapes(reference, shapes, config)
    whole = 2 * 2 * bytes_of(shapes)  # both, float32
    print(f"{bytes_of(shapes) / GB:.2f} GB each; transformers: {whole / MIB:.0f} MiB for both")
    tokens = work / "ids.json"
    ids = np.random.default_rng(0).integers(0, VOCABULARY, count).tolist()
    tokens.write_text(json.dumps([ids]))
    found = []
    for pair in pairs:
        scheme, candidate = PAIRS[pair], work / pair
        if scheme is not None:
            convert(reference, candidate, "--scheme", scheme)
        elif not candidate.is_dir():
            write_shapes(candidate, shapes, config, weights=NoisyWeights())
        found.append(compare(pair, reference, candidate, tokens, count))
        shutil.rmtree(candidate)
    shutil.rmtree(reference)
    return found


def small(work: Path, file: Path, ids: Path, count: int) -> list[Measured]:
    """Compare the W4A16 conversion of SmolLM2-135M with its source, in bfloat16."""
    source = convert(file, work / "bf16", "--scheme", "dense", "--dtype", "bfloat16")
    candidate = convert(source, work / "smollm2-w4a16", "--scheme", "W4A16")
    tokens = work / "ids.json"
    tokens.write_text(ids.read_text())
    return [compare("SmolLM2-135M", source, candidate, tokens, count)]


def print_table(rows: list[Measured]) -> None:
    """Print a Markdown table."""
    print("| pair | seconds | CPU s | peak MiB | anonymous MiB | files MiB |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        sizes = " | ".join(f"{n / MIB:.0f}" for n in (row.peak, row.anonymous, row.file))
        print(f"| {row.name} | {row.seconds:.1f} | {row.cpu:.1f} | {sizes} |")
    print(json.dumps([asdict(row) for row in rows]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--gb", type=float, default=0.0)
    parser.add_argument("--only", default=",".join(PAIRS))
    parser.add_argument("--smollm2", type=Path)
    parser.add_argument("--token-ids", type=Path)
    parser.add_argument("--tokens", type=int)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    rows = []
    if options.gb:
        rows += large(options.work, options.gb, options.tokens or 512, options.only.split(","))
    if options.smollm2:
        count = options.tokens or 2048
        rows += small(options.work, options.smollm2, options.token_ids, count)
    print_table(rows)


if __name__ == "__main__":
    main()
