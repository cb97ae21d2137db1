"""What is read and written through buffers, piece by piece, is all of it."""

from __future__ import annotations

import pytest
import torch

from quantload.loader import page_locked
from quantload.loader.page_locked import PIECE_BYTES, BounceBuffer, Buffer, own_stream

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = [0, 1, 8, 9, 16, 17, 40]


def some_bytes(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", SIZES)
def test_a_tensor_is_read_in_pieces(device, size):
    bounce, stored = BounceBuffer(torch.device(device), piece_bytes=8), some_bytes(size)
    reads = []

    def read(memory: memoryview, at: int) -> None:
        reads.append((at, len(memory)))
        memory[:] = stored[at : at + len(memory)].numpy().data

    place = torch.zeros(size, dtype=torch.uint8, device=device)
    bounce.fill(place, read)
    assert torch.equal(place.cpu(), stored)
    assert reads == [(at, min(8, size - at)) for at in range(0, size, 8)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", SIZES)
def test_a_tensor_is_taken_in_pieces(device, size):
    bounce, stored = BounceBuffer(torch.device(device), piece_bytes=8), some_bytes(size)
    found = bytearray(size)
    for at, piece in bounce.pieces_of(stored.to(device)):
        found[at : at + len(piece)] = piece
    assert bytes(found) == bytes(stored.tolist())
    assert bytes(found) == b"".join(bytes(p) for _, p in bounce.pieces_of(stored.to(device)))


@pytest.mark.parametrize("has_library", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_some_bytes_are_copied(monkeypatch, device, has_library):
    if not has_library:
        monkeypatch.setattr(page_locked, "_copy_of_runtime", lambda: None)
    buffer = Buffer(100, torch.device(device))
    buffer.memory[:] = some_bytes(100)
    place = torch.zeros(50, dtype=torch.uint8, device=device)
    stream = torch.cuda.current_stream() if device == "cuda" else None
    buffer.copy_to(place, at=30, to=7, num_bytes=20, stream=stream)
    buffer.record(stream)
    buffer.wait()
    expected = torch.zeros(50, dtype=torch.uint8)
    expected[7:27] = buffer.memory[30:50]
    assert torch.equal(place.cpu(), expected)


@pytest.mark.gpu
def test_a_copy_that_cuda_refuses(monkeypatch):
    assert page_locked._copy_of_runtime() is not None
    monkeypatch.setattr(page_locked, "_copy_of_runtime", lambda: lambda *_: 700)
    buffer = Buffer(100, torch.device("cuda"))
    place = torch.zeros(50, dtype=torch.uint8, device="cuda")
    with pytest.raises(RuntimeError, match="CUDA error 700 while 10 bytes"):
        buffer.copy_to(place, at=0, to=0, num_bytes=10, stream=torch.cuda.current_stream())


@pytest.mark.gpu
def test_threads_with_streams_of_their_own_do_not_mix():
    """Each thread reads, computes and takes back many times; every byte is its own."""
    from concurrent.futures import ThreadPoolExecutor

    device = torch.device("cuda")

    def work(number: int) -> bool:
        with own_stream(device):
            bounce = BounceBuffer(device)
            generator = torch.Generator().manual_seed(number)
            for _ in range(8):
                size = PIECE_BYTES + PIECE_BYTES // 2 + number
                stored = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
                place = torch.empty(size, dtype=torch.uint8, device=device)
                bounce.fill(place, lambda view, at, s=stored: _put(view, s, at))
                expected = (stored ^ number).numpy().data
                for at, piece in bounce.pieces_of(place ^ number):
                    if piece != expected[at : at + len(piece)]:
                        return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def _put(view: memoryview, stored: torch.Tensor, at: int) -> None:
    view[:] = stored[at : at + len(view)].numpy().data


@pytest.mark.gpu
def test_buffers_are_page_locked():
    buffer = Buffer(100, torch.device("cuda"))
    assert buffer.memory.is_pinned()
    assert len(buffer.view) == 100
