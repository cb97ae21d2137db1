"""Runs inside the environment that holds vLLM: load a folder, continue prompts, print JSON.

Usage: python vllm_generate.py FOLDER NEW_TOKENS PROMPTS_JSON
"""

from __future__ import annotations

import json
import sys

import torch
from vllm import LLM, SamplingParams


def main() -> None:
    """Generate greedily; the last line of stdout is a JSON list of texts."""
    folder, new_tokens, prompts = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    if hasattr(torch.cpu, "_init_amx"):
        torch.cpu._init_amx()  # vLLM's int4 kernel uses AMX without asking the kernel for it
    model = LLM(model=folder, enforce_eager=True, dtype="bfloat16", max_model_len=256)
    outputs = model.generate(prompts, SamplingParams(temperature=0.0, max_tokens=new_tokens))
    texts = [output.outputs[0].text for output in outputs]
    sys.stdout.write(json.dumps(texts) + "\n")


if __name__ == "__main__":
    main()
