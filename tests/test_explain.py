"""What `explain` says of a loaded model: kernels, bytes, limits; on a card against the profiler."""

import json

import pytest
import tiny_checkpoints as tiny
import torch
from click.testing import CliRunner
from moe_models import moe_model

import quantload
from quantload import api
from quantload.cli import main
from quantload.cli_explain import parse_numbers
from quantload.errors import ConfigError
from quantload.layers import kernel_facts
from quantload.layers.linear import QuantLinear
from quantload.quant.rtn import quantize_rtn
from quantload.quant.scheme import parse_scheme
from quantload.runtime import launch_settings
from quantload.runtime.launch_settings import CardLimits

CPU = torch.device("cpu")


def layer(scheme, n, k, device, dtype=torch.bfloat16):
    """A quantized layer [n, k] of random numbers."""
    made = QuantLinear(k, n, bias=False, scheme=scheme, dtype=dtype, prefix="some.layer")
    weight = torch.randn(n, k, dtype=torch.bfloat16, device=device)
    made.receive("weight", 0, quantize_rtn(weight, scheme.weight))
    made.finish(device)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.llama(tmp_path_factory.mktemp("model") / "llama")


def test_each_layer_says_what_serves_it_and_what_does_not(folder):
    model = quantload.load(folder, scheme="W4A16:g32", device="cpu")
    found = quantload.explain(model, tokens=[1, 16])
    by_name = {report.module: report for report in found}
    down = by_name["model.layers.0.mlp.down_proj"]
    packed = model.get_submodule(down.module).gemm
    assert down.weight_bytes == sum(buffer.nbytes for buffer in packed.buffers()) > 0
    assert down.shape == tuple(packed.weight_values(torch.float32).shape)
    gate = by_name["model.layers.0.mlp.gate_proj"]
    up = by_name["model.layers.0.mlp.up_proj"]
    assert gate.fused_into == up.fused_into != ""
    assert gate.shape == up.shape == (2 * down.shape[1], down.shape[0])
    refused = dict(down.refused)
    assert refused["triton weight-only"] == "runs on CUDA, found `cpu`"
    assert [call.tokens for call in down.calls] == [1, 16]
    assert {call.limit_us for call in down.calls} == {None}, "the CPU was not measured"
    head = by_name["lm_head"]
    assert (head.kernel, head.scheme) == ("dense", "dense")


def test_the_table_has_a_line_for_layers_that_run_alike(folder):
    found = quantload.explain(quantload.load(folder, scheme="W4A16:g32", device="cpu"), tokens=1)
    lines = str(found).splitlines()
    assert lines[0].split()[:4] == ["layers", "n", "shape", "scheme"]
    down = next(line for line in lines if line.startswith("model.layers.*.mlp.down_proj"))
    assert down.split()[1] == "2"
    told = [line for line in lines if line.startswith("not `triton weight-only`: runs on CUDA")]
    assert len(told) == 1
    assert "14 layers" in told[0]
    assert len(found.table(every=True)) == len(found) + 1


def test_the_limit_is_the_longer_of_reading_and_computing(monkeypatch):
    limits = CardLimits(1000.0, {"bf16": 1.0, "int8": 2.0})
    monkeypatch.setattr(kernel_facts, "card_limits", lambda device: limits)
    int4 = layer(parse_scheme("W4A16:g32"), 64, 128, CPU)
    size = kernel_facts.weight_bytes(int4.gemm)
    assert size >= 64 * 128 // 2 + 64 * 4 * 2  # two codes a byte, scales in two bytes
    few = kernel_facts.call_of(int4.gemm, (64, 128), None, 1)
    assert few.limit_us == pytest.approx(max(size / 1e6, 2 * 64 * 128 / 1e6))
    many = kernel_facts.call_of(int4.gemm, (64, 128), None, 1000)
    assert many.limit_us == pytest.approx(2 * 1000 * 64 * 128 / 1e6)
    int8 = layer(parse_scheme("W8A8"), 64, 128, CPU)
    rounded = kernel_facts.call_of(int8.gemm, (64, 128), int8.scheme.input, 1000)
    assert rounded.limit_us == pytest.approx(many.limit_us / 2)
    assert many.expected_us is None
    assert many.expected_share is None


