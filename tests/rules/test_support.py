"""What the documentation and the packages say of support is what the reports in conformance/reports/ say."""

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from quintet.engine import platform_support as support

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> Any:
    found = importlib.util.spec_from_file_location("support_script", ROOT / "scripts" / "support.py")
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_nobody_wrote_what_follows_from_the_reports(script: Any) -> None:
    stale = [str(path) for path, content in script.files().items() if _content(ROOT / path) != content]
    assert stale == [], "write them anew: .venv/bin/python scripts/support.py"


def _content(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


def test_no_table_stands_beside_a_platform_without_a_report(script: Any) -> None:
    written = {ROOT / path for path in script.files()}
    assert set((ROOT / "quintet" / "platforms").rglob(support.SUPPORT_FILE)) <= written


def test_the_tables_can_be_read_and_nothing_in_them_failed(script: Any) -> None:
    tables = [path for path in script.files() if path.name == support.SUPPORT_FILE]
    assert len(tables) >= 2, "the platforms that run anywhere have reports"
    for path in tables:
        assert support.read(ROOT / path).supported
    for name, report in script.reports().items():
        assert report is None or report.passed, f"{name}: {report}"


@pytest.fixture
def folder(tmp_path: Path, script: Any) -> Path:
    """A copy of one report."""
    shutil.copy(next(script.REPORTS.glob("*.json")), tmp_path)
    return tmp_path


def edit(folder: Path, **changes: Any) -> None:
    path = next(folder.glob("*.json"))
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_report_that_was_tampered_with_is_refused(folder: Path, script: Any) -> None:
    edit(folder, version=None)
    with pytest.raises(ValueError, match=r"is no report.*Expected `str`, got `null` - at `\$.version`"):
        script.files(folder)


def test_a_report_of_some_sections_is_refused(folder: Path, script: Any) -> None:
    path = next(folder.glob("*.json"))
    rows = [row for row in json.loads(path.read_text())["results"] if row["section"] != "probe"]
    edit(folder, results=rows)
    with pytest.raises(ValueError, match="lacks the sections probe"):
        script.files(folder)


def test_a_quick_report_is_refused(folder: Path, script: Any) -> None:
    edit(folder, quick=True)
    with pytest.raises(ValueError, match="some trials of each check"):
        script.files(folder)


def test_a_report_of_another_contract_is_refused(folder: Path, script: Any) -> None:
    edit(folder, contract=0)
    with pytest.raises(ValueError, match="is of contract 0, not"):
        script.files(folder)


def test_a_report_is_named_after_its_platform(folder: Path, script: Any) -> None:
    edit(folder, platform="acme")
    with pytest.raises(ValueError, match="name it after its platform"):
        script.files(folder)
    next(folder.glob("*.json")).rename(folder / "acme.json")
    with pytest.raises(ValueError, match="reports of acme, which are not built in"):
        script.files(folder)
