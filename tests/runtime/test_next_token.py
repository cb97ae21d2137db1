"""The kernel at the end of a greedy step chooses as torch.argmax does."""

import pytest
import torch

INF, NAN = float("inf"), float("nan")


def chosen(logits):
    from quantload.runtime.kernels.next_token import next_token

    tokens = torch.full((len(logits),), -7, device=logits.device)
    positions = torch.arange(5, 5 + len(logits), device=logits.device)
    for step in (1, 2):  # counters are zero again
        next_token(logits, tokens, positions)
        assert positions.tolist() == [5 + step + row for row in range(len(logits))]
    return tokens.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (1, 2048), (2, 5000), (5, 20000)])
def test_the_largest_wins(dtype, shape, kernel_device):
    logits = torch.randn(shape, device=kernel_device).sub(3).to(dtype)  # bf16 has many equals
    assert chosen(logits) == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 3.0, 3.0, 2.0], 1),
        ([-0.0, 0.0, -1.0], 0),
        ([-5.0, -1.5, -1.5], 1),
        ([1.0, INF, NAN, NAN], 2),
        ([-INF, -INF], 0),
        ([0.0, -NAN, INF], 1),
    ],
)
def test_order(values, expected, kernel_device):
    logits = torch.tensor([values], device=kernel_device)
    assert chosen(logits) == [expected]


def test_the_first_of_equals_in_far_parts(kernel_device):
    logits = torch.zeros(2, 9000, device=kernel_device)
    logits[0, [8999, 2500, 6000]] = 2.0
    logits[1, 8999] = 1e-30
    assert chosen(logits) == [2500, 8999]


def test_rows_that_lie_apart(kernel_device):
    logits = torch.randn(3, 2, 300, device=kernel_device)
    assert chosen(logits[:, 1]) == logits[:, 1].argmax(-1).tolist()
    turned = torch.randn(300, 3, device=kernel_device).t()
    assert chosen(turned) == turned.argmax(-1).tolist()


def test_the_read_kernel_reads_all(kernel_device):
    from quantload.runtime.kernels.read_rate import sum_parts

    data = torch.randint(-1000, 1000, (2, 4096 * 16), dtype=torch.int32, device=kernel_device)
    assert torch.equal(sum_parts(data).long(), data.sum(1, dtype=torch.int64))
