"""`load(scheme=)` against `convert` and `load`: parameters, buffers and logits, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints as tiny
import torch
from moe_models import moe_model
from thread_grid import grid, together
from tiny_gguf import write_tiny_gguf
from torch import nn

import quantload
from quantload import api
from quantload.errors import ConfigError, RuleSplitsStack, UnknownScheme
from quantload.loader.convert import run_plan
from quantload.progress import Silent

IDS = torch.tensor([[1, 5, 9, 40, 7, 33, 2, 30], [1, 6, 9, 17, 41, 3, 2, 4]])
SCHEMES = (
    *("W4A16:g32", "W4A16_ASYM:g32", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "MXFP4A16"),
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    """Tiny models by type; the experts of mixtral lie in one tensor each."""
    root = tmp_path_factory.mktemp("sources")
    qwen2 = tiny.config(base=tiny.QWEN2, intermediate=96, tied=True)
    moe_model("mixtral").to(torch.bfloat16).save_pretrained(root / "mixtral")
    return {
        "llama": tiny.llama(root / "llama"),
        "qwen2": tiny.write(root / "qwen2", qwen2, tiny.tensors(qwen2)),
        "mixtral": root / "mixtral",
    }


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])


def assert_same_state(found: nn.Module, expected: nn.Module) -> None:
    one, two = state(found), state(expected)
    assert list(one) == list(two)
    for name, tensor in two.items():
        assert (one[name].dtype, one[name].shape) == (tensor.dtype, tensor.shape), name
        bits = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one[name], tensor)]
        assert torch.equal(*bits), name


def assert_same_model(found: nn.Module, expected: nn.Module) -> None:
    """Compare all that two models hold, how their layers run, and what they compute."""
    assert_same_state(found, expected)
    assert api.explain(found) == api.explain(expected)
    with torch.no_grad():
        logits = found(IDS).logits, expected(IDS).logits
    assert torch.equal(*logits)
    assert bool(logits[1].isfinite().all())


def written(source: Path, folder: Path, scheme: str, **decisions: Any) -> Path:
    return api.convert(source, folder, scheme, verify_output=False, **decisions).folder


EQUAL = [
    *(("llama", scheme) for scheme in SCHEMES),
    *(("qwen2", "W8A8"), ("mixtral", "W4A16:g32"), ("mixtral", "NVFP4A16")),
]
EQUAL_TOO = [
    (model_type, scheme)
    for model_type in ("qwen2", "mixtral")
    for scheme in SCHEMES
    if (model_type, scheme) not in EQUAL
]


def assert_equal_to_convert_and_load(source: Path, tmp_path: Path, scheme: str) -> None:
    expected = quantload.load(written(source, tmp_path / "out", scheme), device="cpu")
    found = quantload.load(source, scheme=scheme, device="cpu")
    assert_same_model(found, expected)
    schemes = {layer.module: layer.scheme for layer in api.explain(found)}
    assert schemes["model.layers.1.self_attn.o_proj"] == scheme
    assert schemes["lm_head"] == "dense"


@pytest.mark.parametrize(("model_type", "scheme"), EQUAL)
def test_equal_to_convert_and_load(sources, tmp_path, model_type, scheme):
    assert_equal_to_convert_and_load(sources[model_type], tmp_path, scheme)


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "scheme"), EQUAL_TOO)
def test_equal_to_convert_and_load_in_every_scheme(sources, tmp_path, model_type, scheme):
    assert_equal_to_convert_and_load(sources[model_type], tmp_path, scheme)


@pytest.mark.parametrize("scheme", ["W4A16:g32", "NVFP4A16"])
def test_layers_that_are_not_fused_and_other_dtypes(sources, tmp_path, scheme):
    options: dict[str, Any] = {"device": "cpu", "fuse": False, "dtype": "float32"}
    expected = quantload.load(written(sources["llama"], tmp_path / "out", scheme), **options)
    assert_same_model(quantload.load(sources["llama"], scheme=scheme, **options), expected)


def test_rules_and_group_size(sources, tmp_path):
    decisions: dict[str, Any] = {
        "rules": {"model.layers.0.self_attn.": "keep", "lm_head": "W8A16"},
        "group_size": 32,
    }
    source = sources["qwen2"]  # its head is tied: the rule gives it a weight of its own
    out = written(source, tmp_path / "out", "W4A16", **decisions)
    found = quantload.load(source, scheme="W4A16", device="cpu", **decisions)
    assert_same_model(found, quantload.load(out, device="cpu"))
    schemes = {layer.module: layer.scheme for layer in api.explain(found)}
    assert schemes["lm_head"].startswith("W8A16")
    assert schemes["model.layers.1.mlp.down_proj"] == "W4A16:g32"


def test_rules_alone_keep_the_rest(sources, tmp_path):
    rules = ["*.mlp.=FP8_DYNAMIC"]
    out = written(sources["llama"], tmp_path / "out", "keep", rules=rules)
    found = quantload.load(sources["llama"], rules=rules, device="cpu")
    assert_same_model(found, quantload.load(out, device="cpu"))


def test_a_quantized_source_becomes_another_scheme(sources, tmp_path):
    blocks = written(sources["llama"], tmp_path / "fp8", "FP8_BLOCK")
    out = written(blocks, tmp_path / "out", "W4A16:g32")
    found = quantload.load(blocks, scheme="W4A16:g32", device="cpu")
    assert_same_model(found, quantload.load(out, device="cpu"))


def test_gguf_becomes_another_scheme(tmp_path):
    write_tiny_gguf(tmp_path / "m.gguf", architecture="llama", weight_type="Q4_0")
    out = written(tmp_path / "m.gguf", tmp_path / "out", "W8A8")
    found = quantload.load(tmp_path / "m.gguf", scheme="W8A8", device="cpu")
    assert_same_model(found, quantload.load(out, device="cpu"))


def test_a_plan_is_carried_out(sources, tmp_path):
    options = api.PlanOptions(observer="search")
    plan = quantload.plan(sources["llama"], "W4A16:g32", options=options)
    out = run_plan(plan, tmp_path / "out", Silent())
    assert_same_model(quantload.load(plan, device="cpu"), quantload.load(out, device="cpu"))
    with pytest.raises(ConfigError, match="a plan has its schemes"):
        quantload.load(plan, scheme="W8A8", device="cpu")


# -- ranks -----------------------------------------------------------------------------------------

FEW = [
    *(("llama", "W4A16:g32", 2, 1), ("qwen2", "FP8_BLOCK", 2, 1), ("llama", "W8A8", 1, 2)),
    ("mixtral", "NVFP4A16", 2, 1),
]
MANY = [
    (model_type, scheme, tp, pp)
    for model_type in ("llama", "qwen2", "mixtral")
    for scheme in SCHEMES
    for tp, pp in ((2, 1), (1, 2))
    if (model_type, scheme, tp, pp) not in FEW
]


def assert_ranks_agree(source: Path, folder: Path, scheme: str, tp: int, pp: int) -> None:
    """Scales are those of whole weights: these are cut when they are quantized."""
    out = written(source, folder, scheme)
    options: dict[str, Any] = {"device": "cpu", "quantize_inputs": False, "dtype": torch.float32}
    ranks = grid(tp, pp)
    models = [quantload.load(source, scheme=scheme, parallel=rank, **options) for rank in ranks]
    for rank, model in zip(ranks, models, strict=True):
        assert_same_state(model, quantload.load(out, parallel=rank, **options))
    with torch.no_grad():
        expected = quantload.load(source, scheme=scheme, **options)(IDS).logits
    for logits in together(ranks, lambda rank: models[rank.rank](IDS).logits):
        assert (logits - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize(("model_type", "scheme", "tp", "pp"), FEW)
def test_ranks_quantize_what_they_hold(sources, tmp_path, model_type, scheme, tp, pp):
    assert_ranks_agree(sources[model_type], tmp_path / "out", scheme, tp, pp)


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "scheme", "tp", "pp"), MANY)
def test_ranks_quantize_in_every_scheme(sources, tmp_path, model_type, scheme, tp, pp):
    assert_ranks_agree(sources[model_type], tmp_path / "out", scheme, tp, pp)


# -- memory ----------------------------------------------------------------------------------------

MEASURE = """
import gc, re, sys
from pathlib import Path
import quantload
from quantload.quant import compiled

