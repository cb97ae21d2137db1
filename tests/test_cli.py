"""The command line: exit codes, what goes to stdout and stderr, JSON, rules in a file."""

import json
import subprocess
import sys

import pytest
import tiny_checkpoints as tiny
import torch
from click.testing import CliRunner
from converting import opened
from safetensors.torch import load_file

from quantload import __version__, api, cli_output
from quantload.cli import main
from quantload.cli_options import parse_size, read_rules
from quantload.errors import ConfigError, NotComparable
from quantload.loader.formats import FORMATS
from quantload.loader.formats.detect import REFUSED
from quantload.loader.formats.targets import TARGETS
from quantload.loader.manifest import MANIFEST
from quantload.quant.scheme import PRESETS

DOWN = "model.layers.0.mlp.down_proj"


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def folder(tmp_path):
    return tiny.llama(tmp_path / "source")


# -- convert ---------------------------------------------------------------------------------------


def test_convert(tmp_path, folder):
    done = run("convert", folder, tmp_path / "out", "--scheme", "W4A16:g32")
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    assert "W4A16:g32: 14 layers, SQNR mean" in done.stdout
    assert "verify: passed" in done.stdout
    assert done.stdout.splitlines()[-1].startswith(f"written: {tmp_path / 'out'} (")
    assert opened(tmp_path / "out").is_quantized


def test_convert_json(tmp_path, folder):
    done = run("convert", folder, tmp_path / "out", "--scheme", "W8A8", "--json", "--quiet")
    assert done.exit_code == 0, done.output
    (line,) = done.stdout.splitlines()
    content = json.loads(line)
    assert content["quantload_plan"] == 1
    assert content["folder"] == str(tmp_path / "out")
    assert content["groups_origin"] == "model probe"
    assert content["verify"]["passed"] is True
    assert len(content["verify"]["layers"]) == len(content["modules"]) == 16
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert content["quantization_config"] == written["quantization_config"]
    sizes = {f.name: f.stat().st_size for f in (tmp_path / "out").glob("*.safetensors")}
    assert content["files"] == sizes
    assert content["output_bytes"] == sum(sizes.values())


def test_plan_writes_nothing(tmp_path, folder):
    before = sorted(tmp_path.rglob("*"))
    done = run("convert", folder, tmp_path / "out", "--scheme", "W4A16", "--plan")
    assert done.exit_code == 0, done.output
    assert "group 64, since 128 does not divide 64" in done.stdout
    assert "model.layers.{0-1}.mlp.down_proj" in done.stdout
    assert "kept by default: output head" in done.stdout
    assert sorted(tmp_path.rglob("*")) == before
    arguments = ("convert", folder, tmp_path / "out", "--scheme", "W4A16", "--plan", "--json")
    again, once_more = (json.loads(run(*arguments).stdout) for _ in range(2))
    assert again.pop("forecast").keys() == once_more.pop("forecast").keys()  # measured anew
    assert again == once_more
    assert again["files"].keys() == {"model.safetensors"}


def test_plan_with_all_modules(tmp_path, folder):
    done = run("convert", folder, tmp_path / "out", "--scheme", "W4A16:g32", "--plan", "--all")
    assert "model.layers.1.mlp.down_proj" in done.stdout


def test_plan_of_a_place_that_is_taken_is_fine(folder):
    assert run("convert", folder, folder, "--scheme", "W8A8", "--plan").exit_code == 0
    done = run("convert", folder, folder, "--scheme", "W8A8")
    assert done.exit_code == 2
    assert f"error: output folder `{folder}` is not empty" in done.stderr


def test_rules_with_brackets_are_shown_whole(tmp_path, folder):
    rule = r"re:model\.layers\.\d\.mlp\.[a-z_]+=W8A16:g32"
    done = run("convert", folder, tmp_path / "out", "--rule", rule, "--plan")
    assert r"rule `re:model\.layers\.\d\.mlp\.[a-z_]+ = W8A16:g32`" in done.stdout


