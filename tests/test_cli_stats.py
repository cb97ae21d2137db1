"""The `stats` command: its tokens, its file, and what it prints."""

from __future__ import annotations

import json

import pytest
import tiny_checkpoints as tiny
from click.testing import CliRunner
from safetensors.torch import load_file

from quantload.cli import main
from quantload.cli_stats import read_jsonl, sequences_of
from quantload.errors import ConfigError

DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.llama(tmp_path_factory.mktemp("stats") / "source")


@pytest.fixture
def ids(tmp_path):
    file = tmp_path / "ids.json"
    file.write_text(json.dumps({"ids": [[1, 2, 3, 4], [5, 6]]}))
    return file


def run(*arguments):
    return CliRunner().invoke(main, ["stats", *map(str, arguments), "--device", "cpu", "--quiet"])


def test_token_ids(folder, ids, tmp_path):
    out = tmp_path / "stats.safetensors"
    done = run(folder, out, "--token-ids", ids)
    assert done.exit_code == 0, done.output
    assert "6 tokens in 2 sequences, statistics of 15 modules" in done.stdout
    assert f"written: {out}" in done.stdout
    assert load_file(out)[f"{DOWN}.tokens"].tolist() == [6]
    assert {file.name for file in tmp_path.iterdir()} == {"ids.json", "stats.safetensors"}


def test_json_and_max_tokens(folder, ids, tmp_path):
    out = tmp_path / "stats.safetensors"
    done = run(folder, out, "--token-ids", ids, "--max-tokens", 5, "--json")
    content = json.loads(done.stdout)
    assert content["quantload_stats"] == 1
    assert content["num_tokens"] == 5
    assert content["metadata"]["num_sequences"] == "2"
    tensors = load_file(out)
    assert content["modules"][DOWN] == {
        "tokens": 5,
        "input_absmax": tensors[f"{DOWN}.input_absmax"].item(),
    }
    assert content["without_statistics"] == ["model.embed_tokens"]
    assert content["unseen"] == content["warnings"] == []
    assert content["peak_rss"] > 1 << 20


def test_a_taken_place(folder, ids, tmp_path):
    out = tmp_path / "stats.safetensors"
    out.write_text("mine")
    done = run(folder, out, "--token-ids", ids)
    assert done.exit_code == 2
    assert f"output `{out}` is there already" in done.output
    assert "--overwrite" in done.output
    assert out.read_text() == "mine"
    assert run(folder, out, "--token-ids", ids, "--overwrite").exit_code == 0
    assert load_file(out)


def test_convert_takes_the_file(folder, ids, tmp_path):
    out = tmp_path / "stats.safetensors"
    assert run(folder, out, "--token-ids", ids).exit_code == 0
    command = ["convert", folder, tmp_path / "out", "--scheme", "NVFP4", "--stats", out]
    command += ["--observer", "search", "--plan", "--json"]
    done = CliRunner().invoke(main, [str(part) for part in command])
    assert done.exit_code == 0, done.output
    assert "warning" not in done.stderr
    modules = json.loads(done.stdout)["modules"]
    used = [m["importance"] for m in modules if m["importance"]]
    assert len(used) == 14


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


def test_lines_of_text_and_of_chats(tmp_path):
    file = tmp_path / "data.jsonl"
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    file.write_text(f"{json.dumps({'text': 'x' * 600})}\n\n{json.dumps(chat)}\n")
    found = sequences_of(data=file, token_ids=None, tokenizer=Tokenizer)
    assert found == [[120] * 512, [120] * 88, [0, 97, 98]]


def test_a_text_file_and_token_ids_go_together(tmp_path, ids):
    file = tmp_path / "data.txt"
    file.write_text("ab")
    found = sequences_of(data=file, token_ids=ids, tokenizer=Tokenizer)
    assert found == [[1, 2, 3, 4], [5, 6], [97, 98]]
    assert sequences_of(data=None, token_ids=None, tokenizer=Tokenizer) is None


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
        read_jsonl(file, Tokenizer())


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        read_jsonl(tmp_path / "no.jsonl", Tokenizer())
