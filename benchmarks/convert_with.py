"""One conversion by one tool; `bench_convert.py` runs this in the environment of each tool.

python convert_with.py TOOL SOURCE OUTPUT SCHEME [MEMORY]
python convert_with.py TOOL            # only the imports of that tool
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")


def llm_compressor(source, output, scheme):
    from llmcompressor import model_free_ptq

    if source is not None:
        model_free_ptq(source, output, scheme=scheme, ignore=["lm_head"], device="cpu")


def auto_round(source, output, scheme):
    """Plain rounding, as the others do; by default it searches scales, which takes longer."""
    from auto_round import AutoRound
    from auto_round.compressors import model_free  # noqa: F401 - imported by the call below

    if source is not None:
        made = AutoRound(source, scheme=scheme, model_free=True, disable_opt_rtn=True)
        made.quantize_and_save(output)


def compressed_tensors(source, output, _scheme):
    from compressed_tensors.entrypoints.convert import (
        CompressedTensorsDequantizer,
        convert_checkpoint,
    )

    if source is not None:
        convert_checkpoint(source, output, CompressedTensorsDequantizer(source), device="cpu")


def quantload(source, output, scheme, memory="1GiB"):
    """Prints bytes of anonymous memory between plan and execution; an empty output: plans only."""
    from quantload import api
    from quantload.cli_options import parse_size
    from quantload.loader.workers import Resources

    if source is None:
        return
    plan = api.plan(source, scheme)
    if not output:
        return
    print("planned", anonymous_memory(os.getpid()), flush=True)
    resources = Resources(memory=parse_size(memory))
    api.execute(plan, output, verify_output=False, resources=resources)


def anonymous_memory(process: int) -> int:
    """Resident memory of a process that is not of files, in bytes; 0 once it has ended."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


TOOLS = {
    "llm-compressor": llm_compressor,
    "auto-round": auto_round,
    "compressed-tensors": compressed_tensors,
    "quantload": quantload,
}

if __name__ == "__main__":
    tool, *arguments = sys.argv[1:]
    TOOLS[tool](*arguments or (None, None, None))
