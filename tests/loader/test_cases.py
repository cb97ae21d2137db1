"""Cases made from public bug reports: each is read right, or refused with the words it asks for."""

import hashlib
import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from converting import converted, opened
from loading import plain_model
from safetensors.torch import load_file

import quantload
from quantload.accuracy.verify import verify_sources
from quantload.errors import QuantloadError
from quantload.loader.formats.compressed_tensors_encode import encode
from quantload.loader.manifest import MANIFEST
from quantload.progress import Silent

CASES = Path(__file__).parents[3] / "shared" / "cases"
pytestmark = pytest.mark.skipif(not CASES.exists(), reason="no shared cases beside the repository")

REFUSED = ["BR054-fused-packed-experts", "BR096-truncated-shard", "BR097-header-lies"]
READ = ["BR001-linear-suffix-ignore", "BR014-qkv-per-tensor-scales", "BR029-ct-packed-zero-points"]
READ += ["BR036-partial-trailing-block", "BR028-awq-nibble-order", "BR032-gptq-3bit"]
READ += ["BR015-nvfp4-gate-up-divisors", "BR039-mxfp4-scale-bias"]
READ += ["BR067-lm-head-excluded-but-quantized"]
# Schemes of this project for the targets of the cases.
SCHEMES = {
    **{"int4-g32": "W4A16:g32", "int8-channel": "W8A8", "fp8-channel": "FP8_DYNAMIC"},
    "nvfp4": "NVFP4A16",
}


def _expected(case):
    file = CASES / case / "expected.json"
    return json.loads(file.read_text()) if file.exists() else {}


def _inputs(case):
    return [CASES / case / name for name in _expected(case).get("inputs", ["input"])]


def _names(case):
    return [folder.relative_to(CASES).as_posix() for folder in _inputs(case)]


def test_every_case_is_listed():
    others = ["BR051-all-zero-groups", "BR069-kv-scale-names", "BR077-sidecar-files"]
    others += ["BR083-mtp-tensors", "BR100-pickle-checkpoint", "BR026-gptq-v1-v2-zeros"]
    found = {path.name for path in CASES.glob("BR*/")}
    assert found == {*REFUSED, *READ, *others}


@pytest.mark.parametrize("case", READ)
def test_weights(case):
    source = opened(CASES / case / "input")
    expected = load_file(CASES / case / "expected.safetensors")
    for name, values in expected.items():
        if name.endswith(".weight"):
            weight = source.read_dense(name.removesuffix(".weight"))
            assert torch.equal(weight.float(), values), name
    stored = load_file(CASES / case / "input" / "model.safetensors")
    for name in source.plain:
        assert torch.equal(source.read_plain(name), stored[name])


@pytest.mark.parametrize("case", READ)
def test_weights_converted_to_full_precision(case, tmp_path):
    output = opened(converted(CASES / case / "input", tmp_path / "out", "dense"))
    for name, values in load_file(CASES / case / "expected.safetensors").items():
        if name.endswith(".weight"):
            assert torch.equal(output.read_dense(name.removesuffix(".weight")).float(), values)


LOADED = [
    *(f"{case}/input" for case in READ if case != "BR001-linear-suffix-ignore"),
    *_names("BR069-kv-scale-names"),
    *_names("BR026-gptq-v1-v2-zeros"),
    "BR100-pickle-checkpoint/input/bin_next_to_safetensors",
]


@pytest.mark.parametrize("folder", LOADED)
def test_models_run(folder):
    """All logits of the loaded model are those of a plain model with the dequantized weights."""
    ids = torch.arange(1, 9)[None]
    options = {"device": "cpu", "dtype": torch.float32, "quantize_inputs": False}
    model = quantload.load(CASES / folder, **options)
    with torch.no_grad():
        found = model(input_ids=ids).logits
        expected = plain_model(opened(CASES / folder))(input_ids=ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["BR014-qkv-per-tensor-scales", "BR015-nvfp4-gate-up-divisors"])
