"""Which modules of a ModelOpt checkpoint must have factors of their input."""

from pathlib import Path

import pytest
import torch

from quantload.errors import MissingTensor
from quantload.loader.checkpoint import Checkpoint
from quantload.loader.formats.modelopt_factors import check_factors
from quantload.loader.source import SourceWeight
from quantload.quant.scheme import parse_scheme

CHECKPOINT = Checkpoint("here", Path(), {}, {})
LAYERS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.o_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def check(factors, *, of=LAYERS, layers=2, without="", encoding="int4"):
    """Check a model whose modules of these names have factors, without that of one module."""
    weights = {}
    for module in (f"model.layers.{n}.{name}" for n in range(layers) for name in of):
        has = module.endswith(tuple(factors)) and module != without
        leaves = {leaf: f"{module}.{leaf}" for leaf in ("weight", *(["pre_quant_scale"] * has))}
        weights[module] = SourceWeight(
            module, (4, 4), parse_scheme("W4A16"), encoding, torch.bfloat16, leaves
        )
    return check_factors(CHECKPOINT, weights)


@pytest.mark.parametrize(
    "factors", [(), ("o_proj",), ("o_proj", "down_proj"), tuple(LAYERS)], ids=len
)
def test_each_way_to_fold_them(factors):
    assert check(factors) == []
    assert check(factors, layers=1) == []


@pytest.mark.parametrize("without", ["model.layers.1.self_attn.o_proj"])
def test_unlike_another_layer(without):
    match = r"missing: `model.layers.1.self_attn.o_proj.pre_quant_scale`; .* in `here`"
    with pytest.raises(MissingTensor, match=match):
        check(("o_proj",), without=without)


@pytest.mark.parametrize("name", LAYERS)
def test_where_none_was_folded(name):
    with pytest.raises(MissingTensor, match=f"`model.layers.0.{name}.pre_quant_scale`"):
        check(LAYERS, layers=1, without=f"model.layers.0.{name}")


def test_experts_that_saw_no_token_are_told():
    of = ("mlp.experts.0.down_proj", "mlp.experts.1.down_proj")
    (warning,) = check(("down_proj",), of=of, without="model.layers.1.mlp.experts.1.down_proj")
    assert "`model.layers.1.mlp.experts.1.down_proj.pre_quant_scale`" in warning
