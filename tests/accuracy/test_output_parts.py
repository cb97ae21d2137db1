"""What input rounding and routers contribute, against transformers and written-out formulas."""

from __future__ import annotations

import pytest
import tiny_checkpoints as tiny
import torch
from tiny_moe import tiny_moe
from transformers import AutoModelForCausalLM

from quantload import api
from quantload.accuracy.compare_outputs import compare_running
from quantload.accuracy.rounded_inputs import rounded_input
from quantload.accuracy.router_overlap import RouterOverlap, overlap
from quantload.progress import Silent

CPU = torch.device("cpu")
SEQUENCES = [[1, 5, 9, 2, 33], [7, 7, 3]]
UP = "model.layers.1.mlp.up_proj"


def running(one, other):
    return compare_running(
        api.inspect(one), api.inspect(other), SEQUENCES, Silent(), device=CPU, dtype=torch.float32
    )


def inputs_of(folder, module):
    """What enters a layer of the plain model, [T, K]."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    caught = []
    plain.get_submodule(module).register_forward_hook(lambda _, x, __: caught.append(x[0][0]))
    with torch.no_grad():
        for ids in SEQUENCES:
            plain(torch.tensor([ids]))
    return torch.cat(caught), plain.get_submodule(module).weight.detach()


def int8_tokens(x):
    """Symmetric int8 with a scale a token: max |x| / 127.5, codes -128..127."""
    scale = x.abs().amax(dim=1, keepdim=True) / 127.5
    return (x / scale).round().clamp(-128, 127) * scale


def fp8_tokens(x):
    scale = x.abs().amax(dim=1, keepdim=True) / 448
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize(
    ("scheme", "rounding"), [("W8A8", int8_tokens), ("FP8_DYNAMIC", fp8_tokens)]
)
def test_the_error_of_rounded_inputs_alone(tmp_path, scheme, rounding):
    source = tiny.llama(tmp_path / "source")
    found = running(source, api.convert(source, tmp_path / "out", scheme).folder)
    x, weight = inputs_of(source, UP)
    exact = x.double() @ weight.double().T
    rounded = rounding(x).double() @ weight.double().T
    expected = float((rounded - exact).norm() / exact.norm())
    errors = found.isolated_inputs[UP]
    assert errors.sums.relative == pytest.approx(expected, rel=2e-3)
    assert errors.num_tokens == 8
    assert 0 < errors.sums.relative < found.isolated[UP].sums.relative
    quantized = {name for name in found.isolated if name != "lm_head"}
    assert set(found.isolated_inputs) == quantized


def test_weights_alone_round_no_input(tmp_path):
    source = tiny.llama(tmp_path / "source")
    found = running(source, api.convert(source, tmp_path / "out", "W4A16:g32").folder)
    assert found.isolated_inputs == {}


def test_a_fixed_scale_and_factors_of_columns():
    """Oracle: the formulas of a static input and of columns that are scaled before it."""
    from quantload.layers.inputs import ScaledInput, StaticInput
    from quantload.layers.linear import DenseLinear, QuantLinear
    from quantload.quant.grid import INT8
    from quantload.quant.scheme import DENSE

    layer = QuantLinear(4, 3, bias=False, scheme=DENSE, dtype=torch.float32, prefix="x")
    scale, factor = torch.tensor([0.03]), torch.tensor([2.0, 0.5, 1.0, 0.0])
    static = StaticInput(DenseLinear(torch.randn(3, 4)), INT8, scale, None)
    x = torch.randn(5, 4)
    layer.gemm = static
    expected = (x / scale).round().clamp(-128, 127) * scale
    torch.testing.assert_close(rounded_input(layer, x), expected)
    layer.gemm = ScaledInput(static, factor, "*")
    scaled = ((x * factor) / scale).round().clamp(-128, 127) * scale / factor
    found = rounded_input(layer, x)
    torch.testing.assert_close(found[:, :3], scaled[:, :3])
    assert torch.equal(found[:, 3], x[:, 3])  # nothing of this column reaches the weight


def test_routers_choose_as_in_transformers(tmp_path):
    """Oracle: the choices of both plain models, each on its own hidden states."""
    source = tiny_moe(tmp_path / "source")
    output = api.convert(source, tmp_path / "out", "W4A16:g32").folder
    found = running(source, output)
    dense = api.PlanOptions(dtype=torch.float32)
    api.convert(output, tmp_path / "dense", "dense", options=dense)
    chosen = [choices(source), choices(tmp_path / "dense")]
    assert set(found.routers) == set(chosen[0])
    for path, of_reference in chosen[0].items():
        pairs = list(zip(of_reference, chosen[1][path], strict=True))
        expected = sum(len(set(one) & set(other)) for one, other in pairs)
        router = found.routers[path]
        assert (router.tokens, router.chosen, router.shared) == (8, 16, expected)
        assert router.share == expected / 16
    same = running(source, source)
    assert all(router.share == 1.0 for router in same.routers.values())


def choices(folder):
    """{path of the experts: experts of each token}."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    seen = {}
    for path, module in model.named_modules():
        if path.endswith(".experts"):
            module.register_forward_pre_hook(
                lambda _, args, path=path: seen.setdefault(path, []).extend(args[1].tolist())
            )
    with torch.no_grad():
        for ids in SEQUENCES:
            model(torch.tensor([ids]))
    return seen


def test_overlaps_add_up():
    one, other = torch.tensor([[0, 3], [2, 1], [4, 9]]), torch.tensor([[3, 0], [2, 0], [0, 1]])
    found = overlap(one, other, experts=8)
    assert found == RouterOverlap(tokens=3, chosen=5, shared=3)  # 9 is no expert
    assert overlap(one[:1], other[:1], 8) + overlap(one[1:], other[1:], 8) == found
    assert RouterOverlap().share == 1.0
