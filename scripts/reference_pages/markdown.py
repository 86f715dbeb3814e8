"""Cells and tables of Markdown, for pages that scripts write."""

import re
from collections.abc import Iterable


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *([" ".join(cell.split()) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _escaped(found: re.Match[str]) -> str:
    return found[1] or {"<": "&lt;"}.get(found[2], "\\" + found[2])


def cell(text: str) -> str:
    """Text that a table may hold: no pipe ends a cell and no tag opens."""
    return re.sub(r"(`[^`]*`)|([<*|])", _escaped, text)


def code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|") if text else ""
