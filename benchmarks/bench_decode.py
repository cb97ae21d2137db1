"""Time decoding beside transformers' own, on one GPU, with random weights of known shapes.

    python benchmarks/bench_decode.py --model llama-8b --schemes W4A16,FP8_DYNAMIC,dense \
        --batches 1,16,64 --out decode.json

Ways that are timed, in one run:

    fused            our fused step, one CUDA graph
    model            the model's own forward with our layers, one CUDA graph
    compiled         a Llama in bf16 and plain torch, a static cache, its block compiled by
                     torch.compile, in one CUDA graph: what gpt-fast does (compiled_llama.py)
    generate         transformers' `generate` in bf16, eager, a few tokens

Greedy ids of each way with a graph are compared with those of the same step without one. A time of
a row that is `timed` "in the loop" is that of a token in the loop that also copies tokens to the
host; "replays" are medians of a step on the device alone; "replays in turns" are those of our step
and of contestants, one step each after the other. A file of contestants has

    contestants(config, scheme) -> iterable of (way, build)

with `config` a config.json, build() -> (note, start) which checks and builds the model, and
start(batch, prompt_tokens, room) -> step, a call that launches a step of each row: what the rows
have, and may have, are numbers of tokens. The last line is one JSON object with every row.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from compiled_llama import CompiledLlama
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from quantload.api_bench import bench, synthetic
from quantload.layers.decoding import step_model
from quantload.layers.step_bytes import weight_bytes
from quantload.layers.step_model import TransformersStepModel
from quantload.layers.synthetic import CONFIGS
from quantload.runtime.generate import Decoder, Rules
from quantload.runtime.kernels.read_rate import read_rate
from quantload.runtime.step_model import CacheScales, StepModel

DEVICE = torch.device("cuda")
CHECKED = (37, 5, 64)  # lengths of the prompts whose ids are compared
REPLAYS = 60
# Relative distance of logits of two ways to compute in bfloat16, of two layers; it grows with the
# root of their number. (Measured: 0.013 of 2 layers, 0.053 of 32; in float32 the same code agrees
# within 1e-6, see tests.)
TOLERANCE = 0.03
FEW = 12  # tokens of eager `generate`

Row = dict[str, Any]


def main() -> None:
    """Print a line for each row as it is measured, then all as JSON."""
    options = _options()
    rate = read_rate(DEVICE)
    print(f"{torch.cuda.get_device_name()}: reads {rate / 1e9:,.0f} GB/s", flush=True)
    rows: list[Row] = []
    for row in _rows(options):
        share = row["bytes"] / (row["ms"] / 1e3) / rate
        rows.append({**row, "share_of_read_rate": share})
        first = f", first token {row['first_ms']:.1f} ms" if "first_ms" in row else ""
        print(
            f"{row['model']} {row['scheme']:12} {row['way']:12} batch {row['batch']:3}: "
            f"{row['ms']:8.3f} ms a token ({row['timed']}), {share:.1%} of the limit{first} "
            f"{row.get('note', '')}",
            flush=True,
        )
        if options.out:
            Path(options.out).write_text(json.dumps({"read_rate": rate, "rows": rows}))
    print(json.dumps({"read_rate": rate, "rows": rows}))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--schemes", default="W4A16,FP8_DYNAMIC,dense")
    parser.add_argument("--ways", default="fused,model")
    parser.add_argument("--peers", default="generate,compiled")
    parser.add_argument("--contestants", default="", help="file of other steps, see above")
    parser.add_argument("--batches", default="1,16,64")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--kv-cache", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--layers", type=int, help="blocks; default those of the shape")
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing after that")
    parser.add_argument("--out")
    return parser.parse_args()


def _rows(options: argparse.Namespace) -> Iterator[Row]:
    started = time.perf_counter()
    batches = [int(part) for part in options.batches.split(",")]
    for scheme in filter(None, options.schemes.split(",")):
        model = synthetic(options.model, scheme, device=DEVICE, layers=options.layers)
        for way in filter(None, options.ways.split(",")):
            if time.perf_counter() - started < options.seconds:
                yield from _ours(model, scheme, way, batches, options)
        if options.contestants and time.perf_counter() - started < options.seconds:
            yield from _in_turns(model, scheme, batches, options)
        del model
        _forget()
    peers = [peer for peer in options.peers.split(",") if peer]
    if peers and time.perf_counter() - started < options.seconds:
        plain = _plain(options)
        for peer in peers:
            if time.perf_counter() - started < options.seconds:
                yield from _PEERS[peer](plain, batches, options)


def _forget() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _ours(
    model: PreTrainedModel, scheme: str, way: str, batches: list[int], options: argparse.Namespace
) -> Iterator[Row]:
    is_fp8 = options.kv_cache == "fp8" and way == "fused"
    layers = model.config.num_hidden_layers
    cache: dict[str, Any] = {}
    if is_fp8:
        ones = torch.ones(layers)
        cache = {"cache_dtype": torch.float8_e4m3fn, "scales": CacheScales(ones, ones)}
    step, why = step_model(model, fused=None if way == "fused" else False)
    if way == "fused" and why:
        print(f"{options.model} {scheme}: no fused step: {why}", flush=True)
        return
    note = "" if _same_ids(step, cache) else "GREEDY IDS DIFFER from the eager step"
    report = bench(
        model,
        batches=batches,
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        fused=way == "fused",
        **cache,
    )
    for times in report.batches:
        yield {
            "model": options.model,
            "scheme": scheme,
            "way": way,
            "timed": "in the loop",
            "batch": times.batch,
            "ms": times.step * 1e3,
            "first_ms": times.first_token * 1e3,
            "prefill_tokens_per_second": times.prefill_rate,
            "bytes": times.weight_bytes + times.cache_bytes,
            "captured": times.captured,
            "kv_cache": report.cache_dtype,
            "peak_bytes": report.peak_bytes,
            "kernels": report.kernels,
            "note": note or times.why_eager,
            "times": asdict(times),
        }


def _same_ids(step: StepModel, cache: dict[str, Any]) -> bool:
    """True if greedy ids of captured steps are those of eager ones."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(200, (n,), generator=generator).tolist() for n in CHECKED]
    graph, eager = (Decoder(step, graphs=graphs, **cache) for graphs in (True, False))
    return graph.generate(prompts, Rules(16)) == eager.generate(prompts, Rules(16))


