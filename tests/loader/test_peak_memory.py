"""What is stated of memory holds: a bound by arithmetic, held against what processes took."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_checkpoints as tiny
import torch
from converting import converted, plan_of

from quantload.accuracy.verify import verification_memory
from quantload.loader import growing_digests, page_locked
from quantload.loader.peak_memory import peak_memory, peak_rss
from quantload.loader.tasks import tasks_of
from quantload.loader.workers import Resources, most_at_a_time

ROOT = Path(__file__).parents[2]
BESIDE = 1 << 26
MEASURE = """
import json, sys
import torch
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from converting import opened, plan_of
from quantload.accuracy.verify import verification_memory, verify_sources
from quantload.loader.convert import run_plan
from quantload.loader.peak_memory import peak_memory
from quantload.loader.workers import Resources
from quantload.progress import Silent
from quantload.quant import compiled

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

source, output, memory = sys.argv[2:]
resources = Resources(memory=int(memory), workers=2)
plan = plan_of(source, "W4A16")
compiled.start()
before = status("VmRSS")
run_plan(plan, Path(output), Silent(), resources)
converted = status("VmHWM") - before
report = verify_sources(opened(output), plan.source, Silent(), nearest=True, plan=plan,
                        resources=resources)
assert report.passed, report.failures()[:3]
stated = peak_memory(plan, resources), verification_memory(plan, resources)
print(json.dumps([converted, status("VmHWM") - before, *stated]))
"""


def measured(source, output, *, memory=1 << 30):
    """Bytes that a process took: converting, with verification; and what was stated of both."""
    helpers = str(ROOT / "tests" / "helpers")
    command = [sys.executable, "-c", MEASURE, helpers, str(source), str(output), str(memory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Llama of 200 MB with the widths of Llama 3.2 1B."""
    folder = tmp_path_factory.mktemp("model") / "llama"
    script = ROOT / "benchmarks" / "synthetic_models.py"
    command = [sys.executable, str(script), str(folder), "--gb", "0.2"]
    subprocess.run(command, capture_output=True, check=True)
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("encoding", "memory"),
    [
        ("bfloat16", 1 << 30),
        ("bfloat16", 100 << 20),
        pytest.param("fp8", 1 << 30, marks=pytest.mark.slow),
        pytest.param("fp8", 100 << 20, marks=pytest.mark.slow),  # every weight is done alone
    ],
)
def test_a_process_takes_no_more_than_is_stated(tmp_path, model, encoding, memory):
    source = converted(model, tmp_path / "fp8", "FP8_BLOCK") if encoding == "fp8" else model
    taken, with_verification, stated, verifying = measured(source, tmp_path / "out", memory=memory)
    most = 3.5 if encoding == "fp8" else 2.2  # threads may decode their largest weights in turn
    assert taken <= stated <= most * taken
    assert with_verification <= max(stated, verifying) <= most * with_verification
    if encoding == "bfloat16":  # nothing is decoded whole: what was asked for, and what is beside
        assert max(stated, verifying) <= memory + 2 * BESIDE


def test_most_at_a_time():
    assert most_at_a_time([5, 1, 4], threads=2, memory=100) == 9
    assert most_at_a_time([5, 1, 4], threads=8, memory=100) == 10
    assert most_at_a_time([5, 1, 4], threads=8, memory=7) == 7
    assert most_at_a_time([50, 1, 4], threads=2, memory=7) == 50  # does not fit: runs alone
    assert most_at_a_time([], threads=2, memory=7) == 0


def test_arithmetic(tmp_path):
    plan = plan_of(tiny.llama(tmp_path), "W8A8")
    needs = sorted(task.working_bytes for task in tasks_of(plan))
    two, limited = (Resources(workers=2, memory=memory) for memory in (1 << 30, needs[-1] + 1))
    beside = BESIDE + growing_digests.PIECE_BYTES  # one file
    assert peak_memory(plan, two) == beside + needs[-1] + needs[-2]
    assert peak_memory(plan, limited) == beside + needs[-1] + 1
    assert verification_memory(plan, two) > BESIDE
    on_gpu = Resources(workers=2, device=torch.device("cuda"))
    assert peak_memory(plan, on_gpu) == peak_memory(plan, two) + 2 * page_locked.PIECE_BYTES


def test_peak_rss_counts_bytes():
    code = "x = bytearray(300 << 20); from quantload.loader.peak_memory import peak_rss; "
    code += "print(peak_rss())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 300 << 20 < int(done.stdout) < 3000 << 20
    assert peak_rss() > 100 << 20
