"""What a GPU platform adds to the base that GPUs share stays small, and docs/structure.md says how small."""

import re
from pathlib import Path

from tests.rules import rules

ROOT = Path(__file__).parents[2]
PLATFORMS = ROOT / "quintet" / "platforms"
MOST = {"rocm": 300, "xpu": 400}  # lines of code
FLOW = ("platform", "runtime")  # files that override what the base does; the others are facts and providers
NEAR = 15  # lines by which the page may be behind


def lines(platform: str) -> tuple[int, int]:
    """(of facts and providers, of what overrides the base)"""
    files = (PLATFORMS / platform).glob("*.py")
    counted = {file.stem: rules.code_lines(file.read_text(encoding="utf-8")) for file in files}
    flow = sum(count for name, count in counted.items() if name in FLOW)
    return sum(counted.values()) - flow, flow


def test_what_counts_as_a_line_of_code() -> None:
    assert rules.code_lines('"""Of a\nmodule."""\n\nimport os  # why\n\n# a comment\n') == 1
    assert (
        rules.code_lines('def f():\n    """It does."""\n    x = """a\n\n    b"""\n    return (\n        x\n    )\n')
        == 7
    )


def test_a_platform_beside_cuda_stays_small() -> None:
    grown = {name: sum(lines(name)) for name, most in MOST.items() if sum(lines(name)) > most}
    assert not grown, f"{grown}, of at most {MOST}: what another GPU could use goes to quintet/platforms/gpu"


def test_the_page_says_how_many() -> None:
    page = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \|", page, re.MULTILINE)
    said = {name: (int(data), int(flow)) for name, data, flow in rows}
    assert set(said) == {"cuda", *MOST}
    stale = {
        n: lines(n) for n, own in said.items() if any(abs(a - b) > NEAR for a, b in zip(own, lines(n), strict=True))
    }
    assert not stale, f"docs/structure.md is behind: {stale}"
