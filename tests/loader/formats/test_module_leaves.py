"""Checks that every format makes of the tensors of its modules."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quantload.errors import MissingTensor
from quantload.loader.checkpoint import Checkpoint
from quantload.loader.formats.module_leaves import require_input_scales
from quantload.loader.source import SourceWeight
from quantload.quant.scheme import parse_scheme

CHECKPOINT = Checkpoint("here", Path(), {}, {})


def described(module, *, scale, dynamic=False):
    scheme = parse_scheme("FP8_DYNAMIC")
    assert scheme.input is not None
    scheme = replace(scheme, input=replace(scheme.input, dynamic=dynamic, granularity="tensor"))
    leaves = {leaf: f"{module}.{leaf}" for leaf in ("weight", "weight_scale", *scale)}
    return SourceWeight(module, (4, 4), scheme, "FP8", torch.bfloat16, leaves)


@pytest.mark.parametrize("leaf", ["input_scale", "activation_scale", "input_global_scale"])
def test_all_fixed_inputs_have_a_scale_or_none_has(leaf):
    with_scale, without = described("a", scale=(leaf,)), described("b", scale=())
    require_input_scales(CHECKPOINT, {"a": with_scale, "c": with_scale})
    require_input_scales(CHECKPOINT, {"a": without, "b": without})
    dynamic = described("c", scale=(), dynamic=True)
    require_input_scales(CHECKPOINT, {"a": with_scale, "c": dynamic})
    with pytest.raises(MissingTensor, match=r"`1` of `2` .* `b.input_scale` missing, in `here`"):
        require_input_scales(CHECKPOINT, {"a": with_scale, "b": without, "c": dynamic})
