"""What memory a conversion takes: a bound that holds, and what was taken."""

from __future__ import annotations

import resource
import sys

from quantload.loader import growing_digests, page_locked
from quantload.loader.plan import Plan
from quantload.loader.source_view import ViewReader
from quantload.loader.tasks import tasks_of
from quantload.loader.workers import Resources, most_at_a_time

# What libraries load when they are first used, and what allocators keep of what was freed: 40 to
# 70 MB were measured.
_BESIDE = 1 << 26


def peak_memory(plan: Plan, resources: Resources) -> int:
    """Return a bound of the memory that a conversion takes above the interpreter's own, in bytes.

    Args:
        plan: What is carried out.
        resources: What it may use; a weight that needs more than its memory is done alone.
    """
    needs = [task.working_bytes for task in tasks_of(plan)]
    threads = resources.threads()
    at_a_time = most_at_a_time(needs, threads=threads, memory=resources.memory)
    at_a_time += min(threads, len(plan.files)) * growing_digests.PIECE_BYTES
    if resources.device.type != "cpu":
        at_a_time += threads * page_locked.PIECE_BYTES
    return beside_tasks(plan) + at_a_time


def beside_tasks(plan: Plan) -> int:
    """Return the memory that is no single task's, in bytes."""
    reader = plan.source.reader
    kept = reader.largest_kept_bytes if isinstance(reader, ViewReader) else 0
    return _BESIDE + kept


def peak_rss() -> int:
    """Return the most memory that this process had so far, in bytes."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024
