"""Every public bug report has a test, or a reason why there is nothing here to test.

Reports about one kind of thing are in one file: `test_bug_reports_<kind>.py`; those with files of
their own in `test_cases.py`.
"""

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REPORTS = HERE.parents[2] / "shared" / "cases" / "bug-reports.md"
# Reports about things that quantload does not do, with the reason.
OUT_OF_SCOPE: dict[str, str] = {}
# Functions of tests by report; `test_cases.py` has those with files.
TESTED = {
    number
    for file in sorted(HERE.glob("test_bug_reports*.py"))
    for number in re.findall(r"^def test_(br\d{3})_", file.read_text(), re.MULTILINE)
}


def test_nothing_is_both_tested_and_out_of_scope():
    assert not TESTED & {number.lower() for number in OUT_OF_SCOPE}
    assert len(TESTED) > 50


@pytest.mark.skipif(not REPORTS.exists(), reason="no shared cases beside the repository")
def test_every_report_has_a_test():
    text = REPORTS.read_text()
    reports = re.findall(r"^### (BR\d{3}) · (\S+)", text, re.MULTILINE)
    in_files = set(re.findall(r"^- Case: `(BR\d{3})-", text, re.MULTILINE))
    cases = (HERE / "test_cases.py").read_text()
    assert len(reports) == 72
    missing = [
        f"{number} {slug}"
        for number, slug in reports
        if number not in OUT_OF_SCOPE
        and number.lower() not in TESTED
        and not (number in in_files and f"{number}-{slug}" in cases)
    ]
    assert not missing
    slugs = {number.lower(): slug.replace("-", "_") for number, slug in reports}
    for file in sorted(HERE.glob("test_bug_reports_*.py")):
        for number in re.findall(r"^def test_(br\d{3})_", file.read_text(), re.MULTILINE):
            assert f"_{slugs[number]}" in file.read_text(), (file.name, number)
