"""Every architecture of transformers loads, and docs/architectures.md says what becomes of it."""

from __future__ import annotations

import hashlib

import pytest
import transformers
from architecture_page import PAGE, line_for, page_of, read_page, written_for
from tiny_architectures import architectures

ALL = list(architectures())
PUBLISHED = read_page(PAGE)
SHARE = 32  # one architecture in this many is tried in each ordinary run
# queries of attention across passes, which transformers merges by an operation of its own
NOT_LOADED = {"inkling2_loop", "inkling2_loop_text"}

of_this_version = pytest.mark.skipif(
    transformers.__version__ != written_for(PAGE),
    reason=f"docs/architectures.md is of transformers {written_for(PAGE)}",
)


def is_sample(model_type: str) -> bool:
    return int.from_bytes(hashlib.sha256(model_type.encode()).digest()[:4], "big") % SHARE == 0


@pytest.mark.parametrize("model_type", [t for t in ALL if is_sample(t)])
@of_this_version
@pytest.mark.filterwarnings("ignore")
def test_a_sample_is_as_published(model_type: str) -> None:
    assert line_for(model_type) == PUBLISHED[model_type]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [t for t in ALL if not is_sample(t)])
@of_this_version
@pytest.mark.filterwarnings("ignore")
def test_all_are_as_published(model_type: str) -> None:
    found = line_for(model_type)
    if "ModuleNotFoundError" in found and "ModuleNotFoundError" not in PUBLISHED[model_type]:
        pytest.skip(f"transformers needs more than is installed: {found}")
    assert found == PUBLISHED[model_type]


@of_this_version
def test_the_page_has_every_architecture_and_counts_right() -> None:
    assert sorted(PUBLISHED) == sorted(ALL)
    assert page_of(PUBLISHED) == PAGE.read_text()


def test_enough_is_loaded_and_fused() -> None:
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in PUBLISHED.values()]
    built = [cell for cell in cells if cell[2] != "not built"]
    grouped = [cell for cell in built if int(cell[3])]
    fused = [cell for cell in grouped if cell[3] == cell[4]]
    failed = {cell[0].strip("`") for cell in built if cell[6] != "equal"}
    assert len(built) >= 250
    assert failed <= NOT_LOADED
    assert len(fused) >= 0.9 * len(grouped)
