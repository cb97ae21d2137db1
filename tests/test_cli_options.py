"""Options in a file: what `--config` sets, and what beats it."""

import json

import pytest
import tiny_checkpoints as tiny
from click.testing import CliRunner

from quantload.cli import main


def planned(folder, text, *arguments):
    """Plan a conversion with a file of options; returns the result of the command."""
    file = folder.with_name("options.toml")
    file.write_text(text)
    command = ["convert", folder, folder.with_name("out"), "--config", file, "--plan", *arguments]
    return CliRunner().invoke(main, [str(argument) for argument in command])


@pytest.fixture
def folder(tmp_path):
    return tiny.llama(tmp_path / "source", layers=3)


def test_a_file_sets_options(folder):
    text = (
        'scheme = "W4A16"\ngroup_size = 32\ndtype = "float16"\nlayers = "0-1"\n'
        'on_split = "promote"\nmax_shard_size = "60KB"\n[rules]\n'
        '"*.k_proj" = { scheme = "W8A16", group_size = 32 }\n"lm_head" = "keep"\n'
    )
    done = planned(folder, text, "--json")
    assert done.exit_code == 0, done.output
    content = json.loads(done.stdout)
    schemes = {row["module"]: row["scheme"] for row in content["modules"]}
    assert schemes["model.layers.0.mlp.up_proj"] == "W4A16:g32"
    assert schemes["model.layers.1.self_attn.q_proj"] == "W8A16:g32"  # promoted
    assert not any(".layers.2." in module for module in schemes)
    assert len(content["files"]) > 1
    assert {row["dtype"] for row in content["modules"]} == {"float16"}


def test_the_command_line_beats_the_file(folder):
    text = 'scheme = "W4A16"\ngroup_size = 32\nlayers = "0-1"\n'
    done = planned(folder, text, "--group-size", "64", "--layers", "2", "--json")
    assert done.exit_code == 0, done.output
    modules = json.loads(done.stdout)["modules"]
    assert {row["scheme"] for row in modules if "proj" in row["module"]} == {"W4A16:g64"}
    assert not any(".layers.1." in row["module"] for row in modules)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("shceme = 'W4A16'", "has the key `shceme`, expected `scheme`, a table `[rules]` and"),
        ("scheme = 'W8A8'\nplan = true", "has the key `plan`, expected"),
        ("scheme = 'W4A16'\ngroup_size = 'many'", "`group_size` in "),
        ("scheme = 'W8A8'\non_split = 'maybe'", "`on_split` in "),
        ("scheme = 'W8A8'\nformat = 'gguf'", "no such output format: `gguf`"),
        ("scheme = 'W8A8'\nlayers = '9'", "there is no layer 9, the config counts 3"),
    ],
)
def test_files_with_other_keys_or_values(folder, text, told):
    done = planned(folder, text)
    assert done.exit_code == 2
    assert told in done.stderr
