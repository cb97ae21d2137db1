"""Load speed on a GPU: quantload beside transformers, safetensors and fastsafetensors.

    python benchmarks/bench_load.py [--gb 16.06] [--rounds 3] [--folder /dev/shm] [--limits-only]
                                    [--files FOLDER]

Makes a checkpoint with the shapes of Llama 3 8B in bfloat16, and one of the same shapes as W4A16
(compressed-tensors, groups of 128; embedding and head in bfloat16), with random contents, in a
folder that is memory: what is measured is the way from the page cache to the GPU. All methods run
in turn, `--rounds` times, and medians are given. `--files` takes the checkpoints that an earlier
run left in a folder, or leaves them there.

`stream` are the tensors alone, as quantload reads them; `quantload` and `transformers` return
models, the others tensors. Of quantload's load the parts are told, too: opening
(headers), building the model on the meta device with all that is proven of it, the stream of
tensors with their decoding and packing, and what follows (fast paths).

The limits are measured in the same run: `pinned` is the copy of page-locked memory to the device,
`cache` is `preadv` of the same files into page-locked memory by as many threads as quantload takes.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from synthetic_models import MODELS, Weights, write_model

GB = 1e9
GROUP = 128
QUANTIZED = ("_proj.weight",)
SHARD = 5 * GB
CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "version": "0.20.1",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "format": "pack-quantized",
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": GROUP,
                "dynamic": False,
            },
        }
    },
}

Tensors = dict[str, tuple[str, tuple[int, ...], int]]  # name: (dtype, shape, bytes)


# -- files ----------------------------------------------------------------------------------------


def quantized_tensors(shapes: dict[str, tuple[int, ...]]) -> Tensors:
    """The tensors of a W4A16 conversion of a model of these shapes."""
    found: Tensors = {}
    for name, shape in shapes.items():
        if not name.endswith(QUANTIZED):
            found[name] = ("BF16", shape, 2 * math.prod(shape))
            continue
        rows, columns = shape
        module = name.removesuffix(".weight")
        words, groups = columns // 8, columns // GROUP
        found[f"{module}.weight_packed"] = ("I32", (rows, words), 4 * rows * words)
        found[f"{module}.weight_scale"] = ("BF16", (rows, groups), 2 * rows * groups)
        found[f"{module}.weight_shape"] = ("I64", (2,), 16)
    return found


def write_quantized(folder: Path, gb: float) -> Path:
    """Write random codes and scales."""
    shapes, config = MODELS["llama"](int(gb * GB))
    folder.mkdir(parents=True)
    weights, places = Weights(), {}
    shard: Tensors = {}
    shards = [shard]
    for name, tensor in quantized_tensors(shapes).items():
        if sum(size for _, _, size in shard.values()) + tensor[2] > SHARD:
            shards.append(shard := {})
        shard[name] = tensor
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / file, tensors, shapes, weights)
        places |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places})
    )
    config |= {"quantization_config": CONFIG}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _write_shard(
    path: Path, tensors: Tensors, shapes: dict[str, tuple[int, ...]], weights: Weights
) -> None:
    header, position = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, (_, _, size) in tensors.items():
            if name.endswith(".weight_shape"):
                shape = shapes[name.removesuffix("_shape")]
                file.write(np.array(shape, np.int64).tobytes())
                continue
            for piece in weights.pieces(size // 2):  # bits of weights: codes as good as any
                file.write(piece)


def shards_of(folder: Path) -> list[Path]:
    """The files of a checkpoint."""
    return sorted(folder.glob("*.safetensors"))


def bytes_of(folder: Path) -> int:
    """Their bytes."""
    return sum(file.stat().st_size for file in shards_of(folder))


# -- limits ---------------------------------------------------------------------------------------


def pinned_rate(seconds: float = 0.3) -> float:
    """GB/s of copies of page-locked memory to the device, 64 MiB each."""
    source = torch.empty(1 << 26, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        for _ in range(8):
            target.copy_(source, non_blocking=True)
        count += 8
        torch.cuda.synchronize()
    return count * source.nbytes / (time.perf_counter() - begin) / GB


def cache_rate(folder: Path, threads: int, chunk: int) -> float:
    """GB/s of reading a checkpoint into page-locked memory that is used again and again."""
    chunks = [
        (file, start)
        for file in shards_of(folder)
        for start in range(0, file.stat().st_size, chunk)
    ]
    buffers = [torch.empty(chunk, dtype=torch.uint8, pin_memory=True) for _ in range(threads)]
    position, lock = iter(chunks), threading.Lock()

    def work(number: int) -> None:
        view, opened, descriptor = buffers[number].numpy().data, None, -1
        while True:
            with lock:
                found = next(position, None)
            if found is None:
                return
            if found[0] != opened:
                opened, descriptor = found[0], os.open(found[0], os.O_RDONLY)
            os.preadv(descriptor, [view], found[1])

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    begin = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return bytes_of(folder) / (time.perf_counter() - begin) / GB


# -- methods --------------------------------------------------------------------------------------


class Timed:
    """Progress that notes when tensors begin and end to be read."""

    def __init__(self) -> None:
        self.begin = self.end = 0.0

    def start(self, phase: str, *, total: int, unit: str) -> None:
        self.begin = time.perf_counter()

    def advance(self, amount: int, *, note: str = "") -> None:
        pass

    def finish(self) -> None:
        torch.cuda.synchronize()
        self.end = time.perf_counter()


def by_quantload(folder: Path) -> tuple[object, dict[str, float]]:
    import quantload
    from quantload.api_load import load_model

    begin = time.perf_counter()
    source = quantload.inspect(folder)
    opened = time.perf_counter()
    timed = Timed()
    model = load_model(source, device=torch.device("cuda"), progress=timed)
    torch.cuda.synchronize()
    end = time.perf_counter()
    return model, {
        "open": opened - begin,
        "build and plan": timed.begin - opened,
        "stream": timed.end - timed.begin,
        "finish": end - timed.end,
    }


def by_stream(folder: Path) -> tuple[object, dict[str, float]]:
    """Tensors alone, as quantload streams them: no model, nothing is decoded."""
    from quantload.loader.open import open_checkpoint
    from quantload.loader.portion import portion_of
    from quantload.loader.runs import Fetch
    from quantload.loader.stream import Stream

    device = torch.device("cuda", torch.cuda.current_device())
    entries = open_checkpoint(folder).tensors.values()
    fetches = [Fetch(portion_of(e, None, None)[0], device, is_kept=True) for e in entries]
    with Stream(fetches, device) as stream:
        stream.wait(fetches)
        return [fetch.take() for fetch in fetches], {}


def by_transformers(folder: Path) -> tuple[object, dict[str, float]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, device_map="cuda", dtype=torch.bfloat16)
    return model, {}


def by_safetensors(folder: Path) -> tuple[object, dict[str, float]]:
    from safetensors.torch import load_file

    return [load_file(file, device="cuda") for file in shards_of(folder)], {}


def by_fastsafetensors(folder: Path) -> tuple[object, dict[str, float]]:
    from fastsafetensors import fastsafe_open

    with fastsafe_open(
        filenames=[str(file) for file in shards_of(folder)], nogds=True, device="cuda:0"
    ) as opened:
        names = list(opened.keys())
        return {name: opened.get_tensor(name).clone() for name in names}, {}


METHODS: dict[str, Callable[[Path], tuple[object, dict[str, float]]]] = {
    "quantload": by_quantload,
    "stream": by_stream,
    "transformers": by_transformers,
    "safetensors": by_safetensors,
    "fastsafetensors": by_fastsafetensors,
}


def timed_once(method: str, folder: Path) -> dict[str, object]:
    """Seconds of one load, and the memory that it took beside what it gives."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    loaded, parts = METHODS[method](folder)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    kept, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    del loaded
    return {"seconds": seconds, "kept": kept, "above": peak - kept, **parts}


