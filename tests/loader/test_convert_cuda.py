"""A conversion on a GPU writes the bytes of one on a CPU."""

import pytest
import tiny_checkpoints as tiny
import torch
from converting import plan_of

from quantload.loader.convert import run_plan
from quantload.loader.stats import InputStatistics
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