def test_rules_in_a_file(tmp_path, folder):
    file = tmp_path / "rules.toml"
    file.write_text(
        'scheme = "W4A16:g32"\n[rules]\n"*.mlp." = "W8A8"\n"lm_head" = "keep"\n'
        '"model.layers.1.self_attn." = { scheme = "W8A16", group_size = 32 }\n'
        '"model.layers.1.self_attn.o_proj" = { scheme = "FP8_DYNAMIC" }\n'
    )
    arguments = ("--config", file, "--rule", f"{DOWN}=keep")
    done = run("convert", folder, tmp_path / "out", *arguments, "--json")
    assert done.exit_code == 0, done.output
    schemes = {row["module"]: row["scheme"] for row in json.loads(done.stdout)["modules"]}
    assert schemes[DOWN] is None
    assert schemes["model.layers.1.mlp.down_proj"] == "W8A8"
    assert schemes["model.layers.0.self_attn.q_proj"] == "W4A16:g32"
    assert schemes["model.layers.1.self_attn.q_proj"] == "W8A16:g32"
    assert schemes["model.layers.1.self_attn.o_proj"] == "FP8_DYNAMIC"
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert written["format"] == "mixed-precision"


def test_the_scheme_of_the_command_line_beats_that_of_the_file(tmp_path, folder):
    file = tmp_path / "rules.toml"
    file.write_text('scheme = "W4A16:g32"')
    done = run("convert", folder, tmp_path / "out", "--config", file, "--scheme", "W8A8", "--plan")
    assert "W8A8" in done.stdout
    assert "W4A16" not in done.stdout


def test_options_reach_the_plan(tmp_path, folder):
    done = run(
        *("convert", folder, tmp_path / "out", "--scheme", "W4A16", "--group-size", 32),
        *("--dtype", "float32", "--max-shard-size", "40KB", "--json", "--no-verify"),
    )
    assert done.exit_code == 0, done.output
    content = json.loads(done.stdout)
    assert content["verify"] is None
    assert len(content["files"]) > 1
    assert {row["dtype"] for row in content["modules"]} == {"float32"}
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()


def test_a_split_group(tmp_path, folder):
    rule = ("--rule", "model.layers.0.mlp.up_proj=W8A16:g32")
    arguments = ("convert", folder, tmp_path / "out", "--scheme", "W4A16:g32", *rule)
    done = run(*arguments)
    assert done.exit_code == 2
    assert "rules split the fused group `model.layers.0.mlp` (gate_proj, up_proj)" in done.stderr
    done = run(*arguments, "--on-split", "promote", "--plan")
    assert done.exit_code == 0
    assert "warning: fused group `model.layers.0.mlp`" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "error: no scheme: expected `--scheme`, `--rule` or `--config`\n\nhint: for example"),
        (("--scheme", "W4A17"), "error: no such scheme: `W4A17`"),
        (("--scheme", "W4A16:g33"), "is not served by any engine"),
        (("--rule", "model.layer.=W8A16"), "hint: did you mean `model.layers`?"),
        (("--rule", "W8A16"), "error: not a rule: `W8A16`, expected `PATTERN=SCHEME`"),
        (("--scheme", "W8A8", "--dtype", "int8"), "error: unknown dtype: `int8`, expected one of"),
        (("--scheme", "W8A8", "--max-shard-size", "big"), "error: not a size: `big`"),
        (("--group-size", "64", "--rule", "lm_head=W8A16"), "`--group-size` is that of `--scheme`"),
        (
            ("--scheme", "W8A8", "--config", "none.toml"),
            "error: cannot read rules from `none.toml`",
        ),
        (("--on-split", "maybe"), "Invalid value for '--on-split'"),
        (("--unknown",), "No such option"),
    ],
)
def test_usage_errors(tmp_path, folder, arguments, message):
    done = run("convert", folder, tmp_path / "out", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "out").exists()


def test_a_weight_that_is_not_finite(tmp_path, folder):
    made = load_file(folder / "model.safetensors")
    made[f"{DOWN}.weight"][0, 0] = float("nan")
    tiny.save_file(made, folder / "model.safetensors")
    done = run("convert", folder, tmp_path / "out", "--scheme", "W8A8")
    assert done.exit_code == 2
    assert f"error: weight of `{DOWN}` cannot be quantized" in done.stderr
    assert list(tmp_path.iterdir()) == [folder]


