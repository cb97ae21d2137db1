"""What users pass rightly to public functions, though not in the plainest of types."""

import os
import re
from fractions import Fraction

import numpy as np
import pytest
import tiny_checkpoints as tiny
import torch
from torch import nn

import quantload
from quantload import api_bench, arguments
from quantload.api_allocate import allocate_schemes
from quantload.errors import WrongType
from quantload.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from quantload.layers.parallel_linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from quantload.loader.model_dtype import parse_dtype
from quantload.loader.plan import PlanOptions
from quantload.loader.workers import Resources

IDS = [[1, 2, 3], [4, 5, 6]]


class Named(os.PathLike):
    """A path that is no `Path`."""

    def __init__(self, path):
        self.path = str(path)

    def __fspath__(self):
        return self.path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.llama(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def model(folder):
    return quantload.load(folder, device="cpu")


@pytest.mark.parametrize("flag", [np.bool_(False), torch.tensor(False)], ids=["numpy", "torch"])
def test_flags_of_arrays(flag, folder):
    made = quantload.load(folder, device="cpu", fuse=flag, fast_paths=flag)
    assert isinstance(made, nn.Module)
    assert PlanOptions(lossless=flag).lossless is False


def test_numbers_of_arrays_are_no_flags():
    for wrong in (np.int64(1), torch.tensor(1), np.array([True])):
        with pytest.raises(WrongType, match="`fuse` is"):
            arguments.check_flags(fuse=wrong)
    for wrong in (np.bool_(True), torch.tensor(True), np.float32(3), torch.tensor([3])):
        with pytest.raises(WrongType, match="`tokens` is"):
            arguments.check_counts(1, tokens=wrong)


@pytest.mark.parametrize(
    "bits", [np.float32(6), np.int64(6), Fraction(6), torch.tensor(6.0)], ids=type
)
def test_bits_of_a_budget(bits, folder):
    found = allocate_schemes(
        folder,
        bits=bits,
        schemes=["W4A16:g32", "W8A16:channel"],
        sequences=(),
        score="weights",
        verify=False,
        device="cpu",
    )
    assert 0 < found.best.bits_per_weight <= 6


def test_settings_of_generate(model):
    settings = {"max_new_tokens": np.int64(2), "stop": None, "sample": True}
    plain = quantload.generate(model, [1, 2], max_new_tokens=2, sample=True, seed=1)
    for prompt in ([np.int64(1), np.int64(2)], [torch.tensor(1), torch.tensor(2)]):
        made = quantload.generate(model, prompt, seed=np.int64(1), **settings)
        assert [row.ids for row in made] == [row.ids for row in plain]


def test_generate_takes_a_path_as_load_does(folder):
    assert len(quantload.generate(Named(folder), [1, 2], max_new_tokens=2)[0].ids) == 2


@pytest.mark.parametrize(
    "tokens", [torch.tensor([1, 4]), np.array([1, 4]), range(1, 5, 3), iter([1, 4])], ids=type
)
def test_numbers_of_tokens(tokens, model):
    calls = quantload.explain(model, tokens=tokens)[0].calls
    assert [call.tokens for call in calls] == [1, 4]


@pytest.mark.parametrize("tokens", [torch.tensor(4), np.array(4), np.int32(4)], ids=type)
def test_one_number_of_tokens(tokens, model):
    assert [call.tokens for call in quantload.explain(model, tokens=tokens)[0].calls] == [4]


@pytest.mark.parametrize("batches", [range(1, 3), np.array([1, 2])], ids=type)
def test_batches_of_a_benchmark(batches, model):
    report = api_bench.bench(model, batches=batches, prompt_tokens=np.int64(2), new_tokens=2)
    assert [times.batch for times in report.batches] == [1, 2]


@pytest.mark.parametrize("sizes", [np.array([8, 9]), range(8, 10), iter([8, 9])], ids=type)
def test_sizes_of_members(sizes):
    assert MergedColumnParallelLinear(np.int64(8), sizes).output_sizes == [8, 9]


def test_sizes_of_layers():
    size = np.int64(8)
    for kind in (ReplicatedLinear, ColumnParallelLinear, RowParallelLinear, ParallelLMHead):
        layer = kind(size, size)
        assert (type(layer.in_features), layer.out_features) == (int, 8)
    assert VocabParallelEmbedding(size, size).embedding_dim == 8
    layer = QKVParallelLinear(size, np.int64(4), np.int64(4), np.int64(2), v_head_dim=np.int64(2))
    assert layer.output_sizes == [16, 8, 4]
    parallel = quantload.Parallel(tp_rank=np.int64(0), tp_size=np.int64(1))
    assert type(parallel.tp_size) is int


def test_sequences_of_single_tensors():
    made = [[torch.tensor(i) for i in ids] for ids in IDS]
    assert arguments.as_sequences("sequences", made) == IDS


def test_float64_by_its_name():
    assert parse_dtype("float64") == parse_dtype("torch.float64") == torch.float64


def test_sizes_in_bytes_as_floats():
    memory = Resources(memory=1e9, workers=np.int64(2)).memory
    assert (memory, type(memory)) == (10**9, int)
    assert PlanOptions(max_shard_bytes=np.float64(5e9)).max_shard_bytes == 5 * 10**9
    for wrong in (1.5, float("inf"), float("nan"), True, "5e9"):
        with pytest.raises(WrongType, match="`memory` is"):
            Resources(memory=wrong)


def test_patterns_and_functions_as_name_rules():
    rules = quantload.NameRules(regex={re.compile("A", re.IGNORECASE): lambda m: m[0] * 2})
    assert rules.apply("a.B").name == "aa.B"
    assert (rules | rules).for_modules().apply("a.B").name == "aa.B"
    with pytest.raises(WrongType, match="`regex` is"):
        quantload.NameRules(regex={re.compile(b"a"): "b"})
    with pytest.raises(WrongType, match="expected a text or None"):
        quantload.NameRules(prefix={"a": str})


@pytest.mark.parametrize("layers", [np.array([1, 0]), torch.tensor([1, 0])], ids=type)
def test_numbers_of_layers(layers, model):
    model.set_aux_hidden_state_layers(layers)
    try:
        assert len(model(torch.tensor([[1, 2]])).aux_hidden_states) == 2
    finally:
        model.set_aux_hidden_state_layers(())


def test_a_group_size_of_numpy_in_a_rule(folder):
    rules = {"model.layers.0.": {"scheme": "W4A16", "group_size": np.int64(32)}}
    plan = quantload.plan(folder, "W8A16:channel", rules=rules, group_size=None)
    assert "W4A16:g32" in {str(row.scheme) for row in plan.rows}
    assert quantload.plan(folder, "W4A16", group_size=np.int64(32)).rows


DRAWS = {
    "temperature": np.float32(0.7),
    "top_k": np.int64(5),
    "top_p": torch.tensor(0.9),
    "min_p": np.float32(0.1),
    "repetition_penalty": np.float32(1.5),
}


@pytest.mark.parametrize("name", DRAWS)
def test_settings_of_draws(name, model):
    made = [
        quantload.generate(model, [1, 2], max_new_tokens=2, sample=True, seed=1, **{name: value})
        for value in (DRAWS[name], DRAWS[name].item())
    ]
    assert made[0] == made[1]


def test_a_generator_of_prompts_with_a_path(folder):
    made = quantload.generate(folder, (ids for ids in IDS), max_new_tokens=1)
    assert [row.prompt_tokens for row in made] == [3, 3]
