"""Writes the tables of docs/tools.md from the declarations of quintet.parsers: python scripts/parser_tables.py"""

from pathlib import Path

from quintet.parsers.reasoning_formats import REASONING_FORMATS
from quintet.parsers.tool_formats import TOOL_FORMATS

INSIDE = {True: "yes", False: "no"}
PAGE = Path(__file__).parents[1] / "docs" / "tools.md"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *sorted(rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def code(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names).replace("|", "\\|")


def tables() -> dict[str, str]:
    """Kind of parser -> its table."""
    tools = [[code((name,)), code(tool.aliases), tool.models, tool.shape] for name, tool in TOOL_FORMATS.items()]
    thoughts = [
        [code((name,)), code(each.aliases), each.models, code((each.opens[0], each.closes[0])), INSIDE[each.inside]]
        for name, each in REASONING_FORMATS.items()
    ]
    return {
        "tool": table(["name", "aliases", "models", "shape"], tools),
        "reasoning": table(["name", "aliases", "models", "markers", "inside"], thoughts),
    }


def filled(page: str) -> str:
    """The page with its tables as the declarations say."""
    for kind, text in tables().items():
        before, mark, rest = page.partition(f"<!-- {kind} parsers: written by scripts/parser_tables.py -->\n")
        page = before + mark + text + rest[rest.index("<!-- end -->") :]
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
