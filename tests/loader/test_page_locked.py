"""What is read and written through buffers, piece by piece, is all of it."""

from __future__ import annotations

import contextlib

import pytest
import torch

from quantload.loader.page_locked import PIECE_BYTES, Buffer, Ring, own_stream

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = [0, 1, 8, 9, 16, 17, 40]


def some_bytes(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8)


@pytest.fixture(params=[1, 3])
def ring_of(request):
    """Makes rings, with one thread or several."""
    with contextlib.ExitStack() as stack:
        yield lambda device, **options: stack.enter_context(
            Ring(torch.device(device), threads=request.param, **options)
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", SIZES)
def test_a_tensor_is_read_in_pieces(ring_of, device, size):
    ring, stored = ring_of(device, piece_bytes=8), some_bytes(size)
    reads = []

    def read(memory: memoryview, at: int) -> None:
        reads.append((at, len(memory)))
        memory[:] = stored[at : at + len(memory)].numpy().data

    place = torch.zeros(size, dtype=torch.uint8, device=device)
    ring.fill(place, read)
    assert torch.equal(place.cpu(), stored)
    assert sorted(reads) == [(at, min(8, size - at)) for at in range(0, size, 8)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", SIZES)
def test_a_tensor_is_taken_in_pieces(ring_of, device, size):
    ring, stored = ring_of(device, piece_bytes=8), some_bytes(size)
    for _ in range(2):
        found = ring.drain(stored.to(device), lambda piece, at: (at, bytes(piece)))
        assert [at for at, _ in found] == list(range(0, size, 8))
        assert b"".join(piece for _, piece in found) == bytes(stored.tolist())


def test_an_error_comes_after_every_piece_has_ended(ring_of):
    ring, ended = ring_of("cpu", piece_bytes=8), []

    def do(buffer, at):
        if at == 8:
            raise KeyError(at)
        ended.append(at)

    with pytest.raises(KeyError, match="8"):
        ring.each_piece(40, do)
    assert sorted(ended) in ([0], [0, 16, 24, 32])  # of one thread, of several


@pytest.mark.gpu
def test_threads_with_streams_of_their_own_do_not_mix(ring_of):
    """Each thread reads, computes and takes back many times; every byte is its own."""
    from concurrent.futures import ThreadPoolExecutor

    device = torch.device("cuda")

    def work(number: int) -> bool:
        with own_stream(device):
            generator = torch.Generator().manual_seed(number)
            for _ in range(8):
                size = 3 * PIECE_BYTES + number
                stored = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
                place = torch.empty(size, dtype=torch.uint8, device=device)
                ring.fill(place, lambda view, at, s=stored: _put(view, s, at))
                expected = (stored ^ number).numpy().data
                same = ring.drain(
                    place ^ number, lambda piece, at, e=expected: piece == e[at : at + len(piece)]
                )
                if not all(same):
                    return False
        return True

    ring = ring_of(device)
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def _put(view: memoryview, stored: torch.Tensor, at: int) -> None:
    view[:] = stored[at : at + len(view)].numpy().data


@pytest.mark.gpu
def test_buffers_are_page_locked():
    buffer = Buffer(100, torch.device("cuda"))
    assert buffer.memory.is_pinned()
    assert len(buffer.view) == 100
