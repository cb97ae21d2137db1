"""Models shared by ranks give the logits and the text of one process, whatever is cut.

Ranks are threads, see `thread_grid.py`; two processes that gloo connects run the same at the end.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gloo_ranks import run_in_processes
from shared_models import MODELS, ODD, SIZES, write_model
from thread_grid import grid, together
from torch import Tensor
from transformers import AutoConfig, AutoModel

from quantload import api
from quantload.errors import ModelError
from quantload.runtime.parallel import Parallel

SCHEMES = ("dense", "W4A16:g32", "FP8_BLOCK", "NVFP4A16", "FP8_DYNAMIC", "W8A8")
SMALL = [("dense", 4, 1), ("W4A16:g32", 2, 2)]  # (scheme, tensor parallel, stages)
WHOLE = [
    (scheme, tp, pp)
    for scheme in SCHEMES
    for tp, pp in ((2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (2, 2))
    if (scheme, tp, pp) not in SMALL
]
GREEDY = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    return {}


@pytest.fixture
def checkpoint(request, checkpoints, tmp_path_factory):
    """Return the folder of a model in a scheme; each is made once."""

    def make(model_type: str, scheme: str) -> Path:
        if (model_type, scheme) not in checkpoints:
            folder = tmp_path_factory.mktemp(model_type) / "model"
            if scheme == "dense":
                write_model(model_type, folder)
            else:
                api.convert(make(model_type, "dense"), folder, scheme, verify_output=False)
            checkpoints[model_type, scheme] = folder
        return checkpoints[model_type, scheme]

    return make


def tokens() -> Tensor:
    return torch.randint(3, 131, (2, 7), generator=torch.Generator().manual_seed(1))


def assert_ranks_agree(folder: Path, tp: int, pp: int) -> None:
    """Compare with inputs in full precision: a code at the edge of its step would flip."""
    ids, options = tokens(), {"device": "cpu", "quantize_inputs": False}
    with torch.no_grad():
        alone = api.load(folder, **options)
        expected, text = alone(ids).logits, alone.generate(ids[:1], **GREEDY)
    ranks = grid(tp, pp)
    models = [api.load(folder, **options, parallel=rank) for rank in ranks]
    for logits in together(ranks, lambda rank: models[rank.rank](ids).logits):
        assert (logits - expected).norm() <= 1e-5 * expected.norm()
    for found in together(ranks, lambda rank: models[rank.rank].generate(ids[:1], **GREEDY)):
        assert torch.equal(found, text)


@pytest.mark.parametrize(("scheme", "tp", "pp"), SMALL)
@pytest.mark.parametrize("model_type", MODELS)
def test_ranks_agree_with_one_process(checkpoint, model_type, scheme, tp, pp):
    assert_ranks_agree(checkpoint(model_type, scheme), tp, pp)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("model_type", ODD)
def test_models_with_ways_of_their_own(checkpoint, model_type, tp, pp):
    assert_ranks_agree(checkpoint(model_type, "dense"), tp, pp)


def test_stages_keep_float32_between_layers(checkpoint):
    ids, options = tokens(), {"device": "cpu", "dtype": torch.bfloat16}
    with torch.no_grad():
        expected = api.load(checkpoint("mamba", "dense"), **options)(ids).logits
    ranks = grid(1, 2)
    models = [api.load(checkpoint("mamba", "dense"), **options, parallel=rank) for rank in ranks]
    for logits in together(ranks, lambda rank: models[rank.rank](ids).logits):
        assert torch.equal(logits, expected)


def test_stages_refuse_the_states_of_all_layers(checkpoint):
    model = api.load(checkpoint("qwen3", "dense"), device="cpu", parallel=grid(1, 2)[0])
    with pytest.raises(ModelError, match="`output_hidden_states` is asked of a model"):
        model(tokens(), output_hidden_states=True)
    with pytest.raises(ModelError, match="`output_attentions` is asked of a model"):
        model.model(tokens(), output_attentions=True)


def test_stages_of_a_model_without_a_head_share_what_the_last_layer_returns(tmp_path):
    torch.manual_seed(0)
    config = AutoConfig.for_model("bert", **SIZES)
    AutoModel.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    with torch.no_grad():
        expected = api.load(tmp_path, device="cpu")(tokens())
    ranks = grid(1, 2)
    models = [api.load(tmp_path, device="cpu", parallel=rank) for rank in ranks]
    for found in together(ranks, lambda rank: models[rank.rank](tokens())):
        assert torch.equal(found.last_hidden_state, expected.last_hidden_state)
        assert torch.equal(found.pooler_output, expected.pooler_output)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "tp", "pp"), WHOLE)
@pytest.mark.parametrize("model_type", MODELS)
def test_ranks_agree_in_every_scheme(checkpoint, model_type, scheme, tp, pp):
    assert_ranks_agree(checkpoint(model_type, scheme), tp, pp)


def held_bytes(model: torch.nn.Module) -> int:
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())


def test_a_rank_holds_its_part(checkpoint):
    folder = checkpoint("qwen3", "dense")
    whole = held_bytes(api.load(folder, device="cpu"))
    by_tensor = [held_bytes(api.load(folder, device="cpu", parallel=r)) for r in grid(4, 1)]
    by_stage = [held_bytes(api.load(folder, device="cpu", parallel=r)) for r in grid(1, 2)]
    assert max(by_tensor) < 0.45 * whole  # the k and v heads are held twice, norms by all
    assert sum(by_stage) < 1.01 * whole


def test_more_stages_than_layers_are_refused(checkpoint):
    with pytest.raises(ModelError, match="4 layers, expected at least one for each of 5 stages"):
        api.load(checkpoint("qwen3", "dense"), device="cpu", parallel=grid(1, 5)[0])


def run_rank(folder: str, tp: int, pp: int, expected: Tensor, text: Tensor) -> None:
    parallel = Parallel.from_environment(tp, pp, device="cpu")
    model = api.load(folder, parallel=parallel)
    with torch.no_grad():
        logits = model(tokens()).logits
        found = model.generate(tokens()[:1], **GREEDY)
    assert (logits - expected).norm() <= 1e-5 * expected.norm()
    assert torch.equal(found, text)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_processes_that_gloo_connects(checkpoint, tp, pp):
    folder = checkpoint("mixtral", "W4A16:g32")
    with torch.no_grad():
        alone = api.load(folder, device="cpu")
        expected, text = alone(tokens()).logits, alone.generate(tokens()[:1], **GREEDY)
    run_in_processes(2, run_rank, str(folder), tp, pp, expected, text)
