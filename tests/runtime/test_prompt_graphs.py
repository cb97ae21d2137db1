"""Lengths to which prompts are padded for their graphs; the graphs are tested on a card."""

import pytest
import torch
from transformers.utils import import_utils

from quantload.runtime import prompt_graphs
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


def test_a_model_runs_as_if_captured():
    """As transformers asks before it leaves a mask out; afterwards the answer is the right one."""
    asked = torch.cuda.is_current_stream_capturing
    with prompt_graphs._as_if_captured():
        assert import_utils.is_cuda_stream_capturing()
        assert import_utils.is_tracing()
    assert torch.cuda.is_current_stream_capturing is asked


def test_the_right_answer_comes_back_after_a_failure():
    asked = torch.cuda.is_current_stream_capturing
    with pytest.raises(KeyError), prompt_graphs._as_if_captured():
        raise KeyError
    assert torch.cuda.is_current_stream_capturing is asked
