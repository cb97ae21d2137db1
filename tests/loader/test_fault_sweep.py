"""Each fault in each tensor of the tools' own files is refused, told, or changes nothing.

One fault in 29 is tried in the smallest file of each tool in every run, all faults in all files in
slow ones. What no reader can see is counted: see `HIDDEN` of the helper.
"""

import pytest
from fault_layouts import pickled, sharded
from fault_sweep import HIDDEN, sweep, sweepable, table
from truth import CHECKPOINTS

pytestmark = pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason="no shared checkpoints")

STEP = 97  # a prime, so that all kinds of faults come up
TOOLS = sorted(f.name for f in CHECKPOINTS.iterdir() if f.is_dir()) if CHECKPOINTS.is_dir() else []


def check(found):
    assert found.found["wrong"] == [], found.name
    assert found.found["crash"] == [], found.name


@pytest.mark.parametrize("tool", TOOLS)
def test_a_few_faults(tool):
    for place in sorted(sweepable(f"{tool}/*"), key=_size):
        found = sweep(place, step=STEP)
        if not found.skipped:
            check(found)
            assert sum(found.counts.values()) >= 2
            return
    pytest.skip("nothing that is read")


SMALL = [
    "llmcompressor-0.14*/nano-llama-W4A16",
    "compressed-tensors-0.20*/*",
    "gptqmodel-*/*",
    "autoawq-*/*",
    "amd-quark-*/*",
    "nvidia-modelopt-*/*",
]


@pytest.mark.parametrize("laid_out", [sharded, pickled])
@pytest.mark.parametrize("pattern", SMALL)
def test_a_few_faults_in_other_layouts(tmp_path, pattern, laid_out):
    places = [place for place in sweepable(pattern) if place.is_dir()]
    place = min(places, key=_size)
    found = sweep(laid_out(place, tmp_path / place.name), step=STEP)
    assert not found.skipped
    check(found)
    assert sum(found.counts.values()) >= 2


@pytest.mark.slow
def test_all_faults():
    found = [sweep(place) for place in sweepable()]
    print(table(found))  # noqa: T201
    for each in found:
        check(each)
    assert sum(sum(each.counts.values()) for each in found) > 50_000


def test_what_cannot_be_seen_is_of_these_kinds():
    place = sweepable("llmcompressor-*/nano-llama-W4A16")[0]
    found = sweep(place, names="model.norm")
    assert found.counts["hidden"] > 0
    assert {line.split()[0] for line in found.found["hidden"]} <= set(HIDDEN)


def _size(place):
    files = place.glob("*.safetensors") if place.is_dir() else [place]
    return sum(file.stat().st_size for file in files if not file.name.startswith("expected"))
