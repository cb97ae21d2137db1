"""Lengths to which prompts are padded for their graphs; the graphs are tested on a card."""

import pytest

from quantload.runtime.prompt_graphs import padded_length


@pytest.mark.parametrize(
    ("length", "padded"),
    [(1, 32), (32, 32), (33, 64), (256, 256), (257, 288), (512, 512), (513, 576), (1025, 1152)],
)
def test_lengths(length, padded):
    assert padded_length(length) == padded


def test_padding_is_an_eighth_at_most():
    for length in range(256, 5000):
        padded = padded_length(length)
        assert length <= padded < length * 1.126
        assert padded_length(padded) == padded