# -- inspect, verify and the lists -----------------------------------------------------------------


def test_inspect(folder):
    done = run("inspect", folder)
    assert done.exit_code == 0
    assert done.stderr == ""
    assert f"{folder}: LlamaForCausalLM, format dense" in done.stdout.replace("\n", "")
    assert "model.layers.{0-1}.self_attn.q_proj" in done.stdout
    assert "model.layers.1.self_attn.q_proj" in run("inspect", folder, "--all").stdout


def test_inspect_json(tmp_path, folder):
    run("convert", folder, tmp_path / "out", "--scheme", "W4A16:g32", "--no-verify")
    done = run("inspect", tmp_path / "out", "--json")
    content = json.loads(done.stdout)
    assert content["format"] == "compressed-tensors"
    assert content["architectures"] == ["LlamaForCausalLM"]
    row = next(row for row in content["modules"] if row["module"] == DOWN)
    assert row["scheme"] == "W4A16:g32"
    assert row["shape"] == [64, 128]
    assert row["bytes"] == 64 * 128 // 2 + 64 * 4 * 2 + 16
    assert row["bits_per_weight"] == pytest.approx(8 * row["bytes"] / (64 * 128), abs=1e-4)
    assert row["decided_by"] == "group_0: Linear"
    assert content["plain"]["model.norm.weight"] == ["bfloat16", [64]]


DAMAGED = {
    "weight_shape": lambda tensor: tensor.flip(0).contiguous(),
    "weight_scale": lambda tensor: tensor[:, :1].contiguous(),
    "weight_packed": lambda tensor: tensor[:, :1].contiguous(),
}


@pytest.mark.parametrize("leaf", DAMAGED)
def test_verify_fails_on_an_output_that_contradicts_itself(leaf, tmp_path, folder):
    """It is the check that fails: not the way it was called, nor what the output is held to."""
    out = tmp_path / "out"
    run("convert", folder, out, "--scheme", "W4A16:g32", "--no-verify")
    tensors = load_file(out / "model.safetensors")
    tensors[f"{DOWN}.{leaf}"] = DAMAGED[leaf](tensors[f"{DOWN}.{leaf}"])
    tiny.save_file(tensors, out / "model.safetensors")
    done = run("verify", out, "--source", folder)
    assert (done.exit_code, done.stderr) == (1, "")
    assert f"FAILED tensor `{DOWN}.weight_" in done.stdout
    assert "verify: FAILED" in done.stdout
    report = json.loads(run("verify", out, "--source", folder, "--json").stdout)
    assert (report["passed"], report["layers"]) == (False, [])
    assert f"{DOWN}.weight_" in report["problems"][0]
    assert run("verify", out).exit_code == 1
    done = run("verify", folder, "--source", out)  # what the other is held to cannot be used
    assert (done.exit_code, done.stdout) == (2, "")


def test_verify_fails_on_files_that_are_cut_short(tmp_path, folder):
    out = tmp_path / "out"
    run("convert", folder, out, "--scheme", "W4A16:g32", "--no-verify")
    file = out / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert run("verify", out, "--source", folder).exit_code == 1
    file.unlink()
    assert run("verify", out, "--source", folder).exit_code == 1  # `convert` wrote it
    (out / MANIFEST).unlink()
    assert run("verify", out, "--source", folder).exit_code == 2
    assert run("verify", tmp_path / "nothing", "--source", folder).exit_code == 2


@pytest.mark.parametrize("content", ["{", "[]", "", '{"quantload_manifest": 1}', "\xff"])
def test_verify_fails_on_a_damaged_manifest(tmp_path, folder, content):
    """With a source or without: the output is damaged, the command was right."""
    out = tmp_path / "out"
    run("convert", folder, out, "--scheme", "W8A8", "--no-verify")
    (out / MANIFEST).write_text(content, encoding="latin-1")
    done = run("verify", out)
    assert (done.exit_code, done.stderr) == (1, "")
    assert "verify: FAILED" in done.stdout
    assert run("verify", out, "--source", folder).exit_code == 1
    report = json.loads(run("verify", out, "--json").stdout)
    assert not report["passed"]
    assert MANIFEST in report["problems"][0]
    (out / MANIFEST).unlink()
    assert run("verify", out).exit_code == 2


