"""The view of a plan holds what a conversion writes: every tensor, every description, every bit.

The oracle is the written folder, opened as any checkpoint is.
"""

from __future__ import annotations

import gc
import threading
from dataclasses import fields, replace

import pytest
import tiny_checkpoints as tiny
import torch
from converting import opened, plan_of
from tiny_gguf import write_tiny_gguf
from torch import Tensor

from quantload.errors import ConfigError, NonFiniteWeight
from quantload.loader.checkpoint import read_entry
from quantload.loader.convert import run_plan
from quantload.loader.formats.targets import TARGETS
from quantload.loader.layer_selection import select_layers
from quantload.loader.plan import make_plan
from quantload.loader.quantized_view import quantized_view
from quantload.loader.stats import InputStatistics
from quantload.loader.weight_rows import WeightRows
from quantload.mappers.facts import facts_from_names
from quantload.progress import Silent
from quantload.quant.qtensor import QuantTensor

SCHEMES = (
    *("W4A16:g32", "W4A16_ASYM:g32", "W8A8", "W8A16", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16"),
    *("MXFP4A16", "MXFP6A8", "W3A16:g32", "W4A16:channel"),
)


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_equal_values(found, expected, name: str) -> None:
    """Compare two weights part by part, and how they are evaluated."""
    assert type(found) is type(expected), name
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype, name
        assert torch.equal(as_bytes(found), as_bytes(expected)), name
        return
    for part in fields(QuantTensor):
        one, two = getattr(found, part.name), getattr(expected, part.name)
        if isinstance(two, Tensor):
            assert (one.dtype, one.shape) == (two.dtype, two.shape), (name, part.name)
            assert torch.equal(as_bytes(one), as_bytes(two)), (name, part.name)
        else:
            assert one == two, (name, part.name)


def assert_is_written(plan, folder, *, device="cpu") -> None:
    """Compare a view with the folder that the plan writes: headers first, then in any order."""
    view = quantized_view(plan, device=device)
    written = opened(run_plan(plan, folder, Silent()))
    assert view.checkpoint.config == written.checkpoint.config
    assert dict(view.weights) == dict(written.weights)
    assert list(view.weights) == list(written.weights)
    assert list(view.plain) == list(written.plain)
    found, expected = view.checkpoint.tensors, written.checkpoint.tensors
    assert list(found) == list(expected)
    for name, entry in expected.items():
        assert (found[name].dtype, found[name].shape, found[name].num_bytes) == (
            entry.dtype,
            entry.shape,
            entry.num_bytes,
        ), name
    for module in view.weights:
        assert_equal_values(view.read_weight(module), written.read_weight(module), module)
    for name in reversed(found):
        one, two = view.checkpoint.read(name), written.checkpoint.read(name)
        assert one.shape == two.shape, name
        assert torch.equal(as_bytes(one), as_bytes(two)), name


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_view_is_what_would_be_written(tmp_path, scheme):
    content = tiny.config(base=tiny.QWEN2, intermediate=96)
    folder = tiny.write(tmp_path / "source", content, tiny.halves(tiny.tensors(content)))
    assert_is_written(plan_of(folder, scheme), tmp_path / "out")


def test_mixed_dtypes_rules_and_a_head_of_its_own(tmp_path):
    content = tiny.config(tied=True)
    folder = tiny.write(tmp_path / "source", content, tiny.mixed(tiny.tensors(content)))
    rules = ["lm_head=W8A16", "model.layers.0.=W8A8", "model.layers.1.mlp.=keep"]
    assert_is_written(plan_of(folder, "W4A16:g32", rules), tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_dtype_of_all_floats_can_change(tmp_path, dtype):
    plan = plan_of(tiny.llama(tmp_path / "source"), "W4A16:g32", dtype=dtype)
    assert_is_written(plan, tmp_path / "out")


@pytest.mark.parametrize("scheme", ["NVFP4", "FP8"])
def test_fixed_input_scales_are_there(tmp_path, scheme):
    stats = InputStatistics(stated=12.5)
    plan = plan_of(tiny.llama(tmp_path / "source"), scheme, stats=stats)
    assert_is_written(plan, tmp_path / "out")
    weight = quantized_view(plan).read_weight("model.layers.0.mlp.up_proj")
    assert weight.input_scale is not None


@pytest.mark.parametrize("target", [name for name in TARGETS if name != "compressed-tensors"])
def test_other_formats_are_read_as_written(tmp_path, target):
    scheme = {"fp8": "FP8_BLOCK", "modelopt": "NVFP4A16"}.get(target, "W4A16_ASYM:g32")
    folder = tiny.llama(tmp_path / "source", hidden=128, intermediate=256)
    scheme = "W4A16:g32" if target == "gptq" else scheme
    assert_is_written(plan_of(folder, scheme, target=TARGETS[target]), tmp_path / "out")


@pytest.mark.parametrize(
    ("first", "second"),
    [("FP8_BLOCK", "W4A16:g32"), ("W4A16:g32", "W4A16:g32"), ("NVFP4A16", "FP8_DYNAMIC")],
)
def test_quantized_sources_are_rounded_again_or_keep_their_values(tmp_path, first, second):
    folder = tiny.llama(tmp_path / "source")
    between = run_plan(plan_of(folder, first), tmp_path / "between", Silent())
    plan = plan_of(between, second, ["model.layers.1.self_attn.=dense"])
    assert_is_written(plan, tmp_path / "out")
    kept = [row for row in plan.rows if row.scheme is not None and row.keeps_values]
    assert bool(kept) == (first == second)


@pytest.mark.parametrize("weight_type", ["F32", "Q4_0", "BF16"])
def test_gguf_becomes_another_scheme(tmp_path, weight_type):
    write_tiny_gguf(tmp_path / "m.gguf", architecture="qwen2", weight_type=weight_type)
    plan = plan_of(tmp_path / "m.gguf", "W4A16:g32", ["model.layers.0.mlp.=dense"])
    assert_is_written(plan, tmp_path / "out")


def test_a_search_for_scales_is_carried_out(tmp_path):
    plan = plan_of(tiny.llama(tmp_path / "source"), "W4A16:g32", observer="search")
    assert_is_written(plan, tmp_path / "out")


def test_layers_that_are_left_out_stay_out(tmp_path):
    whole = plan_of(tiny.llama(tmp_path / "source", layers=3), "W8A8")
    source = select_layers(whole.source, "1")
    facts = facts_from_names(source.weights, tied_head=False)
    plan = make_plan(source, whole.asked, facts)
    assert_is_written(plan, tmp_path / "out")
    assert quantized_view(plan).layers == "1"


# -- what is read, and when ------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch):
    """Modules in the order in which their rows are quantized."""
    seen: list[str] = []
    quantize = WeightRows.quantize

    def noted(self, weight, row, shared):
        seen.append(row.module)
        return quantize(self, weight, row, shared)

    monkeypatch.setattr(WeightRows, "quantize", noted)
    return seen


def test_opening_quantizes_nothing_and_reading_one_module_only_that(tmp_path, counted):
    view = quantized_view(plan_of(tiny.llama(tmp_path / "source"), "W4A16_ASYM:g32"))
    assert counted == []
    view.read_weight("model.layers.1.mlp.down_proj")
    assert counted == ["model.layers.1.mlp.down_proj"]
    view.read_plain("model.norm.weight")
    assert counted == ["model.layers.1.mlp.down_proj"]


def test_members_of_a_group_that_share_a_scale_are_quantized_once(tmp_path, counted):
    view = quantized_view(plan_of(tiny.llama(tmp_path / "source"), "NVFP4A16"))
    names = [f"model.layers.0.self_attn.{part}_proj" for part in "kqv"]
    first = view.read_weight(names[0])
    view.read_weight("model.layers.0.self_attn.o_proj")  # as in the order of names
    others = [view.read_weight(name) for name in names[1:]]
    assert sorted(counted) == sorted([*names, "model.layers.0.self_attn.o_proj"])
    assert all(torch.equal(other.outer, first.outer) for other in others)


def test_a_weight_read_twice_is_not_touched_by_its_first_reader(tmp_path, counted):
    view = quantized_view(plan_of(tiny.llama(tmp_path / "source"), "FP8_DYNAMIC"))
    module = "model.layers.0.mlp.up_proj"
    first = view.read_weight(module)
    codes = first.codes.clone()
    first.codes.zero_()
    assert torch.equal(as_bytes(view.read_weight(module).codes), as_bytes(codes))
    assert counted == [module]


def test_threads_may_read_at_once(tmp_path):
    plan = plan_of(tiny.llama(tmp_path / "source", layers=3), "NVFP4A16")
    view, alone = quantized_view(plan), quantized_view(plan)
    found: dict[str, object] = {}

    def read(modules):
        for module in modules:
            found[module] = view.read_weight(module)

    modules = list(view.weights)
    threads = [threading.Thread(target=read, args=(modules[n::4],)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == set(modules)
    for module in modules:
        assert_equal_values(found[module], alone.read_weight(module), module)


def test_full_precision_is_read_from_where_it_lies(tmp_path):
    """Fast readers find such tensors in the files, as they are."""
    plan = plan_of(tiny.llama(tmp_path / "source"), "W4A16:g32", ["model.layers.0.=keep"])
    tensors = quantized_view(plan).checkpoint.tensors
    stored = plan.source.checkpoint.tensors
    for name in ("model.layers.0.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"):
        assert tensors[name] == replace(stored[name], name=name)
        assert tensors[name].is_contiguous
    assert not tensors["model.layers.1.mlp.up_proj.weight_packed"].is_contiguous


def held_bytes() -> int:
    """Bytes of all tensors that are alive."""
    gc.collect()
    alive = [found for found in gc.get_objects() if issubclass(type(found), Tensor)]
    return sum(dict(memory_of(tensor) for tensor in alive).values())


def memory_of(tensor: Tensor) -> tuple[int, int]:
    """Return address and bytes; nothing for tensors without memory, which compilers leave."""
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError):
        return 0, 0


def test_what_was_read_is_let_go_of(tmp_path):
    folder = tiny.llama(tmp_path / "source", hidden=256, intermediate=1024)
    view = quantized_view(plan_of(folder, "FP8_DYNAMIC"))
    view.read_weight("model.layers.0.mlp.up_proj")
    before = held_bytes()  # the buffer for rows, and the largest weight
    for module in view.weights:
        view.read_weight(module)
    view.read_weight("model.layers.1.mlp.down_proj")
    assert 0 < held_bytes() <= 1.1 * before


# -- errors ----------------------------------------------------------------------------------------


def test_nan_is_an_error_that_names_the_module(tmp_path):
    content = tiny.config()
    made = tiny.tensors(content)
    made["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    view = quantized_view(plan_of(tiny.write(tmp_path / "s", content, made), "W8A8"))
    view.read_weight("model.layers.0.mlp.up_proj")
    for _ in range(2):
        with pytest.raises(NonFiniteWeight, match=r"model\.layers\.1\.mlp\.up_proj"):
            view.read_weight("model.layers.1.mlp.up_proj")


def test_weights_too_small_for_their_scales_are_refused(tmp_path):
    content = tiny.config(dtype=torch.float16)
    made = {name: t * 1e-6 for name, t in tiny.tensors(content).items()}
    view = quantized_view(plan_of(tiny.write(tmp_path / "s", content, made), "W8A8"))
    with pytest.raises(ConfigError, match="no exact scales"):
        view.read_weight("model.layers.0.mlp.up_proj")


def test_warnings_of_the_plan_are_told(tmp_path, caplog):
    folder = tiny.llama(tmp_path / "source")
    plan = plan_of(folder, "W8A8", ["model.layers.0.self_attn.q_proj=W8A16"], on_split="promote")
    view = quantized_view(plan)
    assert any("was split by the rules" in warning for warning in view.warnings)
    assert "was split by the rules" in caplog.text


def test_a_made_tensor_is_read_like_any(tmp_path):
    view = quantized_view(plan_of(tiny.llama(tmp_path / "source"), "W4A16:g32"))
    entry = view.checkpoint.tensors["model.layers.0.mlp.up_proj.weight_packed"]
    assert torch.equal(read_entry(entry), view.checkpoint.read(entry.name))
