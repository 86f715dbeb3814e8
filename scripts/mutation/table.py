"""The table of a run, and the faults that nothing can show."""

import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.mutation.trials import CAPPED, CAUGHT, ROOT, Fault

EQUIVALENT = ROOT / "scripts" / "mutants_equivalent.txt"


def equivalents(file: Path = EQUIVALENT) -> dict[tuple[str, str, str], str]:
    """The reason for each (path, text of the line, change) that no test can notice."""
    found = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        if line.strip() and not line.startswith("#"):
            path, text, change, reason = (part.strip() for part in line.split(" | "))
            found[path, text, change] = reason
    return found


def split(faults: Iterable[Fault]) -> tuple[list[Fault], list[Fault]]:
    """Faults that count, and those that the list of equivalents names."""
    known = equivalents()
    counted, same = [], []
    for fault in faults:
        (same if (fault.path, fault.text, fault.change) in known else counted).append(fault)
    return counted, same


def summary(outcomes: Sequence[Mapping[str, Any]], equivalent: Sequence[Fault], **facts: Any) -> dict[str, Any]:
    """What --json writes: the table by package, and each fault."""
    rows: dict[str, dict[str, int]] = {}
    for outcome in outcomes:
        row = rows.setdefault(outcome["fault"]["package"], {"faults": 0, "caught": 0, "capped": 0})
        row["faults"] += 1
        row["caught"] += outcome["status"] == CAUGHT
        row["capped"] += outcome["status"] == CAPPED
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    caught = sum(row["caught"] for row in rows.values())
    return {
        "commit": commit,
        **facts,
        "faults": len(outcomes),
        "caught": caught,
        "equivalent": [fault.key for fault in equivalent],
        "packages": rows,
        "outcomes": list(outcomes),
    }


def show(result: Mapping[str, Any]) -> None:
    print(f"\n{'package':<14}{'faults':>8}{'caught':>8}{'capped':>8}")
    for package, row in result["packages"].items():
        print(f"{package:<14}{row['faults']:>8}{row['caught']:>8}{row['capped']:>8}")
    print(f"{result['caught']} of {result['faults']} faults were caught; {len(result['equivalent'])} change nothing")
    for outcome in result["outcomes"]:
        if outcome["status"] != CAUGHT:
            fault, left = outcome["fault"], outcome["left"]
            more = f", {left} test files were left" if left else ""
            print(f"NOT SEEN {fault['path']}:{fault['line']}: {fault['change']}: {fault['text']}{more}")


def write(result: Mapping[str, Any], file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