def kib(key):
    return int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

compiled.start()
quantload.load(sys.argv[1], scheme="FP8_DYNAMIC", device="cpu")  # what libraries take
gc.collect()
Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
before = kib("VmRSS")
model = quantload.load(sys.argv[2], scheme="FP8_DYNAMIC", device="cpu")
tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
print(kib("VmHWM") - before, sum(t.nbytes for t in tensors.values()) // 1024)
"""


@pytest.mark.slow
def test_peak_memory_is_the_model_and_a_few_weights(tmp_path):
    """184 MiB become 94; the largest weight has 8 MiB in full precision."""
    small = tiny.llama(tmp_path / "small")
    large = tiny.llama(
        tmp_path / "large", hidden=1024, intermediate=4096, layers=6, vocabulary=1000
    )
    command = [sys.executable, "-c", MEASURE, str(small), str(large)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, held = (int(number) / 1024 for number in done.stdout.split())
    assert 80 < held < 100
    assert peak < held + 40


# -- what makes no sense ---------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["dense", "same", "keep"])
def test_schemes_that_quantize_nothing(sources, scheme):
    with pytest.raises(ConfigError, match=f"`scheme = {scheme}` quantizes nothing") as caught:
        quantload.load(sources["llama"], scheme=scheme, device="cpu")
    assert "leave `scheme` out" in str(caught.value.hint)


def test_other_errors_are_those_of_plans(sources):
    source = sources["llama"]
    with pytest.raises(ConfigError, match="a group size needs the name of a scheme"):
        quantload.load(source, group_size=32, device="cpu")
    with pytest.raises(UnknownScheme, match="no such scheme: `W4A17`"):
        quantload.load(source, scheme="W4A17", device="cpu")
    rule = ["model.layers.0.self_attn.q_proj=W8A16"]
    with pytest.raises(RuleSplitsStack, match="rules split the fused group"):
        quantload.load(source, scheme="W4A16:g32", rules=rule, device="cpu")
