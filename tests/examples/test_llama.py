"""The worked example of docs/writing-a-model.md against transformers on the same weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from converting import converted
from gloo_ranks import run_in_processes
from loading import plain_model
from thread_ranks import in_ranks
from tiny_checkpoints import QWEN2, config, llama, tensors, write
from transformers import AutoConfig
from whole_weights import assert_close

import quantload
from quantload.errors import ConfigError, MissingTensor, UnexpectedTensor
from quantload.layers.registry import register_model, unregister_model
from quantload.loader.formats.targets import target_named
from quantload.runtime.parallel import Parallel

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "llama.py"
LENGTHS = (5, 1, 3)
IDS = torch.randint(0, 90, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("llama", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    unregister_model("LlamaForCausalLM")  # another test may have registered it
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def registered():
    module = example()
    yield module
    unregister_model("LlamaForCausalLM")


def checkpoint(folder: Path, kind: str) -> Path:
    """A tiny Llama with 4 heads, 2 key-value heads and 99 tokens, in a format."""
    base = llama(folder / "base", vocabulary=99, hidden=64, intermediate=128)
    match kind:
        case "dense":
            return base
        case "tied":
            return llama(folder / "tied", vocabulary=99, tied=True)
        case "GPTQ":
            converted(base, folder / "out", "W4A16:g32", target=target_named("gptq"))
        case _:
            converted(base, folder / "out", kind)
    return folder / "out"


def expected_logits(folder: Path) -> torch.Tensor:
    """Logits of each sequence, by transformers on the dequantized weights."""
    model = plain_model(quantload.inspect(folder))
    with torch.no_grad():
        parts = [model(ids[None]).logits[0] for ids in IDS.split(LENGTHS)]
    return torch.cat(parts)


def logits(folder: Path, parallel: Parallel | None = None, **options) -> torch.Tensor:
    model = quantload.load(folder, device="cpu", dtype=torch.float32, parallel=parallel, **options)
    with torch.no_grad():
        return model.compute_logits(model(IDS, POSITIONS))


KINDS = ["dense", "tied", "W4A16:g32", "FP8_DYNAMIC", "GPTQ"]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(registered, tmp_path: Path, kind: str) -> None:
    folder = checkpoint(tmp_path, kind)
    expected = expected_logits(folder)
    model = quantload.load(folder, device="cpu", dtype=torch.float32, quantize_inputs=False)
    assert type(model) is registered.LlamaForCausalLM
    assert_close(logits(folder, quantize_inputs=False), expected)
    for size in (2, 4):  # 4: each key-value head lies in two ranks
        for found in in_ranks(size, lambda ranks: logits(folder, ranks, quantize_inputs=False)):
            assert_close(found, expected)


def test_rounded_inputs_are_those_of_the_transformers_model(registered, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "FP8_DYNAMIC")
    found = [logits(folder), *in_ranks(2, lambda ranks: logits(folder, ranks))]
    unregister_model("LlamaForCausalLM")
    model = quantload.load(folder, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        expected = torch.cat([model(ids[None]).logits[0] for ids in IDS.split(LENGTHS)])
    assert (expected - expected_logits(folder)).norm() / expected.norm() > 1e-3
    for result in found:
        assert_close(result, expected)


def test_filled_by_hand(registered, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "W4A16:g32")
    config = AutoConfig.from_pretrained(folder)
    model = registered.LlamaForCausalLM(config, parallel=Parallel())
    done = quantload.load_weights(model, folder)
    assert not done.untied
    with torch.no_grad():
        assert torch.equal(model.compute_logits(model(IDS, POSITIONS)), logits(folder))
        rows = model.embed_input_ids(IDS)
        assert torch.equal(model(IDS, POSITIONS, rows), model(IDS, POSITIONS))


def test_quantized_layers_stay_quantized(registered, tmp_path: Path) -> None:
    model = quantload.load(checkpoint(tmp_path, "W4A16:g32"), device="cpu", dtype=torch.float32)
    layer = model.model.layers[0]
    for part in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj):
        assert str(part.scheme) == "W4A16:g32"
        assert part.kernel.name != "dense"
    assert model.lm_head.kernel.name == "dense"
    told = {report.module: report.scheme for report in quantload.explain(model)}
    assert told["model.layers.1.self_attn.qkv_proj"] == "W4A16:g32"
    assert told["lm_head"] == "dense"
    assert len(told) == 2 * 4 + 1


def test_two_processes(tmp_path: Path) -> None:
    folders = [checkpoint(tmp_path / kind, kind) for kind in ("tied", "GPTQ", "FP8_DYNAMIC")]
    run_in_processes(2, _two, folders)


def _two(folders: list[Path]) -> None:
    example()
    parallel = Parallel.from_environment(device="cpu")
    for folder in folders:
        assert_close(logits(folder, parallel), logits(folder))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="wants two CUDA devices")
def test_two_gpus(tmp_path: Path) -> None:
    folders = [checkpoint(tmp_path / kind, kind) for kind in KINDS]
    run_in_processes(2, _two_gpus, folders)


def _two_gpus(folders: list[Path]) -> None:
    example()
    parallel = Parallel.from_environment(device="cuda")
    for folder in folders:
        results = []
        for ranks in (None, parallel):
            model = quantload.load(folder, device=parallel.device, parallel=ranks)
            with torch.inference_mode():
                ids, positions = (x.to(parallel.device) for x in (IDS, POSITIONS))
                results.append(model.compute_logits(model(ids, positions)).float())
        assert_close(results[1], results[0], limit=2e-2)  # sums of bfloat16 in another order


# -- the registry ----------------------------------------------------------------------------------


def test_what_is_missing_or_left_over_is_told(registered, tmp_path: Path) -> None:
    content = config(vocabulary=99)
    made = tensors(content)
    short = dict(made)
    del short["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(MissingTensor, match=r"model\.layers\.1\.self_attn\.qkv_proj\.weight\[1\]"):
        logits(write(tmp_path / "short", content, short))
    more = {**made, "model.layers.1.self_attn.k_proj_2.weight": torch.ones(2, 2)}
    with pytest.raises(UnexpectedTensor, match="k_proj_2"):
        logits(write(tmp_path / "more", content, more))
    with pytest.raises(ConfigError, match="written by hand and runs in one stage, found 2 stages"):
        logits(write(tmp_path / "whole", content, made), Parallel(pp_size=2))


def test_other_architectures_stay_with_transformers(registered, tmp_path: Path) -> None:
    folder = llama(tmp_path / "qwen", base=QWEN2)
    assert type(quantload.load(folder, device="cpu")).__name__ == "Qwen2ForCausalLM"


def test_classes_that_cannot_serve(registered) -> None:
    class Incomplete(torch.nn.Module):
        def embed_input_ids(self, input_ids):
            return input_ids

    class Another(Incomplete):
        def compute_logits(self, hidden_states):
            return hidden_states

    with pytest.raises(ConfigError, match="`Incomplete` cannot serve `X`: it has no `compute_lo"):
        register_model("X", Incomplete)
    with pytest.raises(ConfigError, match="`LlamaForCausalLM` is served by `LlamaForCausalLM` alr"):
        register_model("LlamaForCausalLM", Another)
    try:
        assert register_model("LlamaForCausalLM", Another, replace=True) is Another
    finally:
        unregister_model("LlamaForCausalLM")


class Plain(torch.nn.Module):
    """A model of torch's own layers, of a type that transformers does not know."""

    def __init__(self, config, *, parallel, prefix=""):
        super().__init__()
        self.embed = torch.nn.Embedding(config.vocab_size, config.width)
        self.head = torch.nn.Linear(config.width, config.vocab_size, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.arange(3), persistent=False)

    def embed_input_ids(self, input_ids):
        return self.embed(input_ids)

    def forward(self, input_ids, positions):
        return self.embed_input_ids(input_ids) + positions[:, None]

    def compute_logits(self, hidden_states):
        return self.head(hidden_states)


def test_a_model_of_plain_layers(tmp_path: Path) -> None:
    register_model("PlainModel", Plain)
    try:
        content = {"architectures": ["PlainModel"], "model_type": "plain", "vocab_size": 9}
        weight = torch.randn(9, 4)
        write(tmp_path / "plain", {**content, "width": 4}, {"embed.weight": weight})
        model = quantload.load(tmp_path / "plain", device="cpu", dtype=torch.bfloat16)
    finally:
        unregister_model("PlainModel")
    assert torch.equal(model.embed.weight, weight.bfloat16())
    assert model.head.weight is model.embed.weight
    assert not model.training
    assert not model.head.weight.requires_grad


def test_the_page_shows_the_example() -> None:
    page = (EXAMPLE.parents[1] / "writing-a-model.md").read_text()
    blocks = [part.partition("```")[0] for part in page.split("```python\n")[1:]]
    shown = [block for block in blocks if "quantload.load" not in block]
    assert len(shown) == 4
    for block in shown:
        assert block in EXAMPLE.read_text()
