"""Counters of split sums: enough of them, zero, and none of a card where there is none."""

import torch

from quantload.runtime.kernels.split_locks import prepare, split_locks


def test_without_a_card_every_launch_has_its_own():
    device = torch.device("cpu")
    prepare(device)
    first, second = split_locks(device, 5), split_locks(device, 5)
    assert first.dtype == torch.int32
    assert first.tolist() == [0] * 5
    assert first.data_ptr() != second.data_ptr()
