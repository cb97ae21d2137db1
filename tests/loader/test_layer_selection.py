"""`--layers`: a valid small model of some of the layers."""

import json

import pytest
import tiny_checkpoints as tiny
import torch
from converting import opened
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from truth import CHECKPOINTS

from quantload import api
from quantload.accuracy.verify import verify_sources
from quantload.errors import ConfigError
from quantload.loader.layer_selection import parse_layers, select_layers
from quantload.loader.plan import PlanOptions
from quantload.progress import Silent

IDS = torch.arange(1, 9)[None]
needs_checkpoints = pytest.mark.skipif(
    not CHECKPOINTS.is_dir(), reason="no folder shared/checkpoints"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", (0,)), ("0-1", (0, 1)), ("0,5-7", (0, 5, 6, 7)), (" 3 , 1 ", (1, 3)), ("2-2", (2,))],
)
def test_numbers_and_ranges(text, expected):
    assert parse_layers(text) == expected


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "0,,1", "0-1-2", "1.5", "0;1"])
def test_what_is_no_list_of_layers(text):
    with pytest.raises(ConfigError, match="expected numbers and ranges, for example `0-1`"):
        parse_layers(text)


def test_layers_named_twice():
    with pytest.raises(ConfigError, match="layers named twice: `0-2,1`"):
        parse_layers("0-2,1")


@pytest.fixture
def folder(tmp_path):
    return tiny.llama(tmp_path / "source", layers=4)


@pytest.mark.parametrize(("layers", "kept"), [("0-1", (0, 1)), ("1,3", (1, 3)), ("2", (2,))])
def test_a_part_of_a_model(tmp_path, folder, layers, kept):
    done = api.convert(folder, tmp_path / "out", "dense", options=PlanOptions(layers=layers))
    assert done.report is not None
    assert done.report.failures() == []
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert content["num_hidden_layers"] == len(kept)
    made, written = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "out"))
    for name, tensor in written.items():
        old = name
        for new, number in enumerate(kept):
            if f".layers.{new}." in name:
                old = name.replace(f".layers.{new}.", f".layers.{number}.")
        assert torch.equal(tensor, made[old]), name
    left_out = [n for n in made if ".layers." in n and int(n.split(".")[2]) not in kept]
    assert len(written) == len(made) - len(left_out)
    assert done.plan.source.dropped == {f"--layers {layers}": sum(made[n].nbytes for n in left_out)}
    (told,) = done.plan.warnings
    assert told == f"only layers {layers} of 4 are converted: the output is a part of the model"
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference.model.layers = torch.nn.ModuleList([reference.model.layers[n] for n in kept])
    reference.config.num_hidden_layers = len(kept)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ours = api.load(tmp_path / "out", device="cpu", dtype=torch.float32)
    with torch.no_grad():
        expected = reference(IDS, use_cache=False).logits
        torch.testing.assert_close(loaded(IDS, use_cache=False).logits, expected)
        torch.testing.assert_close(ours(IDS, use_cache=False).logits, expected)


def test_rules_and_quantized_layers_count_from_zero(tmp_path, folder):
    options = PlanOptions(layers="2-3")
    api.convert(
        folder, tmp_path / "out", "W4A16:g32", rules=["model.layers.1.=keep"], options=options
    )
    output = opened(tmp_path / "out")
    assert output.weights["model.layers.0.mlp.up_proj"].is_quantized
    assert not output.weights["model.layers.1.mlp.up_proj"].is_quantized
    again = api.convert(tmp_path / "out", tmp_path / "one", "same", options=PlanOptions(layers="1"))
    assert again.report is not None
    assert again.report.failures() == []


def test_a_source_is_reduced_once(folder):
    once = select_layers(opened(folder), "3")
    assert select_layers(once, "3") is once
    with pytest.raises(ConfigError, match="was reduced to layers `3`"):
        select_layers(once, "0")
    whole = opened(folder)
    assert select_layers(whole, "") is whole


def test_layers_that_do_not_exist(folder):
    with pytest.raises(ConfigError) as caught:
        select_layers(opened(folder), "0,4-5")
    assert str(caught.value) == (
        "`--layers 0,4-5`: there is no layer 4, the config counts 4\n\nhint: layers are 0 to 3"
    )


@pytest.mark.parametrize(
    ("content", "names", "expected"),
    [
        ({}, ["model.layers.0.a.weight"], "does not count decoder layers"),
        (
            {"num_layers": 1, "is_encoder_decoder": True},
            ["encoder.block.0.a.weight", "decoder.block.0.a.weight"],
            "has an encoder and a decoder",
        ),
        (
            {"num_hidden_layers": 2},
            ["model.layers.0.a.weight"],
            r"cannot tell the decoder layers of .*: `model.layers`, expected one list of 2 layers",
        ),
        (
            {"num_hidden_layers": 1},
            ["a.layers.0.a.weight", "b.layers.0.a.weight"],
            "cannot tell the decoder layers of .*: `a.layers`, `b.layers`",
        ),
    ],
)
def test_models_without_one_list_of_layers(tmp_path, content, names, expected):
    made = {name: torch.zeros(2, 2) for name in names}
    source = opened(tiny.write(tmp_path, content, made))
    with pytest.raises(ConfigError, match=expected):
        select_layers(source, "0")


@needs_checkpoints
@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("transformers-5.24.0/tiny-deepseek-v3-mtp", "1"),
        ("transformers-5.24.0/tiny-gpt2-hub-layout", "1"),
        ("transformers-5.24.0/tiny-qwen3-next", "1"),
        ("transformers-5.24.0/tiny-qwen2-vl-old-keys", "1"),
        ("transformers-5.24.0/tiny-gemma3-mm-old-keys", "0"),
        ("transformers-5.24.0/tiny-lfm2", "1"),
        ("transformers-quant-5.24.0/tiny-deepseek-v3-mtp-fp8-block32", "1"),
        ("transformers-quant-5.24.0/tiny-gpt-oss-mxfp4", "1"),
        ("gguf-0.19.0/micro-llama-Q4_0", "0"),
        ("nvidia-modelopt-0.47.0/micro-qwen3-moe-NVFP4", "0"),
        ("auto-round-0.16.1/micro-qwen3-moe-auto_round-W4A16", "0"),
    ],
)
def test_layers_of_real_checkpoints(tmp_path, name, layers):
    folder = CHECKPOINTS / name
    source = opened(next(folder.glob("*.gguf"), folder))
    plan = api.plan(source, "dense", options=PlanOptions(layers=layers))
    done = api.execute(plan, tmp_path / "out", verify_output=False)
    output = opened(tmp_path / "out")
    assert verify_sources(output, plan.source, Silent(), nearest=True).failures() == []
    loaded = api.load(done.folder, device="cpu", dtype=torch.float32)
    assert loaded.config.get_text_config().num_hidden_layers == 1
    with torch.no_grad():
        assert loaded(IDS, use_cache=False).logits.isfinite().all()


@needs_checkpoints
def test_layers_of_another_kind_are_not_numbered_anew():
    source = opened(CHECKPOINTS / "transformers-5.24.0/tiny-jamba")
    with pytest.raises(ConfigError, match="layer 1 would be layer 0, of another kind: the config"):
        select_layers(source, "1")
