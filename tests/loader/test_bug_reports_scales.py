"""Public bug reports about scales, packing and number formats."""

import compressed
import constant_weights as constant
import pytest
import tiny_checkpoints as tiny
import torch
from click.testing import CliRunner
from constant_weights import E4M3, FP8_CHANNEL, INT4_ARGUMENTS, ct_config, fp8, int4, plain
from converting import converted, plan_of, rows_of
from fp8_files import opened, write
from int_packing import gptq_tensors, random_parts, values_of

import quantload
from quantload.cli import main
from quantload.errors import (
    ConfigError,
    MissingTensor,
    RuleSplitsStack,
)
from quantload.quant.activation import fake_quantize, fake_quantize_static
from quantload.quant.grid import E4M3 as E4M3_GRID
from quantload.quant.grid import INT4
from quantload.quant.qtensor import Evaluation, QuantTensor
from quantload.quant.scheme import InputScheme

LAYER = "model.layers.0"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def test_br018_fused_on_disk_channel_scale(tmp_path):
    module = f"{LAYER}.self_attn.qkv_proj"
    scale = torch.tensor([[2.0 ** -(1 + row // 32)] for row in range(128)])
    folder = write(
        tmp_path,
        fp8(module, 128, 64, scale=scale),
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    )
    weight = opened(folder).read_weight(module)
    q, k, v = (weight.rows(*cut).dequantize() for cut in ((0, 64), (64, 96), (96, 128)))
    assert (q[:32] == 0.5).all()
    assert (q[32:] == 0.25).all()
    assert (k == 0.125).all()
    assert (v == 0.0625).all()


def test_br020_ignore_names_fused_module(tmp_path):
    """Layer 0 as the report wants it. Layer 1 does not raise: deliberately another answer.

    The report is about engines that have one layer for q, k and v, and none for two of them in full
    precision and one that is not. Here each of the three keeps what the files hold, and stays
    unfused where they differ, so the model is right and a refusal would lose it. The member that
    disagrees is named instead: by a warning when the checkpoint is converted, by an error when
    rules would split the group, and by `doctor` for the engines of the report.
    """
    fused, attention = f"{LAYER}.self_attn.qkv_proj", "model.layers.1.self_attn"
    ignore = [fused, f"{attention}.q_proj", f"{attention}.k_proj"]
    tensors = {**plain(fused), **plain(f"{attention}.q_proj"), **plain(f"{attention}.k_proj")}
    tensors |= int4(f"{attention}.v_proj", 64, 64)
    folder = write(tmp_path, tensors, ct_config(INT4_ARGUMENTS, ignore=ignore))
    source = opened(folder)
    quantized = {m for m, w in source.weights.items() if w.is_quantized}
    assert quantized == {f"{attention}.v_proj"}
    for module in ignore:
        assert torch.equal(source.read_dense(module), tensors[f"{module}.weight"])
    assert [w for w in plan_of(folder, "same").warnings if f"{attention}.v_proj" in w]
    for engine in ("vllm", "sglang"):
        findings = [f for f in quantload.doctor(folder, engine).errors if f.rule == "fused-scheme"]
        assert len(findings) == 1
        assert f"{attention}.v_proj" in findings[0].layer + findings[0].found
    with pytest.raises(RuleSplitsStack, match=r"v_proj: W4A16"):
        plan_of(folder, "W4A16:g32", ["*.q_proj=keep", "*.k_proj=keep"])


def _groups(rows, columns, group):
    """int4 codes 1 with a scale of its own for each group: 1, 2, 3, ..."""
    count = columns // group
    return QuantTensor(
        grid=INT4,
        codes=torch.ones(rows, columns, dtype=torch.int8),
        scale=torch.arange(1.0, count + 1).expand(rows, count).contiguous(),
        block=(1, group),
        evaluation=Evaluation(torch.float32),
    )


def test_br022_group_straddles_rank():
    weight = _groups(8, 96, 32)
    ranks = [weight.columns(0, 48), weight.columns(48, 96)]
    assert ranks[0].dequantize()[3].tolist() == [1.0] * 32 + [2.0] * 16
    assert ranks[1].dequantize()[3].tolist() == [2.0] * 16 + [3.0] * 32


@pytest.mark.parametrize(("group", "expected"), [(128, ["o_proj"]), (64, []), (32, [])])
def test_br025_tp_compatibility_report(tmp_path, group, expected):
    attention, mlp = f"{LAYER}.self_attn", f"{LAYER}.mlp"
    shapes = {f"{attention}.q_proj": (896, 896), f"{attention}.o_proj": (896, 896)}
    shapes |= {f"{mlp}.up_proj": (4864, 896), f"{mlp}.down_proj": (896, 4864)}
    tensors = {n: t for module, shape in shapes.items() for n, t in plain(module, *shape).items()}
    folder = tiny.write(tmp_path / "in", tiny.config(layers=1), tensors)
    out = converted(folder, tmp_path / "out", f"W4A16:g{group}")
    convert = ["convert", str(folder), "x", "--scheme", f"W4A16:g{group}", "--plan"]
    for arguments in (convert, ["inspect", str(out)]):
        told = CliRunner().invoke(main, [*arguments, "--check-tp", "2"]).stderr
        assert [m for m in shapes if f"`{m}`" in told] == [f"{attention}.{m}" for m in expected]
        assert ("896 columns in 2 parts, groups of 128" in told) is bool(expected)
    weight = opened(out).read_weight(f"{attention}.o_proj")
    parts = [weight.columns(448 * rank, 448 * rank + 448).dequantize() for rank in range(2)]
    assert torch.equal(torch.cat(parts, dim=1), weight.dequantize())


@pytest.mark.parametrize(("columns", "group"), [(768, 512), (80, 32)])
def test_br034_group_does_not_divide(tmp_path, columns, group):
    module = f"{LAYER}.mlp.up_proj"
    folder = tiny.write(tmp_path / "in", tiny.config(layers=1), plain(module, 64, columns))
    with pytest.raises(ConfigError, match=rf"`{module}`.*{columns} columns.*{group}"):
        quantload.convert(folder, tmp_path / "out", "W4A16", group_size=group)
    with pytest.raises(ConfigError, match=rf"`{module}`.*{columns} columns.*{group}"):
        quantload.convert(folder, tmp_path / "out", f"W4A16:g{group}")
    told = CliRunner().invoke(
        main, ["convert", str(folder), str(tmp_path / "out"), "--scheme", f"W4A16:g{group}"]
    )
    assert told.exit_code == 2
    assert all(text in told.stderr for text in (module, str(columns), str(group)))
    assert not (tmp_path / "out").exists()
    plan = plan_of(folder, f"W4A16:g{group}", [f"{module}=W4A16:g16"])
    assert str(rows_of(plan)[module].scheme) == "W4A16:g16"


@pytest.mark.parametrize("batch", [1, 17])
def test_br035_out_features_not_tile(tmp_path, batch):
    content = tiny.config(hidden=64, intermediate=48, layers=1, dtype=torch.float16)
    tensors, expected = tiny.tensors(content), {}
    for part in ("gate_proj", "up_proj"):
        module = f"{LAYER}.mlp.{part}"
        del tensors[f"{module}.weight"]
        fields, zeros, scales = random_parts(48, 64, 2, 4, seed=len(expected))
        zeros = zeros.clip(1)
        leaves = gptq_tensors(fields, zeros, scales, bits=4)
        tensors |= {f"{module}.{leaf}": tensor for leaf, tensor in leaves.items()}
        groups = torch.arange(64) // 32
        expected[part] = values_of(fields, zeros, scales, groups, torch.float16).float()
    dynamic = {r"-:.*(self_attn|down_proj).*": {}}
    content["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    content["quantization_config"] |= {"sym": False, "desc_act": False, "dynamic": dynamic}
    folder = tiny.write(tmp_path, content, tensors)
    model = quantload.load(folder, device="cpu", dtype=torch.float32)
    mlp = model.model.layers[0].mlp
    x = torch.randn(batch, 64)
    for part, weight in expected.items():
        torch.testing.assert_close(getattr(mlp, part)(x), x @ weight.T, rtol=1e-2, atol=2e-3)


def test_br038_unknown_scale_suffix(tmp_path):
    module = "layers.0.attn.wo_b"
    config = {**FP8, "weight_block_size": [32, 32]}
    scaled = fp8(module, 32, 32, scale=torch.full((1, 1), 2.0**-8), leaf="scale")
    weight = opened(write(tmp_path / "a", scaled, config)).read_dense(module)
    assert (weight == 0.00390625).all()
    for name, of_method in (("fp8", config), ("ct", ct_config(FP8_CHANNEL))):
        folder = write(tmp_path / name, fp8(module, 32, 32), of_method)
        with pytest.raises(MissingTensor, match=rf"`{module}.weight`"):
            opened(folder)


MX8 = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}
MX8["scale_dtype"] = "torch.uint8"
MX_CONFIGS = {
    "modelopt": {"quant_method": "modelopt", "quant_algo": "MXFP8"},
    "compressed-tensors": ct_config(MX8, layout="mxfp8-quantized"),
    "mxfp8": {"quant_method": "mxfp8"},
}


@pytest.mark.parametrize("method", MX_CONFIGS)
def test_br040_u8_scale_as_linear(tmp_path, method):
    bytes_ = torch.tensor([[127, 120], [119, 128]], dtype=torch.uint8)
    module = f"{LAYER}.mlp.up_proj"
    folder = write(tmp_path, fp8(module, 2, 64, scale=bytes_), MX_CONFIGS[method])
    found = opened(folder).read_dense(module)
    expected = torch.tensor([[1.0, 0.0078125], [0.00390625, 2.0]])
    assert torch.equal(found.float(), expected.repeat_interleave(32, dim=1))


def test_br042_ue8m0_round_first(tmp_path):
    """Powers of two are rounded before codes are computed: of inputs, and of weights."""
    scheme = InputScheme(grid=E4M3_GRID, granularity="group", group_size=32, scale="e8m0")
    x = torch.zeros(1, 32)
    x[0, :2] = torch.tensor([1.0, 0.3])
    assert fake_quantize(x, scheme)[0, :3].tolist() == [1.0, 0.3125, 0.0]
    module = f"{LAYER}.mlp.up_proj"
    folder = tiny.write(tmp_path / "in", tiny.config(layers=1), {f"{module}.weight": x.bfloat16()})
    written = opened(converted(folder, tmp_path / "out", "MXFP8"))
    leaves = {
        leaf: written.checkpoint.read(f"{module}.{leaf}") for leaf in ("weight", "weight_scale")
    }
    assert leaves["weight"].view(torch.uint8)[0, :3].tolist() == [0x78, 0x6A, 0]
    assert leaves["weight_scale"].view(torch.uint8).tolist() == [[119]]
    assert written.read_dense(module)[0, :3].tolist() == [1.0, 0.3125, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_br046_mx_inputs_are_those_of_the_library(dtype):
    scheme = InputScheme(grid=E4M3_GRID, granularity="group", group_size=32, scale="e8m0")
    arguments = compressed.library().QuantizationArgs(
        **{**MX8, "scale_dtype": torch.uint8}, dynamic=True
    )
    x = torch.randn(1, 40, 64) * torch.logspace(-8, 8, 40)[:, None]
    x[0, 3, :32] = 0
    x[0, :, 40] = x[0, :, 32:].abs().amax(-1) * torch.linspace(1, 2, 40)
    x = x.to(dtype)
    assert torch.equal(fake_quantize(x, scheme), compressed.fake_quantized(x, arguments))


def test_br043_fnuz_conversion(tmp_path):
    """The other FP8 is refused by name where it is declared; codes and scales are never changed."""
    module = f"{LAYER}.mlp.up_proj"
    header = {f"{module}.weight": {"dtype": "F8_E4M3FNUZ", "shape": [1, 3], "data_offsets": [0, 3]}}
    folder = write(tmp_path / "a", plain("lm_head"), FP8)
    tiny.raw_safetensors(folder / "model.safetensors", header, b"\x38\x80\x7e")
    with pytest.raises(quantload.QuantloadError, match="FNUZ"):
        opened(folder)
    codes = torch.tensor([[0x38, 0x80, 0x7E]], dtype=torch.uint8).view(E4M3)
    stored = {f"{module}.weight": codes, f"{module}.weight_scale_inv": torch.tensor(0.5)}
    folder = write(tmp_path / "b", stored, FP8)
    for _ in range(2):
        assert opened(folder).read_dense(module).tolist() == [[0.5, 0.0, 224.0]]


def _one_nvfp4(module):
    """Code 7 (6.0) with block scale 448, as ModelOpt and as compressed-tensors store it."""
    packed = torch.full((4, 16), 0x77, dtype=torch.uint8)
    scale = constant.fp8_codes(4, 2, code=0x7E)
    modelopt = {"weight": packed, "weight_scale": scale, "weight_scale_2": torch.tensor(2.0**-8)}
    modelopt["input_scale"] = torch.tensor(2.0**-8)
    ours = {"weight_packed": packed, "weight_scale": scale}
    ours["weight_global_scale"] = torch.tensor([256.0])
    return [{f"{module}.{k}": t for k, t in leaves.items()} for leaves in (modelopt, ours)]


NVFP4_ARGUMENTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}


def test_br045_divisor_or_multiplier(tmp_path):
    module = f"{LAYER}.mlp.up_proj"
    modelopt, ours = _one_nvfp4(module)
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    one = write(tmp_path / "modelopt", modelopt, config)
    two = write(tmp_path / "ct", ours, ct_config(NVFP4_ARGUMENTS, layout="nvfp4-pack-quantized"))
    three = converted(one, tmp_path / "converted", "same", lossless=True)
    for folder in (one, two, three):
        assert (opened(folder).read_dense(module) == 10.5).all(), folder.name
    source = opened(three)
    assert source.weights[module].is_quantized
    assert source.checkpoint.read(f"{module}.weight_global_scale").item() == 256.0


def test_br046_mx_scale_from_amax_over_6(tmp_path):
    module = f"{LAYER}.mlp.up_proj"
    weight = torch.zeros(3, 32)
    weight[:, 0] = torch.tensor([2.7, 5.5, 1.2])
    folder = tiny.write(tmp_path / "in", tiny.config(layers=1), {f"{module}.weight": weight})
    written = opened(converted(folder, tmp_path / "out", "MXFP4A16"))
    scale = written.checkpoint.read(f"{module}.weight_scale").view(torch.uint8)
    assert scale.tolist() == [[126], [127], [125]]
    assert written.read_dense(module)[:, 0].tolist() == [3.0, 6.0, 1.0]  # 5.4, 5.5, 4.8 on e2m1


def test_br046_mx_scale_of_inputs():
    """Inputs in MXFP4 stay in full precision; in MXFP8 the exponent comes from amax itself."""
    scheme = InputScheme(grid=E4M3_GRID, granularity="group", group_size=32, scale="e8m0")
    x = torch.zeros(3, 32)
    x[:, 0] = torch.tensor([2.7, 5.5, 1.2]) * 64  # the range of e4m3 ends at 2^8, of e2m1 at 2^2
    found = fake_quantize(x, scheme)
    scale = torch.tensor([0.5, 1.0, 0.25])
    expected = (x[:, 0] / scale).to(E4M3).float() * scale
    assert torch.equal(found[:, 0], expected)
    assert ((found[:, 0] / x[:, 0] - 1).abs() < 2**-4).all()


def test_br047_activation_clamp():
    x = torch.tensor([[1000.0, -1e30, 448.0, 464.0, 0.0]])
    found = fake_quantize_static(x, E4M3_GRID, torch.tensor([1.0]), None)
    assert found.tolist() == [[448.0, -448.0, 448.0, 448.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_br048_half_precision_scales(tmp_path, dtype):
    module = f"{LAYER}.mlp.up_proj"
    stored = {f"{module}.weight": constant.fp8_codes(1, 32)}
    stored[f"{module}.weight_scale_inv"] = torch.tensor([[0.0078125]], dtype=dtype)
    folder = write(tmp_path, stored, {**FP8, "weight_block_size": [1, 32]})
    assert (opened(folder).read_dense(module) == 0.0078125).all()
    if dtype == torch.bfloat16:
        scale = torch.tensor([[0.00390625 * 1.9921875]], dtype=dtype)
        stored[f"{module}.weight_scale_inv"] = scale
        folder = write(tmp_path, stored, {**FP8, "weight_block_size": [1, 32]})
        assert (opened(folder).read_dense(module).double() == 255 * 2.0**-15).all()


def test_br050_fp16_scale_underflow(tmp_path, caplog):
    module = f"{LAYER}.mlp.up_proj"
    weight = torch.randn(4, 96)
    weight[1, :32] = torch.linspace(-1, 1, 32) * 7 * 2.0**-27
    weight[1, 32:64] = 0
    tensors = {f"{module}.weight": weight}
    folder = tiny.write(tmp_path / "in", tiny.config(dtype=torch.float32, layers=1), tensors)
    out = converted(folder, tmp_path / "out", "W4A16:g32", dtype=torch.float16)
    found = opened(out).read_dense(module).float()
    assert bool(found.isfinite().all())
    assert ((found - weight)[1, :64].abs() <= 7 * 2.0**-27).all()
    assert f"1 group of `{module}`" in caplog.text


def _gate_and_up(folder, up):
    """NVFP4 of a gate with the largest value 6 beside an up projection."""
    gate, names = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)), ("gate", "up")
    gate = (gate / gate.abs().max() * 6).bfloat16()
    tensors = {f"{LAYER}.mlp.{n}_proj.weight": w for n, w in zip(names, (gate, up), strict=True)}
    source = tiny.write(folder / "in", tiny.config(layers=1), tensors)
    return opened(converted(source, folder / "out", "NVFP4A16")), f"{LAYER}.mlp"


def test_br053_zero_projection_in_fused_group(tmp_path):
    zeros = torch.zeros(32, 64, dtype=torch.bfloat16)
    found, mlp = _gate_and_up(tmp_path / "zeros", zeros)
    other, _ = _gate_and_up(tmp_path / "small", zeros + 0.5)
    assert not found.read_dense(f"{mlp}.up_proj").any()
    scales = {
        name: found.checkpoint.read(f"{mlp}.{name}_proj.weight_global_scale")
        for name in ("gate", "up")
    }
    assert all(bool((scale.isfinite() & (scale > 0)).all()) for scale in scales.values())
    assert torch.equal(scales["gate"], scales["up"])
    for leaf in ("weight_packed", "weight_scale", "weight_global_scale"):
        name = f"{mlp}.gate_proj.{leaf}"
        same = found.checkpoint.read(name), other.checkpoint.read(name)
        assert torch.equal(*(tensor.view(torch.uint8) for tensor in same)), leaf


def test_br053_a_projection_of_zeros_keeps_its_own_global_scale(tmp_path):
    """A fused group that was quantized elsewhere, each with its own global scale."""
    gate, up = f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"
    (tensors, _), (zeros, _) = _one_nvfp4(gate), _one_nvfp4(up)
    zeros[f"{up}.weight"] = torch.zeros(4, 16, dtype=torch.uint8)
    zeros[f"{up}.weight_scale_2"] = torch.tensor(2.0**-20)
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    folder = write(tmp_path / "in", {**tensors, **zeros}, config)
    out = opened(converted(folder, tmp_path / "out", "same", lossless=True))
    assert not out.read_dense(up).any()
    assert (out.read_dense(gate) == 10.5).all()
    for module in (gate, up):
        scale = out.checkpoint.read(f"{module}.weight_global_scale")
        assert bool((scale.isfinite() & (scale > 0)).all())
