"""A pytest plugin: a test fails when a layer of a checkpoint is worse than in its baseline.

    def test_w4_is_no_worse(quantload_check):
        quantload_check("models/qwen-w4", ref="models/qwen-bf16")

The baseline is `baselines/<module>.<test>.json` beside the test. A missing one fails the test; it
is written then, so that it can be looked at and committed, but never where the variable CI is set.

    --quantload-update        write every baseline anew: accept what was lost
    --quantload-update-new    write missing baselines, and pass
    --quantload-report=DIR    put what was measured there, as files that can replace the baselines
    quantload_tol_db          (ini) tolerance of a weight's error in dB, in place of the file's
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from quantload.accuracy.baseline_tolerances import Tolerances
    from quantload.accuracy.baseline_verdict import BaselineReport

_FOLDER = "baselines"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the plugin's options."""
    group = parser.getgroup("quantload", "per-layer accuracy of checkpoints")
    group.addoption(
        "--quantload-update", action="store_true", help="Write every baseline anew and pass."
    )
    group.addoption(
        "--quantload-update-new", action="store_true", help="Write missing baselines and pass."
    )
    group.addoption(
        "--quantload-report", metavar="DIR", help="Write what was measured to files in DIR."
    )
    parser.addini("quantload_tol_db", "Tolerance of a weight's relative error in dB.", default="")


@pytest.fixture
def quantload_check(request: pytest.FixtureRequest) -> QuantloadCheck:
    """Hold a checkpoint to the baseline of this test; see `QuantloadCheck.__call__`."""
    return QuantloadCheck(request)


class QuantloadCheck:
    """What the fixture gives a test.

    Args:
        request: Of the fixture.
    """

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._config, self._node = request.config, request.node
        self._used: set[Path] = set()

    def __call__(
        self,
        candidate: str | Path,
        *,
        ref: str | Path | None = None,
        name: str = "",
        only: str = "*",
        tol_db: float | None = None,
        mean_tol_db: float | None = None,
        strict: bool = False,
    ) -> BaselineReport | None:
        """Fail if a layer of `candidate` is worse than in its baseline.

        Args:
            candidate: A checkpoint in any format that is read.
            ref: The checkpoint it is measured against; needed to write a baseline, and to judge a
                layer that has changed.
            name: Tells apart the baselines of one test.
            only: Glob of the layers that are looked at.
            tol_db: By how many dB a weight's error may grow.
            mean_tol_db: By how many their mean may.
            strict: Fail too if layers are better than the baseline.

        Returns:
            What was found; None if the baseline was written.
        """
        __tracebackhide__ = True
        file = self.baseline_file(name)
        if file in self._used:
            pytest.fail(f"two checks of this test have the baseline {file}: give one a `name`")
        self._used.add(file)
        if self._must_write(file):
            self._write(ref, candidate, file)
            return None
        if not file.exists():
            pytest.fail(self._missing(ref, candidate, file), pytrace=False)
        from quantload import api_baseline
        from quantload.errors import QuantloadError

        try:
            report = api_baseline.check_baseline(
                candidate,
                file,
                reference=ref,
                only=only,
                tolerances=self._tolerances(file, tol_db, mean_tol_db),
            )
        except QuantloadError as error:  # cannot be compared: an error, never a pass
            pytest.fail(str(error), pytrace=False)
        self._report(report, file)
        self._judge(report, strict=strict)
        return report

    def baseline_file(self, name: str = "") -> Path:
        """Return where the baseline of this test is kept."""
        parts = [self._node.path.stem, self._node.name, *([name] if name else [])]
        stem = re.sub(r"[^A-Za-z0-9_.=,+-]+", "-", ".".join(parts)).strip("-")
        return Path(self._node.path).parent / _FOLDER / f"{stem}.json"

    # -- writing -------------------------------------------------------------------------------

    def _must_write(self, file: Path) -> bool:
        if self._config.getoption("--quantload-update"):
            return True
        return not file.exists() and bool(self._config.getoption("--quantload-update-new"))

    def _write(self, ref: str | Path | None, candidate: str | Path, file: Path) -> None:
        from quantload import api_baseline

        if ref is None:
            pytest.fail(f"a baseline is measured against a reference: give `ref`, for {file}")
        api_baseline.write_baseline(ref, candidate, file, overwrite=True)

    def _missing(self, ref: str | Path | None, candidate: str | Path, file: Path) -> str:
        if os.environ.get("CI") or ref is None:
            return (
                f"there is no baseline {file}; `{self._command('--quantload-update-new')}` makes it"
            )
        self._write(ref, candidate, file)
        return f"there was no baseline {file}: it is written now; look at it and commit it"

    # -- judging -------------------------------------------------------------------------------

    def _tolerances(
        self, file: Path, tol_db: float | None, mean_tol_db: float | None
    ) -> Tolerances:
        from quantload.accuracy.baseline import read_baseline

        kept = read_baseline(file).tolerances
        of_ini = str(self._config.getini("quantload_tol_db"))
        if tol_db is None and of_ini:
            tol_db = float(of_ini)
        if tol_db is not None:
            kept = replace(kept, weight_db=tol_db)
        return kept if mean_tol_db is None else replace(kept, weight_mean_db=mean_tol_db)

    def _judge(self, report: BaselineReport, *, strict: bool) -> None:
        __tracebackhide__ = True
        from quantload.cli_baseline_report import failure_text

        if report.passed and not (strict and report.better):
            return
        text = failure_text(report, accept=self._command("--quantload-update"))
        pytest.fail(text, pytrace=False)

    def _command(self, option: str) -> str:
        return f"pytest '{self._node.nodeid}' {option}"

    def _report(self, report: BaselineReport, file: Path) -> None:
        folder = self._config.getoption("--quantload-report")
        if not folder or report.now is None:
            return
        from quantload.accuracy.baseline import baseline_text
        from quantload.api_baseline import write_text

        write_text(Path(folder) / file.name, baseline_text(report.now))
