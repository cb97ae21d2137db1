"""Write docs/architectures.md: what becomes of every architecture of the installed transformers.

    python scripts/architectures.py [TYPE ...] [--processes 2]

Without types all are tried, each as a tiny random model: some minutes. With types only their lines
are made anew. A test holds the page to what it measures again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from architecture_page import PAGE, page_of, read_page, run_all  # noqa: E402


def main() -> None:
    """Sweep and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="model types, all if none is given")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    lines = read_page(PAGE) if options.types else {}
    lines |= run_all(options.types, processes=options.processes)
    PAGE.write_text(page_of(lines))


if __name__ == "__main__":
    main()
