"""What users pass wrongly to public functions: refused by the name of the argument, with a hint."""

import json
import os

import numpy as np
import pytest
import tiny_checkpoints as tiny
import torch
from click.testing import CliRunner
from torch import nn

import quantload
from quantload import api, api_bench, arguments
from quantload.accuracy.baseline_file import read_baseline
from quantload.api_allocate import allocate_schemes
from quantload.api_baseline import check_baseline, write_baseline
from quantload.api_bisect import bisect
from quantload.cli import main
from quantload.errors import ConfigError, QuantloadError, WrongType
from quantload.layers.attention import use_attention
from quantload.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from quantload.layers.fast_paths import explain_fast_paths
from quantload.layers.parallel_linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from quantload.layers.registry import unregister_model
from quantload.loader.plan import PlanOptions
from quantload.loader.workers import Resources
from quantload.quant.grid import INT8
from quantload.quant.qtensor import Evaluation, QuantTensor

IDS = [[1, 2, 3], [4, 5, 6]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.llama(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def model(folder):
    return quantload.load(folder, device="cpu")


def refused(call, *args, **options):
    """The error of a call."""
    with pytest.raises(QuantloadError) as caught:
        call(*args, **options)
    return caught.value


# -- paths -----------------------------------------------------------------------------------------

OPENING = {
    "load": ("source", lambda x, f, out: quantload.load(x, device="cpu")),
    "inspect": ("source", lambda x, f, out: quantload.inspect(x)),
    "plan": ("source", lambda x, f, out: quantload.plan(x, "W4A16:g32")),
    "convert": ("source", lambda x, f, out: quantload.convert(x, out, "W4A16:g32")),
    "verify output": ("output", lambda x, f, out: quantload.verify(x, f)),
    "verify source": ("source", lambda x, f, out: quantload.verify(f, x)),
    "compare reference": ("reference", lambda x, f, out: quantload.compare(x, f)),
    "compare candidate": ("candidate", lambda x, f, out: quantload.compare(f, x)),
    "doctor": ("checkpoint", lambda x, f, out: quantload.doctor(x, "vllm")),
    "load_tokenizer": ("source", lambda x, f, out: quantload.load_tokenizer(x)),
    "load_weights": ("source", lambda x, f, out: quantload.load_weights(nn.Linear(2, 2), x)),
    "stats": ("source", lambda x, f, out: quantload.stats(x, out, sequences=IDS)),
    "bisect": ("reference", lambda x, f, out: bisect(x, f, sequences=IDS, device="cpu")),
    "allocate": (
        "source",
        lambda x, f, out: allocate_schemes(x, bits=6, schemes=["W4A16", "keep"], sequences=IDS),
    ),
    "baseline": ("reference", lambda x, f, out: write_baseline(x, f, out)),
}


@pytest.mark.parametrize("wrong", [None, 3, True, ["a"], b"model", {"a": 1}], ids=repr)
@pytest.mark.parametrize("name", OPENING)
def test_what_names_no_checkpoint(name, wrong, folder, tmp_path):
    argument, call = OPENING[name]
    error = refused(call, wrong, folder, tmp_path / "out")
    assert type(error) is WrongType
    assert error.message.startswith(f"`{argument}` is ")
    assert "expected a folder, a GGUF file or a hub id" in error.message
    assert error.hint


def test_a_loaded_model_in_place_of_a_path(folder, model):
    error = refused(quantload.load, model)
    assert "of type `LlamaForCausalLM`" in error.message
    assert "give what it was loaded from" in error.hint
    assert "`cpu`" not in refused(quantload.generate, None, [[1]]).message


def test_what_was_opened_is_taken_where_paths_are(folder, tmp_path):
    opened = quantload.inspect(folder)
    assert quantload.compare(opened, opened).passed
    done = quantload.convert(folder, tmp_path / "out", "W8A16:channel", verify_output=False)
    assert quantload.verify(quantload.inspect(done.folder), opened).passed
    assert "opened" in refused(quantload.inspect, opened).hint
    assert "api.execute" in refused(quantload.convert, done.plan, tmp_path / "b", None).hint


OUTPUTS = {
    "convert": ("output", lambda x, f: quantload.convert(f, x, "W4A16:g32")),
    "execute": ("output", lambda x, f: api.execute(quantload.plan(f, "W4A16:g32"), x)),
    "stats": ("output", lambda x, f: quantload.stats(f, x, sequences=IDS)),
    "write_baseline": ("file", lambda x, f: write_baseline(f, f, x)),
    "check_baseline": ("file", lambda x, f: check_baseline(f, x)),
}


@pytest.mark.parametrize("wrong", [None, 3, ["a"], b"out", "", " "], ids=repr)
@pytest.mark.parametrize("name", OUTPUTS)
def test_what_names_no_place(name, wrong, folder):
    argument, call = OUTPUTS[name]
    assert refused(call, wrong, folder).message.startswith(f"`{argument}` is ")


# -- devices, dtypes, processes --------------------------------------------------------------------

RUNNING = {
    "load": lambda f, out, **o: quantload.load(f, **o),
    "compare": lambda f, out, **o: quantload.compare(f, f, sequences=IDS, **o),
    "stats": lambda f, out, **o: quantload.stats(f, out, sequences=IDS, **o),
    "bisect": lambda f, out, **o: bisect(f, f, sequences=IDS, **o),
    "allocate": lambda f, out, **o: allocate_schemes(
        f, bits=6, schemes=["W4A16", "keep"], sequences=IDS, **o
    ),
    "baseline": lambda f, out, **o: write_baseline(f, f, out, sequences=IDS, **o),
}
DEVICES = ["meta", "gpu", "", "mps", torch.device("meta"), 3, -1, ["cpu"], False]
DTYPES = ["bf16", "float8", "", torch.int8, torch.float8_e4m3fn, 16, [torch.float16], float]


@pytest.mark.parametrize("wrong", DEVICES, ids=repr)
@pytest.mark.parametrize("name", RUNNING)
def test_what_is_no_device(name, wrong, folder, tmp_path):
    error = refused(RUNNING[name], folder, tmp_path / "out", device=wrong)
    assert "expected `cpu`, `cuda` or `cuda:N`" in error.message
    assert error.hint


def test_a_device_that_is_not_here(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "found 2 CUDA devices" in refused(quantload.load, folder, device="cuda:2").message
    assert "`cuda:1`" in refused(quantload.load, folder, device=1).hint


@pytest.mark.parametrize("wrong", DTYPES, ids=repr)
@pytest.mark.parametrize("name", RUNNING)
def test_what_is_no_dtype(name, wrong, folder, tmp_path):
    error = refused(RUNNING[name], folder, tmp_path / "out", device="cpu", dtype=wrong)
    assert "dtype" in error.message
    assert "expected" in error.message
    assert error.hint


def test_short_names_of_dtypes_are_told_the_long_one(folder):
    for short, name in {"bf16": "bfloat16", "half": "float16", "fp32": "float32"}.items():
        assert refused(quantload.load, folder, dtype=short).hint == f"did you mean `{name}`?"


@pytest.mark.parametrize("name", [n for n in RUNNING if n != "allocate"])
def test_dtypes_that_are_taken(name, folder, tmp_path):
    for number, dtype in enumerate(("auto", "torch.bfloat16", torch.float32)):
        assert RUNNING[name](folder, tmp_path / f"{number}", device="cpu", dtype=dtype) is not None


def test_auto_is_the_dtype_of_the_checkpoint(tmp_path):
    for name, dtype in (("bfloat16", torch.bfloat16), ("torch.float16", torch.float16)):
        for key in ("dtype", "torch_dtype"):
            made = tiny.llama(tmp_path / f"{name}-{key}")
            content = json.loads((made / "config.json").read_text())
            del content["dtype"]
            (made / "config.json").write_text(json.dumps({**content, key: name}))
            assert quantload.load(made, device="cpu", dtype="auto").dtype == dtype
            assert quantload.load(made, device="cpu").dtype == dtype


@pytest.mark.parametrize("wrong", [2, "tp", (2, 2), True, 0], ids=repr)
def test_what_is_no_parallel(wrong, folder):
    error = refused(quantload.load, folder, parallel=wrong)
    assert error.message.startswith("`parallel` is ")
    assert f"tp={2 if wrong == 2 else 'N'}" in error.hint


PARALLEL = [
    *({"tp_size": "2"}, {"tp_size": 1.5}, {"tp_rank": None}, {"pp_size": True}, {"device": "x"}),
]


@pytest.mark.parametrize("wrong", PARALLEL, ids=repr)
def test_parallel_of_no_numbers(wrong):
    refused(quantload.Parallel, **wrong)
    (name, value), *_ = wrong.items()
    if name != "device":
        asked = {"tp" if "size" in name else "pp": "x" if value is True else value}
        refused(quantload.Parallel.from_environment, **({"pp": None} if value is None else asked))


def test_a_name_of_a_device_in_parallel():
    assert quantload.Parallel(device="cpu").device == torch.device("cpu")


# -- flags, progress, rules ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["fuse", "quantize_inputs", "exact", "fast_paths", "trust_remote_code", "progress"]
)
@pytest.mark.parametrize("wrong", ["no", 1], ids=repr)
def test_flags_are_true_or_false(name, wrong, folder):
    assert refused(quantload.load, folder, **{name: wrong}).message.startswith(f"`{name}` is ")


def test_code_is_not_trusted_for_the_text_no(folder, tmp_path):
    options = {"trust_remote_code": "no"}
    for call in (
        lambda: quantload.plan(folder, "W8A16", **options),
        lambda: quantload.convert(folder, tmp_path / "a", "W8A16", **options),
        lambda: quantload.compare(folder, folder, **options),
        lambda: quantload.doctor(folder, "vllm", **options),
        lambda: quantload.stats(folder, tmp_path / "b", sequences=IDS, **options),
        lambda: bisect(folder, folder, sequences=IDS, **options),
        lambda: api.model_shares(folder, **options),
    ):
        assert "`trust_remote_code` is `no`" in refused(call).message


RULES = [
    *("lm_head=keep", b"lm_head=keep", [("lm_head", "keep")], 3, None, [3], [None]),
    *({"lm_head": 3}, {3: "keep"}, {"lm_head": None}),
]


@pytest.mark.parametrize("wrong", RULES, ids=repr)
def test_what_are_no_rules(wrong, folder):
    error = refused(quantload.plan, folder, "W8A16:channel", rules=wrong)
    assert "rule" in error.message
    refused(quantload.QuantConfig.from_options, "W8A16", wrong)


@pytest.mark.parametrize("wrong", [3, ["W8A16"], True, {"a": 1}, quantload.Scheme], ids=repr)
def test_what_is_no_scheme(wrong, folder):
    """Without the check each of these would keep the whole checkpoint as it is."""
    assert refused(quantload.plan, folder, wrong).message.startswith("`scheme` is ")
    assert refused(quantload.QuantConfig, wrong).message.startswith("`default` is ")


@pytest.mark.parametrize("wrong", ["32", -1, 0, 1.5, [32], True], ids=repr)
def test_what_is_no_group_size(wrong, folder):
    assert "`group_size` is" in refused(quantload.plan, folder, "W4A16", group_size=wrong).message


OPTIONS = [
    *({"dtype": "bfloat16"}, {"dtype": torch.int8}, {"dtype": torch.float8_e4m3fn}),
    *({"on_split": "x"}, {"observer": "x"}, {"lossless": "no"}, {"target": "gptq"}),
    *({"max_shard_bytes": -1}, {"max_shard_bytes": "5GB"}, {"layers": 3}, {"stats": "file"}),
]


@pytest.mark.parametrize("wrong", OPTIONS, ids=repr)
def test_options_of_a_plan(wrong):
    error = refused(PlanOptions, **wrong)
    assert next(iter(wrong)) in error.message
    assert "expected" in error.message


def test_options_in_another_form(folder, tmp_path):
    for wrong in (3, {"dtype": "float32"}, PlanOptions):
        assert "`options` is" in refused(quantload.plan, folder, "W8A16", options=wrong).message
    error = refused(quantload.convert, folder, tmp_path / "a", "W8A16", resources=3)
    assert error.message.startswith("`resources` is ")

    for wrong in ({"memory": "1GiB"}, {"workers": "2"}, {"device": "cpu"}):
        assert f"`{next(iter(wrong))}` is" in refused(Resources, **wrong).message


# -- tokens and prompts ----------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["hello", [1, 2], [["a"]], [[1.5]], ["text"], 3], ids=repr)
@pytest.mark.parametrize("name", ["compare", "stats", "bisect"])
def test_what_are_no_sequences(name, wrong, folder, tmp_path):
    calls = {
        "compare": lambda: quantload.compare(folder, folder, sequences=wrong),
        "stats": lambda: quantload.stats(folder, tmp_path / "a", sequences=wrong),
        "bisect": lambda: bisect(folder, folder, sequences=wrong),
    }
    error = refused(calls[name])
    assert "`sequences" in error.message
    assert "tokenizer" in error.hint


@pytest.mark.parametrize("made", [torch.tensor(IDS), np.array(IDS), tuple(map(tuple, IDS))])
def test_tensors_and_arrays_are_sequences(made):
    assert arguments.as_sequences("sequences", made) == IDS


@pytest.mark.parametrize("wrong", ["layer.sqnr<15", 3, None, [3], {"layer.sqnr": 15}], ids=repr)
def test_what_are_no_limits(wrong, folder):
    assert "`limits`" in refused(quantload.compare, folder, folder, limits=wrong).message


@pytest.mark.parametrize("wrong", ["1", 0, -1, None, [1.5], ["1"], True], ids=repr)
def test_what_are_no_numbers_of_tokens(wrong, model):
    assert refused(quantload.explain, model, tokens=wrong).message.startswith("`tokens` is ")


@pytest.mark.parametrize("wrong", [None, "folder", 3])
def test_what_is_no_model(wrong, folder):
    for call in (
        lambda: quantload.explain(wrong),
        lambda: quantload.TextDecoder(wrong),
        lambda: quantload.load_weights(wrong, folder),
    ):
        assert refused(call).message.startswith("`model` is ")


@pytest.mark.parametrize("wrong", [None, 3, [None], [["a"]], [[1.5]], {"a": 1}, b"a"], ids=repr)
def test_what_are_no_prompts(wrong, model):
    assert "`prompts`" in refused(quantload.generate, model, wrong, max_new_tokens=1).message


SETTINGS = [
    *({"max_new_tokens": "3"}, {"max_new_tokens": 1.5}, {"max_new_tokens": None}, {"stop": "x"}),
    *({"max_new_tokens": 0}, {"stop": [3]}, {"sample": "yes"}, {"seed": "x"}, {"emit": 3}),
    *({"tokenizer": "folder"}, {"sample": True, "top_p": 2}, {"chat": "no"}),
]


@pytest.mark.parametrize("wrong", SETTINGS, ids=repr)
def test_settings_of_generate(wrong, model):
    error = refused(quantload.generate, model, [[1, 2]], **{"max_new_tokens": 1, **wrong})
    assert f"`{list(wrong)[-1]}`" in error.message


def test_prompts_as_a_tensor(model):
    told = quantload.generate(model, torch.tensor([[1, 2], [3, 4]]), max_new_tokens=1)
    assert [row.prompt_tokens for row in told] == [2, 2]


def test_engines_and_devices_of_doctor(folder):
    assert "did you mean `vllm`?" in refused(quantload.doctor, folder, "VLLM").hint
    for wrong in (None, ["vllm"]):
        assert refused(quantload.doctor, folder, wrong).message.startswith("`engine` is ")
    for wrong in ("2", 1.5, None, 0):
        assert "`parts` is" in refused(quantload.doctor, folder, "vllm", parts=wrong).message


# -- classes ---------------------------------------------------------------------------------------


class Written(nn.Module):
    """Has what `register_model` asks for."""

    def embed_input_ids(self, ids):
        return ids

    forward = compute_logits = embed_input_ids


def test_what_cannot_be_registered():
    for wrong in (3, "Written", Written()):
        error = refused(quantload.register_model, "Foo", wrong)
        assert error.message.startswith("`model_class` is ")
        assert "register_model(" in error.hint
        assert refused(quantload.register_model("Foo"), wrong).message == error.message
    for wrong in (3, None, ["Foo"], Written):
        assert "`architecture` is" in refused(quantload.register_model, wrong, Written).message
    assert "`architecture` is empty" in refused(quantload.register_model, "", Written).message
    assert refused(quantload.register_model, Written)  # as a decorator without an architecture
    try:
        assert quantload.register_model("Foo", Written) is Written
    finally:
        unregister_model("Foo")


NAMES = [
    *({"prefix": ["a"]}, {"prefix": "a"}, {"prefix": None}, {"prefix": {1: "a"}}),
    *({"prefix": {"a": 1}}, {"prefix": [("a", "b")]}, {"regex": 3}, {"regex": {"a": 3}}),
    *({"substring": ["a"]}, {"suffix": 3}, {"renamings": [3]}, {"renamings": 3}),
    *({"renamings": {"a": "b"}}, {"renamings": [len]}, {"stacked": ["a"]}, {"stacked": {"a": [1]}}),
    *({"stacked": {"a": None}}, {"stacked": {1: ["b"]}}, {"stacked": {"a": []}}),
    *({"stacked": {"a": [""]}}, {"stacked": {"": ["b"]}}),
]


@pytest.mark.parametrize("wrong", NAMES, ids=repr)
def test_what_are_no_name_rules(wrong):
    error = refused(quantload.NameRules, **wrong)
    assert next(iter(wrong)) in error.message or "stack" in error.message


def test_a_replacement_without_its_group():
    assert "is no pattern" in refused(quantload.NameRules, regex={"a": r"\9"}).message


PARTS = [
    *({"grid": "int8"}, {"codes": [[1]]}, {"scale": 1.0}, {"zero": 3}, {"outer": 2.0}),
    *({"block": 3}, {"block": (1,)}, {"evaluation": torch.float32}),
]


@pytest.mark.parametrize("wrong", PARTS, ids=repr)
def test_parts_of_a_quantized_tensor(wrong):
    parts = {
        "grid": INT8,
        "codes": torch.zeros(4, 8, dtype=torch.int8),
        "scale": torch.ones(4, 1),
        "block": (1, 8),
        "evaluation": Evaluation(torch.float32),
    }
    assert QuantTensor(**parts).shape == (4, 8)
    error = refused(QuantTensor, **{**parts, **wrong})
    assert error.message.startswith(f"`{next(iter(wrong))}` is ")


def test_parts_of_a_scheme():
    for wrong in ({"name": 3}, {"weight": "int4"}, {"input": 3}):
        error = refused(quantload.Scheme, **{"name": "W4A16", **wrong})
        assert error.message.startswith(f"`{next(iter(wrong))}` is ")


LAYERS = {
    "column": lambda **o: ColumnParallelLinear(o.pop("size"), 8, **o),
    "row": lambda **o: RowParallelLinear(o.pop("size"), 8, **o),
    "replicated": lambda **o: ReplicatedLinear(8, o.pop("size"), **o),
    "merged": lambda **o: MergedColumnParallelLinear(8, [8, o.pop("size")], **o),
    "qkv": lambda **o: QKVParallelLinear(8, 4, o.pop("size"), **o),
    "embedding": lambda **o: VocabParallelEmbedding(o.pop("size"), 8, **o),
    "head": lambda **o: ParallelLMHead(o.pop("size"), 8, **o),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_for_models_that_are_written_by_hand(name):
    make = LAYERS[name]
    for size in ("8", -8, 1.5, None):
        assert "expected a" in refused(make, size=size).message
    assert "parse_scheme" in refused(make, size=8, scheme="W4A16").hint
    assert "from_environment(tp=2)" in refused(make, size=8, parallel=2).hint
    assert isinstance(make(size=8), nn.Module)


def test_sizes_of_members_are_several():
    assert "`output_sizes` is `8`" in refused(MergedColumnParallelLinear, 8, 8).message


BENCHED = [{"batches": 1}, {"batches": []}, {"batches": ["1"]}, {"new_tokens": 1}]


@pytest.mark.parametrize("wrong", [*BENCHED, {"prompt_tokens": "8"}], ids=repr)
def test_what_is_benched(wrong, model, folder):
    assert refused(api_bench.bench, model, **wrong).message.startswith(f"`{next(iter(wrong))}` is ")
    assert "`model` is" in refused(api_bench.bench, folder).message
    assert "`scheme` is" in refused(api_bench.synthetic, "tiny", scheme=3).message


def test_what_is_asked_of_a_model(model, folder):
    assert "`model` is" in refused(explain_fast_paths, folder).message
    assert "`model` is" in refused(use_attention, None).message
    assert "layer `3`" in refused(model.set_aux_hidden_state_layers, 3).message


# -- what a message shows --------------------------------------------------------------------------


def test_what_is_shown_of_a_value():
    assert arguments.shown(None) == "`None`"
    assert arguments.shown("a") == "`a` of type `str`"
    assert arguments.shown(dict) == "the class `dict`"
    assert arguments.shown(torch.zeros(9999)) == "of type `Tensor`"
    assert arguments.shown("a" * 999) == "of type `str`"


def test_wrong_types_are_also_type_errors():
    with pytest.raises(TypeError):
        arguments.check_type("a", 3, str, expected="a text")
    with pytest.raises(ValueError, match="`a` is 0"):
        arguments.check_counts(1, a=0)
    arguments.check_counts(1, a=np.int64(3))
    assert issubclass(WrongType, ConfigError)


def test_a_path_of_bytes_is_no_path():
    class OfBytes(os.PathLike):
        def __fspath__(self):
            return b"a"

    assert "as text" in refused(quantload.inspect, OfBytes()).message
    assert "as text" in refused(arguments.as_path, "output", OfBytes(), expected="a file").message


def test_dtypes_with_a_prefix_are_written_plain(tmp_path):
    made = tiny.llama(tmp_path / "source")
    content = json.loads((made / "config.json").read_text()) | {"dtype": "torch.bfloat16"}
    (made / "config.json").write_text(json.dumps(content))
    found = [f for f in quantload.doctor(made, "transformers").findings if f.level == "error"]
    assert [f.found for f in found] == ["dtype `torch.bfloat16` in config.json"]
    done = quantload.convert(made, tmp_path / "out", "W8A16:channel")
    assert json.loads((done.folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert not [
        f for f in quantload.doctor(done.folder, "transformers").findings if f.level == "error"
    ]


def run(*arguments):
    return CliRunner().invoke(main, [*map(str, arguments), "--device", "cpu"])


def test_commands_take_auto_as_the_dtype(folder, tmp_path):
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(IDS))
    tokens = ("--token-ids", ids, "--dtype", "auto")
    out = tmp_path / "out"
    calls = [
        ("convert", folder, out, "--scheme", "W8A16:channel", "--dtype", "auto"),
        ("explain", folder, "--dtype", "auto"),
        ("compare", folder, out, *tokens, "--json"),
        ("bisect", folder, out, *tokens),
        ("stats", folder, tmp_path / "stats.safetensors", *tokens),
        ("baseline", "write", folder, out, tmp_path / "baseline.json", *tokens),
        ("baseline", "check", out, tmp_path / "baseline.json", "--ref", folder, "--dtype", "auto"),
    ]
    for call in calls:
        done = run(*call)
        assert done.exit_code in (0, 1), (call[0], done.output)
    assert read_baseline(tmp_path / "baseline.json").dtype == "bfloat16"
    done = run("explain", folder, "--dtype", "bf16")
    assert done.exit_code == 2
    assert "hint: did you mean `bfloat16`?" in done.stderr
