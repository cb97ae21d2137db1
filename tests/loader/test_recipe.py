"""What an output was made from, and the command that makes it again."""

import shlex
from dataclasses import fields, replace

import pytest
import tiny_checkpoints as tiny
import torch
from click.testing import CliRunner
from converting import plan_of

from quantload.cli import main
from quantload.loader.plan import PlanOptions
from quantload.loader.recipe import (
    OUTPUT,
    command_line,
    decisions,
    option_name,
    source_description,
    source_name,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def folder(tmp_path):
    return tiny.llama(tmp_path / "tiny llama", tied=True)


def test_the_command_makes_the_same_bytes(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rules = ("--rule", "model.layers.0.=W8A16:g32", "--rule", r"re:.*\.mlp\.(up|gate)_proj=keep")
    options = ("--dtype", "float32", "--max-shard-size", "40KB", "--on-split", "keep")
    first = ("convert", "tiny llama", "first", "--scheme", "W4A16:g32", *rules, *options)
    done = CliRunner().invoke(main, [*first, "--quiet"])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "first" / "README.md").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("quantload convert")]
    program, *arguments = shlex.split(line)
    assert program == "quantload"
    done = CliRunner().invoke(main, [*arguments, "--quiet"])
    assert done.exit_code == 0, done.output
    one, two = (
        {f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} for name in ("first", OUTPUT)
    )
    assert len(one) > 6
    assert one == two


def test_every_option_of_a_plan_is_one_of_the_command():
    names = {name for option in main.commands["convert"].params for name in option.opts}
    assert {f"--{option_name(field.name)}" for field in fields(PlanOptions)} <= names


def test_options_that_are_not_given_are_left_out(folder):
    plan = plan_of(folder, "W8A8")
    assert command_line(plan) == "quantload convert 'tiny llama' OUTPUT --scheme W8A8"
    assert command_line(plan_of(folder, None)).endswith("OUTPUT --scheme keep")
    only = plan_of(folder, None, ["model.layers.0.=W8A8"], lossless=False)
    assert command_line(only).endswith("OUTPUT --rule model.layers.0.=W8A8")
    trusting = replace(plan, trust_remote_code=True)
    assert command_line(trusting).endswith("--scheme W8A8 --trust-remote-code")


def test_a_scheme_without_a_name(folder):
    plan = plan_of(folder, "W4A16")
    odd = replace(plan.asked.default, weight=replace(plan.asked.default.weight, group_size=24))
    assert command_line(plan_of(folder, "W4A16:g32")) is not None
    assert command_line(replace(plan, asked=replace(plan.asked, default=odd))) is None


def test_decisions(folder):
    made = decisions(plan_of(folder, "W4A16", ["lm_head=keep"], dtype=torch.bfloat16))
    assert made["scheme"] == "W4A16"
    assert made["rules"] == ["lm_head = keep"]
    assert made["options"]["dtype"] == "bfloat16"
    assert made["options"]["target"] == "compressed-tensors"
    assert made["trust_remote_code"] is False


def test_a_source_of_the_hub_is_named_as_there(tmp_path):
    snapshot = tmp_path / "hub" / "models--owner--tiny-llama" / "snapshots" / COMMIT
    plan = plan_of(tiny.llama(snapshot), "W8A8")
    assert source_name(plan) == f"owner/tiny-llama@{COMMIT}"
    description = source_description(plan)
    assert (description["repository"], description["revision"]) == ("owner/tiny-llama", COMMIT)
    assert command_line(plan).startswith(f"quantload convert owner/tiny-llama@{COMMIT} OUTPUT")


@pytest.mark.parametrize("place", ["models--a", "models--a--b/snapshots/main", "a/b"])
def test_other_folders_are_not_of_the_hub(tmp_path, place):
    plan = plan_of(tiny.llama(tmp_path / place), "W8A8")
    assert source_description(plan)["repository"] is None
    assert source_name(plan) == place.rpartition("/")[2]


def test_digests_tell_sources_apart(tmp_path):
    def describe(name, **sizes):
        return source_description(plan_of(tiny.llama(tmp_path / name, **sizes), "W8A8"))

    one, same, other = describe("a"), describe("b"), describe("c", vocabulary=97)
    assert {**one, "name": ""} == {**same, "name": ""}
    assert one["config_sha256"] != other["config_sha256"]
    assert one["headers_sha256"] != other["headers_sha256"]
