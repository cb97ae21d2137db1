"""Loaded models compute what a plain model with the same weights does."""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiny_checkpoints as tiny
import torch
from fake_source import FakeModel, quantized_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import quantload
from quantload.api import explain, load_model
from quantload.errors import MissingTensor
from quantload.layers.linear import QuantLinear
from quantload.layers.stack import LinearStack, StackView
from quantload.layers.surgery import LinearReport
from quantload.quant.rtn import quantize_rtn

CPU = torch.device("cpu")
IDS = torch.tensor([[1, 5, 9, 100, 7, 33, 2, 64], [1, 6, 9, 17, 120, 3, 2, 4]])
MODELS = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "gpt2")


def load(fake: FakeModel, **options: object) -> nn.Module:
    return load_model(fake.source, device=CPU, **options)  # type: ignore[arg-type]


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def close(one: Tensor, two: Tensor, limit: float = 1e-5) -> bool:
    return bool((one - two).norm() <= limit * two.norm())


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("fuse", [True, False])
def test_logits_are_those_of_the_dequantized_model(model_type: str, fuse: bool) -> None:
    fake = quantized_model(model_type)
    model = load(fake, fuse=fuse)
    assert close(logits(model), logits(fake.model))
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model.training


@pytest.mark.parametrize(
    "scheme", ["W4A16_ASYM:g32", "W8A16:g32", "W8A16:channel", "W4A16:channel"]
)
def test_schemes(scheme: str) -> None:
    fake = quantized_model("qwen2", scheme)
    assert close(logits(load(fake)), logits(fake.model))


@pytest.mark.parametrize("scheme", ["W8A8", "FP8_DYNAMIC", "FP8_BLOCK"])
def test_quantized_inputs_are_near_the_weight_only_model(scheme: str) -> None:
    fake = quantized_model("llama", scheme)
    fused, alone = logits(load(fake)), logits(load(fake, fuse=False))
    assert close(fused, alone)
    assert not torch.equal(fused, logits(fake.model))
    assert close(fused, logits(fake.model), limit=0.1)


def test_dense_model_is_fused_and_equal() -> None:
    fake = quantized_model("qwen2", {})
    model = load(fake)
    assert close(logits(model), logits(fake.model), limit=1e-6)
    assert sum(isinstance(module, LinearStack) for module in model.modules()) == 4


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "gemma2", "mistral"])
def test_one_product_a_stack(model_type: str) -> None:
    model = load(quantized_model(model_type))
    stacks = [module for module in model.modules() if isinstance(module, LinearStack)]
    calls = [0] * len(stacks)
    for i, stack in enumerate(stacks):
        stack.gemm.register_forward_hook(lambda *_, i=i: calls.__setitem__(i, calls[i] + 1))
    plain = logits(model)
    with torch.inference_mode():
        inferred = model(IDS, use_cache=False).logits
    assert len(stacks) == 4
    assert calls == [2] * 4
    assert torch.equal(plain, inferred)
    assert not any(stack._memos for stack in stacks)


def test_generate_gives_the_same_tokens() -> None:
    fake = quantized_model("llama")
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    assert torch.equal(load(fake).generate(IDS, **options), fake.model.generate(IDS, **options))


@pytest.mark.parametrize(
    "scheme",
    [
        "W4A16:g32",
        pytest.param("W8A8", marks=pytest.mark.slow),
        pytest.param({}, marks=pytest.mark.slow),
    ],
)
def test_compiles_as_one_graph(scheme: object) -> None:
    fake = quantized_model("llama", scheme, num_hidden_layers=1)  # type: ignore[arg-type]
    model = load(fake)
    expected = logits(model)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert close(logits(compiled), expected)


def test_compiled_stacks_are_one_product() -> None:
    model = load(quantized_model("llama", {}, num_hidden_layers=1))
    products = []

    def count(graph: torch.fx.GraphModule, _: object) -> object:
        products.append(sum(node.target is nn.functional.linear for node in graph.graph.nodes))
        return graph.forward

    torch.compiler.reset()
    logits(torch.compile(model, fullgraph=True, backend=count))
    assert products == [5]  # q k v, o, gate up, down, head
    assert not any(m._memos for m in model.modules() if isinstance(m, LinearStack))


def test_threads_get_their_own_logits() -> None:
    model = load(quantized_model("llama", "W8A8"))
    batches = [(IDS * 7 + i) % 128 for i in range(8)]
    with torch.no_grad():
        expected = [model(ids, use_cache=False).logits for ids in batches]
    together = threading.Barrier(len(batches))

    def wrong(thread: int) -> int:
        together.wait()
        with torch.no_grad():
            results = [model(batches[thread], use_cache=False).logits for _ in range(20)]
        return sum(not torch.equal(result, expected[thread]) for result in results)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(batches)) as pool:
            assert sum(pool.map(wrong, range(len(batches)))) == 0
    finally:
        sys.setswitchinterval(interval)


