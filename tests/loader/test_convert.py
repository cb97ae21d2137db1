"""Whole conversions: what is in the output, and that nothing is left behind when one fails."""

import hashlib
import json

import compressed
import pytest
import tiny_checkpoints as tiny
import torch
from converting import converted, opened, plan_of
from safetensors.torch import load_file

from quantload.errors import NonFiniteWeight, OutputError
from quantload.loader.convert import run_plan
from quantload.loader.convert_task import TaskRunner
from quantload.loader.tasks import tasks_of
from quantload.loader.workers import Resources
from quantload.progress import Silent

DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture
def folder(tmp_path):
    return tiny.llama(tmp_path / "source")


def _hashes(folder):
    return {
        file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


@pytest.mark.parametrize("name", ["W8A8", "FP8_DYNAMIC", "FP8_BLOCK"])
def test_weights_are_those_of_the_library(tmp_path, folder, name):
    weight = load_file(folder / "model.safetensors")[f"{DOWN}.weight"]
    output = load_file(converted(folder, tmp_path / "out", name) / "model.safetensors")
    codes, scale, _, values = compressed.quantized(weight, compressed.preset(name).weights)
    assert torch.equal(output[f"{DOWN}.weight"].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(output[f"{DOWN}.weight_scale"], scale)
    assert torch.equal(opened(tmp_path / "out").read_dense(DOWN), values)


def test_everything_else_is_copied_bit_for_bit(tmp_path, folder):
    made = load_file(folder / "model.safetensors")
    output = load_file(converted(folder, tmp_path / "out", "W4A16:g32") / "model.safetensors")
    kept = [name for name in made if "proj" not in name]
    assert len(kept) == 7
    assert all(torch.equal(output[name], made[name]) for name in kept)


def test_biases_stay_with_their_layers(tmp_path):
    content = tiny.config(layers=1, base=tiny.QWEN2)
    made = tiny.tensors(content)
    folder = tiny.write(tmp_path / "source", content, made)
    output = load_file(converted(folder, tmp_path / "out", "W4A16:g32") / "model.safetensors")
    biases = [name for name in made if name.endswith("bias")]
    assert len(biases) == 3
    assert all(torch.equal(output[name], made[name]) for name in biases)


@pytest.mark.parametrize("shard", [10**9, 20_000])
def test_two_runs_write_the_same_bytes(tmp_path, folder, shard):
    (folder / "tokenizer.json").write_text("{}")
    first = converted(folder, tmp_path / "one", "W4A16_ASYM:g32", max_shard_bytes=shard)
    second = converted(folder, tmp_path / "two", "W4A16_ASYM:g32", max_shard_bytes=shard)
    assert _hashes(first) == _hashes(second)
    assert len(list(first.glob("*.safetensors"))) == (1 if shard == 10**9 else 5)


def test_shards_and_single_files_give_one_output(tmp_path, folder):
    content = json.loads((folder / "config.json").read_text())
    made = load_file(folder / "model.safetensors")
    sharded = tiny.write(tmp_path / "sharded", content, tiny.halves(made))
    one = converted(folder, tmp_path / "one", "W8A8")
    two = converted(sharded, tmp_path / "two", "W8A8")
    for name in ("model.safetensors", "config.json"):
        assert (one / name).read_bytes() == (two / name).read_bytes()


@pytest.mark.parametrize("scheme", ["W4A16_ASYM:g32", "W8A8", "FP8_DYNAMIC"])
def test_dense_output_of_a_quantized_source(tmp_path, folder, scheme):
    quantized = converted(folder, tmp_path / "q", scheme)
    dense = converted(quantized, tmp_path / "dense", "dense")
    source, output = opened(quantized), opened(dense)
    assert not output.is_quantized
    assert "quantization_config" not in output.checkpoint.config
    assert all(torch.equal(output.read_dense(m), source.read_dense(m)) for m in source.weights)
    assert set(output.checkpoint.tensors) == set(opened(folder).checkpoint.tensors)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite(tmp_path, folder, value):
    made = load_file(folder / "model.safetensors")
    made[f"{DOWN}.weight"][3, 5] = value
    tiny.save_file(made, folder / "model.safetensors")
    with pytest.raises(NonFiniteWeight) as caught:
        converted(folder, tmp_path / "out", "W4A16:g32")
    assert f"weight of `{DOWN}` cannot be quantized: 1 of 8192 elements" in str(caught.value)
    assert f"hint: keep it with the rule `{DOWN} = keep`" in str(caught.value)
    assert list(tmp_path.iterdir()) == [folder]
    kept = converted(folder, tmp_path / "out", "W4A16:g32", [f"{DOWN}=keep"])
    copied = opened(kept).read_dense(DOWN)
    assert torch.equal(copied.isfinite(), made[f"{DOWN}.weight"].isfinite())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_member_of_a_group_that_is_not_finite_is_named(tmp_path, folder, value):
    """NVFP4 has one global scale for q, k and v, so that none of them can be kept alone."""
    made = load_file(folder / "model.safetensors")
    attention = "model.layers.1.self_attn"
    made[f"{attention}.v_proj.weight"][3, 5] = value
    tiny.save_file(made, folder / "model.safetensors")
    with pytest.raises(NonFiniteWeight) as caught:
        converted(folder, tmp_path / "out", "NVFP4A16")
    assert f"weight of `{attention}.v_proj` cannot be quantized" in str(caught.value)
    rules = [f"{attention}.{name} = keep" for name in ("q_proj", "k_proj", "v_proj")]
    assert all(f"`{rule}`" in str(caught.value) for rule in rules)
    converted(folder, tmp_path / "out", "NVFP4A16", rules)


def test_values_that_do_not_fit_into_float16(tmp_path, folder):
    made = load_file(folder / "model.safetensors")
    made["model.norm.weight"][0] = 1e6
    tiny.save_file(made, folder / "model.safetensors")
    with pytest.raises(NonFiniteWeight, match=r"1 values of `model.norm.weight` do not fit into"):
        converted(folder, tmp_path / "out", "dense", dtype=torch.float16)
    assert list(tmp_path.iterdir()) == [folder]
    output = converted(folder, tmp_path / "out", "dense", dtype=torch.float32)
    assert opened(output).read_plain("model.norm.weight")[0] == 999424.0  # 1e6 in bfloat16


@pytest.mark.parametrize("name", ["model.norm.weight", f"{DOWN}.weight", "lm_head.weight"])
@pytest.mark.parametrize(
    ("source", "target"), [(torch.float32, torch.bfloat16), (torch.float64, torch.float32)]
)
def test_values_that_overflow_in_any_dtype(tmp_path, folder, name, source, target):
    made = {k: tensor.to(source) for k, tensor in load_file(folder / "model.safetensors").items()}
    made[name].view(-1)[3] = -torch.finfo(source).max
    tiny.save_file(made, folder / "model.safetensors")
    with pytest.raises(NonFiniteWeight) as caught:
        converted(folder, tmp_path / "out", "dense", dtype=target)
    module = name if "norm" in name else name.removesuffix(".weight")
    message = f"1 values of `{module}` do not fit into `{target}`, the source has `{source}`"
    assert message in str(caught.value)


def test_what_is_not_finite_in_the_source_is_no_overflow(tmp_path, folder):
    made = {k: tensor.float() for k, tensor in load_file(folder / "model.safetensors").items()}
    made["model.norm.weight"][0] = float("-inf")
    tiny.save_file(made, folder / "model.safetensors")
    output = converted(folder, tmp_path / "out", "dense", dtype=torch.bfloat16)
    assert opened(output).read_plain("model.norm.weight")[0] == float("-inf")


@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt(), OSError(5, "I/O error")])
@pytest.mark.parametrize("call", [1, 5])
def test_an_error_of_the_machine_keeps_what_is_done(tmp_path, folder, monkeypatch, call, error):
    """Nothing is under the final name, and the same command continues."""
    run, calls = TaskRunner.run, []

    def failing(runner, task):
        calls.append(task)
        if len(calls) == call:
            raise error
        return run(runner, task)

    one = Resources(workers=1)
    monkeypatch.setattr(TaskRunner, "run", failing)
    with pytest.raises(type(error)):
        run_plan(plan_of(folder, "W4A16:g32"), tmp_path / "out", Silent(), one)
    left = [tmp_path / ".out.unfinished"] if call > 1 else []
    assert sorted(tmp_path.iterdir()) == [*left, folder]
    run_plan(plan_of(folder, "W4A16:g32"), tmp_path / "out", Silent(), one)
    tasks = len(tasks_of(plan_of(folder, "W4A16:g32")))
    assert len(calls) == call + tasks - (call - 1)
    whole = converted(folder, tmp_path / "whole", "W4A16:g32")
    assert _hashes(tmp_path / "out") == _hashes(whole)


