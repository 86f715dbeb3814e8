"""Grammars of forced calls let the model end behind the text that stands between two calls."""

import pytest

from quintet.parsers import REASONING_PARSERS, TOOL_PARSERS, RequiredCalls, Tool, ToolParser, call_block, parse
from quintet.parsers.combinators import JsonCall, OneOrMore, one_or_more
from quintet.parsers.tool_formats import TOOL_FORMATS
from tests.parsers.test_calls_grammar import Walker
from tests.parsers.transcripts import WRITERS

llguidance = pytest.importorskip("llguidance", reason="grammars are an extra: pip install 'quintet-llm[structured]'")

TOOLS = [Tool("now"), Tool("add", {"properties": {"a": {"type": "integer"}}, "required": ["a"]})]
CALLS = [("now", {}), ("add", {"a": 12})]
SEPARATED = sorted(name for name, tool in TOOL_FORMATS.items() if (tool.separator or "").isspace())


@pytest.fixture(scope="module")
def walker() -> Walker:
    return Walker()


def accepts(walker: Walker, grammar: str | None, text: str) -> bool:
    """True if the grammar takes all tokens of the text, and then the end of the sequence."""
    assert grammar is not None
    matcher = llguidance.LLMatcher(walker.vocabulary, llguidance.LLMatcher.grammar_from_lark(grammar))
    ids = walker.tokenizer.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_formats_with_space_between_calls_are_here() -> None:
    assert {"hermes", "qwen3_coder", "seed_oss", "glm45", "longcat", "granite-20b-fc", "internlm"} <= set(SEPARATED)
    assert all(TOOL_FORMATS[name].separator == "\n" for name in SEPARATED)


@pytest.mark.parametrize("calls", [CALLS[:1], CALLS[1:], CALLS])
@pytest.mark.parametrize("name", SEPARATED)
def test_a_separator_may_end_the_answer(walker: Walker, name: str, calls: list[tuple[str, dict[str, int]]]) -> None:
    tool = TOOL_PARSERS.get(name)
    text = WRITERS[name](calls).rstrip("\n")
    grammar = tool.grammar(TOOLS, special=walker.special)
    for end in ("", "\n"):
        assert accepts(walker, grammar, text + end), repr(text + end)
        found = parse(text + end, tool, None, TOOLS)
        assert [call.name for call in found.calls] == [called for called, _ in calls]
        assert found.content == ""
    assert not accepts(walker, grammar, text + "\nSo")


@pytest.mark.parametrize("inside", [True, False])
def test_also_behind_a_thought(walker: Walker, inside: bool) -> None:
    thinks = RequiredCalls(reasoning=REASONING_PARSERS.get("qwen3"), inside=inside)
    grammar = TOOL_PARSERS.get("hermes").grammar(TOOLS, thinks, walker.special)
    thought = "Hm.\n</think>\n\n" if inside else "<think>\nHm.\n</think>\n\n"
    assert accepts(walker, grammar, f"{thought}{WRITERS['hermes'](CALLS)}\n")


def test_space_between_calls_of_one_block_may_stand_before_its_end(walker: Walker) -> None:
    deepseek, bare = TOOL_PARSERS.get("deepseek_v3"), TOOL_PARSERS.get("json")
    text = WRITERS["deepseek_v3"](CALLS)
    end = "<｜tool▁calls▁end｜>"
    for written in (text, text.replace(end, f"\n{end}")):
        assert accepts(walker, deepseek.grammar(TOOLS, special=walker.special), written)
        assert len(parse(written, deepseek, None, TOOLS).calls) == 2
    lines = '{"name": "now", "arguments": {}}\n{"name": "add", "arguments": {"a": 12}}'
    for written in (lines, f"{lines}\n"):
        assert accepts(walker, bare.grammar(TOOLS, special=walker.special), written)


@pytest.mark.parametrize("name", ["llama3_json", "granite", "pythonic"])
def test_a_comma_does_not_end_it(walker: Walker, name: str) -> None:
    tool = TOOL_PARSERS.get(name)
    text = WRITERS[name](CALLS)
    grammar = tool.grammar(TOOLS, special=walker.special)
    assert accepts(walker, grammar, text)
    assert not accepts(walker, grammar, text.removesuffix("]") + ", ")
    assert not accepts(walker, grammar, text.removesuffix("]") + "; ")


def test_formats_of_plug_ins_do_the_same(walker: Walker) -> None:
    mine = ToolParser((call_block("<calls>", one_or_more("<c>", JsonCall(), "</c>", between="\n"), "</calls>"),))
    call = '<c>{"name": "now", "arguments": {}}</c>'
    for text in (f"<calls>{call}</calls>", f"<calls>{call}\n{call}</calls>", f"<calls>{call}\n</calls>"):
        assert accepts(walker, mine.grammar(TOOLS, special=walker.special), text)


def test_a_marker_that_begins_with_the_separator_is_written_once(walker: Walker) -> None:
    minimax = TOOL_PARSERS.get("minimax")
    assert not any(isinstance(part, OneOrMore) and part.may_trail for part in minimax.blocks[0].sequence)
    assert accepts(walker, minimax.grammar(TOOLS, special=walker.special), WRITERS["minimax"](CALLS))
