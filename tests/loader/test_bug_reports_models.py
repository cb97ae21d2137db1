"""Public bug reports about models: ties, experts, accuracy, and the cost of names."""

import json
import random
import re
import shutil
import time

import numpy as np
import pytest
import tiny_checkpoints as tiny
import torch
from click.testing import CliRunner
from constant_weights import INT4_ARGUMENTS, ct_config, plain
from fp8_files import opened, write
from int_packing import awq_tensors, random_parts, values_of
from safetensors.torch import load_file, save_file

import quantload
from quantload.accuracy.compare import LayerComparison
from quantload.accuracy.compare_weights import sum_limit
from quantload.accuracy.comparison_json import comparison_json
from quantload.cli import main
from quantload.cli_compare import comparison_markdown
from quantload.errors import MissingTensor
from quantload.loader.formats.compressed_tensors import encode
from quantload.loader.formats.compressed_tensors_config import parse_config
from quantload.loader.formats.matching import matches_regex
from quantload.quant.activation import fake_quantize
from quantload.quant.grid import INT8
from quantload.quant.metrics import error_sums
from quantload.quant.rtn import quantize_rtn
from quantload.quant.scheme import InputScheme, parse_scheme

LAYER = "model.layers.0"


def test_br059_whole_layer_experts_ignored(tmp_path):
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    config |= {"version": "gemm", "modules_to_not_convert": ["model.layers.0.", "self_attn"]}
    tensors, expected = {}, {}
    for number in range(11):
        layer = f"model.layers.{number}"
        tensors |= plain(f"{layer}.self_attn.q_proj", 32, 64, dtype=torch.float16)
        for expert in range(2):
            module = f"{layer}.mlp.experts.{expert}.up_proj"
            if number == 0:
                tensors |= plain(module, 32, 64, dtype=torch.float16)
                continue
            fields, zeros, scales = random_parts(32, 64, 2, 4, seed=len(expected))
            expected[module] = values_of(
                fields, zeros, scales, torch.arange(64) // 32, torch.float16
            )
            made = awq_tensors(fields, zeros, scales, bits=4)
            tensors |= {f"{module}.{leaf}": tensor for leaf, tensor in made.items()}
    source = opened(write(tmp_path, tensors, config, dtype=torch.float16))
    assert {m for m, w in source.weights.items() if w.is_quantized} == set(expected)
    assert len(expected) == 20
    for module, values in expected.items():
        assert torch.equal(source.read_dense(module), values)
    assert not source.warnings


def test_br065_tied_both_stored(tmp_path, caplog):
    """An equal copy is tied. One that differs stays a head of its own: deliberately another answer.

    The report wants the config to decide, or a refusal. transformers 5 leaves such a head untied
    and says so, and it is the reference for what the model of these files computes; tied, its
    weights would be dropped. The difference is reported, as the report wants.
    """
    content = tiny.config(layers=1, tied=True)
    tensors = tiny.tensors(content)
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone()
    model = quantload.load(tiny.write(tmp_path / "same", content, tensors), device="cpu")
    head = model.get_output_embeddings().weight
    assert head.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert not caplog.text
    tensors["lm_head.weight"][0, 0] += 1.0
    difference = (tensors["lm_head.weight"].float() - embedding.float()).abs().max()
    model = quantload.load(tiny.write(tmp_path / "other", content, tensors), device="cpu")
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    assert torch.equal(model.get_output_embeddings().weight, tensors["lm_head.weight"])
    assert "lm_head.weight" in caplog.text
    assert f"largest difference {float(difference):.4g}" in caplog.text


def test_br066_untied_head_missing(tmp_path):
    content = tiny.config(layers=1, tied=False)
    tensors = tiny.tensors(content)
    del tensors["lm_head.weight"]
    folder = tiny.write(tmp_path, content, tensors)
    with pytest.raises(MissingTensor, match=r"(?s)`lm_head.weight`.*tie_word_embeddings"):
        quantload.load(folder, device="cpu")


