"""Bytes quantized, copied and dropped add up to those of the source."""

import pytest
import tiny_checkpoints as tiny
import torch
from converting import converted, opened, plan_of
from safetensors import safe_open
from safetensors.torch import load_file
from truth import CHECKPOINTS

from quantload.errors import QuantloadError
from quantload.loader.layer_selection import select_layers
from quantload.loader.plan import make_plan
from quantload.loader.plan_accounting import AGAIN, DEQUANTIZED, INPUTS, account_for
from quantload.mappers.facts import facts_from_names
from quantload.quant.rules import QuantConfig

TOOLS = sorted(folder.name for folder in CHECKPOINTS.glob("*/")) if CHECKPOINTS.is_dir() else []
Q = "model.layers.0.self_attn.q_proj"


def _sources(tool):
    for folder in sorted((CHECKPOINTS / tool).glob("*/")):
        try:
            yield folder, opened(next(iter(sorted(folder.glob("*.gguf"))), folder))
        except QuantloadError:
            continue  # a format that is not read


def _data_bytes(source):
    """Bytes of the tensors in the files, counted by the safetensors library."""
    total = 0
    for file in {entry.file for entry in source.checkpoint.tensors.values()}:
        with safe_open(file, framework="pt") as content:
            total += sum(content.get_tensor(name).nbytes for name in content.offset_keys())
    return total


@pytest.mark.parametrize("tool", TOOLS)
def test_real_checkpoints_add_up(tool):
    seen = 0
    for folder, source in _sources(tool):
        total = sum(entry.num_bytes for entry in source.checkpoint.tensors.values())
        if folder.name in ("micro-qwen3-moe-FP8", "nano-llama-FP8_BLOCK", "tiny-llama"):
            assert _data_bytes(source) == total
        for scheme in ("W4A16:g32", "dense"):
            found = plan_of(next(iter(sorted(folder.glob("*.gguf"))), folder), scheme).accounting
            assert found.total == total, (folder.name, scheme, found)
            assert min((found.quantized, found.copied, *found.dropped.values())) >= 0
            assert found.quantized == 0 or scheme != "dense"
            seen += 1
    assert seen or tool.startswith(("aqlm", "sinq"))  # formats that are not read


def test_full_precision_becomes_quantized_or_is_copied(tmp_path):
    folder = tiny.llama(tmp_path / "source")
    made = load_file(folder / "model.safetensors")
    found = plan_of(folder, "W4A16:g32", [f"{Q[:-7]}.=keep"]).accounting
    quantized = [n for n in made if "proj" in n and not n.startswith("model.layers.0.self_attn")]
    assert found.quantized == sum(made[name].nbytes for name in quantized)
    assert found.copied == sum(made[n].nbytes for n in made if n not in quantized)
    assert found.dropped == {}


@pytest.mark.parametrize(
    ("scheme", "reason"), [("W4A16:g32", AGAIN), ("dense", DEQUANTIZED), ("same", None)]
)
def test_scales_of_what_was_quantized(tmp_path, scheme, reason):
    folder = converted(tiny.llama(tmp_path / "source"), tmp_path / "fp8", "FP8_DYNAMIC")
    made = load_file(folder / "model.safetensors")
    made[f"{Q}.input_scale"] = torch.ones(1)
    tiny.save_file(made, folder / "model.safetensors")
    found = plan_of(folder, scheme).accounting
    codes = sum(t.nbytes for name, t in made.items() if f"{name}_scale" in made)
    scales = sum(t.nbytes for name, t in made.items() if name.endswith("weight_scale"))
    total = sum(tensor.nbytes for tensor in made.values())
    if reason is None:
        assert (found.quantized, found.dropped) == (codes + scales, {INPUTS: 4})
    else:
        assert found.dropped == {reason: scales, INPUTS: 4}
        assert found.quantized == (codes if scheme != "dense" else 0)
    assert found.total == total


def test_layers_that_are_left_out_count(tmp_path):
    folder = tiny.llama(tmp_path / "source", layers=3)
    made = load_file(folder / "model.safetensors")
    source = select_layers(opened(folder), "1-2")
    facts = facts_from_names(source.weights, tied_head=False)
    found = make_plan(source, QuantConfig.from_options("W8A8"), facts).accounting
    first = sum(tensor.nbytes for name, tensor in made.items() if ".layers.0." in name)
    assert found.dropped == {"--layers 1-2": first}
    assert found.total == sum(tensor.nbytes for tensor in made.values())


def test_a_tensor_without_a_fate_is_an_error(tmp_path):
    plan = plan_of(tiny.llama(tmp_path / "source"), "W8A8")
    with pytest.raises(AssertionError, match="the plan says nothing of"):
        account_for(plan.source, plan.rows[1:], plan.plain)
