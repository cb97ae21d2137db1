"""Every real checkpoint, of every tool: its dequantized weights are the tool's own, bit for bit."""

import pytest
from truth import CHECKPOINTS, read_named, truths

from quantload.errors import FormatError
from quantload.loader.formats import open_source
from quantload.loader.open import open_checkpoint

TRUTHS = truths()
# Folders of formats that are refused, and what the message names.
REFUSED: dict[str, str] = {
    "aqlm-1.1.7/micro-llama-aqlm-1x16g8-int16": "`aqlm` (.*) is not read",
    "sinq-0.2.0/micro-llama-sinq-w4g64": "`sinq` (.*) is not read",
    "gptqmodel-7.7.0/micro-llama-qqq-g128": "`qqq`",
    "llmcompressor-0.14.0.1/nano-llama-SpinQuant-R1R2R4-W4A16": "`transform_config`",
    "llmcompressor-0.7.1/nano-llama-sparse24-FP8": "`sparsity_config`",
    "llmcompressor-0.7.1/nano-llama-sparse24-W4A16-marlin24": "`marlin-24`",
    "llmcompressor-0.7.1/nano-llama-sparse24-bitmask-bf16": "`sparsity_config`",
    "transformers-quant-5.24.0/micro-llama-bitnet-bitlinear": "`bitnet`",
    "transformers-quant-5.24.0/micro-llama-metal-w2g32": "`metal`",
    "transformers-quant-5.24.0/tiny-gemma3-gemmaquant-w4-mixed": "`gemma`",
    "transformers-quant-5.24.0/tiny-qwen2-metal-w4g64": "`metal`",
}
# Folders whose tool rounded in its file what it did not round for its own values.
ULPS = {"auto-round-0.16.1/nano-llama-auto_round-FPW8A16": 1}  # scales, to bfloat16
pytestmark = pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason="no folder shared/checkpoints")


@pytest.mark.parametrize(
    "truth", TRUTHS, ids=lambda truth: f"{truth.folder.parent.name}/{truth.folder.name}"
)
def test_weights_are_those_of_the_tool(truth):
    name = f"{truth.folder.parent.name}/{truth.folder.name}"
    if name in REFUSED:
        with pytest.raises(FormatError, match=REFUSED[name]):
            open_source(open_checkpoint(truth.folder))
        return
    source = open_source(open_checkpoint(truth.folder))
    wrong = {}
    for key in truth.weights:
        problem = truth.difference(
            key, read_named(source, key.partition("@")[0]), ulps=ULPS.get(name, 0)
        )
        if problem:
            wrong[key] = problem
    assert not wrong