def test_an_error_about_content_leaves_nothing(tmp_path, folder):
    made = load_file(folder / "model.safetensors")
    made["lm_head.weight"][0, 0] = float("nan")  # the last task: others are finished
    tiny.save_file(made, folder / "model.safetensors")
    plan = plan_of(folder, "W4A16:g32", ["lm_head=W8A8"])
    with pytest.raises(NonFiniteWeight, match="weight of `lm_head` cannot be quantized"):
        run_plan(plan, tmp_path / "out", Silent(), Resources(workers=1))
    assert list(tmp_path.iterdir()) == [folder]


def test_outputs_that_would_touch_the_source(tmp_path, folder):
    plan = plan_of(folder, "W8A8")
    before = _hashes(folder)
    for output, message in ((folder, "is the source"), (folder / "sub", "is inside the source")):
        with pytest.raises(OutputError, match=message):
            run_plan(plan, output, Silent())
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(OutputError, match="is inside the source"):
        run_plan(plan, tmp_path / "link" / "sub", Silent())
    assert _hashes(folder) == before


def test_the_source_is_not_changed(tmp_path, folder):
    before = _hashes(folder)
    converted(folder, tmp_path / "out", "W4A16:g32")
    assert _hashes(folder) == before


def test_progress_ends_at_its_total(tmp_path, folder):
    class Recorder(Silent):
        total = done = 0

        def start(self, phase, *, total, unit):
            assert (phase, unit) == ("convert", "B")
            self.total = total

        def advance(self, amount, *, note=""):
            self.done += amount

    recorder = Recorder()
    run_plan(plan_of(folder, "W8A8"), tmp_path / "out", recorder)
    assert recorder.total == recorder.done > 0
