"""Verification finds every planted fault, and nothing where there is none."""

import json

import pytest
import tiny_checkpoints as tiny
import torch
from converting import converted, opened
from safetensors.torch import load_file

from quantload.accuracy.verify import sqnr_floor_db, verify_sources
from quantload.progress import Silent
from quantload.quant.scheme import PRESETS

DOWN = "model.layers.0.mlp.down_proj"
UP = "model.layers.0.mlp.up_proj"
GATE = "model.layers.0.mlp.gate_proj"
SCHEMES = ["W4A16:g32", "W4A16_ASYM:g32", "W8A16:g32", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "dense"]


@pytest.fixture
def source(tmp_path):
    return tiny.llama(tmp_path / "source")


def _verify(output, source):
    return verify_sources(opened(output), opened(source), Silent())


def _edited(folder, change):
    """Load the tensors of a folder, change them in place, write them back."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    made = {name: tensor.contiguous() for name, tensor in tensors.items()}
    tiny.save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_convert_writes_passes(tmp_path, source, scheme):
    report = _verify(converted(source, tmp_path / "out", scheme), source)
    assert report.failures() == []
    assert report.passed
    assert len(report.layers) == 16
    for layer in report.layers:
        assert layer.sqnr_db > layer.floor_db or layer.scheme == "dense"
        assert layer.scheme != "dense" or (layer.relative, layer.max_abs) == (0.0, 0.0)


def test_numbers_of_a_layer(tmp_path, source):
    report = _verify(converted(source, tmp_path / "out", "W4A16:g32"), source)
    layer = next(layer for layer in report.layers if layer.module == DOWN)
    weight = opened(source).read_dense(DOWN).double()
    error = opened(tmp_path / "out").read_dense(DOWN).double() - weight
    relative = float(error.norm() / weight.norm())
    assert layer.relative == pytest.approx(relative, rel=1e-12)
    assert layer.max_abs == float(error.abs().max())
    assert layer.bits_per_weight == 4 + 16 / 32 + 64 * 2 / (64 * 128)  # codes, scales, weight_shape
    assert (layer.source, layer.scheme) == ("BF16", "W4A16:g32")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_another_dtype_passes(tmp_path, source, dtype):
    assert _verify(converted(source, tmp_path / "out", "dense", dtype=dtype), source).passed


def test_an_untied_head_passes(tmp_path):
    source = tiny.llama(tmp_path / "tied", tied=True)
    output = converted(source, tmp_path / "out", "W4A16:g32", ["lm_head=W8A16:g32"])
    report = _verify(output, source)
    assert report.passed
    assert "lm_head" in {layer.module for layer in report.layers}


def test_a_quantized_source_passes(tmp_path, source):
    quantized = converted(source, tmp_path / "q", "W8A16:g32")
    report = _verify(converted(quantized, tmp_path / "out", "FP8_DYNAMIC"), quantized)
    assert report.passed
    assert {layer.source for layer in report.layers} == {"BF16", "pack-quantized W8A16:g32"}


# -- planted faults --------------------------------------------------------------------------------


def _flip_nibbles(tensors):
    tensors[f"{DOWN}.weight_packed"] ^= 8  # the sign of every eighth code


def _zero_scale(tensors):
    tensors[f"{DOWN}.weight_scale"][3, 1] = 0


def _nan_scale(tensors):
    tensors[f"{DOWN}.weight_scale"][3, 1] = float("nan")


def _infinite_scale(tensors):
    tensors[f"{DOWN}.weight_scale"][0, 0] = float("inf")


def _swap_scales(tensors):
    one, two = f"{UP}.weight_scale", f"{GATE}.weight_scale"
    tensors[one], tensors[two] = tensors[two], tensors[one]


def _swap_layers(tensors):
    for leaf in ("weight_packed", "weight_scale"):
        one, two = f"{UP}.{leaf}", f"model.layers.1.mlp.up_proj.{leaf}"
        tensors[one], tensors[two] = tensors[two], tensors[one]


def _shift_rows(tensors):
    tensors[f"{DOWN}.weight_packed"] = tensors[f"{DOWN}.weight_packed"].roll(1, 0)


def _drop_norm(tensors):
    del tensors["model.norm.weight"]


def _drop_layer(tensors):
    for leaf in ("weight_packed", "weight_scale", "weight_shape"):
        del tensors[f"{DOWN}.{leaf}"]


def _extra(tensors):
    tensors["model.extra"] = torch.zeros(3)


def _rename(tensors):
    tensors["model.nrm.weight"] = tensors.pop("model.norm.weight")


def _one_ulp(tensors):
    tensors["model.embed_tokens.weight"].view(torch.int16)[7, 7] += 1


def _one_ulp_of_a_norm(tensors):
    tensors["model.norm.weight"].view(torch.int16)[7] += 1


def _nan_in_a_norm(tensors):
    tensors["model.norm.weight"][7] = float("nan")


def _norm_as_integers(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)


def _norm_as_booleans(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bool()


def _other_shape(tensors):
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].contiguous()


def _other_shape_of_a_norm(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].contiguous()


def _narrower(tensors):
    tensors[f"{DOWN}.weight_packed"] = tensors[f"{DOWN}.weight_packed"][:, :12].contiguous()
    tensors[f"{DOWN}.weight_scale"] = tensors[f"{DOWN}.weight_scale"][:, :3].contiguous()
    tensors[f"{DOWN}.weight_shape"][1] = 96


FAULTS = [
    (_flip_nibbles, f"`{DOWN}`: noise is "),
    (_zero_scale, f"`{DOWN}`: 3"),
    (_nan_scale, f"`{DOWN}`: tensor `{DOWN}.weight_scale` holds NaN or infinity"),
    (_infinite_scale, f"`{DOWN}`: tensor `{DOWN}.weight_scale` holds NaN or infinity"),
    (_swap_scales, f"`{GATE}`: noise is "),
    (_swap_layers, f"`{UP}`: noise is "),
    (_shift_rows, f"`{DOWN}`: noise is "),
    (_drop_norm, "1 tensors of the source are missing: `model.norm.weight`"),
    (_drop_layer, f"1 tensors of the source are missing: `{DOWN}`"),
    (_extra, "1 tensors are not in the source: `model.extra`"),
    (_rename, "1 tensors of the source are missing: `model.norm.weight`"),
    (_one_ulp, "`model.embed_tokens`: 1 values differ from the source cast to `torch.bfloat16`"),
    (_one_ulp_of_a_norm, "tensor `model.norm.weight`: 1 values differ"),
    (_nan_in_a_norm, "tensor `model.norm.weight`: 1 values are not finite"),
    (_norm_as_integers, "tensor `model.norm.weight`: dtype is `torch.int8`, the source has"),
    (_norm_as_booleans, "tensor `model.norm.weight`: dtype is `torch.bool`, the source has"),
    (_other_shape, "`lm_head`: shape is `(95, 64)`, the source has `(96, 64)`"),
    (_other_shape_of_a_norm, "tensor `model.norm.weight`: shape is `(63,)`"),
    (_narrower, f"`{DOWN}`: shape is `(64, 96)`, the source has `(64, 128)`"),
]


@pytest.mark.parametrize(
    ("fault", "message"), FAULTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_planted_faults(tmp_path, source, fault, message):
    output = converted(source, tmp_path / "out", "W4A16:g32")
    assert _verify(output, source).passed
    report = _verify(_edited(output, fault), source)
    assert not report.passed
    assert any(line.startswith(message) for line in report.failures()), report.failures()
    untouched = [layer for layer in report.layers if layer.module == "model.layers.1.mlp.down_proj"]
    assert untouched[0].passed


def test_a_lost_zero_point(tmp_path, source):
    output = converted(source, tmp_path / "out", "W4A16_ASYM:g32")

    def shift(tensors):
        tensors[f"{DOWN}.weight_zero_point"] += 0x11111111

    (failure,) = _verify(_edited(output, shift), source).failures()
    assert failure.startswith(f"`{DOWN}`: noise is 1")  # about 13 times that of rounding


def test_a_wrong_sign_in_few_codes(tmp_path, source):
    output = converted(source, tmp_path / "out", "W4A16:g32")

    def flip(tensors):
        tensors[f"{DOWN}.weight_packed"].view(-1)[::8] ^= 8  # one code in 64

    (failure,) = _verify(_edited(output, flip), source).failures()
    assert failure.startswith(f"`{DOWN}`: noise is ")


def test_fp8_codes_of_another_layer(tmp_path, source):
    output = converted(source, tmp_path / "out", "FP8_DYNAMIC")

    def copy(tensors):
        tensors[f"{UP}.weight"] = tensors[f"{GATE}.weight"].clone()

    (failure,) = _verify(_edited(output, copy), source).failures()
    assert failure.startswith(f"`{UP}`: noise is ")


def test_a_scale_of_zero_for_a_group_of_zeros_passes(tmp_path, source):
    def empty(tensors):
        tensors[f"{DOWN}.weight"][3, 32:64] = 0

    _edited(source, empty)
    output = converted(source, tmp_path / "out", "W4A16:g32")
    assert _verify(_edited(output, _zero_scale), source).passed


def test_codes_that_cannot_be_decoded_fail_their_layer_alone(tmp_path, source):
    output = converted(source, tmp_path / "out", "W4A16:g32")

    def disorder(tensors):
        tensors[f"{DOWN}.weight_g_idx"] = torch.full((128,), 99, dtype=torch.int32)

    report = _verify(_edited(output, disorder), source)
    (failure,) = report.failures()
    assert "weight_g_idx" in failure
    assert len(report.layers) == 16


def test_values_that_are_not_finite_in_the_source_fail_too(tmp_path, source):
    def damage(tensors):
        tensors["model.norm.weight"][7] = float("nan")
        tensors["model.embed_tokens.weight"][7, 2:4] = float("inf")

    _edited(source, damage)
    report = _verify(converted(source, tmp_path / "out", "W4A16:g32"), source)
    assert report.failures() == [
        "`model.embed_tokens`: 2 values are not finite",
        "tensor `model.norm.weight`: 1 values are not finite",
    ]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 1),
        ("num_key_value_heads", 4),
        ("rms_norm_eps", 1e-6),
        ("hidden_act", "gelu"),
        ("architectures", ["MistralForCausalLM"]),
        ("rope_theta", 500000.0),
        ("rope_scaling", None),
    ],
)
@pytest.mark.parametrize("place", ["", "text_config."])
def test_a_config_of_another_model(tmp_path, source, key, value, place):
    content = json.loads((source / "config.json").read_text())
    content["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    output = converted(source, tmp_path / "out", "W4A16:g32")
    scheme = json.loads((output / "config.json").read_text())["quantization_config"]
    for folder, extra in ((source, {}), (output, {key: value})):
        written = {**content, "text_config": content | extra} if place else content | extra
        written |= {"quantization_config": scheme} if extra else {}
        (folder / "config.json").write_text(json.dumps(written))
    (failure,) = _verify(output, source).failures()
    of_rope = {
        "rope_theta": f"config: `rope_theta` of RoPE is `{value}`, expected `10000.0`",
        "rope_scaling": "config: `rope_type` of RoPE is `default`, expected `linear`",
    }
    changed = f"config: `{place}{key}` is `{value}`, expected `{content.get(key)}`"
    assert failure == of_rope.get(key, changed)


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": 9.99999974e-06},  # 1e-5 in float32
        {"head_dim": None},
        {"rope_theta": ...},
        {"dtype": "float32", "use_cache": False},
    ],
)
def test_configs_that_say_the_same(tmp_path, source, change):
    output = converted(source, tmp_path / "out", "dense")
    content = json.loads((output / "config.json").read_text()) | change
    kept = {key: value for key, value in content.items() if value is not ...}
    (output / "config.json").write_text(json.dumps(kept))
    assert _verify(output, source).failures() == []


def test_dense_output_that_lost_precision(tmp_path, source):
    made = load_file(source / "model.safetensors")
    content = json.loads((source / "config.json").read_text())
    wide = {name: tensor.float() + 1e-6 for name, tensor in made.items()}
    reference = tiny.write(tmp_path / "wide", content, wide)
    rounded = {name: tensor.bfloat16().float() for name, tensor in wide.items()}
    report = _verify(tiny.write(tmp_path / "rounded", content, rounded), reference)
    assert len(report.failures()) == len(made)


def test_weights_without_elements(tmp_path):
    made = {"a.weight": torch.zeros(0, 4), "b.weight": torch.randn(4, 32), "c": torch.zeros(0)}
    source = tiny.write(tmp_path / "source", {}, made)
    assert _verify(source, source).passed


def test_every_preset_has_a_floor():
    floors = {name: sqnr_floor_db(s) for name, s in PRESETS.items() if s.weight is not None}
    assert floors["W4A16"] < floors["W8A16"] <= floors["FP8_DYNAMIC"]


def test_progress_ends_at_its_total(tmp_path, source):
    class Recorder(Silent):
        total = done = 0

        def start(self, phase, *, total, unit):
            self.total = total

        def advance(self, amount, *, note=""):
            self.done += amount

    recorder = Recorder()
    output = opened(converted(source, tmp_path / "out", "W8A8"))
    verify_sources(output, opened(source), recorder)
    assert recorder.total == recorder.done > 0
