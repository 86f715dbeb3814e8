"""Twice the text is twice the work, whatever the text, a character at a time; and little is ever held unread."""

import sys
from types import FrameType
from typing import Any

import pytest

from quintet.parsers import REASONING_PARSERS, TOOL_PARSERS, StreamParser, ToolParser
from tests.parsers.transcripts import CASES, TOOLS, WRITERS

SIZE = 300  # characters; then twice as many
MARKER = 64  # characters of the longest one


def fillers(name: str) -> dict[str, tuple[str, str]]:
    """Beginnings, and what follows again and again."""
    text = WRITERS[name](CASES["everything"])
    begun = text[: text.index("say") + 40]
    return {
        "text": ("", "some words. "),
        "space": ("", " "),
        "the call": ("", text),
        "its first character": ("", text[0]),
        "its beginning": ("", text[: max(1, text.index("say"))]),
        "a list that never ends": (begun, "[["),
        "a string that never ends": (begun, "<a "),
        "escapes": (begun, '\\"'),
    }


def work(tool: ToolParser, beginning: str, filler: str, size: int) -> int:
    """Calls of any function while a text of that size is fed."""
    count = 0

    def saw(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    splitter = StreamParser(tool, REASONING_PARSERS.get("qwen3"), TOOLS)
    splitter.feed(beginning)
    text = filler * (size // len(filler) + 1)
    sys.setprofile(saw)
    try:
        for character in text[:size]:
            splitter.feed(character)
        splitter.finish()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.grid(cases=13)
@pytest.mark.parametrize("name", WRITERS)
def test_twice_the_text_is_twice_the_work(name: str) -> None:
    tool = TOOL_PARSERS.get(name)
    for what, (beginning, filler) in fillers(name).items():
        period = max(SIZE, 2 * len(filler))
        once, twice = (work(tool, beginning, filler, size) for size in (period, 2 * period))
        assert twice < 2.6 * once, f"{what}: {once} calls, then {twice}"


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_unread_is_never_longer_than_a_marker(name: str) -> None:
    """Each piece is added to what is unread: were that long, the sum of all would grow with the square."""
    for beginning, filler in fillers(name).values():
        splitter = StreamParser(TOOL_PARSERS.get(name), None, TOOLS)
        splitter.feed(beginning)
        for character in filler * (SIZE // len(filler) + 1):
            splitter.feed(character)
            assert len(splitter._scan._text) < MARKER
