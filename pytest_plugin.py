"""A pytest plugin: a test fails when a layer of a checkpoint is worse than in its baseline.

    def test_w4_is_no_worse(quantload_check):
        quantload_check("models/qwen-w4", ref="models/qwen-bf16")

The baseline is `baselines/<module>.<test>.json` beside the test. A missing one fails the test; it
is written then, so that it can be looked at and committed, but never where the variable CI is set.
A second test of the same checkpoints and baseline takes what the first one of the session found.

    --quantload-update        write every baseline anew: accept what was lost
    --quantload-update-new    write missing baselines, and pass
    --quantload-report=DIR    put what was measured there, as pages and as files that can replace
                              the baselines: `cp -r DIR/. .`
    quantload_tol_db          (ini) tolerance of a weight's error in dB, in place of the file's
    quantload_strict          (ini) fail too where layers are better than the baseline

At the end baselines that can be tightened are named, and those that no test has used: this only
where no test was left out.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from quantload.pytest_plugin_summary import NOTE, TEST, USED, summary_lines
from quantload.pytest_plugin_tokens import Given, check_given, is_text, read_given

if TYPE_CHECKING:
    from quantload.accuracy.baseline_tolerances import Tolerances
    from quantload.accuracy.baseline_verdict import BaselineReport

_FOLDER = "baselines"
_LONGEST_NAME = 160
# A name, or one with one case of its parameters, which ends it: no other becomes the same file.
_ONE_CASE = re.compile(r"[^][]*(\[[^][]*\])?")
_FOUND = pytest.StashKey[dict[Any, Any]]()


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
    parser.addini(
        "quantload_strict", "Fail too where layers are better.", type="bool", default=False
    )


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
        self._tell(TEST, str(self.baseline_file().with_suffix("")))

    def __call__(  # noqa: PLR0913 - a keyword for each choice of the user
        self,
        candidate: str | Path,
        *,
        ref: str | Path | None = None,
        name: str = "",
        only: str = "*",
        tier: Literal["weights", "layers"] = "layers",
        tokens: Given | None = None,
        tol_db: float | None = None,
        mean_tol_db: float | None = None,
        tolerances: Mapping[str, Any] | None = None,
        strict: bool | None = None,
        device: str | None = None,
        dtype: str = "float32",
    ) -> BaselineReport | None:
        """Fail if a layer of `candidate` is worse than in its baseline.

        Args:
            candidate: A checkpoint in any format that is read.
            ref: The checkpoint it is measured against; needed to write a baseline, and to judge a
                layer that has changed where the baseline has no sketch.
            name: Tells apart the baselines of one test.
            only: Glob of the layers that are looked at.
            tier: "weights" runs nothing, even if the baseline has tokens.
            tokens: What a baseline that is written runs: lists of token ids, a .json file of them,
                or text (2048 tokens of it; read with the tokenizer of `ref`). A baseline with
                others is not comparable.
            tol_db: By how many dB a weight's error may grow.
            mean_tol_db: By how many their mean may.
            tolerances: Any of those in the file's head, by name; or such by glob of layers.
            strict: Fail too if layers are better than the baseline; default the ini's.
            device: Where both run; default CUDA where there is one.
            dtype: dtype in which both run.

        Returns:
            What was found; None if the baseline was written.
        """
        __tracebackhide__ = True
        file = self.baseline_file(name)
        if file in self._used:
            pytest.fail(
                f"two checks of this test have the baseline {file}: give one a `name`",
                pytrace=False,
            )
        self._used.add(file)
        self._tell(USED, str(file))
        if tier not in ("weights", "layers"):
            pytest.fail(f'tier is "{tier}", expected "weights" or "layers"', pytrace=False)
        own = {"tol_db": tol_db, "mean_tol_db": mean_tol_db, "tolerances": tolerances}
        how = {"run": tier == "layers", "only": only, "device": device, "dtype": dtype}
        with _told():
            if self._must_write(file):
                self._write(ref, candidate, file, tokens, device=device, dtype=dtype)
                return None
            if not file.exists():
                self._miss(ref, candidate, file, tokens, device=device, dtype=dtype)
            report = self._checked(candidate, ref, file, tokens, own, how)
        is_strict = bool(self._config.getini("quantload_strict")) if strict is None else strict
        problem = self._report(report, file, str(candidate), strict=is_strict)
        self._judge(report, file, strict=is_strict, problem=problem)
        return report

    def baseline_file(self, name: str = "") -> Path:
        """Return where the baseline of this test is kept: no two tests have the same."""
        classes = [n.name for n in self._node.listchain() if isinstance(n, pytest.Class)]
        test = ".".join([self._node.path.stem, *classes, self._node.name])
        whole = f"{test}.{name}" if name else test
        stem = re.sub(r"[^A-Za-z0-9_.=,+-]+", "-", whole).strip("-")
        usual = whole.replace("[", "-").replace("]", "")
        if stem != usual or not _ONE_CASE.fullmatch(whole) or len(stem) > _LONGEST_NAME:
            told = f"{test}\0{name}" if "]" in name else whole  # else one test's, and one's only
            digest = hashlib.sha256(told.encode()).hexdigest()[:8]
            stem = f"{stem[:_LONGEST_NAME]}-{digest}"
        return Path(self._node.path).parent / _FOLDER / f"{stem}.json"

    def _tell(self, key: str, value: str) -> None:
        self._node.user_properties.append((key, value))  # xdist hands these to the controller

    # -- writing -------------------------------------------------------------------------------

    def _must_write(self, file: Path) -> bool:
        if self._config.getoption("--quantload-update"):
            return True
        return not file.exists() and bool(self._config.getoption("--quantload-update-new"))

    def _write(
        self,
        ref: str | Path | None,
        candidate: str | Path,
        file: Path,
        tokens: Given | None,
        **how: Any,  # noqa: ANN401 - device and dtype
    ) -> None:
        from quantload import api_baseline

        if ref is None:
            pytest.fail(
                f"a baseline is measured against a reference: give `ref`, for {file}",
                pytrace=False,
            )
        sequences = None if tokens is None else read_given(tokens, ref)
        lost = _damage(file)
        api_baseline.write_baseline(
            ref, candidate, file, sequences=sequences, overwrite=True, inherit=not lost, **how
        )
        if lost:
            self._tell(
                NOTE,
                f"{file} was damaged, and is written anew: tokens and tolerances that it had are "
                f"lost where the test does not give them ({lost})",
            )

    def _miss(
        self,
        ref: str | Path | None,
        candidate: str | Path,
        file: Path,
        tokens: Given | None,
        **how: Any,  # noqa: ANN401 - device and dtype
    ) -> None:
        __tracebackhide__ = True
        if _in_ci() or ref is None:
            command = self._command("--quantload-update-new")
            pytest.fail(f"there is no baseline {file}; `{command}` makes it", pytrace=False)
        self._write(ref, candidate, file, tokens, **how)
        pytest.fail(
            f"there was no baseline {file}: it is written now; look at it and commit it",
            pytrace=False,
        )

    # -- judging -------------------------------------------------------------------------------

    def _checked(
        self,
        candidate: str | Path,
        ref: str | Path | None,
        file: Path,
        tokens: Given | None,
        own: Mapping[str, Any],
        how: Mapping[str, Any],
    ) -> BaselineReport:
        """Return what a check finds; from this session's cache if nothing is another."""
        from quantload import api_baseline

        if tokens is not None and (ref is not None or not is_text(tokens)):
            check_given(file, read_given(tokens, ref))
        allowed = self._tolerances(file, **own)
        found = self._config.stash.setdefault(_FOUND, {})
        key = (
            file.read_bytes(),
            _signature(candidate),
            None if ref is None else _signature(ref),
            repr(allowed),
            *how.items(),
        )
        if key not in found:
            found[key] = api_baseline.check_baseline(
                candidate, file, reference=ref, tolerances=allowed, **how
            )
        report: BaselineReport = found[key]
        return report

    def _tolerances(
        self,
        file: Path,
        tol_db: float | None,
        mean_tol_db: float | None,
        tolerances: Mapping[str, Any] | None,
    ) -> Tolerances:
        """Return what this check allows: the file's, then the ini's, then the test's own."""
        from quantload.accuracy.baseline_file import read_baseline
        from quantload.accuracy.baseline_tolerances import overridden

        baseline = read_baseline(file)
        of_ini = str(self._config.getini("quantload_tol_db"))
        if tol_db is None and of_ini:
            tol_db = _number(of_ini)
        own: dict[str, Any] = {"weight_db": tol_db, "weight_mean_db": mean_tol_db}
        given = {key: value for key, value in own.items() if value is not None}
        found = overridden(baseline.tolerances, {**given, **(tolerances or {})})
        found.check_patterns(baseline.layers, file)
        return found

    def _judge(self, report: BaselineReport, file: Path, *, strict: bool, problem: str) -> None:
        """Fail if a check did, or what `problem` says."""
        __tracebackhide__ = True
        from quantload.cli_baseline_report import failure_text
        from quantload.errors import counted

        for note in report.notes:
            self._tell(NOTE, f"{file}: {note}")
        if report.better and not strict:
            names = ", ".join(verdict.name for verdict in report.better[:5])
            layers = counted(len(report.better), "layer")
            self._tell(NOTE, f"{file} can be tightened: {layers} ({names})")
        text = ""
        if not report.passed or (strict and report.better):
            text = failure_text(report, accept=self._command("--quantload-update"), strict=strict)
        if text or problem:
            pytest.fail("\n".join(filter(None, [text, problem])), pytrace=False)

    def _command(self, option: str) -> str:
        """Return the command that runs this test alone, from where pytest was started."""
        _, separator, test = self._node.nodeid.partition("::")
        path = os.path.relpath(self._node.path, self._config.invocation_params.dir)
        return shlex.join(["pytest", f"{path}{separator}{test}", option])

    def _report(self, report: BaselineReport, file: Path, candidate: str, *, strict: bool) -> str:
        """Write what was measured if that was asked for; say why it cannot be written."""
        folder = self._config.getoption("--quantload-report")
        if not folder or report.now is None:
            return ""
        from quantload.accuracy.baseline import baseline_text
        from quantload.accuracy.html_check import check_page
        from quantload.api_baseline import write_text
        from quantload.errors import OutputError

        root = self._config.rootpath
        inside = file.relative_to(root) if file.is_relative_to(root) else Path(file.name)
        page = check_page(
            report,
            candidate=candidate,
            baseline=str(inside),
            accept=self._command("--quantload-update"),
            strict=strict,
        )
        try:
            write_text(Path(folder) / inside.with_suffix(".html"), page)
            if not report.estimated:  # an estimate is no baseline
                write_text(Path(folder) / inside, baseline_text(report.now))
        except OutputError as error:
            return str(error)
        return ""


