"""Fast paths: what is recognised, that it has the bits of the module's own forward, what is not."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from fake_source import quantized_model, tiny_model
from torch import Tensor, nn
from torch.nn import functional as F

from quantload.api import load_model
from quantload.layers.fast_glu import GluFormula, recognise_glu, swap_glu
from quantload.layers.fast_norm import NormFormula, recognise_norm, swap_norm
from quantload.layers.fast_paths import explain_fast_paths, use_fast_paths
from quantload.layers.stack import LinearStack
from quantload.layers.swapped_class import Swapped

CPU = torch.device("cpu")
IDS = torch.tensor([[1, 5, 9, 100, 7, 33, 2, 64], [1, 6, 9, 17, 120, 3, 2, 4]])
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


# -- norms -----------------------------------------------------------------------------------------


class Norm(nn.Module):
    """An RMS norm under names of nobody."""

    def __init__(self, kind: str, tiny: float = 1e-5, width: int = 24) -> None:
        super().__init__()
        self.kind, self.tiny = kind, tiny
        self.blue = nn.Parameter(torch.randn(width))

    def forward(self, q: Tensor, gate: Tensor | None = None) -> Tensor:
        y = q.to(F32)
        if self.kind == "layer":
            y = y - y.mean(-1, keepdim=True)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.tiny)
        if self.kind == "bounded":
            y = y.clamp(-3, 3)
        if gate is not None:
            y = y * gate
        if self.kind == "late":
            return self.blue * y.to(q.dtype)
        if self.kind == "offset":
            return (y * (1.0 + self.blue.float())).type_as(q)
        return (self.blue * y).to(q.dtype)


FORMULAS = {
    "late": "w * round(x * rsqrt(mean(x^2) + 1e-05))",
    "early": "round(w * (x * rsqrt(mean(x^2) + 1e-05)))",
    "offset": "round((1 + w) * (x * rsqrt(mean(x^2) + 1e-05)))",
}


@pytest.mark.parametrize("kind", FORMULAS)
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_norms_are_recognised_and_have_the_same_bits(kind: str, dtype: torch.dtype) -> None:
    module = Norm(kind, width=40).to(dtype)
    formula = recognise_norm(module)
    assert isinstance(formula, NormFormula)
    if dtype != F32 or kind == "offset":  # in float32 nothing is rounded before the weight
        assert str(formula) == FORMULAS[kind]
    fast = copy.deepcopy(module)
    swap_norm(fast, formula)
    assert isinstance(fast, Norm)
    for scale in (1e-3, 1.0, 300.0):
        for x in (torch.randn(5, 40), torch.randn(2, 3, 4, 40)):
            x = (x * scale).to(dtype)
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    before = x.clone()
                    assert torch.equal(fast(x), module(x))
                    assert torch.equal(x, before)


@pytest.mark.parametrize("eps", [1e-6, 3e-5, 1e-12])
def test_eps_is_found_under_any_name(eps: float) -> None:
    formula = recognise_norm(Norm("early", tiny=eps))
    assert isinstance(formula, NormFormula)
    assert formula.eps == eps


@pytest.mark.parametrize("kind", ["layer", "bounded"])
def test_other_norms_are_told_and_left_alone(kind: str) -> None:
    model = nn.Sequential(Norm(kind))
    (report,) = use_fast_paths(model, dtype=F32)
    assert (report.kind, report.runs) == ("rms norm", "its own forward")
    assert "not an RMS norm that is known" in report.reason
    assert not isinstance(model[0], Swapped)


@pytest.mark.parametrize("module", [nn.LayerNorm(24), nn.Linear(24, 24), nn.SiLU()], ids=str)
def test_what_is_no_norm_is_not_looked_at(module: nn.Module) -> None:
    assert recognise_norm(module) is None


def test_a_norm_keeps_its_own_forward_for_everything_else() -> None:
    module = Norm("late")
    fast = copy.deepcopy(module)
    formula = recognise_norm(fast)
    assert isinstance(formula, NormFormula)
    swap_norm(fast, formula)
    x, gate = torch.randn(3, 24), torch.randn(3, 24)
    assert torch.equal(fast(x, gate), module(x, gate))
    assert torch.equal(fast(q=x), module(x))
    assert torch.equal(fast(x.double()), module(x.double()))
    one, two = (x.clone().requires_grad_() for _ in range(2))
    fast(one).pow(2).sum().backward()
    module(two).pow(2).sum().backward()
    assert torch.equal(one.grad, two.grad)
    assert torch.equal(fast.blue.grad, module.blue.grad)


# -- gated linear units ----------------------------------------------------------------------------


class Mlp(nn.Module):
    """A gated linear unit under names of nobody."""

    def __init__(self, kind: str, act: Any) -> None:
        super().__init__()
        self.kind, self.act = kind, act
        self.one = nn.Linear(16, 48 if kind.startswith("halves") else 24)
        if not kind.startswith("halves"):
            self.two = nn.Linear(16, 24)
        self.three = nn.Linear(24, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "halves":
            a, b = self.one(x).chunk(2, dim=-1)
        elif self.kind == "halves, gate last":
            b, a = self.one(x).chunk(2, dim=-1)
        elif self.kind == "shifted":
            a, b = self.one(x), self.two(x + 1)
        else:
            a, b = self.one(x), self.two(x)
        if self.kind == "second":
            a, b = b, a
        if self.kind == "bounded":
            a = a.clamp(max=60)
        if self.kind == "wide":
            return self.three((self.act(a.float()) * b.float()).to(x.dtype))
        y = self.three(self.act(a) * b)
        return y * 2 if self.kind == "scaled" else y


def double_relu(x: Tensor) -> Tensor:
    return F.relu(x) * 2


GLUS = {
    "first": "three(act(one) * two)",
    "second": "three(act(two) * one)",
    "halves": "three(act(one[:I]) * one[I:])",
    "halves, gate last": "three(act(one[I:]) * one[:I])",
}


@pytest.mark.parametrize("kind", GLUS)
@pytest.mark.parametrize("act", [nn.SiLU(), F.gelu, double_relu], ids=["silu", "gelu", "other"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_glus_are_recognised_and_have_the_same_bits(
    kind: str,
    act: Any,
    dtype: torch.dtype,
) -> None:
    module = Mlp(kind, act).to(dtype).eval()
    formula = recognise_glu(module)
    assert isinstance(formula, GluFormula)
    assert str(formula) == GLUS[kind]
    assert formula.known == {double_relu: "", F.gelu: "gelu"}.get(act, "silu")
    fast = copy.deepcopy(module)
    swap_glu(fast, formula)
    for x in (torch.randn(5, 16), torch.randn(2, 3, 16) * 30):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert torch.equal(fast(x.to(dtype)), module(x.to(dtype)))


class Inline(nn.Module):
    """An activation that is no attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.gelu(self.a(x), approximate="tanh") * self.b(x))


