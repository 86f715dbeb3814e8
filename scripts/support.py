"""Writes docs/support.md, and the table beside each built-in platform, from the reports in conformance/reports/.

After `quintet conformance --device X --json conformance/reports/X.json`: python scripts/support.py
"""

from pathlib import Path

from quintet.conformance import features, report
from quintet.engine.platform_support import SUPPORT_FILE
from quintet.interface.platform import CONTRACT_VERSION
from quintet.platforms import BUILT_IN

ROOT = Path(__file__).parents[1]
REPORTS = ROOT / "conformance" / "reports"
SHOWN = [name for name in BUILT_IN if name != "null"]  # which is for tests, and computes nothing


def reports(folder: Path = REPORTS) -> dict[str, report.ConformanceReport | None]:
    """Platform -> its report, or None. ValueError for one that is incomplete, or of another platform than its name."""
    stray = {path.stem for path in folder.glob("*.json")} - set(SHOWN)
    if stray:
        raise ValueError(f"{folder} has reports of {', '.join(sorted(stray))}, which are not built in; move them away")
    return {name: _read(folder / f"{name}.json") if (folder / f"{name}.json").exists() else None for name in SHOWN}


def _read(path: Path) -> report.ConformanceReport:
    found = report.read(path)
    if found.platform != path.stem or found.distribution != report.OUR_NAME:
        raise ValueError(f"{path} is of {found.platform} by {found.distribution}; name it after its platform")
    if found.contract != CONTRACT_VERSION:
        raise ValueError(f"{path} is of contract {found.contract}, not {CONTRACT_VERSION}; run the kit anew")
    if found.quick:
        raise ValueError(f"{path} is of some trials of each check; run the kit without --quick")
    if missing := features.missing(found):
        raise ValueError(f"{path} lacks the sections {', '.join(missing)}; run the kit without --section")
    return found


def files(folder: Path = REPORTS) -> dict[Path, str]:
    """Everything that follows from the reports: path below the root -> content."""
    known = reports(folder)
    tables = {name: features.support(each).text() for name, each in known.items() if each}
    return {
        Path("docs/support.md"): features.page(known),
        **{Path("quintet/platforms") / name / SUPPORT_FILE: content for name, content in tables.items()},
    }


if __name__ == "__main__":
    for path, content in files().items():
        (ROOT / path).write_text(content, encoding="utf-8")
        print(path)
