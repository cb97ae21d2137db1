"""The files of tokenizers made from GGUF metadata, and the vocabularies that are refused."""

from __future__ import annotations

import importlib.util
import itertools
import json

import pytest
from tiny_gguf import write_metadata_only
from tiny_vocabulary import (
    CONTROL,
    NORMAL,
    SPECIAL,
    TEXTS,
    UNKNOWN,
    UNUSED,
    byte_level,
    load_tokenizer_of,
    pieces,
    train_sentencepiece,
    write_tokenizer_of,
)

from quantload.errors import HeaderError, UnsupportedVariant
from quantload.loader.gguf_tokenizer import write_tokenizer


@pytest.fixture
def make(tmp_path):
    """Return a function that gives the tokenizer of metadata, as transformers loads it."""
    numbers = itertools.count()
    return lambda *args: load_tokenizer_of(args[0], tmp_path / f"{next(numbers)}", *args[1:])


@pytest.mark.parametrize(
    ("model_type", "pre"),
    [("llama", "smollm"), ("mistral", "smollm"), ("qwen3", "qwen2"), ("qwen2", "qwen2")],
)
def test_model_type_does_not_change_the_tokenizer(make, model_type, pre, tmp_path):
    # transformers has a class of its own for each model type; qwen2 always gets it
    vocabularies = [byte_level(pre, added=[("<|im_end|>", CONTROL)])]
    if model_type == "llama" and importlib.util.find_spec("sentencepiece"):
        vocabularies.append(train_sentencepiece(tmp_path)[1])
    for metadata in vocabularies:
        alone = make(metadata)
        beside_config = make(metadata, model_type)
        for text in (*TEXTS, "hi<|im_end|>hi"):
            ids = beside_config(text)["input_ids"]
            assert ids == alone(text)["input_ids"], text
            assert beside_config.decode(ids) == alone.decode(ids)


def test_class_is_one_that_old_and_new_transformers_know(make, tmp_path):
    make(byte_level())
    config = json.loads((tmp_path / "0/tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["model_max_length"] == 77


def test_chat_template_is_kept(make):
    template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    tokenizer = make(byte_level(chat_template=template))
    assert tokenizer.chat_template == template
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "[hi]"
    assert make(byte_level()).chat_template is None


def test_named_chat_templates_are_kept(make):
    options = {"chat_template": "main", "chat_template.tool_use": "tools"}
    tokenizer = make(byte_level(**options))
    assert tokenizer.chat_template == {"default": "main", "tool_use": "tools"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"ggml.eos_token_id": 4}, {"eos_token_id": 4}),
        (
            {"ggml.bos_token_id": 3, "ggml.eos_token_id": 4, "ggml.padding_token_id": 5},
            {"bos_token_id": 3, "eos_token_id": 4, "pad_token_id": 5},
        ),
        (
            {"ggml.eos_token_id": 4, "ggml.eot_token_id": 6, "ggml.eom_token_id": 4},
            {"eos_token_id": [4, 6]},
        ),
    ],
)
def test_generation_config(tmp_path, options, expected):
    written = write_tokenizer_of(byte_level(**options), tmp_path)
    assert "generation_config.json" in written
    assert json.loads((tmp_path / "generation_config.json").read_text()) == expected


def test_file_without_vocabulary(tmp_path):
    assert write_tokenizer_of({"tokenizer.ggml.model": "none"}, tmp_path) == [
        "generation_config.json"
    ]
    assert write_tokenizer_of({}, tmp_path) == ["generation_config.json"]


def test_written_files_are_listed(tmp_path):
    (tmp_path / "out").mkdir()
    file = write_metadata_only(tmp_path / "a.gguf", byte_level(chat_template="x"))
    written = write_tokenizer(file, tmp_path / "out")
    assert sorted(written) == sorted(path.name for path in (tmp_path / "out").iterdir())
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} < set(written)


# -- the original tokenizer beside the file ------------------------------------------------------


def test_unknown_split_is_refused_with_a_way_out(tmp_path):
    with pytest.raises(UnsupportedVariant) as caught:
        write_tokenizer_of(byte_level("brand-new"), tmp_path)
    assert "tokenizer `brand-new` (`tokenizer.ggml.pre`) splits text is not known" in str(
        caught.value
    )
    assert "`smollm`" in str(caught.value)
    assert "hint: put `tokenizer.json`" in str(caught.value)


def test_original_beside_the_file_is_copied(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    write_tokenizer_of(byte_level("smollm", added=[("[PAD1]", UNUSED)]), source)
    metadata = byte_level("brand-new", added=[("[PAD2]", UNUSED)])
    file = write_metadata_only(source / "a.gguf", metadata)
    written = write_tokenizer(file, target)
    assert sorted(written) == ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (target / name).read_bytes() == (source / name).read_bytes()


def test_tokenizer_of_another_model_is_not_copied(tmp_path):
    write_tokenizer_of(byte_level("smollm", merges=["a b"]), tmp_path)
    with pytest.raises(HeaderError, match="belongs to another model: its token `256` is `ab`"):
        write_tokenizer_of(byte_level("brand-new"), tmp_path)


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "error", "words"),
    [
        (
            byte_level() | {"tokenizer.ggml.model": "t5"},
            UnsupportedVariant,
            "tokenizer model `t5` is not read, expected `gpt2` or `llama`",
        ),
        ({"tokenizer.ggml.model": "gpt2"}, HeaderError, "`tokenizer.ggml.tokens` is missing"),
        (
            byte_level(added=[("a", NORMAL)]),
            HeaderError,
            "tokens are in the vocabulary twice: `a`",
        ),
        (
            byte_level() | {"tokenizer.ggml.token_type": [1, 1]},
            HeaderError,
            "`2` token types for a vocabulary of `262`",
        ),
        (
            byte_level() | {"tokenizer.ggml.merges": None},
            HeaderError,
            "`tokenizer.ggml.merges` is missing",
        ),
        (
            byte_level() | {"tokenizer.ggml.merges": ["a b"]},
            HeaderError,
            "merge `a b` joins texts that are no tokens",
        ),
        (
            byte_level() | {"tokenizer.ggml.merges": ["ab"]},
            HeaderError,
            "merge `ab` joins texts that are no tokens",
        ),
        (
            byte_level("llama-bpe"),
            HeaderError,
            "the tokenizer adds a `bos` token, but the metadata names none",
        ),
        (
            byte_level(**{"ggml.eos_token_id": 9999}),
            HeaderError,
            "special token id `9999` in a vocabulary of `262`",
        ),
        (
            byte_level(**{"ggml.add_space_prefix": True}),
            UnsupportedVariant,
            "a byte-level tokenizer that prepends a space",
        ),
        (
            pieces([*SPECIAL, "a"], [0.0], [UNKNOWN, CONTROL, CONTROL, NORMAL]),
            HeaderError,
            "`1` token scores for a vocabulary of `4`",
        ),
        (
            pieces([*SPECIAL, "a", "aa", "aaa"], [-1000.0] * 6, [2, 3, 3, 1, 1, 1]),
            UnsupportedVariant,
            "all tokens have the same score",
        ),
    ],
)
def test_refusals(tmp_path, metadata, error, words):
    with pytest.raises(error, match=words) as caught:
        write_tokenizer_of(metadata, tmp_path)
    assert "a.gguf" in str(caught.value)