# -- peers -----------------------------------------------------------------------------------------


def _plain(options: argparse.Namespace) -> PreTrainedModel:
    """Return the model of a shape as transformers builds it, in bf16."""
    config = {k: v for k, v in CONFIGS[options.model].items() if k != "architectures"}
    if options.layers:
        config["num_hidden_layers"] = options.layers
    with DEVICE:
        config = AutoConfig.for_model(config.pop("model_type"), **config)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def _generate(
    model: PreTrainedModel, batches: list[int], options: argparse.Namespace
) -> Iterator[Row]:
    for batch in batches[:1]:
        ids = torch.randint(200, (batch, options.prompt_tokens), device=DEVICE)
        seconds = {}
        for count in (2, FEW, 2, FEW):  # the first two warm up
            torch.cuda.synchronize()
            started = time.perf_counter()
            model.generate(  # type: ignore[operator]
                ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
            )
            torch.cuda.synchronize()
            seconds[count] = time.perf_counter() - started
        ms = (seconds[FEW] - seconds[2]) / (FEW - 2) * 1e3
        yield {**_peer_row("generate", model, batch, ms, options), "timed": "in its own loop"}


def _compiled(
    model: PreTrainedModel, batches: list[int], options: argparse.Namespace
) -> Iterator[Row]:
    started = time.perf_counter()
    steps = CompiledLlama(model)
    distance = _distance(steps, TransformersStepModel(model))
    note = f"logits of the model's own forward within {distance:.1e}"
    if not distance <= TOLERANCE * math.sqrt(model.config.num_hidden_layers / 2):
        note = f"WRONG: {note}"
    decoder = Decoder(steps)
    for batch in batches:
        slot = decoder.slot(batch, options.prompt_tokens + options.new_tokens)
        compiling = time.perf_counter() - started
        if not slot.is_captured:
            print(f"compiled, batch {batch}: {slot.why_eager}", flush=True)
            continue
        rows = slot.cache.batch
        ids = torch.randint(200, (rows, options.prompt_tokens), device=DEVICE)
        slot.start(ids, torch.full((rows,), options.prompt_tokens, device=DEVICE))
        ms = _replays([slot.step])[0]
        row = _peer_row("compiled", model, batch, ms, options)
        yield {
            **row,
            "timed": "replays",
            "compile_seconds": compiling,
            "captured": True,
            "note": note,
        }
        started = time.perf_counter()