def _nf4(shape, table):
    """A doubly quantized nf4 weight of random codes, byte by byte, and its values."""
    rng = np.random.default_rng(0)
    count = shape[0] * shape[1]
    codes, blocks = rng.integers(0, 16, count, dtype=np.uint8), count // 64
    fields, outer = rng.integers(0, 256, blocks, dtype=np.uint8), np.float32([0.5])
    levels = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}
    state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 2.0}
    leaves = {
        "": (codes[::2] * 16 + codes[1::2]).reshape(-1, 1),
        "absmax": fields,
        "quant_map": table,
        "nested_absmax": outer,
        "nested_quant_map": levels,
        "quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }
    absmax = levels[fields] * outer[0] + np.float32(2.0)
    values = (table[codes] * absmax.repeat(64)).reshape(shape)
    return {k: torch.tensor(part) for k, part in leaves.items()}, torch.tensor(values).bfloat16()


NF4 = np.float32(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)


def test_br075_bnb_state_keys(tmp_path):
    """Known from its tensors alone, without any quantization config."""
    name = f"{LAYER}.self_attn.q_proj.weight"
    leaves, values = _nf4((64, 64), NF4)
    stored = {f"{name}.{leaf}" if leaf else name: part for leaf, part in leaves.items()}
    assert stored[name].shape == (2048, 1)
    folder = tiny.write(tmp_path, tiny.config(layers=1), stored)
    source = opened(folder)
    assert source.format_name == "bitsandbytes"
    assert "nf4" in source.weights[f"{LAYER}.self_attn.q_proj"].encoding
    assert not source.plain
    assert torch.equal(source.read_dense(f"{LAYER}.self_attn.q_proj"), values)


def test_br103_name_matching_cost():
    literals = [f"model.layers.{n}.mlp.gate" for n in range(944)]
    literals += [f"model.layers.{n}.self_attn.q_proj" for n in range(944)]
    regexes = [rf"re:.*layers\.{n}\.mlp\.experts\.1\d\..*" for n in range(5)]
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj"
        for layer in range(59)
        for expert in range(256)
        for part in ("gate", "up", "down")
    ]
    assert len(names) == 45_312
    assert len(literals) == 1888
    names[::100] = literals[: len(names[::100])]
    config = parse_config(ct_config(INT4_ARGUMENTS, ignore=[*literals, *regexes]))
    start = time.process_time()
    found = {name for name in names if config.ignored_by(name, ("Linear",))}
    assert time.process_time() - start < 3
    sample = random.Random(0).sample(names, 1000)
    naive = {
        name
        for name in sample
        if any(name == e or matches_regex(e, name) for e in (*literals, *regexes))
    }
    assert {name for name in sample if name in found} == naive
    assert naive


def test_br103_inspecting_many_names(tmp_path):
    ignore = [f"model.layers.{n}.mlp.gate" for n in range(1888)]
    tensors = {
        f"model.layers.{n // 256}.mlp.experts.{n % 256}.up_proj.weight": torch.zeros(
            1, 1
        ).bfloat16()
        for n in range(20_000)
    }
    folder = write(tmp_path, tensors, ct_config(INT4_ARGUMENTS, ignore=ignore))
    start = time.process_time()
    source = opened(folder)
    assert time.process_time() - start < 3
    assert len(source.weights) == 20_000


def test_br103_packing_cost():
    scheme = parse_scheme("W4A16")
    weight = quantize_rtn(torch.randn(8192, 8192).bfloat16(), scheme.weight)
    start = time.process_time()
    packed = encode(weight, scheme)["weight_packed"]
    assert time.process_time() - start < 3
    assert packed.shape == (8192, 1024)


