"""Model cards: metadata that the hub reads, tables that add up, the text of the source."""

import re

import pytest
import tiny_checkpoints as tiny
import yaml
from converting import converted, plan_of
from huggingface_hub import ModelCard

from quantload import api
from quantload.loader.model_card import model_card, split_card
from quantload.loader.plan import PlanOptions

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SOURCE_CARD = """---
license: other
license_name: tiny-license
license_link: https://example.org/license
language: [en, de]
tags: [tiny, chat]
pipeline_tag: text-generation
eval_results: {secret: 1}
model-index: [{name: x}]
---

# Tiny

A model | with a pipe.
"""


@pytest.fixture
def folder(tmp_path):
    made = tiny.llama(tmp_path / "hub" / "models--owner--tiny" / "snapshots" / COMMIT)
    (made / "README.md").write_text(SOURCE_CARD)
    return made


def metadata(card):
    """The front matter as huggingface_hub reads it."""
    return ModelCard(card).data.to_dict()


def test_metadata(folder):
    found = metadata(model_card(plan_of(folder, "W8A8", ["lm_head=W4A16:g32"])))
    assert found == {
        "license": "other",
        "license_name": "tiny-license",
        "license_link": "https://example.org/license",
        "language": ["en", "de"],
        "pipeline_tag": "text-generation",
        "library_name": "transformers",
        "base_model": "owner/tiny",
        "base_model_relation": "quantized",
        "tags": ["tiny", "chat", "quantload", "compressed-tensors", "W4A16", "W8A8"],
    }


def test_the_text_of_the_source_is_kept(folder, tmp_path):
    output = converted(folder, tmp_path / "out", "W8A8")
    card = (output / "README.md").read_text()
    assert card == model_card(plan_of(folder, "W8A8"))
    assert card.endswith("## The card of the source\n\n# Tiny\n\nA model | with a pipe.\n")
    assert card.count("\n---\n") == 1
    assert f"quantload convert owner/tiny@{COMMIT} OUTPUT --scheme W8A8" in card


def test_tables_add_up(folder):
    plan = plan_of(folder, "W8A8", ["lm_head=W4A16:g32"])
    rows = re.findall(
        r"^\| (\S+) \| (\d+) \| (\d+) \| ([\d.]+) \| (\d+) \|$", model_card(plan), re.M
    )
    by_name = {name: (int(n), int(w), float(b), int(size)) for name, n, w, b, size in rows}
    assert by_name.keys() == {"W8A8", "W4A16:g32", "bfloat16", "all"}
    tensors = sum(t.num_bytes for file in plan.files for t in file.tensors.values())
    assert by_name["all"][3] == tensors == sum(by_name[n][3] for n in by_name if n != "all")
    assert by_name["W4A16:g32"][1] == 96 * 64
    assert by_name["W4A16:g32"][3] == 96 * 64 // 2 + 96 * 2 * 2 + 16
    assert by_name["W4A16:g32"][2] == pytest.approx(
        8 * by_name["W4A16:g32"][3] / (96 * 64), abs=0.01
    )


def test_what_was_kept_and_why(folder):
    card = model_card(plan_of(folder, "W8A8", ["model.layers.0.=keep"]))
    assert "| kept by default: embedding | 1 | 12288 | `model.embed_tokens` |" in card
    assert "| rule `model.layers.0. = keep` | 7 |" in card


@pytest.mark.parametrize(
    ("scheme", "transformers", "vllm"),
    [
        ("W4A16:g32", "from_pretrained", True),
        ("W8A8", "from_pretrained", True),
        ("W4A16_ASYM:g32", "dequantize=True", True),
        ("W8A16:g32", "from_pretrained", False),
        ("FP8_BLOCK", "", False),  # widths of 64 leave partial blocks
        ("dense", "from_pretrained", False),
    ],
)
def test_how_to_load(folder, scheme, transformers, vllm):
    card = model_card(plan_of(folder, scheme))
    assert "quantload.load(" in card
    assert ("vllm serve OUTPUT" in card) == vllm
    assert ("from transformers import" in card) == bool(transformers)
    assert transformers in card
    assert ("dequantize=True" in card) == (transformers == "dequantize=True")


def test_a_quantized_source_is_named(folder, tmp_path):
    once = converted(folder, tmp_path / "once", "W8A8")
    assert "quantized already" not in (once / "README.md").read_text()
    twice = model_card(plan_of(once, "W4A16:g32"))
    assert "were quantized already (int-quantized W8A8); quantizing them again adds" in twice
    assert metadata(twice)["tags"] == [
        *("tiny", "chat", "quantload", "compressed-tensors", "W8A8", "W4A16")
    ]
    assert "base_model" not in metadata(twice)


def test_a_part_of_the_model_says_so(folder):
    part = "**Only a part of the model, for tests**: layers 1 of the source"
    made = api.plan(folder, "W8A8", options=PlanOptions(layers="1"))
    assert part in model_card(made)
    assert "--layers 1" in model_card(made)
    assert "Only a part" not in model_card(api.plan(folder, "W8A8"))


def test_a_source_without_a_card(tmp_path):
    folder = tiny.llama(tmp_path / "tiny")
    card = model_card(plan_of(folder, "dense"))
    assert metadata(card) == {"library_name": "transformers", "tags": ["quantload"]}
    assert "The card of the source" not in card
    (folder / "README.md").write_bytes(b"x" * (1 << 21))
    assert "The card of the source" not in model_card(plan_of(folder, "dense"))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("# No front matter", ({}, "# No front matter")),
        ("---\nlicense: mit\n---\ntext", ({"license": "mit"}, "text")),
        ("\ufeff---\r\nlicense: mit\r\n---\r\ntext\r\n", ({"license": "mit"}, "text")),
        ("---\nlicense: mit\nno end", ({}, "---\nlicense: mit\nno end")),
        ("---\n- a list\n---\ntext", ({}, "text")),
        ("---\n: [ broken\n---\ntext", ({}, "text")),
        ("---\ndate: 2024-99-99\n---\ntext", ({}, "text")),
        ("---\n!!python/object:os.system x\n---\ntext", ({}, "text")),
        ("", ({}, "")),
    ],
)
def test_cards_of_any_form(content, expected):
    assert split_card(content) == expected


def test_metadata_of_a_wrong_type_is_left_out(folder):
    (folder / "README.md").write_text("---\nlicense: {a: 1}\nlanguage: [1, 2]\ntags: one\n---\n")
    card = model_card(plan_of(folder, "W8A8"))
    front = yaml.safe_load(card.split("---\n")[1])
    assert "license" not in front
    assert "language" not in front
    assert front["tags"] == ["one", "quantload", "compressed-tensors", "W8A8"]
