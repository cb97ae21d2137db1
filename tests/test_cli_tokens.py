"""Which tokens commands run: files, texts, chats, and what the model makes up."""

from __future__ import annotations

import hashlib
import json

import pytest
import tiny_checkpoints as tiny

from quantload import api, api_stats
from quantload.accuracy.statistics import ids_digest
from quantload.cli_tokens import read_sequences, read_tokens
from quantload.errors import ConfigError


class Tokenizer:
    """A token for each letter; a chat is opened by 0."""

    def __call__(self, text):
        return {"input_ids": [ord(letter) for letter in text]}

    def apply_chat_template(self, messages, *, tokenize, return_dict):
        assert tokenize
        assert return_dict
        if any(message["role"] == "wrong" for message in messages):
            raise ValueError("unknown role")
        return {"input_ids": [0, *(ord(x) for m in messages for x in m["content"])]}


def read(*, max_tokens=10_000, tokenizer=Tokenizer, **arguments):
    return read_sequences(tokenizer=tokenizer, max_tokens=max_tokens, **arguments)


def no_tokenizer():
    raise AssertionError("nobody needs a tokenizer here")


def test_text_is_cut_into_sequences(tmp_path):
    (tmp_path / "text.txt").write_text("a" * 1000)
    assert [len(s) for s in read(data=tmp_path / "text.txt", max_tokens=900)] == [512, 388]
    assert read(prompts=("ab", "c")) == [[97, 98], [99]]


def test_prompts_are_lines(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("ab\n\nc\r\n")
    assert read(prompts_file=file) == [[97, 98], [99]]
    assert read(data=file) == [[97, 98, 10, 10, 99, 10]]
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"text": "a\u2028b"}\n{"text": "c"}\n')
    assert read(prompts_file=lines) == read(data=lines) == [[97, 0x2028, 98], [99]]


def test_lines_of_text_and_of_chats(tmp_path):
    file = tmp_path / "data.jsonl"
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    file.write_text(f"{json.dumps({'text': 'x' * 600})}\n\n{json.dumps(chat)}\n")
    assert read(data=file) == [[120] * 512, [120] * 88, [0, 97, 98]]


def test_everything_goes_together_and_loads_one_tokenizer(tmp_path):
    loads = []

    def load():
        loads.append(1)
        return Tokenizer()

    (tmp_path / "data.txt").write_text("ab")
    (tmp_path / "more.txt").write_text("e\nf")
    (tmp_path / "ids.json").write_text('{"ids": [[1, 2], [3]]}')
    found = read(
        data=tmp_path / "data.txt",
        token_ids=tmp_path / "ids.json",
        prompts=["d"],
        prompts_file=tmp_path / "more.txt",
        tokenizer=load,
    )
    assert found == [[1, 2], [3], [100], [101], [102], [97, 98]]
    assert loads == [1]


def test_token_ids_need_no_tokenizer(tmp_path):
    (tmp_path / "ids.json").write_text("[[1, 2, 3], [4]]")
    found = read(token_ids=tmp_path / "ids.json", tokenizer=no_tokenizer, max_tokens=2)
    assert found == [[1, 2]]


@pytest.mark.parametrize(
    "content", ["[]", "[[]]", '{"ids": 3}', '[["a"]]', "[1, 2]", "[[", "[[true]]"]
)
def test_bad_token_ids(tmp_path, content):
    file = tmp_path / "ids.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match="token ids"):
        read(token_ids=file)


@pytest.mark.parametrize("name", ["missing.txt", "missing.jsonl"])
def test_text_that_cannot_be_read(tmp_path, name):
    for option in ("data", "prompts_file"):
        with pytest.raises(ConfigError, match=rf"cannot read `.*{name}`"):
            read(**{option: tmp_path / name})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 of `.*` is no JSON"),
        ("[1]", "line 2 of `.*` has neither `text` nor a list of chat `messages`"),
        ('{"text": 3}', "line 2 of `.*` has neither"),
        ('{"messages": ["hi"]}', "line 2 of `.*` has neither"),
        (
            '{"messages": [{"role": "wrong", "content": ""}]}',
            "line 2 of `.*` cannot be put into the chat template of the tokenizer: unknown role",
        ),
    ],
)
def test_lines_of_another_form(tmp_path, line, message):
    file = tmp_path / "data.jsonl"
    file.write_text(f'{{"text": "a"}}\n{line}\n')
    with pytest.raises(ConfigError, match=message):
        read(data=file)


def test_a_text_without_tokens(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(ConfigError, match="there are no tokens"):
        read(data=tmp_path / "empty.txt")


def flags(**given):
    return {"max_tokens": 40, "device": "cpu", **given}


def test_nothing_asked_for():
    assert read_tokens("nowhere", flags()) == []


def test_made_up_tokens_are_those_of_stats(tmp_path):
    folder = tiny.llama(tmp_path / "model")
    expected = api_stats.generated_tokens(api.inspect(folder), 40, device=api.parse_device("cpu"))
    assert read_tokens(str(folder), flags(generated=True)) == expected
    assert read_tokens(str(folder), flags(), generate=True) == expected
    assert sum(map(len, expected)) == 40


def test_made_up_tokens_and_a_file_contradict(tmp_path):
    with pytest.raises(ConfigError, match="`--generated` and `--data` are both given"):
        read_tokens("nowhere", flags(generated=True, data=tmp_path / "x"))


def test_digest_of_ids():
    assert ids_digest([[1, 2], (3,)]) == hashlib.sha256(b"[[1,2],[3]]").hexdigest()


def test_nesting_without_end_is_no_token_file(tmp_path):
    file = tmp_path / "ids.json"
    file.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="cannot read token ids from"):
        read(token_ids=file, tokenizer=no_tokenizer)
    file = tmp_path / "chat.jsonl"
    file.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"line 1 of .* is no JSON"):
        read(data=file)
