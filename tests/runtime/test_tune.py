"""Tuning: what is tried, what is kept, when it stops; with a kernel that asks for settings."""

import contextlib
import time
import types

import pytest
import torch
from pretended_card import pretended_card

from quantload.errors import ConfigError
from quantload.quant.scheme import parse_scheme
from quantload.runtime import launch_settings, tune
from quantload.runtime.gemm import Reference
from quantload.runtime.launch_settings import Table

CPU = torch.device("cpu")
FAMILIES, import_module = tune.FAMILIES, tune.importlib.import_module
RULE = {"speed": 5}
SETTINGS = [{"speed": 7}, {"speed": 3}, {"speed": 2, "wrong": 1}, {"speed": 1, "fails": 1}]


class Asking(torch.nn.Module):
    """Multiplies as the reference does, with the settings that it is given."""

    def __init__(self, gemm, name):
        super().__init__()
        self.gemm, self.name = gemm, name
        self.register_buffer("codes", torch.zeros(8))

    def forward(self, x, bias=None):
        n, k = self.gemm.weight_values(torch.float32).shape
        found = launch_settings.find(self.name, CPU, m=len(x), n=n, k=k) or RULE
        if "fails" in found:
            raise RuntimeError("out of resource: shared memory")
        ran.append(found["speed"])
        y = self.gemm(x, bias)
        return y * 1.1 if "wrong" in found else y


ran = []


def timer(calls, n_copies, rounds):
    """Microseconds that are the speed of the settings with which a call ran."""
    times = []
    for call in calls:
        call(n_copies - 1)
        times.append(float(ran[-1]))
    return times


@pytest.fixture(autouse=True)
def family(monkeypatch):
    """A family of kernels, `pretended`, that serves every weight."""

    class Row(Reference):
        def pack(self, weight, input, *, device, dtype):
            return Asking(super().pack(weight, input, device=device, dtype=dtype), "pretended one")

    module = types.SimpleNamespace(candidates=lambda m, n, k: iter(SETTINGS))
    monkeypatch.setattr(tune, "choose", lambda *a, **k: types.SimpleNamespace(kernel=Row()))
    monkeypatch.setattr(tune.importlib, "import_module", lambda name: module)
    monkeypatch.setattr(tune, "FAMILIES", {"pretended": "somewhere"})
    monkeypatch.setattr(tune, "copies", lambda state, size: [state, state])
    ran.clear()


def run(table, scheme="W4A16:g32", tokens=(1, 4), **options):
    layers = [(parse_scheme(scheme), 64, 96)]
    return list(tune.tune(layers, tokens, device=CPU, table=table, timer=timer, **options))


def test_the_fastest_settings_whose_result_is_right_are_kept():
    table = Table("card")
    first, second = run(table)
    assert (first.settings, first.us, first.rule_us) == ({"speed": 3}, 3.0, 5.0)
    assert (first.tried, first.failed, first.complete) == (2, 2, True)
    assert first.gain == pytest.approx(0.4)
    assert (first.tokens, second.tokens) == (1, 4)
    assert table.kernels == {"pretended one": {"64x96": {1: {"speed": 3}, 4: {"speed": 3}}}}
    assert table.us == {"pretended one": {"64x96": {1: 3.0, 4: 3.0}}}


@pytest.mark.parametrize("scheme", ["W8A8", "FP8_DYNAMIC", "FP8_BLOCK"])
def test_rounded_inputs_are_no_error(scheme):
    (found,) = run(Table("card"), scheme, tokens=(4,))
    assert found.settings == {"speed": 3}


def test_a_rule_that_is_not_beaten_stays(monkeypatch):
    monkeypatch.setitem(RULE, "speed", 3)
    table = Table("card")
    (found,) = run(table, tokens=(1,))
    assert (found.settings, found.us, found.gain) == (None, 3.0, 0.0)
    assert table.kernels == {}
    assert table.us == {"pretended one": {"64x96": {1: 3.0}}}


def test_what_the_table_has_is_not_measured_again():
    table = Table("card")
    run(table, tokens=(1,))
    ran.clear()
    assert [found.tokens for found in run(table)] == [4]
    assert [found.tokens for found in run(table, again=True)] == [1, 4]


