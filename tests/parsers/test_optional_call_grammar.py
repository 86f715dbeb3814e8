"""Answers that may call: any text, and from a call's first marker on what its tool allows, where the tool is strict."""

from typing import Any

import pytest

from quintet.parsers import REASONING_PARSERS, TOOL_PARSERS, RequiredCalls, Tool, ToolParser
from quintet.parsers.tool_formats import TOOL_FORMATS
from tests.parsers.transcripts import ALONE, PROMPTS, TYPES, WRITERS, Asked

llguidance = pytest.importorskip("llguidance", reason="grammars are an extra: pip install 'quintet-llm[structured]'")

TEXT = "Let me see (1 < 2), {so} [on].\n\n"
CALLS: list[Asked] = [("get_weather", {"city": "Bern", "days": 3}), ("now", {})]
SPECIAL = {"<tool_call>": 257, "</tool_call>": 258, "<think>": 259, "</think>": 260, "<|im_end|>": 261}
WATCHED = sorted(name for name, tool in TOOL_FORMATS.items() if all(block.certain for block in tool.blocks))


def tools(strict: bool = True, allowed: Any = None) -> list[Tool]:
    """Those of CALLS, as they are called there; of one of them the city is one of the allowed."""
    made = []
    for name, arguments in CALLS:
        properties: dict[str, Any] = {key: {"type": TYPES[type(value)]} for key, value in arguments.items()}
        if allowed is not None and "city" in properties:
            properties["city"] = {"enum": allowed}
        schema = {"properties": properties, "required": list(arguments), "additionalProperties": False}
        made.append(Tool(name, schema, strict))
    return made


class Vocabulary:
    """Bytes, and special tokens."""

    def __init__(self, special: dict[str, int]) -> None:
        self._special = special
        size = max(special.values(), default=256) + 1
        pieces = [bytes([each]) for each in range(256)] + [b"<eos>"] + [b""] * (size - 257)
        for text, place in special.items():
            pieces[place] = text.encode()
        wrapper = type("Bytes", (), {
            "eos_token_id": 256, "bos_token_id": None, "tokens": pieces, "special_token_ids": [256, *special.values()],
            "__call__": lambda self, text: list(text.encode() if isinstance(text, str) else text),
        })()  # fmt: skip
        self.tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(wrapper))

    def ids(self, text: str) -> list[int]:
        found, at = list[int](), 0
        while at < len(text):
            special = next((each for each in self._special if text.startswith(each, at)), None)
            found += [self._special[special]] if special else text[at].encode()
            at += len(special or text[at])
        return found


def lets(
    tool: ToolParser, given: list[Tool], text: str, choice: RequiredCalls | None = None, special: Any = None
) -> bool:
    """Whether the grammar lets the text out, and then an end."""
    vocabulary = Vocabulary(special or {})
    grammar = tool.optional_call_grammar(given, choice, special)
    assert grammar is not None
    matcher = llguidance.LLMatcher(vocabulary.tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = vocabulary.ids(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def written(name: str, asked: list[Asked] = CALLS) -> str:
    return ("" if name in ALONE else TEXT) + WRITERS[name](asked)


@pytest.mark.parametrize("name", WATCHED)
def test_text_and_calls_that_follow_their_schema_come_through(name: str) -> None:
    tool = TOOL_PARSERS.get(name)
    for text in (written(name), written(name) + "\nDone.", "No call, { nor [.", ""):
        assert lets(tool, tools(), text), text


@pytest.mark.parametrize("name", WATCHED)
def test_a_strict_tools_arguments_follow_its_schema(name: str) -> None:
    tool = TOOL_PARSERS.get(name)
    assert lets(tool, tools(allowed=["Bern"]), written(name))
    assert not lets(tool, tools(allowed=["Rome"]), written(name))
    assert not lets(tool, tools(), written(name, [("nowhere", {})]))  # a tool that there is not


@pytest.mark.parametrize("name", WATCHED)
def test_those_of_others_may_be_anything(name: str) -> None:
    loose, strict = tools(strict=False, allowed=["Rome"])[0], tools()[1]
    assert lets(TOOL_PARSERS.get(name), [loose, strict], written(name))


@pytest.mark.parametrize("special", [{}, SPECIAL])
@pytest.mark.parametrize("inside", [False, True])
def test_thoughts_are_free(inside: bool, special: dict[str, int]) -> None:
    """Even of markers, which mean nothing there; whatever is a token of its own."""
    hermes, choice = TOOL_PARSERS.get("hermes"), RequiredCalls(reasoning=REASONING_PARSERS.get("qwen3"), inside=inside)
    thought = f"{'' if inside else '<think>'}I might <tool_call> it.</think>\n\n"
    assert lets(hermes, tools(), thought + written("hermes"), choice, special)
    assert lets(hermes, tools(), thought.removesuffix("</think>\n\n"), choice, special)
    assert not lets(hermes, tools(allowed=["Rome"]), thought + written("hermes"), choice, special)


def test_a_marker_is_one_however_it_is_spelled() -> None:
    hermes = TOOL_PARSERS.get("hermes")
    call = WRITERS["hermes"](CALLS)
    assert lets(hermes, tools(), f"Hi <|im_end|> so {call}", None, SPECIAL)
    assert not lets(hermes, tools(), "Hi <tool_call> so", None, SPECIAL)
    other = {"</tool_call>": 257}  # the first marker is out of letters
    assert lets(hermes, tools(), f"Hi {call}", None, other)
    assert not lets(hermes, tools(), "Hi <tool_call> so", None, other)


def test_one_call_alone() -> None:
    hermes = TOOL_PARSERS.get("hermes")
    assert lets(hermes, tools(), written("hermes", CALLS[:1]), RequiredCalls(parallel=False))
    assert not lets(hermes, tools(), written("hermes"), RequiredCalls(parallel=False))
    assert lets(hermes, tools(), TEXT, RequiredCalls(parallel=False))


def test_where_a_marker_may_be_something_else_there_is_no_grammar() -> None:
    assert set(TOOL_FORMATS) - set(WATCHED) == {"openai", "muse", "phi4_mini_json", "xlam", "json"}
    assert TOOL_PARSERS.get("json").optional_call_grammar(tools()) is None


@pytest.mark.parametrize("name", WRITERS)
def test_a_call_that_is_forced_is_what_the_template_writes(name: str) -> None:
    """But for JSON that escapes what needs no escape."""
    grammar = TOOL_PARSERS.get(name).grammar(tools())
    assert grammar is not None
    vocabulary = Vocabulary({})
    matcher = llguidance.LLMatcher(vocabulary.tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    ids = vocabulary.ids(WRITERS[name](CALLS[:1]).removeprefix(PROMPTS.get(name, "")))
    assert matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
