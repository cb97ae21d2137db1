"""Names that the mapper knows of a model, and what surgery leaves alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fake_source import NOWHERE, quantized_model, tiny_config
from torch import nn

from quantload.api import load_model
from quantload.errors import ModelError
from quantload.layers.meta_model import build_on_meta
from quantload.layers.siblings import find_siblings
from quantload.layers.stack import StackView
from quantload.layers.surgery import finish, mapper_of, replace_linears
from quantload.mappers.mapper import Target
from quantload.quant.scheme import parse_scheme

CPU = torch.device("cpu")


def test_mapper_knows_parameters_and_persistent_buffers() -> None:
    model = build_on_meta(tiny_config("llama"), NOWHERE, dtype=torch.float32)
    model.model.norm.register_buffer("correction_bias", torch.zeros(4))
    model.model.norm.register_buffer("table", torch.zeros(4), persistent=False)
    mapper = mapper_of(model)
    assert mapper.target("norm.correction_bias") == Target("model.norm", "correction_bias")
    assert mapper.target("model.norm.weight") == Target("model.norm", "weight")
    assert mapper.find("model.rotary_emb.inv_freq") is None


def test_prediction_layers_may_be_left_out() -> None:
    config = tiny_config("llama") | {"num_nextn_predict_layers": 1}
    mapper = mapper_of(build_on_meta(config, NOWHERE, dtype=torch.float32))
    assert mapper.why_dropped("model.layers.2.mlp.gate_proj.weight") is not None
    assert mapper.why_dropped("mtp.fc.weight") is not None
    assert mapper.why_dropped("model.layers.3.mlp.gate_proj.weight") is None


def test_a_linear_with_a_forward_of_its_own_is_left_alone() -> None:
    model = build_on_meta(tiny_config("llama"), NOWHERE, dtype=torch.float32)

    class Scaled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    path = "model.layers.0.self_attn.o_proj"
    model.get_submodule(path).__class__ = Scaled
    schemes = {path: parse_scheme("W4A16:g32")}
    replace_linears(model, schemes, find_siblings(model), dtype=torch.float32)
    assert isinstance(model.get_submodule(path), Scaled)
    assert isinstance(model.get_submodule("model.layers.0.self_attn.q_proj"), StackView)


def test_finish_refuses_a_model_that_is_not_loaded() -> None:
    model = build_on_meta(tiny_config("llama"), NOWHERE, dtype=torch.float32)
    with pytest.raises(ModelError, match="never loaded"):
        finish(model, CPU)


def test_layers_that_run_otherwise_than_their_scheme_are_warned_of(caplog) -> None:
    made = quantized_model("llama", {"down_proj": "FP8_DYNAMIC"})
    for name, (scheme, weight) in list(made.quantized.items()):
        assert scheme.input is not None
        static = replace(scheme, input=replace(scheme.input, dynamic=False))
        made.quantized[name] = (static, weight)
    load_model(made.source, device=CPU, dtype=torch.float32)
    (record,) = caplog.records
    assert record.getMessage().startswith("2 layers: the checkpoint has no scale for its static")
    assert "`model.layers.0.mlp.down_proj`" in record.getMessage()
