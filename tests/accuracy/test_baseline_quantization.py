"""A baseline holds what the quantization config says: engines read weights by it."""

from __future__ import annotations

import json
import shutil

import pytest
import tiny_checkpoints as tiny
from click.testing import CliRunner
from truth import CHECKPOINTS

from quantload import api, api_baseline
from quantload.accuracy.baseline import content_digest
from quantload.accuracy.baseline_file import read_baseline
from quantload.accuracy.baseline_quantization import changed_quantization, quantization_facts
from quantload.cli import main
from quantload.errors import BaselineError

SOUND_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": True}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantization")
    source = tiny.llama(folder / "source")
    output = api.convert(source, folder / "out", "W4A16:g32", verify_output=False).folder
    file = folder / "b.json"
    api_baseline.write_baseline(source, output, file)
    return source, output, file


def with_config(folder, made_from, change):
    """A copy with another quantization config, and nothing else changed."""
    shutil.copytree(made_from, folder)
    (folder / "quantload.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def put(**values):
    return lambda content: content.update(values)


def put_into_groups(**values):
    def change(content):
        for group in content["config_groups"].values():
            group.update(values)

    return change


CHANGES = {
    "cache": (put(kv_cache_scheme=SOUND_CACHE), "`quantization_config.kv_cache_scheme` is `{"),
    "ignore": (put(ignore=["re:.*"]), "leaves out 14 quantized modules: "),
    "targets": (put_into_groups(targets=["re:.*mlp.*"]), "leaves out 8 quantized modules: "),
    "format": (put(format="naive-quantized"), "config.format` is `'naive-quantized'`, expected `"),
    "no format": (lambda c: c.pop("format"), "config.format` is `absent`, expected"),
    "status": (
        put(quantization_status="frozen"),
        "quantization_status` is `'frozen'`, expected `'compressed'`",
    ),
    "head": (put(ignore=[]), "covers 1 module in full precision: `lm_head`"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_quantization_config_fails(made, tmp_path, what):
    source, output, file = made
    change, told = CHANGES[what]
    other = with_config(tmp_path / "other", output, change)
    for reference in (None, source):
        report = api_baseline.check_baseline(other, file, reference=reference)
        assert not report.passed
        assert report.unchanged == len(read_baseline(file).layers)  # all else is as it was
        (line,) = report.config
        assert told in line


def test_formats_of_groups_count_where_tensors_are_called_alike(made, tmp_path):
    source, _, _ = made
    output = api.convert(source, tmp_path / "out", "FP8_DYNAMIC", verify_output=False).folder
    api_baseline.write_baseline(source, output, tmp_path / "b.json")
    other = with_config(tmp_path / "o", output, put_into_groups(format="naive-quantized"))
    report = api_baseline.check_baseline(other, tmp_path / "b.json")
    assert report.config == (
        "config: `quantization_config.config_groups` is `['naive-quantized']`, expected "
        "`['float-quantized']`",
    )


SAME = {
    "names": lambda c: c.update(
        ignore=["re:.*lm_head$"],
        config_groups={
            "other": c["config_groups"]["group_0"]
            | {"targets": ["re:.*self_attn.*", "re:.*proj$", "Linear"]}
        },
    ),
    "order": put(ignore=["model.norm", "lm_head", "lm_head"]),
    "version": put(version="0.12.2", global_compression_ratio=1.5),
    "group's format": lambda c: c["config_groups"]["group_0"].pop("format"),
    "no cache": put(kv_cache_scheme=None),
}


@pytest.mark.parametrize("what", SAME)
def test_other_words_of_the_same_meaning_are_no_change(made, tmp_path, what):
    _, output, file = made
    report = api_baseline.check_baseline(with_config(tmp_path / "o", output, SAME[what]), file)
    assert report.passed, report.config
    assert report.notes == ()


def test_a_cache_that_was_there_may_say_how_it_was_found(made, tmp_path):
    source, output, _ = made
    one = with_config(tmp_path / "one", output, put(kv_cache_scheme=SOUND_CACHE))
    api_baseline.write_baseline(source, one, tmp_path / "b.json")
    for name, more, passes in (
        ("same", {"observer": "minmax", "group_size": None}, True),
        ("bits", {"num_bits": 4}, False),
    ):
        scheme = SOUND_CACHE | more
        other = with_config(tmp_path / name, output, put(kv_cache_scheme=scheme))
        assert api_baseline.check_baseline(other, tmp_path / "b.json").passed is passes
    report = api_baseline.check_baseline(output, tmp_path / "b.json")
    assert "kv_cache_scheme` is `absent`, expected `{'dynamic': true," in report.config[0]


def test_another_file_format_of_the_same_codes_is_no_change():
    before = {
        "method": "compressed-tensors",
        "formats": {"format": "pack-quantized"},
        "tensors": ["weight_packed", "weight_scale"],
        "kv_cache": SOUND_CACHE,
        "left_out": [],
        "left_plain": [],
    }
    now = before | {
        "method": "gptq",
        "formats": {},
        "tensors": ["qweight", "scales"],
        "kv_cache": {"num_bits": 8, "type": "float"},
        "left_plain": ["model.embed_tokens"],
    }
    assert changed_quantization(before, now) == []
    assert changed_quantization({}, now) == [
        "config: `quantization_config.quant_method` is `'gptq'`, expected `absent`"
    ]
    assert len(changed_quantization(before, {})) == 1
    assert len(changed_quantization(before, now | {"left_out": ["a", "b"]})) == 1
    assert len(changed_quantization(before, now | {"tensors": before["tensors"]})) == 2


def edited(file, made_from, change):
    content = json.loads(made_from.read_text())
    change(content)
    content["sha256"] = content_digest(content)
    file.write_text(json.dumps(content))
    return file


def test_a_baseline_of_before_still_works_and_says_so(made, tmp_path):
    _, output, file = made
    old = edited(tmp_path / "old.json", file, lambda c: c.pop("quantization"))
    report = api_baseline.check_baseline(output, old)
    assert report.passed
    assert "says nothing of the quantization config" in report.notes[0]
    with_facts = report.now.quantization
    assert with_facts == read_baseline(file).quantization


def test_damaged_facts_are_refused(made, tmp_path):
    _, _, file = made
    for key, value in (("left_out", "lm_head"), ("left_plain", [1]), ("formats", []), ("more", 1)):
        bad = edited(
            tmp_path / "bad.json",
            file,
            lambda c, key=key, value=value: c["quantization"].update({key: value}),
        )
        with pytest.raises(BaselineError, match="damaged"):
            read_baseline(bad)


def test_full_precision_has_nothing_to_say(made, tmp_path):
    source, _, _ = made
    api_baseline.write_baseline(source, source, tmp_path / "b.json")
    assert read_baseline(tmp_path / "b.json").quantization == {}
    assert api_baseline.check_baseline(source, tmp_path / "b.json").passed


@pytest.mark.parametrize("arguments", [["--structure"], []])
def test_compare_fails_on_layers_that_the_config_leaves_out(made, tmp_path, arguments):
    source, output, _ = made
    other = with_config(tmp_path / "o", output, put_into_groups(targets=["re:.*mlp.*"]))
    found = CliRunner().invoke(main, ["compare", str(source), str(other), *arguments])
    assert found.exit_code == 1, found.output
    assert "the quantization config leaves 8 quantized layers out:" in " ".join(
        found.output.split()
    )
    written = CliRunner().invoke(
        main, ["baseline", "write", str(source), str(other), str(tmp_path / "b.json")]
    )
    assert "the quantization config leaves 8 quantized layers out:" in " ".join(
        written.output.split()
    )
    sound = CliRunner().invoke(main, ["compare", str(source), str(output), *arguments])
    assert sound.exit_code == 0, sound.output


@pytest.mark.slow
@pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason="no folder shared/checkpoints")
def test_no_tool_leaves_quantized_layers_out():
    seen = 0
    for config in sorted(CHECKPOINTS.glob("*/*/config.json")):
        try:
            source = api.inspect(config.parent)
        except Exception:  # noqa: BLE001 - those that are not read are another test's
            continue
        facts = quantization_facts(source)
        assert not facts.get("left_out"), config.parent
        seen += bool(facts)
    assert seen > 100
