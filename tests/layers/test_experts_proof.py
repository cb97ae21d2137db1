"""Which modules that hold experts may be replaced: only those that are proven to compute alike."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest
import torch
import transformers.models
from experts_modules import E, H, config_of, module_of
from torch import nn
from torch.nn.functional import linear
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from quantload.layers.experts import FusedExperts
from quantload.layers.experts_layout import holds_experts, layout_of
from quantload.layers.experts_proof import fused_experts


def why(module):
    found = fused_experts(module, schemes={}, dtype=torch.float32, prefix="experts")
    return "" if isinstance(found, FusedExperts) else found


class AddsItsInput(MixtralExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        result = MixtralExperts.forward(self, hidden_states, top_k_index, top_k_weights)
        return result + 1e-4 * hidden_states


class WeighsTheInput(MixtralExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        result = torch.zeros_like(hidden_states)
        for token in range(len(hidden_states)):
            for choice, e in enumerate(top_k_index[token]):
                x = hidden_states[token] * top_k_weights[token, choice]
                gate, up = linear(x, self.gate_up_proj[e]).chunk(2)
                result[token] += linear(self.act_fn(gate) * up, self.down_proj[e])
        return result


class ForgetsTheDtype(MixtralExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return MixtralExperts.forward(self, hidden_states, top_k_index, top_k_weights).float()


class UpFirst(MixtralExperts):
    def _apply_gate(self, gate_up):
        up, gate = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up


class TakesMore(MixtralExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights, scale):
        return MixtralExperts.forward(self, hidden_states, top_k_index, top_k_weights) * scale


class HasMore(MixtralExperts):
    def __init__(self, config):
        super().__init__(config)
        self.scale = nn.Parameter(torch.ones(E))


class CannotShrink(MixtralExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return MixtralExperts.forward(self, hidden_states.view(-1, H), top_k_index, top_k_weights)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (AddsItsInput, "its forward differs from ours by"),
        (WeighsTheInput, "its forward differs from ours by"),
        (ForgetsTheDtype, "its forward gives `torch.float32` of shape (7, 8), ours `torch.bfloat1"),
        (UpFirst, "its forward differs from ours by"),
        (TakesMore, "its forward takes hidden_states, top_k_index, top_k_weights, scale"),
        (HasMore, "its parameters are down_proj, gate_up_proj, scale"),
        (CannotShrink, "a small copy of it cannot be run: "),
    ],
)
def test_unlike_modules_stay(make, reason):
    assert why(module_of("mixtral", make)).startswith(reason)


def test_settings_are_part_of_the_proof():
    """The same class with another activation is proven anew."""
    module = module_of("mixtral")
    assert why(module) == ""
    module.act_fn = nn.ReLU()
    assert why(module) == ""
    found = fused_experts(module, schemes={}, dtype=torch.float32, prefix="experts")
    assert found.activation(torch.tensor([[-1.0, 3.0]])).item() == 0


def test_without_a_gate_the_class_says_which_features_come_first():
    module = module_of("nemotron_h")
    assert isinstance(module, NemotronHExperts)
    assert not layout_of(module).is_gated
    assert not layout_of(module).up.has_input_first
    module.is_transposed = True
    assert layout_of(module).up.has_input_first
    assert why(module) != ""


def test_shapes_that_fit_no_experts():
    module = module_of("mixtral")
    module.down_proj = nn.Parameter(torch.zeros(E, H, 5))
    assert "do not fit each other" in why(module)
    assert not holds_experts(nn.Linear(3, 4))


def _experts_of_transformers():
    """Every class of the installed transformers that calls itself experts."""
    for info in pkgutil.iter_modules(transformers.models.__path__):
        path = f"transformers.models.{info.name}.modeling_{info.name}"
        try:
            names = vars(importlib.import_module(path))
        except ImportError:
            continue
        for name, kind in names.items():
            if inspect.isclass(kind) and name.endswith("Experts") and kind.__module__ == path:
                yield name, kind


# Classes of transformers 5.24 whose experts are kept otherwise; each with the reason.
OTHERWISE = {
    "LongcatFlashExperts": "shapes (8, 192, 64) and (4, 64, 96) do not fit each other",
}


@pytest.mark.slow
def test_modules_of_the_installed_transformers():
    """All that can be built from one config are proven, but for those known."""
    refused, found = {}, 0
    for name, kind in _experts_of_transformers():
        try:
            module = kind(config_of())
        except (AttributeError, TypeError, KeyError):
            continue
        if holds_experts(module):
            found += 1
            if reason := why(module):
                refused[name] = reason
    assert found >= 40
    assert refused == {name: OTHERWISE[name] for name in refused}