def test_an_activation_in_the_code_is_found() -> None:
    formula = recognise_glu(Inline())
    assert isinstance(formula, GluFormula)
    assert str(formula) == "c(gelu_tanh(a) * b)"
    assert formula.known == "gelu_tanh"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("bounded", "what `three` is given is not act(gate) * up"),
        ("wide", "what `three` is given is not act(gate) * up"),
        ("shifted", "`two` is not given the module's input"),
        ("scaled", "it returns something else than what `three` returns"),
    ],
)
def test_other_units_are_told_and_left_alone(kind: str, reason: str) -> None:
    model = nn.Sequential(Mlp(kind, nn.SiLU()))
    (report,) = use_fast_paths(model, dtype=F32)
    assert reason in report.reason
    assert report.runs == "its own forward"
    assert not isinstance(model[0], Swapped)


def test_two_layers_in_a_row_are_not_looked_at() -> None:
    assert recognise_glu(nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))) is None
    assert recognise_glu(nn.ModuleList([nn.Linear(8, 12), nn.Linear(12, 8)])) is None


def test_a_unit_has_the_gradients_of_its_own_forward() -> None:
    module = Mlp("first", nn.ReLU()).eval()  # relu's gradient reads its result
    fast = copy.deepcopy(module)
    formula = recognise_glu(fast)
    assert isinstance(formula, GluFormula)
    swap_glu(fast, formula)
    one, two = (torch.ones(3, 16, requires_grad=True) for _ in range(2))
    fast(one).sum().backward()
    module(two).sum().backward()
    assert torch.equal(one.grad, two.grad)
    assert torch.equal(fast.one.weight.grad, module.one.weight.grad)


