"""Eight models in every encoding, shared by ranks and stages: logits of one process, no cell left.

Ranks are threads, see `thread_grid.py`. What is replicated is asserted: a grid in which every layer
is held whole by every rank would be equal, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rank_encodings import ENCODINGS, NOT_IN_PLAN, REPLICATED, write_encoded
from shared_models import MODELS
from thread_grid import grid, together
from torch import Tensor, nn

from quantload import api
from quantload.layers import preparation
from quantload.layers.sharding import ShardPlan, plan_sharding

GRIDS = ((2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (2, 2))
FAST = [  # (model, encoding, tensor parallel, stages)
    ("deepseek_v3", "W4A16:g32 act-order", 4, 1),
    ("phi3", "W4A16_ASYM:g128 act-order", 4, 1),
    ("gpt_oss", "NVFP4", 4, 1),
]
CELLS = [
    pytest.param(*cell, marks=[] if cell in FAST else pytest.mark.slow)
    for model_type in MODELS
    for encoding in ENCODINGS
    for cell in ((model_type, encoding, *sizes) for sizes in GRIDS)
]
OPTIONS = {"device": "cpu", "quantize_inputs": False}  # a code at the edge of its step would flip

Made = Callable[[str, str], tuple[Path, Tensor]]


@pytest.fixture
def one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ranks of a test share one plan: they would all make the same, one after the other."""
    plans: dict[int, ShardPlan] = {}

    def plan(model: nn.Module, ranks: int) -> ShardPlan:
        if ranks not in plans:
            plans[ranks] = plan_sharding(model, ranks)
        return plans[ranks]

    monkeypatch.setattr(preparation, "plan_sharding", plan)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Return the folder of a model in an encoding, and its logits; each is made once."""

    @functools.cache
    def make(model_type: str, encoding: str) -> tuple[Path, Tensor]:
        folder = write_encoded(model_type, encoding, tmp_path_factory.mktemp(model_type))
        with torch.no_grad():
            return folder, api.load(folder, **OPTIONS)(tokens()).logits

    return make


def tokens() -> Tensor:
    return torch.randint(3, 131, (2, 7), generator=torch.Generator().manual_seed(1))


@pytest.mark.usefixtures("one_plan")
@pytest.mark.parametrize(("model_type", "encoding", "tp", "pp"), CELLS)
def test_ranks_give_the_logits_of_one_process(
    made: Made, model_type: str, encoding: str, tp: int, pp: int
) -> None:
    folder, expected = made(model_type, encoding)
    assert expected.isfinite().all()
    ranks = grid(tp, pp)
    models = [api.load(folder, **OPTIONS, parallel=rank) for rank in ranks]
    for logits in together(ranks, lambda rank: models[rank.rank](tokens()).logits):
        assert (logits - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoding", "tp"), [("dense", 2), ("dense", 4), *((encoding, 8) for encoding in ENCODINGS)]
)
@pytest.mark.parametrize("model_type", MODELS)
def test_what_every_rank_holds_whole(made: Made, model_type: str, encoding: str, tp: int) -> None:
    shares = api.model_shares(made(model_type, encoding)[0], tp=tp)
    whole = {s.module.partition("layers.")[2]: s for s in shares if s.style == "replicated"}
    assert {path.partition(".")[2] for path in whole} == REPLICATED.get(model_type, set())
    assert {share.reason for share in whole.values()} <= {NOT_IN_PLAN}
    experts = [share for share in shares if share.kind == "FusedExperts"]
    assert {share.style for share in experts} <= {"part of each expert"}
    quantized = [s for s in shares if s.scheme != "dense"]
    assert bool(quantized) == (encoding != "dense")