def run(folder: Path, methods: list[str], rounds: int) -> Iterator[dict[str, object]]:
    """Yield a row for each method."""
    found: dict[str, list[dict[str, object]]] = {method: [] for method in methods}
    pinned = []
    for number in range(rounds + 1):  # the first is not counted: imports, first allocations
        for method in list(found):
            try:
                result = timed_once(method, folder)
            except Exception as error:  # noqa: BLE001 - a rival that fails is told, not hidden
                print(f"{method} failed: {type(error).__name__}: {str(error)[:200]}", flush=True)
                del found[method]
                continue
            print(number, folder.name, method, _rounded(result), flush=True)
            if number:
                found[method].append(result)
        pinned.append(pinned_rate())
    limit, size = statistics.median(pinned), bytes_of(folder)
    for method, results in found.items():
        row: dict[str, object] = {"files": folder.name, "method": method}
        for key in results[0]:
            row[key] = statistics.median(float(result[key]) for result in results)  # type: ignore[arg-type]
        rate = size / float(row["seconds"]) / GB  # type: ignore[arg-type]
        yield row | {"GB/s": rate, "of pinned": rate / limit, "pinned": limit}


def _rounded(row: dict[str, object]) -> dict[str, object]:
    return {
        key: round(value, 3 if value < 1e4 else 0) if isinstance(value, float) else value
        for key, value in row.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=16.06)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--files", type=Path)
    parser.add_argument("--limits-only", action="store_true")
    parser.add_argument("--write-only", action="store_true")
    options = parser.parse_args()
    folder = options.files or Path(tempfile.mkdtemp(dir=options.folder))
    try:
        dense, packed = written(folder, options.gb)
        if not options.write_only:
            measure(dense, packed, options)
    finally:
        if not options.files:
            shutil.rmtree(folder, ignore_errors=True)


def written(folder: Path, gb: float) -> tuple[Path, Path]:
    """Return both checkpoints; they are written if they are not there."""
    begin = time.perf_counter()
    dense, packed = folder / "bf16", folder / "w4a16"
    if not dense.exists():
        write_model(dense, shape="llama", gb=gb, shard_gb=3.5)
    if not packed.exists():
        write_quantized(packed, gb)
    sizes = f"{bytes_of(dense) / GB:.2f} and {bytes_of(packed) / GB:.2f} GB"
    print(f"{sizes}, written in {time.perf_counter() - begin:.1f} s", flush=True)
    return dense, packed


def measure(dense: Path, packed: Path, options: argparse.Namespace) -> None:
    """Measure limits and methods, and print them."""
    rows: list[dict[str, object]] = []
    for threads in (8, 12, 16):
        for mib in (4, 8):
            rate = cache_rate(dense, threads, mib << 20)
            rows.append({"limit": "cache", "threads": threads, "MiB": mib, "GB/s": rate})
            print(_rounded(rows[-1]), flush=True)
    print(f"pinned {pinned_rate():.1f} GB/s", flush=True)
    if not options.limits_only:
        rows += run(dense, options.methods, options.rounds)
        rows += run(packed, options.methods, options.rounds)
    for row in rows:
        print(_rounded(row))
    system = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "cores": os.cpu_count(),
    }
    print(json.dumps({"rows": rows, **system}))


if __name__ == "__main__":
    main()