def test_br104_down_proj_outliers():
    x = torch.ones(8, 64)
    x[0, 63] = 1000.0
    per_tensor = InputScheme(grid=INT8, granularity="tensor")
    rounded = fake_quantize(x, per_tensor)
    assert not rounded[:, :63].any()
    assert rounded[0, 63] == pytest.approx(1000, rel=1e-2)
    assert error_sums(rounded[:, :63], x[:, :63]).relative == 1.0
    per_token = fake_quantize(x, InputScheme(grid=INT8, granularity="token"))
    assert error_sums(per_token[1:], x[1:]).relative < 0.01


def test_br104_the_layer_with_the_outliers_is_shown_first(tmp_path):
    """Inputs of one layer have an outlier; only its output is wrong, and the report says so."""
    content = tiny.config(layers=2, dtype=torch.float32)
    tensors = tiny.tensors(content)
    down = "model.layers.1.mlp.down_proj"
    for part in ("gate_proj", "up_proj"):
        tensors[f"model.layers.1.mlp.{part}.weight"][5] *= 60
    tensors[f"{down}.weight"][:, 5] /= 3600
    folder = tiny.write(tmp_path / "in", content, tensors)
    quantload.convert(folder, tmp_path / "w8a8", "W8A8")
    ids = [torch.randint(0, 96, (32,)).tolist()]
    result = quantload.compare(folder, tmp_path / "w8a8", sequences=ids, device="cpu")
    assert max(result.layers, key=_output_error).module == down
    shown = comparison_markdown(result).splitlines()
    first = next(line for line in shown if line.startswith("| ") and "_proj" in line)
    assert down in first
    assert comparison_json(result)


def _output_error(row: LayerComparison) -> float:
    return row.output.relative if row.output is not None else 0.0


def test_br106_cross_tool_tolerance():
    """Another order of sums and a wrong scale lie far apart in the one measure of `compare`."""
    x, w = torch.randn(64, 4096).bfloat16(), torch.randn(256, 4096).bfloat16()
    y = (x @ w.T).float()
    halves = ((x[:, :2048] @ w[:, :2048].T) + (x[:, 2048:] @ w[:, 2048:].T)).float()
    doubled = w.clone()
    doubled[0] *= 2
    bound = sum_limit(4096)
    assert error_sums(halves, y).relative < bound
    assert error_sums((x @ doubled.T).float(), y).relative > bound


def test_br106_compare_has_a_verdict(tmp_path):
    """One default limit: sums in another order pass, one doubled scale of a layer fails."""
    folder = tiny.llama(tmp_path / "in", layers=1)
    quantload.convert(folder, tmp_path / "q", "W4A16:g32")
    shutil.copytree(tmp_path / "q", tmp_path / "same")
    shutil.copytree(tmp_path / "q", tmp_path / "doubled")
    file = tmp_path / "doubled" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight_scale"][0] *= 2
    save_file(tensors, file)
    ids = [list(range(32))]
    compared = {
        name: quantload.compare(tmp_path / "q", tmp_path / name, sequences=ids, device="cpu")
        for name in ("same", "doubled")
    }
    assert compared["same"].passed
    assert not compared["doubled"].passed
    (failure,) = compared["doubled"].failures
    assert re.match(
        r"`model.layers.0.mlp.up_proj`: weight error .*, limit 0; output error", failure
    )
    assert quantload.compare(folder, tmp_path / "q", sequences=ids, device="cpu").passed
    for name, status in (("same", 0), ("doubled", 1)):
        done = CliRunner().invoke(main, ["compare", str(tmp_path / "q"), str(tmp_path / name)])
        assert done.exit_code == status, done.output
        assert ("FAILED" in done.output) is bool(status)


def test_br106_weights_are_compared_exactly(tmp_path):
    folder = tiny.llama(tmp_path / "in", layers=1)
    copy = tiny.llama(tmp_path / "copy", layers=1)
    assert quantload.verify(copy, folder).passed
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] *= 1 + 2**-7
    save_file(tensors, copy / "model.safetensors")
    report = quantload.verify(copy, folder)
    assert [layer.module for layer in report.layers if layer.problem] == [
        "model.layers.0.mlp.up_proj"
    ]