def test_it_stops_when_the_time_is_up(monkeypatch):
    assert run(Table("card"), seconds=0) == []
    clock = iter([0.0, 1.0, 2.0, 3.0, 99.0, 99.0, 99.0])  # the second setting comes too late
    monkeypatch.setattr(tune, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    table = Table("card")
    (found,) = run(table, seconds=50)
    assert not found.complete
    assert found.tried == 2
    assert found.settings == {"speed": 3}


def test_a_kernel_without_settings_is_left_out(monkeypatch):
    monkeypatch.setattr(tune, "FAMILIES", {"another": "somewhere"})
    assert run(Table("card")) == []


def test_the_own_table_is_written_in_one_step(tmp_path, monkeypatch):
    monkeypatch.setenv("QUANTLOAD_CACHE", str(tmp_path))
    table = Table("Some Card")
    run(table)
    path = tune.write_own_table(table)
    assert path == launch_settings.user_table("Some Card")
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert tune.read_own_table("Some Card").kernels == table.kernels
    assert tune.read_own_table("Another Card").kernels == {}


def test_an_own_table_that_cannot_be_read_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("QUANTLOAD_CACHE", str(tmp_path))
    path = tune.write_own_table(Table("Some Card"))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=path.name):
        tune.read_own_table("Some Card")


@pytest.mark.parametrize("text", ["64", "²x3", "0x4"])
def test_shapes_on_the_command_line(text):
    assert tune.parse_shapes("64x128, 6144x4096") == [(64, 128), (6144, 4096)]
    with pytest.raises(ConfigError, match=f"`{text}` is no shape, expected NxK"):
        tune.parse_shapes(text)


@pytest.mark.parametrize(
    "kernel", ["nibble int g128", "byte e4m3 channel", "rounded int8", "rounded e4m3 g128"]
)
@pytest.mark.parametrize("m", [1, 16])
def test_every_family_has_settings_to_try(kernel, m, monkeypatch, kernel_device):
    # `kernel_device`, since kernels are imported here that other tests interpret
    monkeypatch.setattr(tune, "FAMILIES", FAMILIES)
    monkeypatch.setattr(tune.importlib, "import_module", import_module)
    here = torch.cuda.is_available()
    with contextlib.nullcontext() if here else pretended_card(90):
        found = list(tune._candidates(kernel, m, 6144, 4096))
    assert len(found) > 3
    assert all(isinstance(value, int) for one in found for value in one.values())
    assert len({tuple(sorted(one.items())) for one in found}) == len(found), "tried twice"


@pytest.mark.parametrize(
    ("kernel", "m", "n", "k", "settings"),
    [
        ("nibble int g128", 8, 28672, 4096, {"tokens": 8, "stages": 5, "warps": 2, "prefetch": 4}),
        ("nibble int g128", 16, 28672, 4096, {"stages": 5}),
        ("nibble int g128", 8, 8192, 28672, {"tokens": 8, "splits": 8, "warps": 2}),
        ("byte e4m3 channel", 1, 6144, 4096, {"columns": 128, "stages": 3, "rows": 64}),
        ("pairs int groups", 64, 6144, 4096, {"columns": 128, "stages": 4, "splits": 1}),
        ("rounded e4m3", 64, 28672, 4096, {"library": 1}),
        ("rounded int8", 64, 28672, 4096, {"bn": 64, "bk": 256, "stages": 3}),
    ],
)
def test_what_won_is_among_what_is_tried(kernel, m, n, k, settings, monkeypatch, kernel_device):
    monkeypatch.setattr(tune.importlib, "import_module", import_module)
    monkeypatch.setattr(tune, "FAMILIES", FAMILIES)
    with contextlib.nullcontext() if torch.cuda.is_available() else pretended_card(90):
        found = list(tune._candidates(kernel, m, n, k))
    assert any(settings.items() <= one.items() for one in found)


@pytest.mark.gpu
def test_settings_are_compiled_in_other_processes(monkeypatch, tmp_path):
    monkeypatch.undo()  # the real families
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    device = torch.device("cuda")
    job = tune._Job(parse_scheme("W4A16"), 512, 1024, 1, "nibble int g128", device)
    with tune._compilers(2) as compile_ahead:
        done = compile_ahead(job)
    assert done > 3
    assert len(list(tmp_path.rglob("*.cubin"))) > 3


@pytest.mark.gpu
def test_a_kernel_is_tuned_on_the_card(tmp_path, monkeypatch):
    monkeypatch.undo()  # the real families
    monkeypatch.setenv("QUANTLOAD_CACHE", str(tmp_path))
    table, started = Table(torch.cuda.get_device_name()), time.monotonic()
    layers = [(parse_scheme("W4A16"), 1024, 1024)]
    found = list(
        tune.tune(
            layers, [1], device=torch.device("cuda"), table=table, seconds=60, workers=4, again=True
        )
    )
    assert time.monotonic() - started < 120
    assert [one.tokens for one in found] == [1]
    assert found[0].tried > 0
    assert 0.5 < found[0].us <= found[0].rule_us < 100
    assert table.us[found[0].kernel]["1024x1024"][1] == pytest.approx(found[0].us, abs=1e-3)