def test_inspect_explains_where_tensors_go(folder):
    name, extra = f"{DOWN}.weight_scale", "model.layers.0.self_attn.rotary_emb.inv_freq"
    done = run("inspect", folder, *(f"--explain={n}" for n in (f"{DOWN}.weight", name, extra)))
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [
        f"{DOWN}.weight: bfloat16 64x128, of the BF16 weight {DOWN}",
        f"    = {DOWN}.weight",
        f"{name}: not in the checkpoint",
        f"    = {name}",
        f"{extra}: not in the checkpoint",
        "    = left out: rotary table, computed",
    ]
    done = run("inspect", folder, "--explain", "layers.1.mlp.up_proj.weight", "--json")
    (route,) = json.loads(done.stdout)["routes"]
    assert route["targets"][0]["module"] == "model.layers.1.mlp.up_proj"
    assert route["steps"] == ["base prefix `model.` added -> model.layers.1.mlp.up_proj.weight"]
    assert not route["in_checkpoint"]


def test_inspect_explains_where_members_of_fused_layers_lie(tmp_path, folder):
    attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    names = [f"{attention}.{n}_proj.weight" for n in "qkvo"] + [f"{mlp}.up_proj.weight"]
    stacks = (
        f"{attention}.q_proj_k_proj_v_proj_stack 128x64",
        f"{mlp}.gate_proj_up_proj_stack 256x64",
    )
    done = run("inspect", folder, *(f"--explain={name}" for name in names))
    told = [line.strip() for line in done.stdout.splitlines() if "loaded as" in line]
    assert told == [
        f"loaded as rows 0..64 of {stacks[0]}, slot 0 of 3",
        f"loaded as rows 64..96 of {stacks[0]}, slot 1 of 3",
        f"loaded as rows 96..128 of {stacks[0]}, slot 2 of 3",
        f"loaded as rows 128..256 of {stacks[1]}, slot 1 of 2",
    ]
    model = api.load(folder, device="cpu")
    weights = load_file(folder / "model.safetensors")
    stack = model.get_submodule(f"{attention}.q_proj_k_proj_v_proj_stack").weight
    assert torch.equal(stack[64:96], weights[names[1]])
    run("convert", folder, tmp_path / "out", "--scheme", "W4A16:g32", "--no-verify")
    name = f"{mlp}.gate_proj.weight_scale"
    done = run("inspect", tmp_path / "out", "--explain", name, "--json")
    (target,) = json.loads(done.stdout)["routes"][0]["targets"]
    assert target["leaf"] == "weight_scale"
    assert target["fused"]["rows"] == [0, 128]


def test_inspect_explains_what_cannot_be_loaded(folder):
    (folder / "model.safetensors").unlink()
    tiny.save_file({f"{DOWN}.weight": torch.zeros(64, 128)}, folder / "model.safetensors")
    done = run("inspect", folder, "--explain", f"{DOWN}.weight")
    assert done.exit_code == 0, done.output
    assert f"    = {DOWN}.weight" in done.stdout.splitlines()
    assert "fused layers are not known: " in done.stdout


@pytest.mark.parametrize("architectures", [None, "LlamaForCausalLM", [], [3], {"a": 1}])
def test_inspect_any_architectures(folder, architectures):
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"architectures": architectures}))
    assert run("inspect", folder).exit_code == 0
    assert run("inspect", folder, "--json").exit_code == 0


def test_inspect_warns_on_stderr(folder):
    tiny.save_file({"x": torch.zeros(1)}, folder / "adapter_model.safetensors")
    done = run("inspect", folder, "--json")
    (warning,) = json.loads(done.stdout)["warnings"]
    assert done.stderr == f"warning: {warning}\n"
    assert warning.startswith("an adapter (`adapter_model.safetensors`) is left out")


def test_nothing_there():
    done = run("inspect", "./nothing")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no such folder or file: `./nothing`\n\nhint: a hub id")


