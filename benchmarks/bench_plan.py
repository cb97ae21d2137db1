"""Time and memory to open and plan a checkpoint of 100,000 tensors, from its headers alone.

The checkpoint is synthetic: a mixture-of-experts decoder whose shards are sparse files, so that
only headers take space. Each format runs in a process of its own.

    python benchmarks/bench_plan.py [FORMAT ...] [--tensors 100000]

Prints one row a format: tensors, modules, seconds to open (headers, config, name matching) and to
plan a conversion to full precision, CPU seconds of that, and the peak memory of the process and of
its copy that probes the model; the copy imports transformers' model code while the files are
opened, and shares what was there before it. Only quantload itself is imported before the clock
starts. There is no peer: no other tool has a step that stops before tensors are read.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

HIDDEN, INNER, GROUP, EXPERTS, SHARD_TENSORS = 512, 256, 128, 256, 2000
PROJECTIONS = {
    "gate_proj": (INNER, HIDDEN),
    "up_proj": (INNER, HIDDEN),
    "down_proj": (HIDDEN, INNER),
}
SIZES = {"I32": 4, "BF16": 2, "F16": 2, "F32": 4, "I64": 8, "F8_E4M3": 1, "U8": 1}
Spec = tuple[str, tuple[int, ...]]


def _nvfp4(rows: int, columns: int) -> dict[str, Spec]:
    return {
        "weight_packed": ("U8", (rows, columns // 2)),
        "weight_scale": ("F8_E4M3", (rows, columns // 16)),
        "weight_global_scale": ("F32", (1,)),
        "input_global_scale": ("F32", (1,)),
    }


def _gptq(rows: int, columns: int) -> dict[str, Spec]:
    return {
        "qweight": ("I32", (columns // 8, rows)),
        "qzeros": ("I32", (columns // GROUP, rows // 8)),
        "scales": ("F16", (columns // GROUP, rows)),
        "g_idx": ("I32", (columns,)),
    }


def _awq(rows: int, columns: int) -> dict[str, Spec]:
    return {
        "qweight": ("I32", (columns, rows // 8)),
        "qzeros": ("I32", (columns // GROUP, rows // 8)),
        "scales": ("F16", (columns // GROUP, rows)),
    }


def _fp8(rows: int, columns: int) -> dict[str, Spec]:
    return {
        "weight": ("F8_E4M3", (rows, columns)),
        "weight_scale_inv": ("F32", (-(-rows // 128), -(-columns // 128))),
    }


def _modelopt(rows: int, columns: int) -> dict[str, Spec]:
    return {
        "weight": ("U8", (rows, columns // 2)),
        "weight_scale": ("F8_E4M3", (rows, columns // 16)),
        "weight_scale_2": ("F32", ()),
        "input_scale": ("F32", ()),
    }


def _dense(rows: int, columns: int) -> dict[str, Spec]:
    return {"weight": ("BF16", (rows, columns))}


_FP4 = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
FORMATS = {
    "dense": (_dense, None),
    "compressed-tensors": (
        _nvfp4,
        {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "config_groups": {
                "group_0": {
                    "targets": [r"re:.*mlp\.experts\.\d+\..*_proj$", "Linear"],
                    "weights": _FP4,
                    "input_activations": {**_FP4, "dynamic": "local"},
                }
            },
            "ignore": ["lm_head", r"re:.*self_attn.*", r"re:.*mlp\.gate$"],
        },
    ),
    "gptq": (
        _gptq,
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": GROUP,
            "sym": True,
            "desc_act": False,
            "checkpoint_format": "gptq",
            "dynamic": {r"-:.*self_attn.*": {}, r"-:.*\.gate$": {}},
        },
    ),
    "awq": (
        _awq,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": ["self_attn", "mlp.gate", "lm_head"],
        },
    ),
    "fp8": (
        _fp8,
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "self_attn", "mlp.gate"],
        },
    ),
    "modelopt": (
        _modelopt,
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": 16,
            "ignore": ["lm_head", "model.layers.*.self_attn*", "model.layers.*.mlp.gate"],
        },
    ),
}


def tensors(format_name: str, least: int) -> Iterator[tuple[str, Spec]]:
    """Yield names and headers of a decoder with at least so many tensors."""
    leaves = FORMATS[format_name][0]
    yield "model.embed_tokens.weight", ("BF16", (1024, HIDDEN))
    yield "lm_head.weight", ("BF16", (1024, HIDDEN))
    yield "model.norm.weight", ("BF16", (HIDDEN,))
    count, layer = 3, 0
    while count < least:
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{name}.weight", ("BF16", (HIDDEN,))
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{prefix}.self_attn.{name}.weight", ("BF16", (HIDDEN, HIDDEN))
        for name in ("q_norm", "k_norm"):
            yield f"{prefix}.self_attn.{name}.weight", ("BF16", (64,))
        yield f"{prefix}.mlp.gate.weight", ("BF16", (EXPERTS, HIDDEN))
        count += 9
        for expert in range(EXPERTS):
            for name, shape in PROJECTIONS.items():
                for leaf, spec in leaves(*shape).items():
                    yield f"{prefix}.mlp.experts.{expert}.{name}.{leaf}", spec
                    count += 1
        layer += 1


def write_checkpoint(folder: Path, format_name: str, least: int) -> int:
    """Write config, index and sparse shards; returns the number of tensors."""
    everything = list(tensors(format_name, least))
    weight_map = {}
    for number, start in enumerate(range(0, len(everything), SHARD_TENSORS)):
        file_name = f"model-{number + 1:05}.safetensors"
        header, offset = {}, 0
        for name, (dtype, shape) in everything[start : start + SHARD_TENSORS]:
            size = SIZES[dtype]
            for length in shape:
                size *= length
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
            offset += size
            weight_map[name] = file_name
        raw = json.dumps(header).encode()
        raw += b" " * (-len(raw) % 8)
        with (folder / file_name).open("wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            file.truncate(8 + len(raw) + offset)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    layers = sum(name.endswith("input_layernorm.weight") for name in weight_map)
    (folder / "config.json").write_text(json.dumps(_config(format_name, layers)))
    return len(everything)


def _config(format_name: str, layers: int) -> dict[str, object]:
    config: dict[str, object] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "moe_intermediate_size": INNER,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 8,
        "num_hidden_layers": layers,
        "vocab_size": 1024,
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    quantization = FORMATS[format_name][1]
    if quantization is not None:
        config["quantization_config"] = quantization
    return config


def measure(folder: Path) -> dict[str, float]:
    """Open and plan; meant for a process of its own."""
    from quantload import api

    before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    plan = api.plan(folder, "dense")
    planned = time.perf_counter()
    after = resource.getrusage(resource.RUSAGE_SELF)
    probe = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "modules": len(plan.rows),
        "seconds": planned - start,
        "cpu_s": cpu + probe.ru_utime + probe.ru_stime,
        "peak_mib": after.ru_maxrss / 1024,
        "probe_mib": probe.ru_maxrss / 1024,
    }


def main() -> None:
    """Run each format in a process of its own and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("formats", nargs="*", help=f"some of {', '.join(FORMATS)}")
    parser.add_argument("--tensors", type=int, default=100_000)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    print("format               tensors  modules  seconds    CPU s   peak MiB   of the probe")
    for name in options.formats or FORMATS:
        with tempfile.TemporaryDirectory() as folder:
            count = write_checkpoint(Path(folder), name, options.tensors)
            command = [sys.executable, __file__, "--measure", folder]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{name:20} {count:7}  {done.stderr.strip().splitlines()[-1]}")
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        print(
            f"{name:20} {count:7} {found['modules']:8} {found['seconds']:8.2f} "
            f"{found['cpu_s']:8.2f} {found['peak_mib']:10.0f} "
            f"{found['probe_mib']:10.0f}"
        )


if __name__ == "__main__":
    main()