def test_the_expected_share_is_of_a_measured_call(monkeypatch):
    asked = []

    def measured(name, device, **sizes):
        asked.append((name, sizes))
        return 8.0

    class Packed(torch.nn.Module):
        layout = "rows"

        def __init__(self):
            super().__init__()
            self.register_buffer("codes", torch.zeros(4000, dtype=torch.uint8))

        def kernels_for(self, tokens):
            launch_settings.find("some kernel", CPU, m=tokens, n=80, k=100)
            return ("small",) if tokens < 8 else ("large", "sum")

    monkeypatch.setattr(kernel_facts, "card_limits", lambda device: CardLimits(1.0))
    monkeypatch.setattr(kernel_facts, "measured_us", measured)
    call = kernel_facts.call_of(Packed(), (80, 100), None, 16)
    assert call.kernels == ("large", "sum")
    assert call.expected_share == pytest.approx(4.0 / 8.0)
    assert asked == [("some kernel", {"m": 16, "n": 80, "k": 100})]
    assert kernel_facts.layout_of(Packed()) == "rows"


def test_tokens_are_at_least_one(folder):
    model = quantload.load(folder, device="cpu")
    with pytest.raises(ConfigError, match="`tokens` is 0, expected at least 1"):
        quantload.explain(model, tokens=[4, 0])


@pytest.mark.parametrize("text", ["1,²", "0", "-1", "1.5", ","])
def test_the_command_refuses_what_is_no_number(text):
    with pytest.raises(ConfigError, match="expected positive numbers such as"):
        parse_numbers(text, "--tokens")


def test_experts_are_told_together(tmp_path):
    moe_model("qwen3_moe").to(torch.bfloat16).save_pretrained(tmp_path)
    model = quantload.load(tmp_path, scheme="W8A16:channel", device="cpu")
    found = [report for report in quantload.explain(model, tokens=4) if report.experts]
    assert found
    for report in found:
        path, _, leaf = report.module.rpartition(".")
        packed = model.get_submodule(path)._modules[f"{leaf}_experts"]
        assert report.weight_bytes == sum(buffer.nbytes for buffer in packed.buffers()) > 0
        assert [call.tokens for call in report.calls] == [4]
    lines = str(quantload.explain(model)).splitlines()
    assert any(f" {found[0].experts} experts " in line for line in lines)


def test_the_command(folder):
    arguments = ["explain", str(folder), "--scheme", "W8A8", "--device", "cpu", "--tokens", "1,64"]
    done = CliRunner().invoke(main, [*arguments, "--json", "--quiet"])
    assert done.exit_code == 0, done.output
    layers = json.loads(done.stdout)["layers"]
    expected = api.explain(api.load(folder, scheme="W8A8", device="cpu"), tokens=[1, 64])
    assert [row["module"] for row in layers] == [report.module for report in expected]
    assert layers[0]["kernel"] == expected[0].kernel
    assert [call["tokens"] for call in layers[0]["calls"]] == [1, 64]
    shown = CliRunner().invoke(main, [*arguments, "--quiet"])
    assert "not `triton weight-only`" in shown.stdout
    wrong = CliRunner().invoke(main, [*arguments[:-1], "1,x"])
    assert wrong.exit_code == 2
    assert "`--tokens` is `1,x`, expected positive numbers" in wrong.stderr


# -- on the card -----------------------------------------------------------------------------------

PROFILED = (
    *("W4A16", "W4A16_ASYM", "W4A16:g32", "W4A16:channel", "W2A16", "W8A16", "MXFP4A16"),
    *("NVFP4A16", "FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "MXFP8", "W4A8", "W4AFP8", "MXFP6A16"),
)


def launched(run):
    """Names of the device functions that a call launches."""
    run()  # compiles
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        run()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [event.name for event in sorted(events, key=lambda e: e.time_range.start)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROFILED)
@torch.no_grad()
def test_the_profiler_sees_the_kernels_that_are_told(name):
    scheme, device = parse_scheme(name), torch.device("cuda")
    made = layer(scheme, 1024, 2048, device)
    for m in (1, 3, 16, 64, 129, 2048):
        call = kernel_facts.call_of(made.gemm, (1024, 2048), scheme.input, m)
        x = torch.randn(m, 2048, device=device, dtype=torch.bfloat16)
        seen = launched(lambda x=x: made(x))
        if "cuBLAS" in call.kernels:  # which function that is, cuBLAS decides
            ours = {kernel for kernel in call.kernels if kernel != "cuBLAS"}
            seen = [name if name in ours else "cuBLAS" for name in seen]
            seen = [name for i, name in enumerate(seen) if name != "cuBLAS" or name not in seen[:i]]
        if not call.kernels:
            assert "triton" not in made.kernel.name, f"{made.kernel.name} tells no kernels"
            continue
        if scheme.input is None:
            assert tuple(seen) == call.kernels, (made.kernel.name, m)
        else:  # before them the input is rounded
            told = set(call.kernels)
            assert tuple(n for n in seen if n in told) == call.kernels, (made.kernel.name, m, seen)
        if call.expected_share is not None:
            assert 0 < call.expected_share < 1.1
