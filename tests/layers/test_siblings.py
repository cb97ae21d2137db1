"""Siblings are found by running the model, whatever its layers are called."""

from __future__ import annotations

import pytest
import torch
from fake_source import NOWHERE, tiny_config
from torch import Tensor, nn

from quantload.layers.meta_model import build_on_meta
from quantload.layers.siblings import Siblings, find_siblings, is_plain_linear


def siblings(model_type: str) -> Siblings:
    model = build_on_meta(tiny_config(model_type), NOWHERE, dtype=torch.float32)
    return find_siblings(model)


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text"]
)
def test_attention_and_mlp(model_type: str) -> None:
    found = siblings(model_type)
    assert found.failure == ""
    assert found.guessed == ()
    assert len(found.proven) == 4
    block = "model.layers.0"
    assert found.proven[0] == tuple(f"{block}.self_attn.{n}_proj" for n in "qkv")
    assert found.proven[1] == (f"{block}.mlp.gate_proj", f"{block}.mlp.up_proj")


def test_subclasses_are_linear_layers_if_they_compute_the_same() -> None:
    class Written(nn.Linear):  # as Falcon's
        def forward(self, input: Tensor) -> Tensor:
            out = input @ self.weight.T
            return out if self.bias is None else out + self.bias

    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    class Adapted(nn.Linear):
        def __init__(self, *args: int) -> None:
            super().__init__(*args)
            self.factor = 1

        def forward(self, input: Tensor) -> Tensor:
            return self.factor * super().forward(input)

    class Asking(nn.Linear):
        def forward(self, input: Tensor, group: int) -> Tensor:
            return super().forward(input)

    kinds = (nn.Linear, Written, Doubled, Adapted, Asking)
    assert [is_plain_linear(kind(4, 4)) for kind in kinds] == [True, True, False, False, False]


def test_layers_fused_on_disk_have_no_siblings() -> None:
    assert siblings("phi3").groups == ()


def test_a_write_between_members_splits_the_group() -> None:
    model = build_on_meta(tiny_config("llama"), NOWHERE, dtype=torch.float32)

    class Writing(type(model.model.layers[0].mlp)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            gate = self.gate_proj(x)
            x.mul_(2)
            return self.down_proj(gate * self.up_proj(x))

    model.model.layers[0].mlp.__class__ = Writing
    groups = find_siblings(model).proven
    assert ("model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj") in groups
    assert not any("layers.0.mlp" in group[0] for group in groups)


def test_a_forward_that_fails_falls_back_to_names() -> None:
    model = build_on_meta(tiny_config("llama"), NOWHERE, dtype=torch.float32)

    def fail(*_: object, **__: object) -> Tensor:
        raise RuntimeError("cannot run on meta")

    model.model.layers[1].mlp.forward = fail
    found = find_siblings(model)
    assert found.failure == "RuntimeError: cannot run on meta"
    assert len(found.proven) == 3  # what was seen before the error stays true
    assert found.guessed == (("model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"),)


def test_values_of_masks_and_routers_may_be_asked_for() -> None:
    model = build_on_meta(tiny_config("llama"), NOWHERE, dtype=torch.float32)

    class Asking(type(model.model.layers[0].mlp)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            chosen = torch.where(x.sum(-1) > 0)
            if x.max().item() > 0 and bool((x > 0).any()):
                x = x[chosen].unsqueeze(0)
            rows = x.new_zeros(len(x)).cpu().tolist()
            return super().forward(x) * float(len(rows))

    model.model.layers[0].mlp.__class__ = Asking
    found = find_siblings(model)
    assert found.failure == ""
    assert len(found.proven) == 4


def test_groups_across_modules() -> None:
    found = siblings("cohere2")
    block = "model.layers.0"
    members = (*(f"self_attn.{n}_proj" for n in "qkv"), "mlp.gate_proj", "mlp.up_proj")
    assert found.wider[0] == tuple(f"{block}.{member}" for member in members)
    assert found.scope_of(found.wider[0]) == block
    assert found.widest == found.wider
    assert len(found.groups) == 4  # engines fuse within a module


def test_layers_of_a_list_share_in_the_module_that_calls_them() -> None:
    model = build_on_meta(tiny_config("llama"), NOWHERE, dtype=torch.float32)
    mlp = model.model.layers[0].mlp
    mlp.parts = nn.ModuleList([mlp.gate_proj, mlp.up_proj])
    del mlp.gate_proj, mlp.up_proj

    def forward(x: Tensor) -> Tensor:
        return mlp.down_proj(mlp.parts[0](x) * mlp.parts[1](x))

    mlp.forward = forward
    found = find_siblings(model)
    group = ("model.layers.0.mlp.parts.0", "model.layers.0.mlp.parts.1")
    assert group in found.proven
    assert found.scope_of(group) == "model.layers.0.mlp"


def test_layers_that_are_called_in_a_loop_are_siblings_each_time() -> None:
    model = build_on_meta(tiny_config("llama"), NOWHERE, dtype=torch.float32)
    model.model.layers[1] = model.model.layers[0]
    found = find_siblings(model)
    assert found.proven == (
        tuple(f"model.layers.0.self_attn.{n}_proj" for n in "qkv"),
        ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"),
    )


def test_hooks_and_attention_are_restored() -> None:
    model = build_on_meta(tiny_config("llama"), NOWHERE, dtype=torch.float32)
    before = model.config._attn_implementation
    find_siblings(model)
    assert model.config._attn_implementation == before
    assert not any(module._forward_pre_hooks for module in model.modules())
