"""Every error class: raised through what users call, and what its text says.

Form: what is wrong, found and expected values in backticks, where; then a blank line and a hint.
"""

import inspect
import json

import pytest
import tiny_checkpoints as tiny
import torch
from converting import converted, opened, plan_of
from safetensors.torch import load_file

import quantload
from quantload import errors
from quantload.layers.meta_model import build_on_meta
from quantload.loader.open import open_checkpoint
from quantload.quant.grid import INT8
from quantload.quant.qtensor import Evaluation, QuantTensor

DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture
def folder(tmp_path):
    return tiny.llama(tmp_path / "source")


def _retold(folder, change):
    """Change config.json."""
    content = json.loads((folder / "config.json").read_text())
    change(content)
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def _edited(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    tiny.save_file(tensors, folder / "model.safetensors")
    return folder


def header_error(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    quantload.inspect(folder)


def missing_tensor(folder):
    quantized = converted(folder, folder.with_name("q"), "W4A16:g32")
    quantload.inspect(_edited(quantized, lambda tensors: tensors.pop(f"{DOWN}.weight_scale")))


def unexpected_tensor(folder):
    quantload.load(
        _edited(folder, lambda tensors: tensors.update({"model.extra.weight": torch.zeros(2, 2)}))
    )


def non_finite_weight(folder):
    _edited(folder, lambda tensors: tensors[f"{DOWN}.weight"].fill_(float("nan")))
    quantload.convert(folder, folder.with_name("out"), "W8A8")


def source_not_found(folder):
    quantload.inspect(folder / "nothing")


def unknown_format(folder):
    quantload.inspect(
        _retold(folder, lambda c: c.update(quantization_config={"quant_method": "eetq"}))
    )


def unsupported_variant(folder):
    quantized = converted(folder, folder.with_name("q"), "W4A16:g32")
    quantload.inspect(
        _retold(quantized, lambda c: c["quantization_config"].update(transform_config={"u": 1}))
    )


def format_mismatch(folder):
    quantized = converted(folder, folder.with_name("q"), "W4A16:g32")

    def eight_bits(content):
        content["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 8

    quantload.inspect(_retold(quantized, eight_bits))


def unknown_scheme(folder):
    quantload.plan(folder, "W4A61")


def wrong_type(folder):
    quantload.load(folder, parallel=2)


def unused_rule(folder):
    quantload.plan(folder, "W8A8", rules=["model.layer.0.=keep"])


def rule_splits_stack(folder):
    quantload.plan(folder, "W8A8", rules={"model.layers.0.mlp.up_proj": "keep"})


def output_error(folder):
    quantload.convert(folder, folder, "W8A8")


def shape_error(folder):
    codes = torch.zeros(2, 4, dtype=torch.int8)
    scale = torch.ones(3, 1)
    QuantTensor(
        grid=INT8, codes=codes, scale=scale, block=(1, 4), evaluation=Evaluation(torch.float32)
    )


def model_error(folder):
    build_on_meta({"model_type": "no_such_model"}, folder, dtype=torch.bfloat16)


def config_error(folder):
    quantload.plan(folder, "W4A16:g33")


def checkpoint_error(folder):
    (folder / "config.json").unlink()
    open_checkpoint(folder)


RAISED = [
    (header_error, errors.HeaderError, "not a sound safetensors file: ", "download it again"),
    (missing_tensor, errors.MissingTensor, f"tensor `{DOWN}.weight_scale` is missing in", ""),
    (unexpected_tensor, errors.UnexpectedTensor, "model.extra", ""),
    (
        non_finite_weight,
        errors.NonFiniteWeight,
        f"weight of `{DOWN}` cannot be quantized",
        "keep it with",
    ),
    (source_not_found, errors.SourceNotFound, "no such folder or file: `", "a hub id has the form"),
    (
        unknown_format,
        errors.UnknownFormat,
        "quantization format `eetq` (EETQ int8 in a kernel's layout) is not read",
        "start from the full-precision model",
    ),
    (
        unsupported_variant,
        errors.UnsupportedVariant,
        "with a `transform_config` are not read",
        "convert",
    ),
    (
        format_mismatch,
        errors.FormatMismatch,
        "for a 8-bit weight",
        "config group `group_0` says 8 bits",
    ),
    (unknown_scheme, errors.UnknownScheme, "no such scheme: `W4A61`", "did you mean `W4A16`?"),
    (wrong_type, errors.WrongType, "`parallel` is `2` of type `int`", "Parallel.from_environment"),
    (unused_rule, errors.UnusedRule, "1 rule matches nothing: `model.layer.0.`", "did you mean"),
    (rule_splits_stack, errors.RuleSplitsStack, "rules split the fused group", "give all members"),
    (output_error, errors.OutputError, "output folder `", "give a new name"),
    (shape_error, errors.ShapeError, "`scale` has shape `(3, 1)`, expected `(2, 1)`", ""),
    (model_error, errors.ModelError, "no_such_model", ""),
    (config_error, errors.ConfigError, "group size `33` in `W4A16:g33`", "use 32, 64 or 128"),
    (checkpoint_error, errors.CheckpointError, "`config.json` is missing in `", ""),
]
# What other test files raise through the public interface, and the bases that are never raised.
ELSEWHERE = {
    *("QuantloadError", "FormatError", "AccuracyError", "NotComparable", "NotLossless"),
    *("WorkerError", "UploadError", "BaselineError"),
}


@pytest.mark.parametrize(
    ("cause", "kind", "message", "hint"), RAISED, ids=lambda v: getattr(v, "__name__", "")
)
def test_errors_that_users_meet(folder, cause, kind, message, hint):
    with pytest.raises(kind) as caught:
        cause(folder)
    error = caught.value
    assert type(error) is kind
    assert message in error.message
    assert hint in error.hint
    assert bool(hint) <= bool(error.hint)
    assert str(error) == (f"{error.message}\n\nhint: {error.hint}" if error.hint else error.message)
    first = error.message.splitlines()[0]
    assert "`" in error.message
    assert not first.endswith(".")
    assert "invalid" not in first.lower()


def test_every_class_is_raised():
    classes = {
        n for n, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__
    }
    assert classes == {kind.__name__ for _, kind, _, _ in RAISED} | ELSEWHERE


def test_the_tree_in_the_docstring_is_the_tree():
    lines = [line for line in errors.__doc__.splitlines() if "+--" in line]
    depths = {}
    for line in lines:
        kind = line.split("+-- ")[1].split()[0]
        depths[kind] = line.index("+--") // 4
    depths["QuantloadError"] = 0
    for kind, depth in depths.items():
        found = [c for c in getattr(errors, kind).__mro__ if c.__module__ == errors.__name__]
        assert len(found) == depth + 1, kind


def test_mistakes_of_users_are_also_builtin_errors():
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.CheckpointError, ValueError)
    assert issubclass(errors.OutputError, OSError)
    assert str(errors.OutputError("a", hint="b")) == "a\n\nhint: b"


def test_listed():
    assert errors.listed(["b", "a"]) == "`a`, `b`"
    assert errors.listed(range(8)) == "`0`, `1`, `2`, `3`, `4` and 3 more"
    assert errors.listed([]) == ""


def test_the_source_of_an_error_is_opened_by_public_functions(folder):
    assert opened(folder).format_name == quantload.inspect(folder).format_name == "dense"
    assert plan_of(folder, "W8A8").output_bytes == quantload.plan(folder, "W8A8").output_bytes