# -- models ----------------------------------------------------------------------------------------


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def load(scheme: object, model_type: str = "llama", **options: Any) -> nn.Module:
    fake = quantized_model(model_type, scheme)  # type: ignore[arg-type]
    return load_model(fake.source, device=CPU, **options)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "phi3", "qwen3"])
@pytest.mark.parametrize("scheme", [{}, "W4A16:g32"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_models_have_the_same_bits(model_type: str, scheme: object, dtype: torch.dtype) -> None:
    plain = load(scheme, model_type, dtype=dtype, fast_paths=False)
    fast = load(scheme, model_type, dtype=dtype)
    assert not any(isinstance(module, Swapped) for module in plain.modules())
    kinds = [report.kind for report in explain_fast_paths(fast)]
    norms = {"llama": 5, "gemma2": 9, "phi3": 5, "qwen3": 9}[model_type]
    assert (kinds.count("glu"), kinds.count("rms norm")) == (2, norms)
    assert all(r.runs == "the same operations, in place" for r in explain_fast_paths(fast))
    assert torch.equal(logits(fast), logits(plain))


def test_the_product_of_a_stack_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load("W4A16:g32")
    stack = model.model.layers[0].mlp.gate_proj_up_proj_stack
    taken, products = [], []
    monkeypatch.setattr(LinearStack, "take", lambda *_: taken.append(1))
    stack.gemm.register_forward_hook(lambda *_: products.append(1))
    model.model.layers[0].mlp(torch.randn(3, 64))
    assert (taken, products) == ([], [1])


def test_hooks_of_layers_are_called() -> None:
    model = load("W4A16:g32")
    mlp, seen = model.model.layers[0].mlp, []
    expected = mlp(torch.ones(3, 64))
    for name in ("gate_proj", "up_proj", "down_proj", "act_fn"):
        mlp.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
    assert torch.equal(mlp(torch.ones(3, 64)), expected)
    assert sorted(seen) == ["act_fn", "down_proj", "gate_proj", "up_proj"]


def pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("clone", [copy.deepcopy, pickled])
def test_copies_run_by_fast_paths_of_their_own(clone: Any) -> None:
    model = load({})
    expected, twin = logits(model), clone(model)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.zero_()
    assert torch.equal(logits(twin), expected)
    mlp, norm = twin.model.layers[0].mlp, twin.model.norm
    assert isinstance(mlp, Swapped)
    assert isinstance(norm, Swapped)
    assert (type(mlp).__name__, type(norm).__name__) == ("LlamaMLP", "LlamaRMSNorm")
    assert explain_fast_paths(twin) == explain_fast_paths(model)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_compiled_modules_are_equal(mode: Any) -> None:
    layer = load("W4A16:g32").model.layers[0]
    both = nn.Sequential(layer.input_layernorm, layer.mlp)
    x = torch.randn(3, 64)
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    with mode():
        expected, found = both(x), compiled(x)
    assert (found - expected).norm() <= 1e-6 * expected.norm()


def test_a_model_that_is_cast_stays_right() -> None:
    fast, plain = load({}).to(BF16), load({}, fast_paths=False).to(BF16)
    assert torch.equal(logits(fast), logits(plain))


def test_a_plain_model_may_use_them_too() -> None:
    model = tiny_model("gemma2")
    expected = logits(model)
    reports = use_fast_paths(model, dtype=F32)
    assert len(reports) == len(use_fast_paths(tiny_model("gemma2"), dtype=F32))
    assert torch.equal(logits(model), expected)
