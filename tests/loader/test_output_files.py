"""Headers and offsets of output files, read by the safetensors library."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from quantload.loader.output_files import OutputTensor, assign_files, usual_shard_bytes

_DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.float8_e4m3fn]
_TENSORS = st.lists(
    st.tuples(st.sampled_from(_DTYPES), st.lists(st.integers(0, 5), max_size=3)),
    min_size=1,
    max_size=8,
)


@given(_TENSORS)
def test_files_are_laid_out_as_the_library_does(tmp_path_factory, tensors):
    folder = tmp_path_factory.getbasetemp()
    made = {f"t{i}": torch.full(shape, i).to(dtype) for i, (dtype, shape) in enumerate(tensors)}
    planned = [OutputTensor(name, t.dtype, tuple(t.shape), name) for name, t in made.items()]
    (file,) = assign_files([planned], max_bytes=1 << 30)
    raw = bytearray(file.num_bytes)
    raw[: len(file.header)] = file.header
    for name, tensor in made.items():
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert file.offsets[name] % tensor.element_size() == 0
        raw[file.offsets[name] : file.offsets[name] + len(data)] = data
    (folder / "ours.safetensors").write_bytes(raw)
    for name, tensor in load_file(folder / "ours.safetensors").items():
        assert tensor.dtype == made[name].dtype
        assert torch.equal(tensor.float(), made[name].float())
    save_file(made, folder / "theirs.safetensors", metadata={"format": "pt"})
    size = (folder / "theirs.safetensors").stat().st_size
    assert abs(size - file.num_bytes) <= 8  # tensors of one width may stand in another order


def _modules(*sizes):
    return [[OutputTensor(f"m{i}", torch.int8, (size,), "")] for i, size in enumerate(sizes)]


def test_files_are_filled_in_order():
    files = assign_files(_modules(40, 40, 40, 100, 10), max_bytes=100)
    assert [list(file.tensors) for file in files] == [["m0", "m1"], ["m2"], ["m3"], ["m4"]]
    assert [file.name for file in files] == [
        f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)
    ]


def test_a_module_stays_together_even_if_it_is_too_large():
    pair = [OutputTensor(name, torch.int8, (80,), "") for name in ("a", "b")]
    files = assign_files([*_modules(10), pair], max_bytes=100)
    assert [list(file.tensors) for file in files] == [["m0"], ["a", "b"]]
    files = assign_files([pair, *_modules(10)], max_bytes=100)
    assert [list(file.tensors) for file in files] == [["a", "b"], ["m0"]]


def test_one_file_has_no_number():
    (file,) = assign_files(_modules(1, 2), max_bytes=100)
    assert file.name == "model.safetensors"
    (empty,) = assign_files([], max_bytes=100)
    assert (empty.name, empty.tensors) == ("model.safetensors", {})


@pytest.mark.parametrize(
    ("gigabytes", "files"), [(0.4, 1), (0.9, 2), (2.1, 5), (4.0, 8), (40.0, 8), (80.0, 16)]
)
def test_large_outputs_have_some_files(gigabytes, files):
    """Several threads then write and hash; none is above 5 GB."""
    modules = _modules(*[10_000_000] * round(100 * gigabytes))
    found = assign_files(modules, max_bytes=None)
    assert len(found) == files
    limit = usual_shard_bytes(round(1e9 * gigabytes))
    assert 500_000_000 <= limit <= 5_000_000_000
    assert max(len(file.tensors) for file in found) * 10_000_000 <= limit