def test_verify(tmp_path, folder):
    output = tmp_path / "out"
    run("convert", folder, output, "--scheme", "W4A16:g32", "--no-verify")
    done = run("verify", output, "--source", folder)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "The 10 layers with the largest error" in done.stdout
    assert run("verify", output, "--source", folder, "--all").stdout.count(".mlp.") == 6
    content = json.loads(run("verify", output, "--source", folder, "--json").stdout)
    assert content["passed"] is True
    dense = next(layer for layer in content["layers"] if layer["scheme"] == "dense")
    assert dense["sqnr_db"] is None
    assert dense["relative_error"] == 0.0


def test_verify_fails_with_1(tmp_path, folder):
    output = tmp_path / "out"
    run("convert", folder, output, "--scheme", "W4A16:g32", "--no-verify")
    tensors = load_file(output / "model.safetensors")
    tensors[f"{DOWN}.weight_scale"][0, 0] = float("nan")
    tiny.save_file(tensors, output / "model.safetensors")
    done = run("verify", output, "--source", folder)
    assert done.exit_code == 1
    assert f"FAILED `{DOWN}`: tensor `{DOWN}.weight_scale` holds NaN" in done.stdout
    assert done.stdout.rstrip().endswith("verify: FAILED")
    done = run("verify", output, "--source", folder, "--json")
    assert done.exit_code == 1
    content = json.loads(done.stdout)
    assert content["passed"] is False
    (failed,) = [layer for layer in content["layers"] if layer["problem"]]
    assert (failed["module"], failed["sqnr_db"]) == (DOWN, None)


def test_schemes_and_formats():
    done = run("schemes")
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(PRESETS)
    assert "weights int4, group 128, zero points" in done.stdout
    assert "weights e4m3, block 128x128; inputs e4m3 per group 128, dynamic" in done.stdout
    read, _, rest = run("formats").stdout.partition("\nwritten, with --format:\n")
    written, _, refused = rest.partition("\nnot read:\n")
    assert [line.split()[0] for line in written.splitlines()] == list(TARGETS)
    names = [line.split()[0] for line in read.splitlines()]
    assert names == [row.name for row in FORMATS]
    assert {"dense", "compressed-tensors", "gptq", "awq", "fp8", "gguf"} <= set(names)
    assert [line.split()[0] for line in refused.splitlines()] == list(REFUSED)
    assert "MLX affine: convert it with `mlx_lm.convert --dequantize`" in refused


def test_not_comparable_is_3(monkeypatch, folder):
    def inspect(source):
        raise NotComparable("another model")

    monkeypatch.setattr("quantload.api.inspect", inspect)
    done = run("inspect", folder)
    assert (done.exit_code, done.stderr) == (3, "error: another model\n")


def test_as_a_module():
    command = [sys.executable, "-m", "quantload"]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"quantload, version {__version__}\n"
    done = subprocess.run([*command, "schemes"], capture_output=True, text=True, check=True)
    assert "W4A16" in done.stdout


# -- parsing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5GB", 5 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        ("500MiB", 500 * 2**20),
        ("200kb", 200_000),
        ("1000", 1000),
        ("2 TB", 2 * 10**12),
        ("10B", 10),
    ],
)
def test_sizes(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    "text", ["", "GB", "-1GB", "0", "0.0GB", "0.1B", "5 PB", "1e3", "9" * 400, "5GB5"]
)
def test_what_is_no_size(text):
    with pytest.raises(ConfigError, match="not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scheme = 4", "has the keys `scheme`, expected the name of a `scheme` and a table"),
        ("rules = 3", "has the keys `rules`, expected"),
        ("[rules]\na = 3", "rule `a` has the value `3`, expected a scheme name or"),
        ("[rules]\na = { schema = 'W8A8' }", "rule `a` has the value `{'schema': 'W8A8'}`"),
        ("[rules]\na = { scheme = 4 }", "rule `a` has the value `4`"),
        ("[rules", "cannot read rules from"),
        ("a = '\xff'", "cannot read rules from"),
    ],
)
def test_rule_files_of_the_wrong_form(tmp_path, text, message):
    file = tmp_path / "rules.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as caught:
        read_rules(file, ())
    assert message in str(caught.value)


