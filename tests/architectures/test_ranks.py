"""Ranks and stages of every architecture give the logits of one process, or stages are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from thread_grid import grid, together
from tiny_architectures import architectures, inputs_of, tiny_model

from quantload import api
from quantload.errors import ModelError

# What loads on one process neither; `test_sweep.py` says why.
NOT_LOADED = {"inkling2_loop", "inkling2_loop_text"}
ALL = {name: cls for name, cls in architectures().items() if name not in NOT_LOADED}
NOT_BUILT = (ImportError, ValueError, AttributeError, TypeError, StrictDataclassError)
SAMPLE = [
    ("step3p7", 2, 1),  # gate and up of all experts are a tensor each
    ("diffusion_gemma", 2, 1),  # blocks of encoder and decoder share their experts
    ("diffusion_gemma", 1, 2),  # the decoder reads keys and values of the encoder's layers
    ("xmod", 1, 2),  # model code asks a layer what adapters it has
]
REST = [
    pytest.param(model_type, tp, pp, marks=pytest.mark.slow)
    for model_type in ALL
    for tp, pp in ((2, 1), (4, 1), (1, 2))
    if (model_type, tp, pp) not in SAMPLE
]


def is_refused(folder: Path, stages: int) -> bool:
    try:
        api.load(folder, device="cpu", parallel=grid(1, stages)[0])
    except ModelError as error:
        return "stages" in error.message
    return False


@pytest.mark.parametrize(("model_type", "tp", "pp"), [*SAMPLE, *REST])
@pytest.mark.filterwarnings("ignore")
def test_ranks_agree(model_type: str, tp: int, pp: int, tmp_path: Path) -> None:
    try:
        model = tiny_model(model_type, ALL[model_type])
        inputs = inputs_of(model)
        with torch.no_grad():
            model(**inputs, use_cache=False)
    except NOT_BUILT as error:
        pytest.skip(f"no tiny model that runs on text: {error}")
    model.save_pretrained(tmp_path)
    mask = torch.ones_like(inputs["attention_mask"])
    mask[0, :5] = 0  # texts of unlike lengths
    inputs = {**inputs, "attention_mask": mask, "use_cache": False}
    options = {"device": "cpu", "dtype": torch.float32}
    seen = mask[..., None].bool()
    with torch.no_grad():
        torch.manual_seed(0)
        expected = api.load(tmp_path, **options)(**inputs).logits
    ranks = grid(tp, pp)
    if pp > 1 and is_refused(tmp_path, pp):
        return  # what ranks of a stage cannot share is replicated, never refused
    models = [api.load(tmp_path, **options, parallel=rank) for rank in ranks]
    torch.manual_seed(0)
    for logits in together(ranks, lambda rank: models[rank.rank](**inputs).logits):
        if logits.shape[:2] == mask.shape:  # not where an image or a decoder gives other tokens
            logits, wanted = logits * seen, expected * seen
        else:
            wanted = expected
        assert (logits - wanted).norm() <= 1e-5 * wanted.norm()
