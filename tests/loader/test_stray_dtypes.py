"""One tensor in the other 16-bit float is told; usual mixtures of dtypes are not."""

import pytest
import tiny_checkpoints as tiny
import torch
from truth import CHECKPOINTS

from quantload.errors import QuantloadError
from quantload.loader.formats import open_source
from quantload.loader.open import open_checkpoint

NORM = "model.layers.1.input_layernorm.weight"
STRAY = "tensors of the kind are"


def warnings_of(folder):
    return [line for line in open_source(open_checkpoint(folder)).warnings if STRAY in line]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [NORM, "lm_head.weight"])
def test_bytes_of_one_read_as_the_other(tmp_path, dtype, name):
    content = tiny.config(dtype=dtype)
    made = tiny.tensors(content)
    assert warnings_of(tiny.write(tmp_path / "sound", content, made)) == []
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    made[name] = made[name].view(other)
    (line,) = warnings_of(tiny.write(tmp_path / "stray", content, made))
    assert line.startswith(f"`{name}`: `{other}`, but 20 tensors of the kind are `{dtype}`")


def test_usual_mixtures_are_not_told(tmp_path):
    content = tiny.config()
    made = tiny.tensors(content)
    assert warnings_of(tiny.write(tmp_path / "three", content, tiny.mixed(made))) == []
    wide = {name: t.float() if "norm" in name else t for name, t in made.items()}
    assert warnings_of(tiny.write(tmp_path / "wide", content, wide)) == []


@pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason="no shared checkpoints")
def test_no_tool_writes_such_a_file():
    read = 0
    for folder in sorted(CHECKPOINTS.glob("*/*/")):
        try:
            assert warnings_of(folder) == [], folder
            read += 1
        except QuantloadError:
            continue
    assert read > 100
