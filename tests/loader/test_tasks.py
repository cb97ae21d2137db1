"""Tasks of a plan: what belongs together, who gets what, and what makes two runs the same."""

import json
import os
from dataclasses import replace

import pytest
import tiny_checkpoints as tiny
import torch
from converting import plan_of
from safetensors.torch import load_file

import quantload.loader.tasks as module
from quantload.errors import CheckpointError
from quantload.loader.convert import run_plan
from quantload.loader.formats.targets import target_named
from quantload.loader.output_files import OutputTensor, assign_files
from quantload.loader.tasks import Task, identity_of, share_of, spread_over_files, tasks_of
from quantload.loader.workers import Resources
from quantload.progress import Silent

LAYER = "model.layers.0"


@pytest.fixture
def folder(tmp_path):
    return tiny.llama(tmp_path / "source")


def _modules(tasks):
    return [tuple(row.module for row in task.rows) for task in tasks if task.rows]


@pytest.mark.parametrize("scheme", ["W4A16:g32", "FP8_BLOCK", "NVFP4A16", "dense"])
def test_every_output_tensor_belongs_to_one_task(folder, scheme):
    plan = plan_of(folder, scheme)
    tasks = tasks_of(plan)
    assert [task.number for task in tasks] == list(range(len(tasks)))
    written = [tensor.name for task in tasks for tensor in task.outputs]
    assert len(written) == len(set(written))
    assert set(written) == {name for file in plan.files for name in file.tensors}
    assert sum(task.source_bytes for task in tasks) == sum(
        entry.num_bytes for entry in plan.source.checkpoint.tensors.values()
    )


@pytest.mark.parametrize("scheme", ["W4A16:g32", "dense"])
def test_large_tensors_are_copied_in_several_tasks(folder, tmp_path, monkeypatch, scheme):
    whole = run_plan(plan_of(folder, scheme), tmp_path / "whole", Silent())
    digest = identity_of(plan_of(folder, scheme)).digest
    monkeypatch.setattr(module, "_COPY_BYTES", 1000)
    plan = plan_of(folder, scheme)
    tasks = tasks_of(plan)
    parts = {}
    for task in tasks:
        for tensor, start, stop in task.written:
            parts.setdefault(tensor.name, []).append((start, stop, tensor.num_bytes))
    for found in parts.values():  # one after the other, without gaps
        assert [start for start, _, _ in found] == [0, *(stop for _, stop, _ in found[:-1])]
        assert found[-1][1] == found[-1][2]
    assert any(len(found) > 2 for found in parts.values())
    assert sum(task.source_bytes for task in tasks) == sum(
        entry.num_bytes for entry in plan.source.checkpoint.tensors.values()
    )
    assert identity_of(plan).digest != digest
    apart = run_plan(plan, tmp_path / "apart", Silent(), Resources(workers=3))
    for file in whole.iterdir():
        assert (apart / file.name).read_bytes() == file.read_bytes()


def test_members_of_a_fused_group_share_a_task_where_they_share_a_scale(folder):
    together = [set(group) for group in _modules(tasks_of(plan_of(folder, "NVFP4A16")))]
    attention, mlp = f"{LAYER}.self_attn", f"{LAYER}.mlp"
    assert {f"{attention}.{x}_proj" for x in "qkv"} in together
    assert {f"{mlp}.gate_proj", f"{mlp}.up_proj"} in together
    assert {f"{mlp}.down_proj"} in together
    for scheme in ("W4A16:g32", "MXFP4A16", "FP8_DYNAMIC"):
        assert all(len(group) == 1 for group in _modules(tasks_of(plan_of(folder, scheme))))


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 100])
def test_ranks_share_all_tasks(folder, ranks):
    tasks = tasks_of(plan_of(folder, "W4A16:g32"))
    shares = [share_of(tasks, rank, ranks) for rank in range(ranks)]
    assert [task.number for share in shares for task in share] == list(range(len(tasks)))
    total = sum(task.source_bytes for task in tasks)
    largest = max(task.source_bytes for task in tasks)
    for share in shares:
        assert abs(sum(task.source_bytes for task in share) - total / ranks) <= largest


