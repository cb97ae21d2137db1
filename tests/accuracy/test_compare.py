"""Comparison of two checkpoints: weights, isolated outputs, agreement at the end."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tiny_checkpoints as tiny
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from quantload import api
from quantload.accuracy.compare import LayerComparison, ModelComparison
from quantload.accuracy.compare_weights import cast_limit, sum_limit
from quantload.accuracy.end_metrics import EndMetrics
from quantload.errors import NotComparable
from quantload.quant.metrics import ErrorSums, error_sums

UP = "model.layers.1.mlp.up_proj"
SEQUENCES = [[1, 5, 9, 2], [7, 7, 3]]


@pytest.fixture
def folders(tmp_path):
    source = tiny.llama(tmp_path / "source")
    return source, api.convert(source, tmp_path / "out", "W4A16:g32").folder


def relative(got, expected):
    """In NumPy, float64."""
    got, expected = (np.asarray(t.double()) for t in (got, expected))
    return math.sqrt(((got - expected) ** 2).sum() / (expected**2).sum())


def test_weights(folders):
    source, output = folders
    comparison = api.compare(source, output)
    rows = {row.module: row for row in comparison.layers}
    expected = relative(
        api.inspect(output).read_dense(UP),
        load_file(source / "model.safetensors")[f"{UP}.weight"],
    )
    assert rows[UP].weight.relative == pytest.approx(expected, rel=1e-12)
    assert rows["model.embed_tokens"].weight.relative == 0.0
    assert rows[UP].output is None
    assert comparison.end is None


def test_isolated_outputs_get_the_reference_input(folders):
    """Oracle: the input of one layer, caught in plain transformers, through both weights."""
    source, output = folders
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    caught = []
    plain.get_submodule(UP).register_forward_hook(lambda module, x, y: caught.append(x[0][0]))
    with torch.no_grad():
        for ids in SEQUENCES:
            plain(torch.tensor([ids]))
    inputs = torch.cat(caught).double()
    weight = api.inspect(output).read_dense(UP).double()
    exact = plain.get_submodule(UP).weight.detach().double()
    expected = relative(inputs @ weight.T, inputs @ exact.T)
    comparison = api.compare(source, output, sequences=SEQUENCES, device="cpu")
    row = next(row for row in comparison.layers if row.module == UP)
    assert row.output.relative == pytest.approx(expected, rel=1e-4)


def test_end_metrics(folders):
    source, output = folders
    comparison = api.compare(source, output, sequences=SEQUENCES, device="cpu")
    models = [api.load(f, device="cpu", dtype=torch.float32, fuse=False) for f in folders]
    kl, same = [], []
    with torch.no_grad():
        for ids in SEQUENCES:
            p, q = (np.asarray(m(torch.tensor([ids])).logits[0].double()) for m in models)
            p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
            kl += list((np.exp(p) * (p - q)).sum(-1))
            same += list(p.argmax(-1) == q.argmax(-1))
    end = comparison.end
    assert end.num_tokens == 7
    assert end.kl_mean == pytest.approx(np.mean(kl), rel=1e-9)
    assert end.kl_standard_error == pytest.approx(np.std(kl, ddof=1) / math.sqrt(7), rel=1e-9)
    assert end.kl_quantile(0.5) == pytest.approx(np.median(kl), rel=1e-9)
    assert end.top1 == pytest.approx(np.mean(same))


def test_a_checkpoint_equals_itself(folders):
    source, _ = folders
    comparison = api.compare(source, source, sequences=SEQUENCES, device="cpu")
    assert {row.weight.noise for row in comparison.layers} == {0.0}
    assert {row.output.noise for row in comparison.layers if row.output} == {0.0}
    assert comparison.end.kl_mean == 0.0
    assert comparison.end.top1 == 1.0


def test_top1_standard_error_is_binomial():
    end = EndMetrics(kl=torch.zeros(4), same_top1=torch.tensor([True, True, True, False]))
    assert end.top1_standard_error == pytest.approx(math.sqrt(0.75 * 0.25 / 4))


def test_other_shapes_are_not_comparable(tmp_path, folders):
    other = tiny.llama(tmp_path / "other", intermediate=64)
    with pytest.raises(NotComparable, match=r"weight of `.*` has shape .* in the reference"):
        api.compare(folders[0], other)


def test_no_common_weight(tmp_path, folders):
    source = folders[0]
    tensors = {f"x.{name}": t for name, t in load_file(source / "model.safetensors").items()}
    tiny.write(tmp_path / "renamed", tiny.config(), tensors)
    with pytest.raises(NotComparable, match="have no weight of the same name"):
        api.compare(source, tmp_path / "renamed")


def edited(tmp_path, folders, change, **config):
    """The source of the folders with tensors and config changed."""
    tensors = load_file(folders[0] / "model.safetensors")
    change(tensors)
    return tiny.write(tmp_path / "edited", {**tiny.config(), **config}, tensors)


NORM = "model.layers.1.input_layernorm.weight"


def test_a_norm_that_differs_is_a_row(tmp_path, folders):
    def change(tensors):
        tensors[NORM] *= 1.25

    expected = load_file(folders[0] / "model.safetensors")[NORM]
    comparison = api.compare(folders[0], edited(tmp_path, folders, change))
    assert [row.module for row in comparison.layers if row.differs] == [NORM]
    row = comparison.layers[-1]
    assert row.is_plain
    assert row.weight.relative == pytest.approx(relative(expected * 1.25, expected), rel=1e-12)
    assert (row.reference, row.candidate) == ("bfloat16", "bfloat16")
    assert len(comparison.layers) == 17  # the norms that are equal are no rows


def test_rows_of_norms_stay_when_outputs_are_joined(tmp_path, folders):
    def change(tensors):
        tensors[NORM] *= 1.25

    other = edited(tmp_path, folders, change)
    comparison = api.compare(folders[0], other, sequences=SEQUENCES, device="cpu")
    (row,) = [row for row in comparison.layers if row.is_plain]
    assert (row.module, row.output) == (NORM, None)


def test_values_that_are_not_finite(tmp_path, folders):
    def change(tensors):
        tensors[NORM][3:5] = math.nan
        tensors[f"{UP}.weight"][0, 0] = math.inf

    other = edited(tmp_path, folders, change)
    assert api.compare(folders[0], other).problems == (
        f"`{UP}`: 1 values of the candidate are not finite",
        f"`{NORM}`: 2 values of the candidate are not finite",
    )
    assert api.compare(other, folders[0]).problems == (
        f"`{UP}`: values of the reference are not finite",
        f"`{NORM}`: values of the reference are not finite",
    )


def test_tensors_of_one_side(tmp_path, folders):
    def change(tensors):
        del tensors[NORM], tensors[f"{UP}.weight"]
        tensors[f"{UP}.bias"] = torch.zeros(128)

    comparison = api.compare(folders[0], edited(tmp_path, folders, change))
    assert comparison.only_in_reference == (UP, NORM)
    assert comparison.only_in_candidate == (f"{UP}.bias",)


@pytest.mark.parametrize(
    "config", [{"architectures": ["MistralForCausalLM"]}, {"model_type": "mistral"}]
)
def test_other_architectures_are_not_comparable(tmp_path, folders, config):
    other = edited(tmp_path, folders, lambda tensors: None, **config)
    with pytest.raises(NotComparable, match=r"not of one model: config: `(arch|model_type)"):
        api.compare(folders[0], other)


def test_other_shapes_of_a_norm_are_not_comparable(tmp_path, folders):
    def change(tensors):
        tensors[NORM] = tensors[NORM][:-1].clone()

    with pytest.raises(NotComparable, match=f"tensor `{NORM}` has shape `.64,.` in the reference"):
        api.compare(folders[0], edited(tmp_path, folders, change))


def test_limits():
    assert cast_limit(torch.bfloat16, torch.bfloat16) == 0.0
    assert cast_limit(torch.float32, torch.float16) == cast_limit(torch.float16, torch.float32)
    assert cast_limit(torch.float32, torch.float16) == 2**-8
    values = torch.randn(64, 64)
    found = error_sums(values.to(torch.float16), values).relative
    assert 0 < found < cast_limit(torch.float32, torch.float16)
    assert sum_limit(4096) > sum_limit(64) > 4 * 2**-7


def test_what_exceeds_a_limit():
    def row(noise, **limits):
        sums = ErrorSums(noise=noise, signal=1.0, count=1)
        kinds = {"reference": "", "candidate": ""}
        return LayerComparison(module="m", weight=sums, **kinds, **limits)

    assert row(0.24).failure == ""
    assert row(0.26).failure == "weight error 0.51, limit 0.5"
    assert row(1e-30, weight_limit=0.0).failure == "weight error 1e-15, limit 0"
    assert row(float("nan")).failure == "weight error nan, limit 0.5"
    fine, bad = (ModelComparison(layers=(row(noise),)) for noise in (0.0, 1.0))
    assert (fine.passed, fine.failures) == (True, ())
    assert (bad.passed, bad.failures) == (False, ("`m`: weight error 1, limit 0.5",))
    assert not ModelComparison(layers=(), only_in_reference=("x",)).passed