def test_members_of_fused_layers_keep_their_scales(case):
    model = quantload.load(CASES / case / "input", device="cpu", dtype=torch.float32)
    expected = load_file(CASES / case / "expected.safetensors")
    stacks = {report.module: report.fused_into for report in quantload.explain(model)}
    for fused, members in _expected(case)["fused"].items():
        names = [member.removesuffix(".weight") for member in members]
        assert len({stacks[name] for name in names} - {""}) == 1, fused
        parts = [model.get_submodule(name).weight.float() for name in names]
        whole = torch.cat([expected[member] for member in members])
        assert torch.equal(torch.cat(parts), whole)


def test_br026_conventions_of_zero_points():
    case = CASES / "BR026-gptq-v1-v2-zeros"
    expected = load_file(case / "expected.safetensors")
    for folder in _inputs(case.name):
        prefix = _expected(case.name)["expected_prefix"].get(f"input/{folder.name}", "")
        source = opened(folder)
        found = {f"{prefix}{m}.weight": m for m, w in source.weights.items() if w.is_quantized}
        assert found.keys() == {n for n in expected if n.startswith("c/") == bool(prefix)}
        for name, module in found.items():
            assert torch.equal(source.read_dense(module).float(), expected[name]), name
        assert len(source.warnings) == bool(prefix)


def test_br028_words_keep_their_bits():
    case = CASES / "BR028-awq-nibble-order"
    source = opened(case / "input")
    expected = load_file(case / "expected.safetensors")
    words = {n.split("/", 1)[1]: t for n, t in expected.items() if n.startswith("converted_to")}
    assert len(words) == 28
    for module, weight in source.weights.items():
        if weight.is_quantized:
            for leaf, tensor in encode(source.read_weight(module), weight.scheme).items():
                assert torch.equal(tensor, words.pop(f"{module}.{leaf}")), f"{module}.{leaf}"
    assert not words


def test_br001_which_modules_are_quantized():
    source = opened(CASES / "BR001-linear-suffix-ignore" / "input")
    for module, is_quantized in _expected("BR001-linear-suffix-ignore")["quantized"].items():
        found = source.weights.get(module)
        if found is not None:
            assert found.is_quantized is is_quantized, module
    assert "model.layers.0.self_attn.q_proj.linear" in source.weights


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_the_right_words(case):
    for folder in _inputs(case):
        before = time.perf_counter()
        with pytest.raises(QuantloadError) as caught:
            opened(folder)
        assert time.perf_counter() - before < _expected(case).get("limits", {}).get("seconds", 10)
        for word in _expected(case)["error_must_mention_all"]:
            assert word.lower() in str(caught.value).lower()


@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize("target", SCHEMES)
def test_br051_groups_of_zeros(target, dtype, tmp_path):
    case = CASES / "BR051-all-zero-groups"
    expected = _expected(case.name)
    source = opened(case / "input")
    output = opened(converted(case / "input", tmp_path / "out", SCHEMES[target], dtype=dtype))
    # In bfloat16, bit-equal to compressed-tensors, quotients up to 127 are rounded to half a step.
    slack = 2.2 if (target, dtype) == ("int8-channel", None) else 1.0
    for name, places in expected["must_be_exactly_zero"].items():
        module = name.removesuffix(".weight")
        read = output.read_weight(module)
        assert bool(read.scale.float().isfinite().all())
        assert bool((read.scale.float() >= 0).all())
        values, weight = read.dequantize().float(), source.read_dense(module).float()
        for row, columns in places:
            part = values[row] if columns == "all" else values[row, columns[0] : columns[1]]
            assert not part.any()
        assert bool(((values - weight).abs() <= slack * _bound(weight, target)).all())


def test_br051_has_every_target():
    assert set(SCHEMES) == set(_expected("BR051-all-zero-groups")["params"]["targets"])


