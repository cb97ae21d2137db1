"""`allocate`: scores by gradients, the budget, and the file that convert takes."""

from __future__ import annotations

import json
import tomllib

import pytest
import tiny_checkpoints as tiny
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from quantload import api
from quantload.accuracy.sensitivity import gradient_scores
from quantload.accuracy.streaming import open_streamed
from quantload.api_allocate import allocate_schemes
from quantload.cli import main
from quantload.errors import ConfigError
from quantload.loader.quantized_view import quantized_view
from quantload.progress import Silent
from quantload.quant.qtensor import QuantTensor

CPU = torch.device("cpu")
SEQUENCES = [[1, 5, 9, 2, 33, 8], [7, 7, 3, 20], [4, 90, 11, 17], [6, 2, 2, 8]]
SCHEMES = ("W4A16:g32", "W8A16:g32")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny.llama(tmp_path_factory.mktemp("allocate") / "source", dtype=torch.float32)


def test_scores_against_gradients_of_transformers(source):
    """Oracle: each layer's output gets a dummy addend, whose gradient is that of the output."""
    view = quantized_view(api.plan(source, SCHEMES[0]), device=CPU)
    opened = api.inspect(source)
    modules = [m for m in view.weights if isinstance(view.read_weight(m), QuantTensor)]
    model = open_streamed(opened, device=CPU, dtype=torch.float32)
    found = gradient_scores(model, {"x": view}, modules, SEQUENCES[:2], Silent())
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    stored = load_file(source / "model.safetensors")
    expected = dict.fromkeys(modules, 0.0)
    for ids in SEQUENCES[:2]:
        seen, addends = {}, {}

        def hook(module, args, output, *, name, seen=seen, addends=addends):
            seen[name] = args[0].detach()
            addends[name] = torch.zeros_like(output, requires_grad=True)
            return output + addends[name]

        handles = [
            plain.get_submodule(m).register_forward_hook(
                lambda module, args, output, name=m, hook=hook: hook(
                    module, args, output, name=name
                )
            )
            for m in modules
        ]
        tokens = torch.tensor([ids])
        logits = plain(input_ids=tokens).logits[0]
        torch.nn.functional.cross_entropy(logits[:-1], tokens[0, 1:], reduction="sum").backward()
        for handle in handles:
            handle.remove()
        for m in modules:
            change = view.read_weight(m).dequantize(torch.float32) - stored[f"{m}.weight"]
            products = addends[m].grad * (seen[m] @ change.t())
            expected[m] += float(products.double().square().sum())
    for m in modules:
        assert found[m]["x"] == pytest.approx(expected[m], rel=1e-3)


def test_a_budget_between_two_schemes(source):
    found = allocate_schemes(source, bits=6.5, schemes=SCHEMES, sequences=SEQUENCES, device="cpu")
    mix = found.mixes[0]
    assert mix.name == "by gradients"
    assert 5.5 < mix.bits_per_weight <= 6.5
    assert set(mix.schemes.values()) == set(SCHEMES)
    for layer in range(2):
        attention = f"model.layers.{layer}.self_attn"
        assert len({mix.schemes[f"{attention}.{name}_proj"] for name in "qkv"}) == 1
    assert found.mixes[1].bits_per_weight <= 6.5
    assert found.best.kl_mean == min(mix.kl_mean for mix in found.mixes)
    assert found.mixes[2].bits_per_weight < mix.bits_per_weight


def test_everything_fits_or_nothing(source):
    found = allocate_schemes(
        source, bits=99, schemes=("W4A16:g32", "keep"), sequences=SEQUENCES, device="cpu"
    )
    assert set(found.mixes[0].schemes.values()) == {"keep"}
    assert found.mixes[0].kl_mean == 0.0
    with pytest.raises(ConfigError, match="smallest schemes take"):
        allocate_schemes(source, bits=3, schemes=SCHEMES, sequences=SEQUENCES, device="cpu")
    with pytest.raises(ConfigError, match="expected two"):
        allocate_schemes(source, bits=6, schemes=SCHEMES[:1], sequences=SEQUENCES, device="cpu")


def test_the_file_is_what_convert_takes(source, tmp_path):
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(SEQUENCES))
    rules = tmp_path / "rules.toml"
    arguments = [
        "allocate",
        str(source),
        str(rules),
        "--bits",
        "6.5",
        "--schemes",
        ",".join(SCHEMES),
    ]
    done = CliRunner().invoke(
        main, [*arguments, "--token-ids", str(ids), "--device", "cpu", "--json", "--quiet"]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    best = next(mix for mix in found["mixes"] if mix["name"] == found["best"])
    content = tomllib.loads(rules.read_text())
    for module, scheme in best["schemes"].items():
        assert content["rules"].get(module, content["scheme"]) == scheme
    out = tmp_path / "out"
    done = CliRunner().invoke(
        main, ["convert", str(source), str(out), "--config", str(rules), "--quiet"]
    )
    assert done.exit_code == 0, done.output
    assert CliRunner().invoke(main, [*arguments, "--token-ids", str(ids)]).exit_code == 2
