"""Every real quantized checkpoint, loaded: its logits are those of transformers on its weights.

The oracle is plain transformers in float32 on the dense float32 conversion, whose weights are the
tool's own (`tests/loader/formats/test_truth.py`); and the logits that the tool recorded in
bfloat16.
"""

import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM
from truth import CHECKPOINTS, truths

from quantload import api
from quantload.errors import FormatError

# Recorded logits that are further off, each with the reason; limits are twice what was measured.
OTHERWISE = {
    # the tool rounds activations as well
    "bitsandbytes-0.50.2/micro-llama-int8": 0.05,
    "torchao-0.18.0/micro-llama-int8da": 0.05,
    "torchao-0.18.0/micro-llama-int8da-intx4": 0.06,
    # the tool dequantizes k-quants in bfloat16
    "gptqmodel-7.7.0/micro-llama-gguf-q4_k": 0.09,
    # one token is routed to another expert in bfloat16, also by plain transformers
    "amd-quark-0.13/micro-qwen3-moe-MXFP4": 0.2,
}
TRUTHS = [truth for truth in truths() if not truth.folder.parent.name.startswith("transformers-5")]
pytestmark = pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason="no folder shared/checkpoints")


def relative(found, expected):
    return float((found - expected.float()).norm() / expected.float().norm())


def in_transformers(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    "truth", TRUTHS, ids=lambda truth: f"{truth.folder.parent.name}/{truth.folder.name}"
)
@torch.no_grad()
def test_logits(truth, tmp_path):
    folder, name = truth.folder, f"{truth.folder.parent.name}/{truth.folder.name}"
    try:
        model = api.load(folder, device="cpu", dtype=torch.float32, quantize_inputs=False)
    except FormatError:
        pytest.skip("refused by name: see test_truth.py")
    ids = truth.tensors["input_ids"]
    found = model(ids, use_cache=False).logits
    plan = api.plan(folder, "dense", options=api.PlanOptions(dtype=torch.float32))
    dense = api.execute(plan, tmp_path / "dense", verify_output=False).folder
    expected = in_transformers(dense)(ids, use_cache=False).logits
    assert relative(found, expected) < 1e-4
    assert relative(found, truth.tensors["logits"]) < OTHERWISE.get(name, 0.02)