def test_rules_of_the_command_line_come_last(tmp_path):
    file = tmp_path / "rules.toml"
    file.write_text('scheme = "W4A16"\n[rules]\na = "W8A8"\n')
    assert read_rules(file, ("a=keep",)) == ("W4A16", ["a=W8A8", "a=keep"])
    assert read_rules(None, ("b=keep",)) == (None, ["b=keep"])


# -- output ----------------------------------------------------------------------------------------


def test_rows_that_differ_in_numbers_only_are_one():
    rows = [(f"m.{i}.q", ("a",)) for i in (0, 1, 2, 5)] + [("m.3.q", ("b",)), ("head", ("a",))]
    rows += [(f"m.{i}.e.{j}.w", ("c",)) for i in (0, 1) for j in range(4)]
    assert cli_output.collapse(rows) == [
        ("m.{0-2,5}.q", 4, ("a",)),
        ("m.3.q", 1, ("b",)),
        ("head", 1, ("a",)),
        ("m.{0-1}.e.{0-3}.w", 8, ("c",)),
    ]


def test_texts_of_files_show_as_what_they_are():
    assert cli_output.printable("model.layers.0.größe") == "model.layers.0.größe"
    assert cli_output.printable("a\x1b[31m\u202eb\nc\x00\ud800") == (
        r"a\x1b[31m\u202eb\nc\x00\ud800"
    )
    assert cli_output.printable("a\nb\r", keep="\n") == "a\nb\\r"


def test_sizes_for_people():
    assert [cli_output.size(n) for n in (0, 1023, 1536, 3 * 2**20, 5 * 2**30, 2**42)] == [
        *("0 B", "1023 B", "1.5 KiB", "3.0 MiB", "5.00 GiB", "4096.00 GiB")
    ]


def test_progress_draws_nothing_without_a_terminal(capsys):
    with cli_output.BarProgress(quiet=False) as progress:
        progress.start("convert", total=10, unit="B")
        progress.advance(4, note="x")
        progress.finish()
        progress.advance(4)
    assert capsys.readouterr() == ("", "")


def test_unknown_device(folder):
    done = run("generate", folder, "x", "--device", "foo")
    assert done.exit_code == 2
    expected = "error: unknown device: `foo`, expected `cpu`, `cuda` or `cuda:N`\n\nhint: a GPU is"
    assert done.stderr.startswith(expected)


def test_generate_quantizes_while_loading(folder, monkeypatch):
    models = []
    monkeypatch.setattr("quantload.api_generate.load_tokenizer", lambda source: None)
    monkeypatch.setattr("quantload.cli_generate._show", lambda made, *_: models.append(made.model))
    rules = ("--rule", "model.layers.1.=keep", "--rule", "model.layers.0.mlp.=FP8_DYNAMIC")
    done = run("generate", folder, "x", "--device", "cpu", "--scheme", "W8A8", *rules)
    assert done.exit_code == 0, done.stderr
    schemes = {layer.module: layer.scheme for layer in api.explain(models[0])}
    assert schemes["model.layers.0.self_attn.q_proj"] == "W8A8"
    assert schemes["model.layers.0.mlp.down_proj"] == "FP8_DYNAMIC"
    assert "8" not in schemes["model.layers.1.mlp.down_proj"]


def test_generate_refuses_a_scheme_that_quantizes_nothing(folder):
    done = run("generate", folder, "x", "--device", "cpu", "--scheme", "dense")
    assert done.exit_code == 2
    assert "`scheme = dense` quantizes nothing" in done.stderr


def test_an_incomplete_checkpoint_is_not_loaded(tmp_path):
    content = tiny.config(layers=2)
    folder = tiny.write(tmp_path, content | {"num_hidden_layers": 3}, tiny.tensors(content))
    done = run("generate", folder, "x")
    assert done.exit_code == 2
    assert "is incomplete: the config counts 3 layers, the files hold 2" in done.stderr


@pytest.mark.parametrize("seconds", ["nan", "-1"])
def test_tune_wants_seconds_that_end(seconds):
    found = CliRunner().invoke(main, ["tune", "--shapes", "64x128", "--seconds", seconds])
    assert found.exit_code == 2
    assert "expected a number that is not negative" in found.output
