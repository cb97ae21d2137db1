"""The GEMM benchmark without a card: what it compares with, what it counts, what its tables say."""

import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def cells(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import gemm_cells

    yield gemm_cells
    for name in ("gemm_cells", "gemm_table", "gemm_goals"):
        sys.modules.pop(name, None)


def test_every_format_has_an_exact_product(cells):
    x = torch.randn(3, 256, dtype=torch.bfloat16)
    for fmt, form in cells.FORMATS.items():
        dense = cells.dense_weight(128, 256, torch.device("cpu"))
        weight = dense if fmt == "bf16" else cells.quantized(fmt, dense)
        exact = cells.exact_product(fmt, weight, x)
        unrounded = x.double() @ dense.double().T
        error = float((exact - unrounded).norm() / unrounded.norm())
        assert error == 0 if fmt == "bf16" else 0 < error < (0.2 if "4" in fmt else 0.06), fmt
        same = x.double() @ cells.exact_rows(weight, 0, 128).T
        assert torch.equal(exact, same) != form.rounds_input, fmt


def test_bytes_are_those_of_the_format(cells):
    n, k = 256, 512
    expected = {
        "w4a16_g128": n * k // 2 + n * k // 128 * 2,
        "w4a16_g128_asym": n * k // 2 + n * k // 128 * 2 + n * k // 128 // 2,
        "mxfp4_a16": n * k // 2 + n * k // 32,
        "nvfp4_a16": n * k // 2 + n * k // 16 + 4,
        "fp8_ch": n * k + 2 * n,
        "fp8_blk": n * k + 2 * (n // 128) * (k // 128),
        "bf16": 2 * n * k,
    }
    for fmt, size in expected.items():
        dense = cells.dense_weight(n, k, torch.device("cpu"))
        weight = dense if fmt == "bf16" else cells.quantized(fmt, dense)
        assert cells.weight_bytes(fmt, weight) == size, fmt


def test_a_wrong_result_counts_for_nothing(cells):
    import gemm_table

    def row(name, us, *, ok=True, m=1):
        return {"fmt": "w4a16_g128", "shape": "8b.qkv", "m": m, "name": name, "us": us,
                "limit_us": 3.0, "ok": ok, "rounds_input": False}  # fmt: skip

    rows = [row("ours", 6.0), row("fast", 1.0, ok=False), row("slow", 9.0), row("ours", 8.0, m=16)]
    lines = gemm_table.markdown([*rows, row("quick", 7.0, m=16)]).splitlines()
    assert lines[4] == "| 8b.qkv | **6.00** (50 %) | 8.00 (38 %) |"
    assert lines[5] == "| *best other* | 9.00 slow | 7.00 quick |"
    assert lines[6] == "| *goal* | 7 | 8.8 |"