@pytest.mark.parametrize("together", [1, 2, 3, 4, 100])
def test_tasks_that_run_together_write_to_different_files(folder, together):
    plan = plan_of(folder, "W4A16:g32", max_shard_bytes=20_000)
    tasks = tasks_of(plan)
    order = spread_over_files(tasks, plan.files, together=together)
    assert sorted(task.number for task in order) == list(range(len(tasks)))
    assert len(plan.files) > 4
    file_of = {name: file.name for file in plan.files for name in file.tensors}
    written = [file_of[task.outputs[0].name] for task in order]
    numbers = {}
    for task, name in zip(order, written, strict=True):
        numbers.setdefault(name, []).append(task.number)
    assert all(found == sorted(found) for found in numbers.values())  # from start to end
    for place in range(len(order)):  # begun, and not at its end
        open_files = {n for n in written[: place + 1] if n in written[place:]}
        assert len(open_files) <= together
    if together == 1:
        assert [file.name for file in plan.files] == list(dict.fromkeys(written))


@pytest.mark.parametrize(("together", "expected"), [(1, 1), (4, 3), (8, 5), (9, 9), (100, 9)])
def test_as_many_files_in_each_round(together, expected):
    """Nine files by eight threads are five and then four: not eight, and one that all wait for."""
    tensors = [[OutputTensor(f"{f}.{t}", torch.int8, (4,), "")] for f in range(9) for t in range(3)]
    files = assign_files(tensors, max_bytes=12)
    tasks = [Task(0, (), tensor, 4, 4) for (tensor,) in tensors]
    order = [task.outputs[0].name[0] for task in spread_over_files(tasks, files, together=together)]
    assert next(i for i, name in enumerate(order) if name in order[:i]) == expected
    assert len(order) == 27


def test_tasks_without_bytes(folder):
    empty = [replace(task, source_bytes=0) for task in tasks_of(plan_of(folder, "W8A8"))]
    assert [len(share_of(empty, rank, 2)) for rank in range(2)] == [len(empty), 0]


# -- what makes two runs the same ------------------------------------------------------------------


def _digest(folder, scheme="W4A16:g32", rules=(), **options):
    return identity_of(plan_of(folder, scheme, rules, **options)).digest


def test_the_same_command_is_the_same_conversion(folder, monkeypatch):
    usual = _digest(folder)
    assert _digest(folder) == usual
    monkeypatch.chdir(folder.parent)
    assert _digest(folder.relative_to(folder.parent)) == usual
    assert "32" in identity_of(plan_of(folder, "W4A16:g32")).summary


def test_other_commands_are_other_conversions(folder):
    digests = [
        _digest(folder),
        _digest(folder, "W4A16:g64"),
        _digest(folder, "W4A16_ASYM:g32"),
        _digest(folder, rules=[f"{LAYER}.=W8A16"]),
        _digest(folder, rules=[f"{LAYER}.mlp.up_proj=keep", f"{LAYER}.mlp.gate_proj=keep"]),
        _digest(folder, max_shard_bytes=20_000),
        _digest(folder, dtype=torch.float16),
        _digest(folder, "dense", lossless=True),
        _digest(folder, "dense"),
        _digest(folder, on_split="keep"),
        _digest(folder, "W4A16:g32", target=target_named("gptq")),
    ]
    assert len(set(digests)) == len(digests)


def test_a_changed_source_is_another_conversion(folder, monkeypatch):
    usual, file = _digest(folder), folder / "model.safetensors"
    state = file.stat()
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    touched = _digest(folder)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert _digest(folder) == usual
    made = load_file(file)
    tiny.save_file({k: t.clone() for k, t in made.items() if "up_proj" not in k}, file)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    fewer = _digest(folder)
    tiny.save_file(made, file, metadata={"format": "pt"})
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "rms_norm_eps": 1e-6}))
    other_config = _digest(folder)
    monkeypatch.setattr(module, "__version__", "0.0.0")
    assert len({usual, touched, fewer, other_config, _digest(folder)}) == 5


def test_a_source_that_vanished(folder):
    plan = plan_of(folder, "W8A8")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read `.*model.safetensors`: No such file"):
        identity_of(plan)


def test_memory_of_tasks(folder):
    """Plain weights go through in chunks; what is encoded as a whole needs all of it at once."""
    plan = plan_of(folder, "W4A16:g32", target=target_named("gptq"))
    row = next(row for row in plan.rows if row.scheme is not None)
    assert plan.target.row_step(row.scheme) is None
    elements = row.shape[0] * row.shape[1]
    assert module.working_bytes(plan, row) >= 4 * elements + row.source_bytes
    huge = replace(row, shape=(row.shape[0] * 1000, row.shape[1]))
    assert module.working_bytes(plan, huge) > 900 * 4 * elements
    chunked = plan_of(folder, "W8A8")
    row = next(row for row in chunked.rows if row.scheme is not None)
    region = replace(row.region, rows=row.region.rows * 10**6)
    row = replace(row, region=region, shape=(region.rows, region.columns))
    assert module.working_bytes(chunked, row) <= 1 << 25
