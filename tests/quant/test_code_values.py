"""Values of codes by the compiled loop: those of PyTorch, bit for bit."""

import pytest
import torch

from quantload.quant import code_values, compiled
from quantload.quant.code_values import values_of
from quantload.quant.grid import E2M1, E2M3, E3M2, E4M3, E5M2, INT8

WIDE = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


@pytest.fixture
def calls(monkeypatch):
    """Arguments of the loop: it is used whatever the size."""
    from quantload.quant import compiled_decoding

    monkeypatch.setattr(compiled, "is_ready", lambda _: True)
    found, usual = [], compiled_decoding.look_up

    def noted(*arguments):
        found.append(arguments)
        usual(*arguments)

    monkeypatch.setattr(compiled_decoding, "look_up", noted)
    return found


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("grid", [E4M3, E5M2])
def test_every_code_of_float8(calls, grid, dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(grid.storage).reshape(4, 64)
    found, expected = values_of(codes, grid, dtype), codes.to(dtype)
    assert found.dtype == dtype
    assert torch.equal(found.view(WIDE[dtype]), expected.view(WIDE[dtype]))
    assert len(calls) == 1


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("grid", [E2M1, E2M3, E3M2])
def test_every_code_of_a_table(calls, grid, dtype):
    codes = torch.arange(len(grid.table), dtype=torch.uint8).reshape(2, -1)
    expected = torch.tensor(grid.table, dtype=torch.float64).to(dtype).reshape(2, -1)
    assert torch.equal(values_of(codes, grid, dtype), expected)
    assert len(calls) == 1


def test_columns_of_a_larger_tensor(calls):
    codes = torch.randint(0, 120, (6, 10), dtype=torch.uint8).view(torch.float8_e4m3fn)
    for part in (codes.t(), codes[1:4, 2:9], codes[:0]):
        assert torch.equal(values_of(part, E4M3, torch.float32), part.to(torch.float32))
    assert len(calls) == 2


@pytest.mark.parametrize(("grid", "dtype"), [(INT8, torch.float32), (E4M3, torch.float64)])
def test_what_pytorch_does(calls, grid, dtype):
    codes = torch.arange(0, 100, dtype=torch.int8).view(grid.storage)
    assert torch.equal(values_of(codes, grid, dtype), codes.to(dtype))
    assert not calls


def test_numba_is_not_started_for_few(monkeypatch):
    asked = []
    monkeypatch.setattr(compiled, "is_ready", lambda many: bool(asked.append(many)))
    codes = torch.zeros(80, dtype=torch.float8_e4m3fn)
    assert torch.equal(code_values.values_of(codes, E4M3, torch.float32), torch.zeros(80))
    assert asked == [10]