def _bound(weight, target):
    if target == "int4-g32":
        groups = weight.abs().unflatten(1, (-1, 32))
        bound = groups.amax(2, keepdim=True).expand_as(groups).flatten(1) / 14
    elif target == "int8-channel":
        bound = weight.abs().amax(1, keepdim=True) / 254
    elif target == "nvfp4":
        groups = weight.abs().unflatten(1, (-1, 16))
        return groups.amax(2, keepdim=True).expand_as(groups).flatten(1) / 4
    else:
        rows = weight.abs().amax(1, keepdim=True) / 448 * 2**-9
        bound = torch.maximum(weight.abs() / 16, rows)
    return bound * 1.01


def test_br069_scales_of_the_cache_are_carried_along(tmp_path):
    case = "BR069-kv-scale-names"
    wanted = {
        f"{layer}.self_attn.{leaf}": value
        for layer, scales in _expected(case)["kv_scales"].items()
        for leaf, value in scales.items()
    }
    for folder in _inputs(case):
        output = opened(converted(folder, tmp_path / folder.name, "W8A8"))
        for source in (opened(folder), output):
            names = [name for name in source.plain if name.endswith(("k_scale", "v_scale"))]
            assert {name: source.read_plain(name).item() for name in names} == wanted
        config = output.checkpoint.quantization_config
        before = json.loads((folder / "config.json").read_text())["quantization_config"]
        assert config["kv_cache_scheme"] == before["kv_cache_scheme"] is not None


def test_br077_side_files(tmp_path):
    case = CASES / "BR077-sidecar-files"
    expected = _expected(case.name)
    source = shutil.copytree(case / "input", tmp_path / "source", symlinks=True)
    output = converted(source, tmp_path / "out", "W4A16:g32")
    assert opened(output).is_quantized
    for name, digest in expected["must_copy_bit_identical"].items():
        assert hashlib.sha256((output / name).read_bytes()).hexdigest() == digest, name
    for name in expected["must_not_copy"]:
        assert not (output / name).exists() or name.startswith("model"), name
    wanted = {*expected["must_copy_bit_identical"], *expected["may_copy"]}
    written = {f.relative_to(output).as_posix() for f in output.rglob("*") if f.is_file()}
    assert written - wanted == {"config.json", "model.safetensors", MANIFEST}
    before, after = (json.loads((f / "config.json").read_text()) for f in (source, output))
    for key in expected["config_json"]["must_equal_source_except"]:
        before.pop(key, None)
        after.pop(key, None)
    assert before == after


def test_br083_layers_that_the_model_does_not_have(tmp_path):
    case = CASES / "BR083-mtp-tensors"
    output = opened(
        converted(case / "input", tmp_path / "out", "W4A16:g32", max_shard_bytes=40_000)
    )
    ignored = set(output.checkpoint.quantization_config["ignore"])
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    expected = load_file(case / "expected.safetensors")
    for name in _expected(case.name)["extra_tensors"]:
        module = name.removesuffix(".weight")
        if module not in output.weights:
            assert torch.equal(output.read_plain(name), expected[name])
            assert name in index["weight_map"]
        elif output.weights[module].is_quantized:
            error = (output.read_dense(module).float() - expected[name].float()).abs()
            assert bool((error <= _bound(expected[name].float(), "int4-g32")).all())
        else:
            assert module in ignored
            assert torch.equal(output.read_dense(module), expected[name])
    assert verify_sources(output, opened(case / "input"), Silent()).passed


def test_br100_pickles_are_not_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused, read = _inputs("BR100-pickle-checkpoint")
    with pytest.raises(QuantloadError, match="safetensors"):
        opened(refused)
    assert len(opened(read).weights) == 9
    output = converted(read, tmp_path / "out", "W8A8")
    assert not list(output.glob("*.bin"))
    assert not (tmp_path / "PICKLE_WAS_EXECUTED").exists()
