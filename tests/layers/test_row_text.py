"""Text comes in whole characters and ends before stop strings."""

import pytest

from quantload.layers.row_text import RowText


def of_bytes(ids):
    return bytes(ids).decode("utf-8", errors="replace")


def pieces(text, stop=()):
    row = RowText(of_bytes, stop)
    found = [row.add(token) for token in text.encode()]
    return [*found, row.finish()], row


def test_characters_come_whole():
    found, row = pieces("aé漢b")
    assert found == ["a", "", "é", "", "", "漢", "b", ""]
    assert row.text == "aé漢b"


def test_what_stays_unfinished_comes_at_the_end():
    row = RowText(of_bytes)
    assert [row.add(97), row.add("é".encode()[0]), row.finish()] == ["a", "", "\ufffd"]


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one. two", [". "], "one"),
        ("ababac", ["abac"], "ab"),
        ("x\n\ny", ["\n\n", "y"], "x"),
        ("nothing", ["z", ""], "nothing"),
        ("end sto", ["stop"], "end sto"),
    ],
)
def test_stop_strings(text, stop, expected):
    found, row = pieces(text, stop)
    assert "".join(found) == expected == row.text
    assert row.stopped == (expected != text)


def test_the_begin_of_a_stop_string_is_held_back():
    found, _ = pieces("a stone", ["stop"])
    assert found == ["a", " ", "", "", "", "ston", "e", ""]


def test_a_stop_string_in_one_token():
    words = {0: "see ", 1: "you</s>bye", 2: "!"}
    row = RowText(lambda ids: "".join(words[i] for i in ids), ["</s>"])
    assert [row.add(0), row.add(1), row.add(2), row.finish()] == ["see ", "you", "", ""]


def test_tokens_are_decoded_after_those_before_them():
    def decode(ids):  # as sentencepiece: the first token loses its space
        return "".join(f" w{i}" for i in ids).removeprefix(" ")

    row = RowText(decode)
    assert [row.add(1), row.add(2), row.add(3)] == ["w1", " w2", " w3"]
