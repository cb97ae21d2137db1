"""Float16 weights that are too small for float16 scales are refused when they are written."""

import pytest
import tiny_checkpoints as tiny
import torch
from converting import plan_of
from safetensors.torch import load_file

from quantload.accuracy.verify import verify_sources
from quantload.errors import ConfigError
from quantload.loader.convert import run_plan
from quantload.loader.formats import open_source
from quantload.loader.open import open_checkpoint
from quantload.progress import Silent

MODULE = "model.layers.0.mlp.down_proj"


def small(folder, dtype, size, rows=slice(None)):
    """A llama of which one weight, or some of its rows, is small."""
    tiny.llama(folder, dtype=dtype)
    tensors = load_file(folder / "model.safetensors")
    weight = tensors[f"{MODULE}.weight"]
    torch.manual_seed(0)
    weight[rows] = (torch.randn(weight.shape) * size).to(dtype)[rows]
    tiny.save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("scheme", "size", "problem"),
    [
        ("W8A16:g32", 1e-5, "noise of .+ rows is more than 10 times"),
        ("W8A16:g32", 6e-8, "SQNR is"),
        ("W4A16:g32", 6e-8, "SQNR is"),
        ("FP8_DYNAMIC", 1e-6, "SQNR is"),
        ("MXFP4A16", 1e-5, "SQNR is"),
        ("NVFP4A16", 6e-8, "noise"),
    ],
)
def test_a_small_weight_is_refused_by_name(tmp_path, scheme, size, problem):
    folder = small(tmp_path / "in", torch.float16, size)
    plan = plan_of(folder, scheme)
    with pytest.raises(ConfigError, match=rf"`{MODULE}` cannot be quantized .+{problem}") as caught:
        run_plan(plan, tmp_path / "out", Silent())
    assert "--dtype bfloat16" in caught.value.hint
    assert sorted(tmp_path.iterdir()) == [folder]
    held = run_plan(plan_of(folder, scheme, dtype=torch.bfloat16), tmp_path / "held", Silent())
    assert failures(held, folder) == []


@pytest.mark.parametrize(
    ("dtype", "scheme", "size"),
    [
        (torch.float16, "W4A16:g32", 1e-6),
        (torch.float16, "NVFP4A16", 1e-6),
        (torch.float16, "W8A16:g32", 1e-4),
        (torch.bfloat16, "W8A16:g32", 6e-8),
    ],
)
def test_what_verify_lets_pass_is_written(tmp_path, dtype, scheme, size):
    folder = small(tmp_path / "in", dtype, size)
    assert failures(run_plan(plan_of(folder, scheme), tmp_path / "out", Silent()), folder) == []


def test_rows_that_become_zeros_in_a_sound_weight_are_only_told(tmp_path, caplog):
    folder = small(tmp_path / "in", torch.float16, 6e-8, rows=slice(0, 2))
    output = run_plan(plan_of(folder, "W8A16:g32"), tmp_path / "out", Silent())
    assert f"of `{MODULE}` become zeros" in caplog.text
    assert failures(output, folder) == []


def failures(output, folder):
    output, source = (open_source(open_checkpoint(place)) for place in (output, folder))
    return verify_sources(output, source, Silent(), nearest=True).failures()
