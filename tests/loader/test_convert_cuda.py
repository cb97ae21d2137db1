"""A conversion on a GPU writes the bytes of one on a CPU."""

from collections import Counter

import pytest
import tiny_checkpoints as tiny
import torch
from converting import plan_of
from safetensors.torch import save_file

from quantload.loader.convert import run_plan
from quantload.loader.row_reader import RowReader
from quantload.loader.stats import InputStatistics, read_stats
from quantload.loader.workers import Resources
from quantload.progress import Silent
from quantload.quant.scheme import PRESETS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", [name for name, scheme in PRESETS.items() if scheme.weight])
def test_bytes_do_not_depend_on_the_device(tmp_path, name, dtype):
    content = tiny.config(hidden=256, intermediate=384)
    made = {key: tensor.to(dtype) for key, tensor in tiny.tensors(content).items()}
    folder = tiny.write(tmp_path / "in", content, made)
    outputs = []
    for device in ("cpu", "cuda"):
        plan = plan_of(folder, name, stats=InputStatistics(stated=12.5))
        out = tmp_path / device
        run_plan(plan, out, Silent(), Resources(device=torch.device(device), workers=2))
        outputs.append({file.name: file.read_bytes() for file in out.iterdir()})
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("has_room", [True, False])
def test_weights_of_a_group_are_read_once_if_there_is_room(tmp_path, monkeypatch, has_room):
    """NVFP4 looks at all members of a group before it rounds the first."""
    content = tiny.config(hidden=256, intermediate=384)
    folder = tiny.write(tmp_path / "in", content, tiny.tensors(content))
    expected = run_plan(plan_of(folder, "NVFP4A16"), tmp_path / "cpu", Silent())
    read = Counter()
    read_rows = RowReader.read_rows

    def counted(self, entry, *where):
        read[entry.name] += 1
        return read_rows(self, entry, *where)

    monkeypatch.setattr(RowReader, "read_rows", counted)
    if not has_room:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 20, 1 << 30))
    resources = Resources(device=torch.device("cuda"), workers=2)
    found = run_plan(plan_of(folder, "NVFP4A16"), tmp_path / "cuda", Silent(), resources)
    assert set(read.values()) == {1 if has_room else 2}
    for file in expected.iterdir():
        assert (found / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize("format_name", ["fp8", "gptq", "awq", "modelopt"])
def test_bytes_of_other_formats(tmp_path, format_name):
    from quantload.loader.formats.targets import target_named

    scheme = {"fp8": "FP8_BLOCK", "gptq": "W4A16", "awq": "W4A16_ASYM", "modelopt": "NVFP4A16"}
    content = tiny.config(hidden=256, intermediate=384)
    folder = tiny.write(tmp_path / "in", content, tiny.tensors(content))
    outputs = []
    for device in ("cpu", "cuda"):
        plan = plan_of(folder, scheme[format_name], target=target_named(format_name))
        out = tmp_path / device
        run_plan(plan, out, Silent(), Resources(device=torch.device(device), workers=2))
        outputs.append({file.name: file.read_bytes() for file in out.iterdir()})
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "name", ["W3A16", "W4A16", "W4A16_ASYM", "W8A8", "NVFP4A16", "MXFP4A16", "FP8_BLOCK"]
)
@pytest.mark.parametrize("is_weighed", [False, True])
def test_bytes_of_a_search(tmp_path, name, dtype, is_weighed):
    content = tiny.config(hidden=256, intermediate=384)
    made = {key: tensor.to(dtype) for key, tensor in tiny.tensors(content).items()}
    folder = tiny.write(tmp_path / "in", content, made)
    options = {"observer": "search"}
    if is_weighed:
        rows = [row for row in plan_of(folder, name).rows if row.scheme]
        squares = {
            f"{row.module}.input_mean_square": torch.rand(row.shape[1]) ** 6 * 1e3 for row in rows
        }
        save_file(squares, tmp_path / "stats.safetensors")
        options["stats"] = read_stats(tmp_path / "stats.safetensors")
    outputs = []
    for device in ("cpu", "cuda"):
        plan = plan_of(folder, name, **options)
        assert all((row.mean_square is not None) == is_weighed for row in plan.rows if row.scheme)
        out = tmp_path / device
        run_plan(plan, out, Silent(), Resources(device=torch.device(device), workers=2))
        outputs.append({file.name: file.read_bytes() for file in out.iterdir()})
    assert outputs[0] == outputs[1]
