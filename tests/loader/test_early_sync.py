"""The disk takes an output while it is written, and its errors are told."""

import errno
import os
from pathlib import Path

import pytest
import torch

from quantload.errors import OutputError
from quantload.loader.early_sync import EarlySync
from quantload.loader.output_files import OutputTensor, assign_files
from quantload.loader.writer import OutputFiles

TENSORS = [OutputTensor(f"m{n}.weight", torch.uint8, (100,), f"m{n}") for n in range(6)]


@pytest.fixture
def files(tmp_path):
    planned = assign_files([[tensor] for tensor in TENSORS], max_bytes=300)
    assert len(planned) == 2
    opened = OutputFiles(tmp_path, planned, final=tmp_path / "out")
    opened.create()
    yield opened
    opened.close()


def _finish(sync):
    for tensor in TENSORS:
        sync.add(tensor.name, tensor.num_bytes)
    sync.finish()


def _record_syncs(monkeypatch, error=0):
    synced = []

    def fdatasync(descriptor):
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        if error:
            raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    return synced


def test_each_file_is_synchronized_after_so_many_bytes(files, monkeypatch):
    synced = _record_syncs(monkeypatch)
    with EarlySync(files, every=200) as sync:
        for tensor in TENSORS:
            sync.add(tensor.name, 40)
            sync.add(tensor.name, tensor.num_bytes - 40)
        sync.finish()
    assert synced == [file.name for file in files.all]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_an_error_of_the_disk_is_told_once_and_here(files, monkeypatch, number):
    synced = _record_syncs(monkeypatch, number)
    with EarlySync(files, every=100) as sync, pytest.raises(OutputError) as caught:
        _finish(sync)
    assert synced
    assert str(caught.value).startswith(f"cannot write `{files.final}`: {os.strerror(number)}")


def test_what_is_left_is_synchronized_at_the_end(files, monkeypatch):
    synced = _record_syncs(monkeypatch)
    with EarlySync(files, every=301) as sync:
        _finish(sync)
        assert synced == []
        sync.add_rest()
        sync.finish()
    assert synced == [file.name for file in files.all]
