"""Digests of files that grow in any order are those of the finished files."""

import hashlib
import os
import random

import pytest
import torch

from quantload.errors import OutputError
from quantload.loader.growing_digests import GrowingDigests
from quantload.loader.output_files import OutputTensor, assign_files
from quantload.loader.writer import OutputFiles

TENSORS = {f"t{i}": torch.arange(i * 7, dtype=torch.int16) for i in range(12)}


def _files(folder):
    planned = [[OutputTensor(n, t.dtype, tuple(t.shape), n)] for n, t in TENSORS.items()]
    files = OutputFiles(folder, assign_files(planned, max_bytes=400), final=folder)
    files.create()
    return files


def tell(digests, name):
    """Say that a tensor is written; the second half of it before the first."""
    size = TENSORS[name].nbytes
    for start, stop in ((size // 2, size), (0, size // 2)):
        digests.add(name, start, stop)


@pytest.mark.parametrize("seed", range(6))
def test_any_order(tmp_path, seed):
    names = random.Random(seed).sample(sorted(TENSORS), len(TENSORS))
    files = _files(tmp_path)
    told = names if seed % 2 else names[:5]
    with GrowingDigests(files, threads=2) as digests:
        for name in names:
            files.write(name, TENSORS[name])
            if name in told:
                tell(digests, name)
        found = digests.finish(everything=told != names)
    files.close()
    assert len(found) > 1
    assert found == {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in tmp_path.iterdir()
    }


def test_a_tensor_without_elements_that_is_told_last(tmp_path):
    tensors = {"none": torch.empty(0), "last": torch.arange(10.0)}  # both begin at one place
    planned = [[OutputTensor(n, t.dtype, tuple(t.shape), n)] for n, t in tensors.items()]
    files = OutputFiles(tmp_path, assign_files(planned, max_bytes=400), final=tmp_path)
    files.create()
    with GrowingDigests(files, threads=1) as digests:
        for name in ("last", "none"):
            files.write(name, tensors[name])
            digests.add(name, 0, tensors[name].nbytes)
            for job in digests._jobs:
                job.result()  # what is ready is hashed before the next one comes
        found = digests.finish(everything=False)
    files.close()
    (file,) = tmp_path.iterdir()
    assert found == {file.name: hashlib.sha256(file.read_bytes()).hexdigest()}


def test_a_file_that_is_cut(tmp_path):
    files = _files(tmp_path)
    with GrowingDigests(files, threads=1) as digests:
        for file in files.all:
            os.truncate(tmp_path / file.name, len(file.header) + 1)
        with pytest.raises(OutputError, match="has become shorter"):
            digests.finish(everything=True)
    files.close()


def test_a_tensor_that_is_missing(tmp_path):
    files = _files(tmp_path)
    with GrowingDigests(files, threads=1) as digests:
        for name in TENSORS:
            if name != "t5":
                tell(digests, name)
        with pytest.raises(AssertionError, match="is not hashed to its end"):
            digests.finish(everything=False)
    files.close()
