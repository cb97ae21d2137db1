"""One task: what is written slice by slice is the weight quantized at once."""

from dataclasses import replace

import pytest
import tiny_checkpoints as tiny
import torch
from converting import plan_of
from safetensors.torch import load_file

from quantload.errors import CheckpointError, NonFiniteWeight, NotLossless, OutputError
from quantload.loader import lost_scales, row_reader
from quantload.loader.convert import run_plan
from quantload.loader.formats.targets import TARGETS, target_named
from quantload.loader.plan_row import SourceRegion
from quantload.loader.workers import Resources
from quantload.progress import Silent
from quantload.quant.rtn import quantize_rtn
from quantload.quant.scheme import PRESETS, Scheme, parse_scheme

LAYER = "model.layers.0"
# Rows that end inside blocks of 128, inside words of zero points, and after one row.
SHAPES = {
    "self_attn.q_proj": (96, 256),
    "self_attn.k_proj": (32, 256),
    "self_attn.v_proj": (32, 256),
    "self_attn.o_proj": (33, 256),
    "mlp.gate_proj": (200, 256),
    "mlp.up_proj": (200, 256),
    "mlp.down_proj": (261, 384),
    "mlp.single_proj": (1, 128),
}
GROUPS = [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]
SCHEMES = {
    name: scheme
    for name, scheme in PRESETS.items()
    if scheme.weight is not None and not (scheme.input is not None and scheme.input.needs_scale)
}
SCHEMES["FP8 weights"] = Scheme(name="FP8 weights", weight=PRESETS["FP8"].weight)
ASYMMETRIC = replace(PRESETS["W4A16_ASYM"].weight, granularity="channel", group_size=None)
SCHEMES["W4A16_ASYM:channel"] = Scheme(name="W4A16_ASYM", weight=ASYMMETRIC)


def _weights(dtype=torch.bfloat16, shapes=SHAPES):
    made = {}
    for number, (name, shape) in enumerate(shapes.items()):
        weight = torch.randn(shape) * torch.rand(shape[0], 1) * 2.0**-number
        made[f"{LAYER}.{name}.weight"] = weight.to(dtype)
    return made


def _folder(path, made):
    return tiny.write(path, tiny.config(layers=1), made | {"model.norm.weight": torch.ones(64)})


@pytest.fixture
def chunks(monkeypatch):
    """Make chunks tiny."""

    def set_to(num_bytes):
        monkeypatch.setattr(row_reader, "CHUNK_BYTES", num_bytes)

    return set_to


def _range_of(made, module):
    """Smallest and largest value of a module's fused group, without the code under test."""
    (group,) = [g for g in GROUPS if module.rpartition(".")[2] in g] or [[]]
    parent = module.rpartition(".")[0]
    names = [f"{parent}.{name}.weight" for name in group] or [f"{module}.weight"]
    everything = torch.cat([made[name].flatten() for name in names])
    return torch.stack([everything.min(), everything.max()])


def _expected(made, plan, scheme, *, dtype=None):
    """Every module quantized at once."""
    leaves = {}
    for name, weight in made.items():
        module = name.removesuffix(".weight")
        weight = weight.to(dtype or weight.dtype)
        fitted = scheme.fitted(weight.shape[1])
        shared = None
        if fitted.weight.scale == "e4m3":
            cast = {n: t.to(dtype or t.dtype) for n, t in made.items()}
            shared = _range_of(cast, module)
        quantized = plan.target.quantize(weight, fitted.weight, shared=shared)
        for leaf, tensor in plan.target.encode(quantized, fitted, tuple(weight.shape)).items():
            leaves[f"{module}.{leaf}"] = tensor
    return leaves


def _same(found, expected):
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (found[name], tensor)]
        assert torch.equal(*as_bytes), name


