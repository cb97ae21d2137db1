"""Runs inside the environment that holds llm-compressor: quantize a folder to several schemes.

Usage: python llm_compressor_quantize.py SOURCE OUTPUT JOB...

JOB is FUNCTION=SCHEME or FUNCTION=SCHEME:gSIZE; FUNCTION is `model_free` (model_free_ptq) or
`oneshot` (QuantizationModifier, on four random prompts). Writes OUTPUT/JOB; a job that
llm-compressor refuses leaves OUTPUT/JOB.error with what it said. OUTPUT/stats.safetensors gets the
largest input of each linear layer over the prompts, as `<module>.input_absmax`; plain hooks see it.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

import torch
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from datasets import Dataset
from llmcompressor import model_free_ptq, oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

PROMPTS, TOKENS = 4, 32


def scheme_of(name: str) -> QuantizationScheme:
    preset, _, size = name.partition(":g")
    scheme = preset_name_to_scheme(preset, ["Linear"])
    if size:
        scheme.weights.group_size = int(size)
    return scheme


def model_free(source: Path, output: Path, name: str) -> None:
    ignored = ["re:.*lm_head", "re:.*embed_tokens"]  # it knows no kinds of modules
    model_free_ptq(source, output, scheme=scheme_of(name), ignore=ignored, device="cpu")


def tokenizer() -> PreTrainedTokenizerFast:
    """It asks for one, though prompts come as ids."""
    words = Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<unk>")


def calibration(vocabulary: int) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (PROMPTS, TOKENS), generator=generator)
    return Dataset.from_dict(
        {"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()}
    )


@torch.no_grad()
def input_maxima(source: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    found: dict[str, torch.Tensor] = {}

    def watch(name: str):
        def hook(_module, inputs):
            key = f"{name}.input_absmax"
            most = inputs[0].abs().amax().float().reshape(1)
            found[key] = torch.maximum(found.get(key, most), most)

        return hook

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(watch(name))
    for row in calibration(model.config.vocab_size):
        model(**{name: torch.tensor([ids]) for name, ids in row.items()}, use_cache=False)
    return found


def in_one_shot(source: Path, output: Path, name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    recipe = QuantizationModifier(
        config_groups={"group_0": scheme_of(name)}, ignore=["re:.*lm_head"]
    )
    oneshot(
        model=model,
        recipe=recipe,
        processor=tokenizer(),
        dataset=calibration(model.config.vocab_size),
        num_calibration_samples=PROMPTS,
        max_seq_length=TOKENS,
        pipeline="basic",
    )
    model.save_pretrained(output, save_compressed=True)


FUNCTIONS = {"model_free": model_free, "oneshot": in_one_shot}


def main() -> None:
    source, output, *jobs = sys.argv[1:]
    Path(output).mkdir(parents=True, exist_ok=True)
    save_file(input_maxima(Path(source)), f"{output}/stats.safetensors")
    for job in jobs:
        function, _, name = job.partition("=")
        folder = Path(output) / re.sub(r"\W", "-", job)
        try:
            FUNCTIONS[function](Path(source), folder, name)
        except Exception:  # noqa: BLE001 - what it refuses is told, the next job runs
            folder.with_name(f"{folder.name}.error").write_text(traceback.format_exc())


if __name__ == "__main__":
    main()
