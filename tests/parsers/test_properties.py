"""Any text, cut anywhere: the pieces are the whole, nothing is raised, and nothing is lost."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quintet.parsers import REASONING_PARSERS, TOOL_PARSERS, StreamParser, parse
from quintet.parsers.reasoning_formats import REASONING_FORMATS
from tests.parsers.cutting import whole
from tests.parsers.transcripts import CASES, TOOLS, WRITERS

NAMES = sorted(WRITERS)
SCRAPS = ["{", "}", "[", "]", '"', ":", ",", "(", ")", "=", "\\", "\n", " ", "name", "f", "1", '{"name": "f"', "null"]
EVERYTHING = {name: WRITERS[name](CASES["everything"]) for name in NAMES}


def scraps(name: str) -> st.SearchStrategy[str]:
    """Text out of pieces of a transcript, of syntax and of anything."""
    text = EVERYTHING[name]
    cuts = st.tuples(st.integers(0, len(text)), st.integers(1, 60)).map(lambda cut: text[cut[0] : cut[0] + cut[1]])
    return st.lists(st.one_of(cuts, st.sampled_from(SCRAPS), st.text(max_size=8)), max_size=12).map("".join)


def cut(text: str, places: list[int]) -> list[str]:
    ends = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(ends)]


PLACES = st.lists(st.integers(0, 2000), max_size=40)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pieces_are_the_whole(name: str, data: st.DataObject) -> None:
    text = data.draw(scraps(name))
    tool = TOOL_PARSERS.get(name)
    expected = parse(text, tool, None, TOOLS)
    assert whole(StreamParser(tool, None, TOOLS), cut(text, data.draw(PLACES))) == expected
    assert whole(StreamParser(tool, None, TOOLS), text) == expected
    if not expected.calls and not any(mark in text for mark in tool.drops):
        assert expected.content == text


@pytest.mark.parametrize("name", list(REASONING_FORMATS))
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pieces_are_the_whole_with_reasoning(name: str, data: st.DataObject) -> None:
    reasoning = REASONING_PARSERS.get(name)
    marks = [*reasoning.opens, *reasoning.closes, *reasoning.drops, *reasoning.until]
    pieces = st.one_of(scraps("hermes"), st.sampled_from(marks), st.sampled_from(marks).map(lambda mark: mark[:-1]))
    text = "".join(data.draw(st.lists(pieces, max_size=8)))
    inside = data.draw(st.booleans())
    tool = TOOL_PARSERS.get("hermes")
    expected = parse(text, tool, reasoning, TOOLS, inside)
    assert whole(StreamParser(tool, reasoning, TOOLS, inside), cut(text, data.draw(PLACES))) == expected
    if not expected.calls and not any(mark in text for mark in marks):
        if reasoning.shown:
            assert expected.content == (marks[0] if inside else "") + text
            return
        kept = expected.reasoning if inside else expected.content
        assert kept == (text.lstrip() if inside else text)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20, deadline=None)
@given(before=st.text("ab \n", max_size=20), after=st.text("ab \n", max_size=20))
def test_what_stands_around_calls_is_content(name: str, before: str, after: str) -> None:
    if name in ("xlam", "json", "llama3_json", "pythonic"):
        before = ""
    found = parse(before + EVERYTHING[name] + after, TOOL_PARSERS.get(name), None, TOOLS)
    space = before[len(before.rstrip()) :] or after[: len(after) - len(after.lstrip())]
    space = " " if name == "muse" else space  # a call's marker begins with one
    around = before.rstrip(), after.lstrip()
    assert found.content == (space if all(around) else "").join(around)
    assert len(found.calls) == len(CASES["everything"])
