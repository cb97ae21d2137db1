"""Names that wrappers of a model leave in checkpoints: taken off, told, or refused."""

import json
import shutil

import pytest
import tiny_checkpoints as tiny
import tiny_torchao as ao
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import quantload
from quantload.cli import main
from quantload.errors import CheckpointError, UnexpectedTensor
from quantload.loader.wrapper_names import find_wrappers

WRAPPED = {
    "module": ("module.", lambda name: f"module.{name}"),
    "compiled": ("_orig_mod.", lambda name: f"_orig_mod.{name}"),
    "module of compiled": ("_orig_mod.module.", lambda name: f"module._orig_mod.{name}"),
    "compiled module": ("_orig_mod.module.", lambda name: f"_orig_mod.module.{name}"),
    "module twice": ("module.module.", lambda name: f"module.module.{name}"),
    "compiled inside": ("_orig_mod.", lambda name: name.replace("model.", "model._orig_mod.", 1)),
    "compiled layers": (
        "_orig_mod.",
        lambda name: name.replace("layers.0.", "layers.0._orig_mod."),
    ),
    "FSDP": (
        "_fsdp_wrapped_module._checkpoint_wrapped_module.",
        lambda name: (
            "_fsdp_wrapped_module."
            + name.replace("layers.1.", "layers.1._fsdp_wrapped_module._checkpoint_wrapped_module.")
        ),
    ),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A model in full precision, and quantized ones whose configs name modules."""
    made = tmp_path_factory.mktemp("plain")
    folder = tiny.llama(made / "dense")
    rules = {"model.layers.0.mlp.down_proj": "W8A16:channel"}
    quantload.convert(folder, made / "W4A16", "W4A16:g32", rules=rules)
    return made


def wrapped(folder, place, rename, *, config=False):
    """Copy a checkpoint with other names of tensors, and of modules in its quantization config."""
    shutil.copytree(folder, place)
    tensors = load_file(place / "model.safetensors")
    save_file(
        {rename(name): tensor for name, tensor in tensors.items()},
        place / "model.safetensors",
        metadata={"format": "pt"},
    )
    if config:
        content = json.loads((place / "config.json").read_text())
        groups = content["quantization_config"]["config_groups"].values()
        for group in groups:
            group["targets"] = [rename(name) for name in group["targets"]]
        ignored = content["quantization_config"]["ignore"]
        content["quantization_config"]["ignore"] = [rename(name) for name in ignored]
        (place / "config.json").write_text(json.dumps(content))
    return place


def logits(model):
    with torch.no_grad():
        return model(torch.tensor([[1, 5, 9, 40]])).logits


@pytest.mark.parametrize("kind", ["dense", "W4A16"])
@pytest.mark.parametrize("case", WRAPPED)
def test_wrapped_checkpoints_load_as_plain_ones(case, kind, plain, tmp_path, caplog):
    shown, rename = WRAPPED[case]
    folder = wrapped(plain / kind, tmp_path / "wrapped", rename)
    found, expected = quantload.inspect(folder), quantload.inspect(plain / kind)
    assert list(found.checkpoint.tensors) == list(expected.checkpoint.tensors)
    assert {n: w.encoding for n, w in found.weights.items()} == {
        n: w.encoding for n, w in expected.weights.items()
    }
    (warning,) = found.warnings
    assert warning.startswith(f"`{shown}` taken off the names of ")
    model = quantload.load(folder, device="cpu")
    assert torch.equal(logits(model), logits(quantload.load(plain / kind, device="cpu")))
    assert any("taken off" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("case", ["module", "module of compiled", "compiled inside"])
def test_configs_may_name_modules_as_the_files_do(case, plain, tmp_path):
    folder = wrapped(plain / "W4A16", tmp_path / "wrapped", WRAPPED[case][1], config=True)
    found, expected = quantload.inspect(folder), quantload.inspect(plain / "W4A16")
    assert {n: str(w.scheme) for n, w in found.weights.items()} == {
        n: str(w.scheme) for n, w in expected.weights.items()
    }
    assert len(found.warnings) == 1, "every entry of the config matches a module"
    (folder / "quantload-manifest.json").unlink()  # it is of the files before they were changed
    report = quantload.verify(folder, plain / "dense")
    assert all(layer.passed for layer in report.layers)
    assert [problem.split(" with ")[0] for problem in report.failures()] == [
        "its tensors have names"
    ]


@pytest.mark.parametrize("start", ["module.", "_orig_mod.", "module._orig_mod."])
def test_descriptions_in_a_header_are_found_by_plain_names(start, tmp_path):
    """torchao says in the metadata of a file, by the name of the weight, what its parts are."""
    name = "model.layers.0.self_attn.q_proj"
    config = ao.quantization(ao.fqn({f"{start}{name}": ao.INT8, "_default": None}))
    folder = ao.write(tmp_path / "a", {f"{start}{name}.weight": ao.int8()}, config=config)
    found = quantload.inspect(folder)
    assert list(found.weights) == [name]
    plain = ao.write(tmp_path / "b", {f"{name}.weight": ao.int8()})
    expected = quantload.inspect(plain).read_weight(name).dequantize(torch.float32)
    assert torch.equal(found.read_weight(name).dequantize(torch.float32), expected)


def test_what_is_converted_has_plain_names(plain, tmp_path):
    rename = WRAPPED["module of compiled"][1]
    folder = wrapped(plain / "dense", tmp_path / "wrapped", rename)
    done = quantload.convert(folder, tmp_path / "out", "W4A16:g32")
    assert done.report.passed
    other = quantload.convert(plain / "dense", tmp_path / "other", "W4A16:g32")
    name = "model.safetensors"
    assert (done.folder / name).read_bytes() == (other.folder / name).read_bytes()
    assert quantload.compare(folder, plain / "dense").passed


def test_a_saved_state_dict_of_a_compiled_model(tmp_path):
    """The names are those that torch itself makes, in a pickled file."""
    folder = tiny.llama(tmp_path / "source")
    wrapper = torch.compile(quantload.load(folder, device="cpu", fuse=False))
    names = [name for name, _ in wrapper.named_modules()]
    assert any(name.startswith("_orig_mod.model.layers.0") for name in names)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({f"_orig_mod.{n}": t for n, t in tensors.items()}, folder / "pytorch_model.bin")
    assert "taken off the names of" in quantload.inspect(folder).warnings[-1]


def test_a_data_parallel_wrapper_says_module():
    model = nn.ModuleDict({"lm_head": nn.Linear(2, 2)})
    assert find_wrappers(nn.DataParallel(model).state_dict()).shown == "module."


def test_names_of_both_kinds_are_refused(plain, tmp_path):
    tensors = load_file(plain / "dense" / "model.safetensors")
    folder = wrapped(plain / "dense", tmp_path / "wrapped", lambda name: name)
    both = tensors | {f"_orig_mod.{n}": t.clone() for n, t in tensors.items()}
    save_file(both, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="with and without `_orig_mod") as e:
        quantload.inspect(folder)
    assert "`_orig_mod.lm_head.weight`" in e.value.message
    assert "save the model itself" in e.value.hint


def test_module_in_front_of_some_names_stays_and_is_told(plain, tmp_path):
    folder = wrapped(
        plain / "dense", tmp_path / "wrapped", lambda n: f"module.{n}" if "mlp" in n else n
    )
    opened = quantload.inspect(folder)
    assert "module.model.layers.0.mlp.up_proj" in opened.weights
    assert opened.warnings[0].startswith("6 of 21 tensors have names that begin with `module.`")
    with pytest.raises(UnexpectedTensor) as caught:
        quantload.load(folder, device="cpu")
    assert "`module` is what a wrapper of the model leaves in names" in caught.value.hint


def test_module_inside_of_names_is_the_models_own(plain, tmp_path):
    folder = wrapped(
        plain / "dense", tmp_path / "wrapped", lambda n: n.replace("layers.0.", "layers.0.module.")
    )
    assert not quantload.inspect(folder).warnings
    with pytest.raises(UnexpectedTensor) as caught:
        quantload.load(folder, device="cpu")
    assert "save the model itself: `model.module`" in caught.value.hint


@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers"])
def test_doctor_says_that_engines_refuse_them(engine, plain, tmp_path):
    folder = wrapped(plain / "dense", tmp_path / "wrapped", WRAPPED["module"][1])
    found = [f for f in quantload.doctor(folder, engine).findings if f.level == "error"]
    assert [f.rule for f in found] == ["unexpected"]
    assert "`module.`" in found[0].found


def test_the_command_tells_it(plain, tmp_path):
    folder = wrapped(plain / "dense", tmp_path / "wrapped", WRAPPED["compiled"][1])
    done = CliRunner().invoke(main, ["inspect", str(folder)])
    assert done.exit_code == 0, done.output
    assert "warning: `_orig_mod.` taken off the names of 21 tensors" in done.stderr
    assert "_orig_mod" not in done.stdout


NAME = st.lists(st.sampled_from(["model", "layers", "0", "q_proj", "module"]), min_size=1)


@given(names=st.lists(NAME.map(".".join), min_size=1, unique=True), front=st.integers(0, 2))
def test_plain_names_come_back(names, front):
    names = [name for name in names if not name.startswith("module.")] + ["lm_head.weight"]
    marked = [f"{'module.' * front}_orig_mod.{name}" for name in names]
    wrappers = find_wrappers(marked)
    assert [wrappers.taken_off(name) for name in marked] == names
    assert find_wrappers(names).shown == ""


@pytest.mark.parametrize("depth", [1, 2])
def test_a_model_whose_own_name_is_module_keeps_it(depth, tmp_path, caplog):
    """What follows is no name of a model of transformers: the model itself is called so."""
    front = "module." * depth
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "mine", "architectures": ["MineFor"]}')
    weight = torch.randn(32, 32)
    save_file({f"{front}proj.weight": weight}, folder / "model.safetensors")
    model = nn.ModuleDict({"proj": nn.Linear(32, 32, bias=False)})
    for _ in range(depth):
        model = nn.ModuleDict({"module": model})
    quantload.load_weights(model, folder)
    assert torch.equal(model.get_parameter(f"{front}proj.weight"), weight)
    quantload.convert(folder, tmp_path / "out", "W8A16:g32")
    made = quantload.inspect(tmp_path / "out").checkpoint
    assert {name.rsplit(".", 1)[0] for name in made.tensors} == {f"{front}proj"}
    warnings = quantload.inspect(folder).warnings
    assert any("what follows is no name" in warning for warning in warnings)


def test_an_error_says_what_was_taken_off(plain, tmp_path):
    folder = wrapped(plain / "dense", tmp_path / "w", lambda name: f"module.{name}")
    with pytest.raises(UnexpectedTensor, match=r"no place") as error:
        quantload.load_weights(nn.ModuleDict({"module": nn.Linear(2, 2)}), folder)
    assert "`module.` was taken off all names" in error.value.hint


def test_an_output_with_wrapped_names_fails_verification(plain, tmp_path):
    out = wrapped(plain / "W4A16", tmp_path / "w", lambda name: f"module.{name}")
    (out / "quantload-manifest.json").unlink(missing_ok=True)
    report = quantload.verify(out, plain / "dense")
    assert not report.passed
    assert any("names with `module.`" in problem for problem in report.failures())


def test_verification_and_comparison_tell_of_wrapped_names(plain, tmp_path, caplog):
    source = wrapped(plain / "dense", tmp_path / "s", lambda name: f"module.{name}")
    assert quantload.verify(plain / "W4A16", source).passed
    assert "`module.` taken off the names of its tensors" in caplog.text
    caplog.clear()
    quantload.compare(plain / "dense", source, tier="structure")
    assert "`module.` taken off the names of its tensors" in caplog.text
