"""What each family of models writes is split alike, however it is cut."""

import functools
import json

import pytest

from quintet.parsers import REASONING_PARSERS, TOOL_PARSERS, Parsed, StreamParser, parse
from quintet.parsers.tool_formats import TOOL_FORMATS
from tests.parsers.cutting import cut_in_two, in_bytes, whole
from tests.parsers.transcripts import ALONE, CASES, TOOLS, WEATHER, WRITERS, Asked

TEXT = "Let me look (1 < 2), [so] {to} speak."


def calls_of(parsed: object) -> list[Asked]:
    assert all(each.complete for each in parsed.calls)  # type: ignore[attr-defined]
    return [(each.name, json.loads(each.arguments)) for each in parsed.calls]  # type: ignore[attr-defined]


def said_before(name: str) -> str:
    return "" if name in ALONE else f"{TEXT}\n\n"


def test_every_tool_parser_has_a_transcript() -> None:
    assert set(WRITERS) == set(TOOL_FORMATS)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", WRITERS)
def test_calls_are_found(name: str, case: str) -> None:
    text = said_before(name) + WRITERS[name](CASES[case])
    tool = TOOL_PARSERS.get(name)
    found = parse(text, tool, None, TOOLS)
    assert calls_of(found) == CASES[case]
    assert found.content == said_before(name).strip()
    assert whole(StreamParser(tool, None, TOOLS), in_bytes(text)) == found


@pytest.mark.parametrize("name", WRITERS)
def test_any_cut_gives_the_same(name: str) -> None:
    text = said_before(name) + WRITERS[name](CASES["parallel calls"]) + " Done."
    tool = TOOL_PARSERS.get(name)
    expected = parse(text, tool, None, TOOLS)
    assert calls_of(expected) == CASES["parallel calls"]
    for pieces in cut_in_two(text):
        assert whole(StreamParser(tool, None, TOOLS), pieces) == expected, pieces


@pytest.mark.parametrize("name", WRITERS)
def test_text_without_a_call_is_content(name: str) -> None:
    for text in (TEXT, "", " \n", "[1] is {not} a <call>.\n", '{"answer": [1, 2]}', "[", "to=functions.f"):
        found = whole(StreamParser(TOOL_PARSERS.get(name), None, TOOLS), in_bytes(text))
        assert (found.content, found.calls) == (text, ())


@pytest.mark.parametrize("name", WRITERS)
def test_a_call_that_is_cut_off_is_not_complete(name: str) -> None:
    """Wherever it is cut: it is content until its arguments have begun, and then a call that says so; in Python until
    the call's end."""
    text = WRITERS[name]([WEATHER])
    tool = TOOL_PARSERS.get(name)
    arguments = parse(text, tool, None, TOOLS).calls[0].arguments
    seen = set()
    for at in range(1, len(text)):
        found = parse(text[:at], tool, None, TOOLS)
        if found.calls:
            assert [each.name for each in found.calls] == [WEATHER[0]]
            assert arguments.startswith(found.calls[0].arguments)
            assert found.calls[0].complete == (found.calls[0].arguments == arguments)
            seen.add(found.calls[0].complete)
        else:
            text_alone = functools.reduce(lambda rest, mark: rest.replace(mark, ""), tool.drops, text[:at])
            assert found.content.strip() == text_alone.strip() or not found.content
    assert (False in seen) == ("Python" not in tool.shape)


@pytest.mark.parametrize("name", WRITERS)
def test_a_broken_call_ends_and_the_rest_is_content(name: str) -> None:
    """Its arguments turn into something else: what was given of it is marked as not complete. In Python nothing was."""
    tool = TOOL_PARSERS.get(name)
    text = WRITERS[name]([("get_weather", {"days": 3})])
    end = {"kimi_k3": "<|sep|>", "minimax_m3": "/days>"}.get(name, ">") if "XML" in tool.shape else ""
    at = text.index(end, text.index("3") + 1) + len(end)
    broken = text[:at] + f" ?! {TEXT}"
    found = whole(StreamParser(tool, None, TOOLS), in_bytes(broken))
    assert found == parse(broken, tool, None, TOOLS)
    if "Python" in tool.shape:
        assert found == Parsed(content=broken)
        return
    assert [(each.name, each.arguments, each.complete) for each in found.calls] == [
        ("get_weather", '{"days": 3', False)
    ]
    assert found.content == f"?! {TEXT}"


@pytest.mark.parametrize("name", [name for name in WRITERS if name not in ALONE])
def test_reasoning_comes_before(name: str) -> None:
    reasoning = REASONING_PARSERS.get("openai_gptoss" if name == "openai" else "deepseek_r1")
    thought = f"Hm. {TEXT} What about {{this}}?"
    text = f"{reasoning.opens[0]}\n{thought}\n{reasoning.closes[0]}\n\n"
    text += ("<|start|>assistant" if name == "openai" else f"{TEXT}\n") + WRITERS[name](CASES["parallel calls"])
    tool = TOOL_PARSERS.get(name)
    found = whole(StreamParser(tool, reasoning, TOOLS), in_bytes(text))
    assert found == parse(text, tool, reasoning, TOOLS)
    assert found.reasoning == thought
    assert found.content == ("" if name == "openai" else TEXT)
    assert calls_of(found) == CASES["parallel calls"]