@torch.no_grad()
def _distance(one: StepModel, two: StepModel) -> float:
    """Return the relative distance of logits of a step of one row after a prompt."""
    ids = torch.randint(200, (1, CHECKED[0]), device=DEVICE)
    lengths = torch.tensor([CHECKED[0]], device=DEVICE)
    found = []
    for steps in (one, two):
        cache = steps.new_cache(1, 128)
        steps.prefill(ids, lengths, cache)
        tokens = torch.full_like(lengths, 5)  # the same for both, whatever they found likely
        found.append(steps.step(tokens, lengths, cache).double())
    return float((found[0] - found[1]).norm() / found[1].norm())


def _replays(steps: Sequence[Callable[[], object]]) -> list[float]:
    """Return the median ms on the device of each step, run in turns."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS * len(steps) + 1)]
    events[0].record()
    for number, event in enumerate(events[1:]):
        steps[number % len(steps)]()
        event.record()
    torch.cuda.synchronize()
    times = [one.elapsed_time(two) for one, two in itertools.pairwise(events)]
    return [statistics.median(times[number :: len(steps)]) for number in range(len(steps))]


# -- contestants -----------------------------------------------------------------------------------

Start = Callable[[int, int, int], Callable[[], object]]


def _in_turns(
    model: PreTrainedModel, scheme: str, batches: list[int], options: argparse.Namespace
) -> Iterator[Row]:
    """Yield rows of our step and of the contestants', replayed in turns."""
    starts = _contestants(model, scheme, options)
    if not starts:
        return
    step, why = step_model(model)
    ours, room = "model" if why else "fused", options.prompt_tokens + REPLAYS + 4
    decoder = Decoder(step)
    for batch in batches:
        slot = decoder.slot(batch, room)
        rows = slot.cache.batch
        ids = torch.randint(200, (rows, options.prompt_tokens), device=DEVICE)
        slot.start(ids, torch.full((rows,), options.prompt_tokens, device=DEVICE))
        steps = {ours: (slot.why_eager, slot.step)}
        for way, (note, start) in starts.items():
            steps[way] = note, start(batch, options.prompt_tokens, room)
        times = _replays([call for _, call in steps.values()])
        size = weight_bytes(model, batch) + slot.cache.bytes_read(
            options.prompt_tokens + REPLAYS // 2
        )
        for (way, (note, _)), ms in zip(steps.items(), times, strict=True):
            yield {
                "model": options.model,
                "scheme": scheme,
                "way": way,
                "timed": "replays in turns",
                "batch": batch,
                "ms": ms,
                "bytes": size,
                "note": note,
            }
        del steps
        _forget()


def _contestants(
    model: PreTrainedModel, scheme: str, options: argparse.Namespace
) -> dict[str, tuple[str, Start]]:
    """Build the contestants of a scheme by their way; say which cannot run."""
    path = Path(options.contestants)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = sys.modules.setdefault(path.stem, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    config = dict(CONFIGS[options.model], num_hidden_layers=model.config.num_hidden_layers)
    found: dict[str, tuple[str, Start]] = {}
    for way, build in module.contestants(config, scheme):
        try:
            found[way] = build()
        except Exception as error:  # noqa: BLE001 - one that fails is a hole in the table
            print(f"{way} {scheme}: {type(error).__name__}: {error}", flush=True)
    return found


def _peer_row(
    way: str, model: PreTrainedModel, batch: int, ms: float, options: argparse.Namespace
) -> Row:
    config = model.config
    keys = options.prompt_tokens + options.new_tokens // 2
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = 2 * 2 * config.num_key_value_heads * head * config.num_hidden_layers * keys * batch
    return {
        "model": options.model,
        "scheme": "bf16",
        "way": way,
        "batch": batch,
        "ms": ms,
        "bytes": weight_bytes(model, batch) + cache,
    }


_PEERS = {"generate": _generate, "compiled": _compiled}

if __name__ == "__main__":
    main()
