"""A plugin of pytest that writes down which files it has begun and what failed, while the run may be broken off."""

import json
import sys
from pathlib import Path

import pytest

REPORT = Path(sys.prefix) / "report.jsonl"


def _write(**line: str) -> None:
    with REPORT.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(begun=nodeid.partition("::")[0], test=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    REPORT.touch()  # its time shows that tests go on
    if report.failed:
        _write(failed=report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    REPORT.touch()
    if report.failed:
        _write(failed=report.nodeid)
