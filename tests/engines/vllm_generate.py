"""Runs inside the environment that holds vLLM: load a folder, run prompts, print JSON.

Usage: python vllm_generate.py FOLDER NEW_TOKENS PROMPTS_JSON

Prompts that are texts are continued. Prompts that are lists of token ids are read only, for models
without a tokenizer: each gives the log-probabilities of the whole vocabulary after every id but
the last.
"""

from __future__ import annotations

import json
import sys

import torch
from vllm import LLM, SamplingParams


def continued(model, prompts, new_tokens):
    """Return a greedy continuation of each text."""
    outputs = model.generate(prompts, SamplingParams(temperature=0.0, max_tokens=new_tokens))
    return [output.outputs[0].text for output in outputs]


def log_probabilities(model, prompts):
    """Return [prompt][position][token] for lists of token ids; the first id has no prediction."""
    settings = SamplingParams(max_tokens=1, detokenize=False, prompt_logprobs=-1)
    outputs = model.generate([{"prompt_token_ids": ids} for ids in prompts], settings)
    return [
        [[found[token].logprob for token in sorted(found)] for found in output.prompt_logprobs[1:]]
        for output in outputs
    ]


def main() -> None:
    """Run the prompts; the last line of stdout is a JSON list with one result for each."""
    folder, new_tokens, prompts = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    of_ids = not isinstance(prompts[0], str)
    if hasattr(torch.cpu, "_init_amx"):
        torch.cpu._init_amx()  # vLLM's int4 kernel uses AMX without asking the kernel for it
    model = LLM(
        model=folder,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=256,
        max_logprobs=-1,
        skip_tokenizer_init=of_ids,
    )
    results = log_probabilities(model, prompts) if of_ids else continued(model, prompts, new_tokens)
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
