"""Static inputs: the number of each layer comes from statistics, the user, or a default."""

import pytest
import tiny_checkpoints as tiny
import torch
from click.testing import CliRunner
from converting import converted, plan_of, rows_of
from safetensors.torch import load_file, save_file

from quantload.cli import main
from quantload.errors import ConfigError
from quantload.loader.stats import InputStatistics, read_stats

QKV = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture
def folder(tmp_path):
    return tiny.llama(tmp_path / "source")


def test_fp8_takes_the_largest_of_a_fused_group(tmp_path, folder):
    modules = [row.module for row in plan_of(folder, "W8A8").rows if row.scheme]
    absmax = {module: torch.tensor([8.0]) for module in modules} | {QKV[1]: torch.tensor([28.0])}
    absmax["of.another.model"] = torch.tensor([1.0])
    file = tmp_path / "stats.safetensors"
    save_file({f"{module}.input_absmax": value for module, value in absmax.items()}, file)
    plan = plan_of(folder, "FP8", stats=read_stats(file))
    assert [w for w in plan.warnings if "is used by no layer: `of.another.model`" in w]
    out = converted(folder, tmp_path / "out", "FP8", stats=read_stats(file))
    written = load_file(out / "model.safetensors")
    for module in modules:
        expected = torch.tensor([28.0 if module in QKV else 8.0]).bfloat16() / 448
        assert torch.equal(written[f"{module}.input_scale"], expected), module
        assert written[f"{module}.weight_scale"].shape == (1,)


def test_fp8_without_a_number_is_refused(folder):
    with pytest.raises(ConfigError, match="nothing says how large that input gets"):
        plan_of(folder, "FP8")


def test_nvfp4_has_a_default_that_is_told(tmp_path, folder):
    plan = plan_of(folder, "NVFP4")
    assert [w for w in plan.warnings if "covered up to 2688, a default without data" in w]
    out = converted(folder, tmp_path / "out", "NVFP4")
    written = load_file(out / "model.safetensors")
    assert written[f"{DOWN}.input_global_scale"].tolist() == [1.0]
    stated = plan_of(folder, "NVFP4", stats=InputStatistics(stated=448.0))
    assert not [w for w in stated.warnings if "default" in w]
    assert rows_of(stated)[DOWN].input_absmax.value == 448.0


def test_the_command_line(tmp_path, folder):
    command = ["convert", str(folder), str(tmp_path / "out"), "--scheme", "FP8", "-q"]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 2
    assert "--input-absmax X" in done.output
    done = CliRunner().invoke(main, [*command, "--input-absmax", "56"])
    assert done.exit_code == 0, done.output
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written[f"{DOWN}.input_scale"].tolist() == [0.125]