@pytest.mark.parametrize("name", SCHEMES)
def test_slices_are_the_weight_quantized_at_once(tmp_path, chunks, monkeypatch, name):
    made = _weights()
    plan = plan_of(_folder(tmp_path / "in", made), SCHEMES[name])
    quantize, slices = type(plan.target).quantize, []

    def counted(target, weight, *arguments, **options):
        slices.append(weight.shape[0])
        return quantize(target, weight, *arguments, **options)

    monkeypatch.setattr(type(plan.target), "quantize", counted)
    chunks(1)  # one step of rows at a time
    one = run_plan(plan, tmp_path / "one", Silent())
    step = plan.target.row_step(SCHEMES[name])
    assert max(slices) == step
    assert len(slices) == sum(-(-rows // step) for rows, _ in SHAPES.values())
    chunks(7 * 512)
    run_plan(plan, tmp_path / "other", Silent())
    monkeypatch.undo()
    whole = run_plan(plan, tmp_path / "whole", Silent())
    found = (one / "model.safetensors").read_bytes()
    assert (tmp_path / "other" / "model.safetensors").read_bytes() == found
    assert (whole / "model.safetensors").read_bytes() == found
    _same(load_file(one / "model.safetensors"), _expected(made, plan, SCHEMES[name]))


@pytest.mark.parametrize("target", [name for name in TARGETS if name != "compressed-tensors"])
def test_other_formats_in_slices(tmp_path, chunks, target):
    scheme = next(
        scheme
        for scheme in SCHEMES.values()
        if target_named(target).obstacle(scheme, (96, 256)) == ""
    )
    shapes = {name: (rows // 32 * 32, 256) for name, (rows, _) in SHAPES.items() if rows > 8}
    made = _weights(torch.float16, shapes)
    folder = tiny.write(tmp_path / "in", tiny.config(layers=1, dtype=torch.float16), made)
    plan = plan_of(folder, scheme, target=target_named(target))
    chunks(1)
    output = run_plan(plan, tmp_path / "out", Silent())
    _same(load_file(output / "model.safetensors"), _expected(made, plan, scheme))


@pytest.mark.parametrize("name", ["W4A16_ASYM", "NVFP4A16"])
@pytest.mark.parametrize(
    ("source", "dtype"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.float16),
    ],
)
def test_other_dtypes(tmp_path, chunks, name, source, dtype):
    made = _weights(source)
    plan = plan_of(_folder(tmp_path / "in", made), SCHEMES[name], dtype=dtype)
    chunks(4000)
    output = run_plan(plan, tmp_path / "out", Silent())
    expected = _expected(made, plan, SCHEMES[name], dtype=dtype)
    _same(load_file(output / "model.safetensors"), expected)


def test_one_global_scale_for_a_fused_group(tmp_path, chunks):
    made = _weights()
    plan = plan_of(_folder(tmp_path / "in", made), "NVFP4A16")
    chunks(1)
    found = load_file(run_plan(plan, tmp_path / "out", Silent()) / "model.safetensors")
    scales = {n.split(".")[-2]: float(t) for n, t in found.items() if "global_scale" in n}
    for group in GROUPS:
        assert len({scales[name] for name in group}) == 1
    assert len(set(scales.values())) == 5
    largest = made[f"{LAYER}.mlp.down_proj.weight"].abs().max().float()
    assert scales["down_proj"] == pytest.approx(448 * 6 / float(largest), rel=2**-7)


# -- what stays in full precision ------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [4001, 1 << 22])
def test_copies(tmp_path, chunks, chunk):
    made = _weights() | {
        "model.embed_tokens.weight": torch.randn(31, 7),
        f"{LAYER}.experts": torch.randn(3, 5, 4).bfloat16(),
        f"{LAYER}.empty": torch.zeros(0, 4),
        f"{LAYER}.number": torch.tensor(3),
    }
    plan = plan_of(_folder(tmp_path / "in", made), "dense")
    chunks(chunk)
    _same(load_file(run_plan(plan, tmp_path / "out", Silent()) / "model.safetensors"), made)


@pytest.mark.parametrize("chunk", [1, 4001, 1 << 22])
def test_casts(tmp_path, chunks, chunk):
    made = _weights(torch.float32) | {"model.embed_tokens.weight": torch.randn(31, 7)}
    plan = plan_of(_folder(tmp_path / "in", made), "dense", dtype=torch.bfloat16)
    chunks(chunk)
    found = load_file(run_plan(plan, tmp_path / "out", Silent()) / "model.safetensors")
    _same(found, {name: tensor.bfloat16() for name, tensor in made.items()})


def test_lossless_casts(tmp_path):
    norm = torch.tensor([1.0, 1 + 2.0**-12])
    folder = tiny.write(tmp_path / "in", tiny.config(layers=1), {"model.norm.weight": norm})
    plan = plan_of(folder, "dense", dtype=torch.bfloat16)
    with pytest.raises(NotLossless, match=r"1 of 2 values of `model.norm.weight` would change"):
        run_plan(replace(plan, lossless=True), tmp_path / "out", Silent())
    assert list(tmp_path.iterdir()) == [folder]


def _interleaved(tmp_path, scheme, **options):
    """A plan that reads a weight from every second row of a tensor."""
    both = torch.randn(64, 128).bfloat16()
    made = {f"{LAYER}.mlp.up_proj.weight": torch.zeros(32, 128).bfloat16(), "both": both}
    plan = plan_of(_folder(tmp_path / "in", made), scheme, **options)
    region = SourceRegion(tensor="both", first=128, rows=32, columns=128, row_stride=256)
    rows = [replace(r, region=region) if "up_proj" in r.module else r for r in plan.rows]
    return replace(plan, rows=tuple(rows)), both[1::2]


@pytest.mark.parametrize("chunk", [1, 1100, 1 << 22])
@pytest.mark.parametrize("name", ["W4A16_ASYM", "FP8_BLOCK", "NVFP4A16", "FP8 weights", "dense"])
def test_rows_that_take_turns_with_others(tmp_path, chunks, chunk, name):
    scheme = SCHEMES.get(name, name)
    plan, weight = _interleaved(tmp_path, scheme)
    chunks(chunk)
    found = load_file(run_plan(plan, tmp_path / "out", Silent()) / "model.safetensors")
    made = {f"{LAYER}.mlp.up_proj.weight": weight}
    if scheme != "dense":
        quantized = plan.target.quantize(weight.contiguous(), scheme.weight)
        leaves = plan.target.encode(quantized, scheme, (32, 128))
        made = {f"{LAYER}.mlp.up_proj.{leaf}": tensor for leaf, tensor in leaves.items()}
    _same(found, made)


def test_rows_that_take_turns_and_are_cast(tmp_path, chunks):
    plan, weight = _interleaved(tmp_path, "dense", dtype=torch.float32)
    chunks(1)
    found = load_file(run_plan(plan, tmp_path / "out", Silent()) / "model.safetensors")
    _same(found, {f"{LAYER}.mlp.up_proj.weight": weight.float()})


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["W4A16", "FP8_BLOCK", "NVFP4A16", "FP8 weights", "MXFP4"])
@pytest.mark.parametrize("row", [0, 199])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite(tmp_path, chunks, name, row, value):
    made = _weights()
    made[f"{LAYER}.mlp.gate_proj.weight"][row, 5] = value
    plan = plan_of(_folder(tmp_path / "in", made), SCHEMES[name])
    chunks(1)
    with pytest.raises(NonFiniteWeight) as caught:
        run_plan(plan, tmp_path / "out", Silent(), Resources(workers=1))
    text = str(caught.value)
    assert f"weight of `{LAYER}.mlp.gate_proj` cannot be quantized" in text
    assert "hint: keep it" in text
    assert f"`{LAYER}.mlp.gate_proj = keep`" in text
    assert (f"`{LAYER}.mlp.up_proj = keep`" in text) == (name == "NVFP4A16")  # one global scale
    assert sorted(tmp_path.iterdir()) == [tmp_path / "in"]


def test_a_read_that_fails(tmp_path, monkeypatch):
    plan = plan_of(_folder(tmp_path / "in", _weights()), "W8A8")

    def preadv(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(row_reader.os, "preadv", preadv)
    file = tmp_path / "in" / "model.safetensors"
    with pytest.raises(CheckpointError) as caught:
        run_plan(plan, tmp_path / "out", Silent())
    assert str(caught.value) == f"cannot read `{file}`: Input/output error"


def test_short_reads_are_continued(tmp_path, monkeypatch):
    made, preadv = _weights(), row_reader.os.preadv

    def short(file, buffers, offset):
        return preadv(file, [buffers[0][:1000]], offset)

    plan = plan_of(_folder(tmp_path / "in", made), "dense")
    monkeypatch.setattr(row_reader.os, "preadv", short)
    _same(load_file(run_plan(plan, tmp_path / "out", Silent()) / "model.safetensors"), made)


def test_bytes_are_counted(tmp_path, monkeypatch):
    """A format whose tensors are not those of its plan is found out at once."""
    plan = plan_of(_folder(tmp_path / "in", _weights()), "W8A8")
    encode = type(plan.target).encode

    def forgetful(*arguments):
        leaves = encode(*arguments)
        del leaves["weight_scale"]
        return leaves

    monkeypatch.setattr(type(plan.target), "encode", forgetful)
    with pytest.raises(AssertionError, match="and what belongs to it were written, planned were"):
        run_plan(plan, tmp_path / "out", Silent())


def test_a_write_that_fails(tmp_path, monkeypatch):
    plan = plan_of(_folder(tmp_path / "in", _weights()), "W8A8")

    def pwrite(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("quantload.loader.writer.os.pwrite", pwrite)
    with pytest.raises(OutputError, match=r"out`: No space left on device"):
        run_plan(plan, tmp_path / "out", Silent())
    assert sorted(tmp_path.iterdir()) == [tmp_path / "in"]


@pytest.mark.parametrize("rows", [1, 48])
def test_groups_that_become_zeros_are_told(rows):
    """A scale below what float16 divides is replaced by its eps, whatever the number of rows."""
    weight = torch.full((rows, 64), 0.5, dtype=torch.float16)
    weight[0, :32] = 1.2e-7  # max / 7.5 is zero in float16
    quantized = quantize_rtn(weight, parse_scheme("W4A16:g32").weight)
    assert float(quantized.scale[0, 0]) == torch.finfo(torch.float16).eps
    assert lost_scales._lost_groups(weight, quantized) == 1
    weight[0, :32] = 7.5 * torch.finfo(torch.float16).eps  # a scale of eps that is its own
    quantized = quantize_rtn(weight, parse_scheme("W4A16:g32").weight)
    assert float(quantized.scale[0, 0]) == torch.finfo(torch.float16).eps
    assert lost_scales._lost_groups(weight, quantized) == 0