def test_members_have_no_storage() -> None:
    fake = quantized_model("llama", "W4A16:g32")
    model = load(fake)
    views = [module for module in model.modules() if isinstance(module, StackView)]
    assert len(views) == 10
    assert not any(view.state_dict() or list(view.parameters()) for view in views)
    held = sum(t.nbytes for t in model.state_dict().values())
    dense = sum(tensor.nbytes for tensor in fake.tensors.values())
    quantized = sum(
        weight.codes.numel() // 2 + weight.scale.nbytes for _, weight in fake.quantized.values()
    )
    assert held == dense + quantized


def test_differing_schemes_stay_separate() -> None:
    schemes = {
        "q_proj": "W8A16:g32",
        "k_proj": "W4A16:g32",
        "v_proj": "W4A16:g32",
        "down_proj": "W8A8",
    }
    fake = quantized_model("qwen2", schemes)
    model = load(fake)
    reports = {report.module: report for report in explain(model)}
    block = "model.layers.0.self_attn"
    assert reports[f"{block}.q_proj"].fused_into == ""
    assert reports[f"{block}.k_proj"].fused_into == f"{block}.k_proj_v_proj_stack"
    assert reports["model.layers.0.mlp.up_proj"].scheme == "dense"
    assert close(logits(model), logits(load(fake, fuse=False)))


def test_members_that_cannot_be_stacked_still_load() -> None:
    fake = quantized_model("llama", "W4A16_ASYM:g32")
    name = "model.layers.0.self_attn.k_proj"
    scheme, weight = fake.quantized[name]
    without_zero = type(weight)(
        grid=weight.grid,
        codes=weight.codes,
        scale=weight.scale,
        block=weight.block,
        evaluation=weight.evaluation,
    )
    fake.quantized[name] = (scheme, without_zero)
    with torch.no_grad():
        fake.model.get_submodule(name).weight.copy_(without_zero.dequantize())
    model = load(fake)
    report = next(report for report in explain(model) if report.module == name)
    assert report.fused_into == ""
    assert "only some have a `zero`" in report.note
    assert close(logits(model), logits(fake.model))


def test_explain_names_kernel_and_reasons() -> None:
    model = load(quantized_model("llama"))
    reports = explain(model)
    assert len(reports) == 15
    first = reports[0]
    assert isinstance(first, LinearReport)
    assert first.kernel == "dequantize and multiply"
    assert ("triton weight-only", "runs on CUDA, found `cpu`") in first.refused
    head = reports[-1]
    assert isinstance(head, LinearReport)
    assert (head.module, head.scheme, head.kernel) == ("lm_head", "dense", "dense")
    weight = model.get_submodule("lm_head").weight
    assert isinstance(weight, Tensor)
    assert (head.shape, head.weight_bytes) == (tuple(weight.shape), weight.nbytes)


def test_members_still_show_their_weight() -> None:
    fake = quantized_model("qwen2")
    model = load(fake)
    for name, (_, weight) in fake.quantized.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, (StackView, QuantLinear))
        assert torch.equal(layer.weight, weight.dequantize())


def quantized_embedding() -> FakeModel:
    """A tied model whose embedding, which scales its rows, is quantized."""
    fake = quantized_model("gemma2")
    scheme, _ = fake.quantized["model.layers.0.mlp.up_proj"]
    assert scheme.weight is not None
    weight = quantize_rtn(fake.tensors.pop("model.embed_tokens.weight"), scheme.weight)
    fake.quantized["model.embed_tokens"] = (scheme, weight)
    with torch.no_grad():
        fake.model.get_input_embeddings().weight.copy_(weight.dequantize())
    return fake


def test_quantized_embedding_stays_quantized_and_tied() -> None:
    fake = quantized_embedding()
    model = load(fake)
    assert model.lm_head.gemm is model.model.embed_tokens.table
    assert close(logits(model), logits(fake.model))
    held = sum(buffer.nbytes for buffer in model.model.embed_tokens.buffers())
    assert held < fake.quantized["model.embed_tokens"][1].codes.numel()  # 4 bits a code, scales


@pytest.mark.parametrize("name", ["self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj"])
def test_a_missing_member_of_a_fused_layer_has_its_own_name(tmp_path: Path, name: str) -> None:
    folder = tiny.llama(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"model.layers.0.{name}.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(MissingTensor) as caught:
        quantload.load(folder, device="cpu")
    assert f"no tensor for `model.layers.0.{name}.weight`" in str(caught.value)
    assert "stack" not in str(caught.value)


def test_what_was_left_out_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny.llama(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "stray": torch.zeros(1)}, folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    quantload.load(folder, device="cpu")
    assert "1 tensors are not listed in the index, left out: `stray`" in caplog.text
