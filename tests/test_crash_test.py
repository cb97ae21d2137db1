"""The crash test of `benchmarks/`, with a few kills."""

import importlib.util
import random
import sys
from pathlib import Path

import pytest
from converting import plan_of

from quantload.loader.convert import run_plan
from quantload.loader.workers import Resources
from quantload.progress import Silent

FILE = Path(__file__).parent.parent / "benchmarks" / "crash_test.py"


@pytest.fixture(scope="module")
def crash_test():
    spec = importlib.util.spec_from_file_location("crash_test", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["crash_test"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["crash_test"]


@pytest.fixture(scope="module")
def source(crash_test, tmp_path_factory):
    folder = tmp_path_factory.mktemp("crash") / "in"
    return crash_test.synthetic(folder, layers=2, hidden=256, shards=2)


@pytest.mark.parametrize(("threads", "processes"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("name", ["mixed", "NVFP4A16"])
def test_killed_conversions_end_with_the_same_digest(
    tmp_path, crash_test, source, name, threads, processes
):
    scheme, rules = crash_test.SCHEMES[name]
    plan = plan_of(source, scheme, rules, max_shard_bytes=400_000)
    whole = crash_test.digest(run_plan(plan, tmp_path / "whole", Silent(), Resources(workers=1)))
    found = crash_test.disturbed(
        plan,
        tmp_path / "out",
        whole,
        threads=threads,
        processes=processes,
        dice=random.Random(threads * 10 + processes),
    )
    assert found.kills == found.places.total() > 0
    assert found.is_same
    assert crash_test.digest(tmp_path / "out") == whole


@pytest.mark.parametrize("step", range(1, 20))
def test_every_step_of_the_end(tmp_path, crash_test, source, step):
    plan = plan_of(source, "W8A8")
    whole = crash_test.digest(run_plan(plan, tmp_path / "whole", Silent()))
    kill = crash_test.Kill(end_step=step)
    ended = crash_test.run(plan, tmp_path / "out", threads=1, processes=1, kills=[kill])
    assert ended in ([-9], [0])
    if ended == [0]:
        assert step > 12  # there are not so many steps
    left = tmp_path / ".out.unfinished"
    if left.exists() and any(path.name != "lock" for path in left.iterdir()):
        run_plan(plan, tmp_path / "out", Silent())
        assert not left.exists()
    assert crash_test.digest(tmp_path / "out") == whole


def test_a_run_that_is_not_killed(tmp_path, crash_test, source):
    plan = plan_of(source, "W8A8")
    kills = [crash_test.Kill(), crash_test.Kill(bytes_written=10**12)]
    assert crash_test.run(plan, tmp_path / "out", threads=1, processes=2, kills=kills) == [0, 0]
