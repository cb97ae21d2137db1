"""Statistics of inputs: reading the file, and which number a module gets."""

import hashlib

import pytest
import torch
from safetensors.torch import save_file

from quantload.errors import (
    CheckpointError,
    ConfigError,
    FormatMismatch,
    HeaderError,
    SourceNotFound,
)
from quantload.loader.stats import (
    InputAbsmax,
    InputStatistics,
    input_absmax_for,
    read_stats,
)
from quantload.quant.activation import NVFP4_ABSMAX
from quantload.quant.scheme import PRESETS

FP8, NVFP4 = PRESETS["FP8"], PRESETS["NVFP4"]


def written(folder, **tensors):
    file = folder / "stats.safetensors"
    save_file({f"{name}.input_absmax": tensor for name, tensor in tensors.items()}, file)
    return file


def test_numbers_of_a_file(tmp_path):
    file = written(tmp_path, a=torch.tensor([3.5]), b=torch.tensor(0.0))
    stats = read_stats(file, stated=9.0)
    assert stats == InputStatistics(
        absmax={"a": 3.5, "b": 0.0},
        stated=9.0,
        file=file,
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
    )
    assert input_absmax_for(FP8, "a", stats) == InputAbsmax(3.5, f"`{file}`")
    assert input_absmax_for(NVFP4, "b", stats) == InputAbsmax(0.0, f"`{file}`")
    assert input_absmax_for(FP8, "c", stats) == InputAbsmax(9.0, "stated")


@pytest.mark.parametrize("name", ["W4A16", "W8A8", "FP8_DYNAMIC", "MXFP4", "NVFP4A16", "dense"])
def test_other_schemes_have_no_number(name):
    stats = InputStatistics(absmax={"a": 3.0}, stated=1.0)
    assert input_absmax_for(PRESETS[name], "a", stats) is None


def test_members_that_see_one_input_get_its_largest():
    stats = InputStatistics(absmax={"q": 2.0, "v": 5.0})
    for module in ("q", "k", "v"):
        assert input_absmax_for(FP8, module, stats, members=("q", "k", "v")).value == 5.0


def test_nvfp4_has_a_default_and_says_so():
    absmax = input_absmax_for(NVFP4, "a")
    assert absmax == InputAbsmax(NVFP4_ABSMAX, "a default without data", is_default=True)


def test_fixed_scales_have_no_default(tmp_path):
    with pytest.raises(ConfigError) as error:
        input_absmax_for(FP8, "a")
    assert str(error.value) == (
        "scheme `FP8` has a fixed scale for the input of `a`, and nothing says how large that "
        "input gets\n\nhint: give statistics with `--stats FILE`, or the largest value with "
        "`--input-absmax X`; `FP8_DYNAMIC` needs neither"
    )
    file = written(tmp_path, b=torch.tensor([1.0]))
    with pytest.raises(ConfigError) as error:
        input_absmax_for(FP8, "a", read_stats(file))
    assert str(error.value) == (
        f"tensor `a.input_absmax` is missing in `{file}`, and scheme `FP8` has a fixed scale for "
        "its input\n\nhint: collect statistics of all layers, or give `--input-absmax X` for "
        "those left out"
    )


def test_mean_squares_of_a_file(tmp_path):
    file = tmp_path / "stats.safetensors"
    values = torch.tensor([0.5, 0.0, 3.0])
    made = {"a.input_mean_square": values, "b.input_mean_square": torch.zeros(2)}
    save_file({**made, "a.input_absmax": torch.ones(1), "a.hessian": torch.ones(3, 3)}, file)
    stats = read_stats(file)
    assert torch.equal(stats.mean_square["a"].read(), values)
    assert {name: found.is_zero for name, found in stats.mean_square.items()} == {
        "a": False,
        "b": True,
    }
    assert stats.absmax == {"a": 1.0}
    assert stats.others == ("a.hessian",)


def test_mean_squares_that_change_after_they_were_checked(tmp_path):
    file = tmp_path / "stats.safetensors"
    save_file({"a.input_mean_square": torch.ones(3)}, file)
    found = read_stats(file).mean_square["a"]
    save_file({"a.input_mean_square": torch.tensor([1.0, 1.0, 2.0])}, file)
    with pytest.raises(CheckpointError, match=r"`a\.input_mean_square` has changed since the plan"):
        found.read()


# -- files that are wrong ----------------------------------------------------------------------


def test_there_is_no_file(tmp_path):
    with pytest.raises(SourceNotFound, match=r"no file `.*stats\.safetensors`, expected"):
        read_stats(tmp_path / "stats.safetensors")


def test_a_damaged_file(tmp_path):
    file = written(tmp_path, a=torch.tensor([1.0]))
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(HeaderError, match="not a sound safetensors file"):
        read_stats(file)


def test_a_file_of_other_tensors(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"a.weight": torch.ones(1)}, file)
    with pytest.raises(FormatMismatch) as error:
        read_stats(file)
    assert str(error.value) == (
        f"`{file}` has no tensors `<module>.input_absmax` or `<module>.input_mean_square`, found "
        "`a.weight`\n\nhint: statistics of inputs are float32 tensors, [1] and [input features] of "
        "each layer"
    )


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(1, dtype=torch.float64), r"is `torch\.float64` of shape `\(1,\)`, expected"),
        (torch.ones(2), r"is `torch\.float32` of shape `\(2,\)`, expected"),
        (torch.tensor([torch.nan]), "is `nan`, expected a finite number that is not negative"),
        (torch.tensor([-1.0]), r"is `-1\.0`, expected a finite number that is not negative"),
    ],
)
def test_numbers_that_make_no_sense(tmp_path, tensor, message):
    with pytest.raises(FormatMismatch, match=rf"tensor `a\.input_absmax` {message}"):
        read_stats(written(tmp_path, a=tensor))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(2, dtype=torch.float64), r"is `torch\.float64` of shape `\(2,\)`, expected"),
        (torch.ones(2, 1), r"is `torch\.float32` of shape `\(2, 1\)`, expected `torch\.float32`"),
        (torch.tensor(1.0), r"is `torch\.float32` of shape `\(\)`, expected `torch\.float32`"),
        (torch.tensor([1.0, torch.nan]), "is `nan` at feature 1, expected finite numbers"),
        (torch.tensor([torch.inf, 1.0]), "is `inf` at feature 0, expected finite numbers"),
        (torch.tensor([1.0, 1.0, -2.0]), r"is `-2\.0` at feature 2, expected finite numbers"),
    ],
)
def test_mean_squares_that_make_no_sense(tmp_path, tensor, message):
    file = tmp_path / "stats.safetensors"
    save_file({"a.input_mean_square": tensor}, file)
    with pytest.raises(FormatMismatch, match=rf"tensor `a\.input_mean_square` {message}") as error:
        read_stats(file)
    assert f"in `{file}`" in str(error.value)
