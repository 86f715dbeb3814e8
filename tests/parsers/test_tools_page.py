"""docs/tools.md says what the declarations say."""

from pathlib import Path

from quintet.parsers.reasoning_formats import REASONING_FORMATS
from quintet.parsers.tool_formats import TOOL_FORMATS
from scripts import parser_tables

PAGE = (Path(__file__).parents[2] / "docs" / "tools.md").read_text(encoding="utf-8")


def test_the_tables_are_those_of_the_declarations() -> None:
    assert parser_tables.filled(PAGE) == PAGE, "run .venv/bin/python scripts/parser_tables.py"


def test_the_tables_name_every_parser() -> None:
    for name, parser in [*TOOL_FORMATS.items(), *REASONING_FORMATS.items()]:
        assert parser.models
        for each in (name, *parser.aliases):
            assert f"`{each}`" in PAGE
