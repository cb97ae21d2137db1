"""What tables of launch settings may hold for each family of kernels."""

import itertools
from pathlib import Path

import pytest

import quantload
from quantload.errors import ConfigError
from quantload.runtime.launch_settings import parse_table
from quantload.runtime.launch_settings_names import why_not_settings

TILE = {"rows": 64, "tokens": 16, "warps": 4, "stages": 3, "splits": 1}
ROUNDED = {
    "bn": 64, "bm": 64, "bk": 128, "stages": 4, "warps": 4, "splits": 1, "swap": 0, "exact": 1,
    "band": 1,
}  # fmt: skip


def test_packaged_tables_hold_what_kernels_know():
    folder = Path(quantload.__file__).parent / "runtime" / "tuned"
    for path in folder.iterdir():
        for kernel, shapes in parse_table(path.read_text(), where=path.name).kernels.items():
            for settings in (entry for of in shapes.values() for entry in of.values()):
                assert why_not_settings(kernel, settings) is None, (kernel, settings)


@pytest.mark.parametrize("has_copy_engine", [True, False])
def test_whatever_is_worth_measuring_may_be_written(has_copy_engine, monkeypatch):
    from quantload.runtime.kernels import (
        byte_settings,
        grouped_product,
        grouped_sum,
        nibble_plan,
        nibble_rounded_settings,
        one_token,
        rounded_settings,
    )

    for module in (byte_settings, nibble_rounded_settings):
        monkeypatch.setattr(module, "card", lambda device: (132, 227 << 10, has_copy_engine))
    for m, (n, k) in itertools.product((1, 16, 48, 128, 1024), ((6144, 4096), (1024, 512))):
        offered = {
            "byte int channel": byte_settings.candidates(m, n, k, grouped=False),
            "grouped int g128 of 8": grouped_product.candidates(m, n, k),
            "grouped int g128 of 8, summed": grouped_sum.candidates(m, n, k),
            "nibble int g128": nibble_plan.candidates(m, n, k),
            "pairs int groups": nibble_rounded_settings.candidates(m, n, k),
            "one token nibbles": one_token.candidates(n, k, glu=False, nibbles=True),
            "rounded int8": rounded_settings.candidates(m, n, k, floats=False, group=0),
            "rounded e4m3 g128": rounded_settings.candidates(m, n, k, floats=True, group=128),
            "rounded e4m3 g32": rounded_settings.candidates(m, n, k, floats=True, group=32),
        }
        for kernel, candidates in offered.items():
            for settings in candidates:
                assert why_not_settings(kernel, settings) is None, (kernel, settings)


@pytest.mark.parametrize(
    ("kernel", "settings", "said"),
    [
        ("nibble int g128", {"path": 7}, "`path` is `7`, expected a number from 0 to 6"),
        ("nibble int g128", {"path": 0, "height": 3}, "it has `height`"),
        ("nibble int g128", {"rows": 64}, "it lacks `path`"),
        ("nibble int g128", {"path": 0, "rows": 48}, "expected a power of two from 8 to 512"),
        ("byte int channel", {"rows": 64}, "it lacks"),
        ("byte int channel", TILE | {"warps": 0}, "`warps` is `0`"),
        ("pairs int groups", TILE | {"splits": 0}, "`splits` is `0`"),
        ("rounded int8", ROUNDED | {"bn": 0}, "`bn` is `0`"),
        ("rounded int8", {"wide": 1, "bn": 64}, "it lacks"),
        ("rounded int8", {"library": 1, "bn": 64}, "it has `bn`"),
        ("grouped int g128 of 8", {"block": 8}, "it lacks"),
        ("grouped int g128 of 8, summed", {"rows": 16}, "it lacks `stages`"),
        ("one token nibbles", {"tiles": 1}, "it lacks"),
    ],
)
def test_what_a_kernel_would_stumble_over_is_told_with_its_place(kernel, settings, said):
    found = why_not_settings(kernel, settings)
    assert found is not None
    assert said in found
    text = str({"card": "c", "kernels": {kernel: {"64x128": {"16": settings}}}}).replace("'", '"')
    with pytest.raises(ConfigError) as caught:
        parse_table(text, where="own.json")
    for part in (kernel, "64x128", "16", said, "own.json"):
        assert part in str(caught.value)


def test_settings_of_other_versions_kernels_are_left_alone():
    assert why_not_settings("a kernel of another version", {"any": 3}) is None