@contextmanager
def _told() -> Iterator[None]:
    """Fail with the message of an error: what cannot be compared is never a pass."""
    __tracebackhide__ = True
    from quantload.errors import QuantloadError

    try:
        yield
    except QuantloadError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None


def _damage(file: Path) -> str:
    """Say why a baseline cannot be read; "" if it can, or there is none."""
    from quantload.accuracy.baseline_file import read_baseline
    from quantload.errors import BaselineError

    try:
        if file.exists():
            read_baseline(file)
    except BaselineError as error:
        return error.message
    return ""


def _in_ci() -> bool:
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        pytest.fail(f"ini `quantload_tol_db` is `{text}`, expected a number", pytrace=False)


def _signature(place: str | Path) -> tuple[Any, ...]:
    """Return what tells whether the files of a checkpoint are the same; a hub name is itself."""
    path = Path(place)
    if not path.exists():
        return (str(place),)
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    stats = [(str(one), one.stat()) for one in files]
    return tuple((name, found.st_size, found.st_mtime_ns) for name, found in stats)


def pytest_terminal_summary(
    terminalreporter: Any,  # noqa: ANN401 - a class of pytest that is private
    config: pytest.Config,
) -> None:
    """Name baselines that can be tightened, what checks could not see, and unused baselines."""
    if lines := summary_lines(terminalreporter.stats, config):
        terminalreporter.section("quantload")
        for line in lines:
            terminalreporter.line(line)
