"""mkdocs.yml lists every page of docs/, and links of all pages lead somewhere; MkDocs is not needed for that."""

import posixpath
import re
from pathlib import Path

import pytest
import yaml

from scripts import docs_site

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "README.md",
    *(ROOT / path for path in docs_site.OUTSIDE),
]


def test_every_page_is_in_nav_once() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    there = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(docs_site.pages_of_nav(config["nav"])) == sorted([*there, *docs_site.OUTSIDE.values()])


def broken(page: Path) -> list[str]:
    """Links of a page to files or headings that do not exist."""
    found = []
    for target in docs_site.links(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = Path(posixpath.normpath(page.parent / path)) if path else page
        if not file.exists():
            found.append(target)
        elif anchor and file.suffix == ".md" and anchor not in docs_site.anchors(file.read_text(encoding="utf-8")):
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    assert broken(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A title: *here*\n[a](#a-title-here) [b](page.md#no) [c](gone.md) `[d](gone)` [e](https://x.y)\n")
    assert broken(page) == ["page.md#no", "gone.md"]


def test_lists_and_tables_stand_apart() -> None:
    """MkDocs joins a list to the paragraph before it, where GitHub does not."""
    joined = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for before, line in zip(text.splitlines(), text.splitlines()[1:], strict=False):
            opens = re.match(r"([-*]|\d+\.) ", line) and not re.match(r"\s|[-*#<]|\d+\.", before)
            if before.strip() and (opens or (line.startswith("|") and not re.match(r"[|#<]", before))):
                joined.append(f"{page.name}: {line[:60]}")
    assert joined == []


@pytest.mark.parametrize(
    ("link", "page", "there"),
    [
        ("[a](kv.md#events)", "tuning.md", "[a](kv.md#events)"),
        ("[a](../kv.md)", "platforms/cpu.md", "[a](../kv.md)"),
        ("[a](../quintet/bundled/README.md)", "server.md", "[a](bundled.md)"),
        ("[a](docs/kv.md)", "changelog.md", "[a](kv.md)"),
        ("[a](../examples/machines/torchrun.py)", "x.md", "[a](https://h/r/blob/main/examples/machines/torchrun.py)"),
        ("[a](https://b.c)", "x.md", "[a](https://b.c)"),
        ("`[a](../x)`", "x.md", "`[a](../x)`"),
    ],
)
def test_links_are_rewritten_for_the_site(link: str, page: str, there: str) -> None:
    assert docs_site.rewritten(link, page, "https://h/r") == there


def test_without_a_repository_the_path_of_a_source_file_is_printed() -> None:
    text = "[file](../benchmarks/results/a.json), [`bench`](../benchmarks/bench)"
    assert docs_site.rewritten(text, "x.md", None) == "file (`benchmarks/results/a.json`), `benchmarks/bench`"
