"""Whatever a grammar admits is read back as calls: random walks through the tokens that llguidance allows."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quintet.parsers import REASONING_PARSERS, TOOL_PARSERS, Parsed, RequiredCalls, Tool, parse
from quintet.parsers.tool_formats import TOOL_FORMATS
from tests.parsers import random_tools

llguidance = pytest.importorskip("llguidance", reason="grammars are an extra: pip install 'quintet-llm[structured]'")
jsonschema = pytest.importorskip("jsonschema")
tokenizers = pytest.importorskip("tokenizers")

FOLDER = Path(__file__).parents[2] / "quintet" / "bundled"
TOOLS = [
    Tool(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"$ref": "#/$defs/name"},
                "days": {"type": "integer", "minimum": 1, "maximum": 14},
                "units": {"enum": ["C", "F"]},
                "where": {"type": "array", "items": {"type": "number"}, "maxItems": 2},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"name": {"type": "string", "maxLength": 6}},
        },
    ),
    Tool("now"),
    Tool("ns.say/it-2", {"properties": {"text": {"type": "string", "maxLength": 4}}, "additionalProperties": False}),
]
SCHEMAS = {tool.name: {"type": "object", **tool.parameters} for tool in TOOLS}
LIMIT = 200  # tokens of a walk; one that has not ended then is left
LONG = {"muse": 600}  # its markers are many tokens of the vocabulary here
WALKS = 40
NAMES = sorted(name for name, tool in TOOL_FORMATS.items() if tool.grammar(TOOLS) is not None)


class Walker:
    """Says whatever a grammar allows, by chance."""

    def __init__(self) -> None:
        self.tokenizer = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
        self.vocabulary = llguidance.LLTokenizer(self.tokenizer.to_str())
        said = [self.tokenizer.decode([id], skip_special_tokens=False) for id in range(self.tokenizer.get_vocab_size())]
        self._closes = np.array([bool(set(text) & set('"}]<')) for text in said])
        added = self.tokenizer.get_added_tokens_decoder()
        self.special = {token.content: id for id, token in added.items() if self.vocabulary.is_special_token(id)}

    def walks(self, grammar: str, seed: int, begin: str = "", limit: int = LIMIT) -> list[str]:
        """Texts that begin so."""
        matcher = llguidance.LLMatcher(self.vocabulary, llguidance.LLMatcher.grammar_from_lark(grammar))
        assert not matcher.is_error(), matcher.get_error()
        chance = random.Random(seed)
        texts = []
        for _ in range(WALKS):
            matcher.reset()
            first = self.tokenizer.encode(begin, add_special_tokens=False).ids
            assert matcher.consume_tokens(first), begin
            ids = self._walk(matcher, chance, limit)
            if ids is not None:
                texts.append(self.tokenizer.decode(first + ids, skip_special_tokens=False))
        return texts

    def _walk(self, matcher: Any, chance: random.Random, limit: int) -> list[int] | None:
        """Token ids; None if it came to no end. The end is often taken where it is allowed."""
        ids: list[int] = []
        end = self.vocabulary.eos_token
        while len(ids) < limit:
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[: len(self._closes)])
            if end in allowed and (len(allowed) == 1 or chance.random() < 0.3):
                return ids
            closing = allowed[self._closes[allowed]]  # more often than by chance: else few walks would end
            token = int(chance.choice(closing if len(closing) and chance.random() < 0.5 else allowed))
            if token == end:
                return ids
            assert matcher.consume_token(token)
            ids.append(token)
            if matcher.is_stopped():
                return ids
        return None


@pytest.fixture(scope="module")
def walker() -> Walker:
    return Walker()


def check(found: Parsed, text: str, schemas: dict[str, Any] = SCHEMAS) -> None:
    assert found.content == "", text
    assert found.calls, text
    for call in found.calls:
        assert call.complete, text
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])


def test_every_parser_has_a_grammar() -> None:
    assert set(NAMES) == set(TOOL_FORMATS)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_grammar_admits_is_read_back(walker: Walker, name: str) -> None:
    tool = TOOL_PARSERS.get(name)
    grammar = tool.grammar(TOOLS, special=walker.special)
    assert grammar is not None
    texts = walker.walks(grammar, seed=len(name), limit=LONG.get(name, LIMIT))
    assert len(texts) > 5
    several = names = 0
    for text in texts:
        found = parse(text, tool, None, TOOLS)
        check(found, text)
        several += len(found.calls) > 1
        names |= 1 << [tool.name for tool in TOOLS].index(found.calls[0].name)
    assert names.bit_count() > 1
    assert several or tool.separator is None


OWN = ["glm45", "qwen3_coder", "deepseek_v32", "pythonic", "olmo3", "gemma4", "minimax_m3"]  # ways to write values


@pytest.mark.grid(cases=24)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", OWN)
def test_whatever_the_tools_arguments_are_they_follow_their_schema(walker: Walker, name: str, seed: int) -> None:
    tool, tools = TOOL_PARSERS.get(name), random_tools.tools(seed)
    grammar = tool.grammar(tools, special=walker.special)
    if grammar is None:  # Gemma's bare keys may not have spaces
        assert name == "gemma4" and "l m" in str(tools)
        return
    schemas = {each.name: {"type": "object", **each.parameters} for each in tools}
    for text in walker.walks(grammar, seed):
        check(parse(text, tool, None, tools), text, schemas)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["hermes", "glm45", "qwen3_coder", "mistral", "olmo3", "gemma4", "llama3_json"])
def test_calls_in_an_answer_that_may_call_follow_their_schema(walker: Walker, name: str, seed: int) -> None:
    tool = TOOL_PARSERS.get(name)
    tools = [replace(each, strict=at == 0) for at, each in enumerate(random_tools.tools(seed))]
    grammar = tool.optional_call_grammar(tools, None, walker.special)
    if grammar is None:
        assert name == "gemma4" and "l m" in str(tools)
        return
    schemas = {each.name: {"type": "object", **each.parameters} if each.strict else {} for each in tools}
    first = tool.blocks[0].sequence[0].marks()[0]
    for text in walker.walks(grammar, seed, begin=first if tool.blocks[0].anchored else f"So {first}"):
        found = parse(text, tool, None, tools)
        assert found.calls and (tool.blocks[0].anchored or found.content.startswith("So")), text
        for call in found.calls:
            assert call.complete, text
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])


@pytest.mark.parametrize("name", ["hermes", "mistral", "granite", "llama3_json"])
def test_a_named_tool_is_called_once(walker: Walker, name: str) -> None:
    tool = TOOL_PARSERS.get(name)
    for choice, calls in (
        (RequiredCalls(named="now"), {("now",)}),
        (RequiredCalls(parallel=False), {(each.name,) for each in TOOLS}),
    ):
        grammar = tool.grammar(TOOLS, choice, walker.special)
        assert grammar is not None
        found = [parse(text, tool, None, TOOLS) for text in walker.walks(grammar, seed=1)]
        assert len(found) > 5
        assert {tuple(call.name for call in each.calls) for each in found} <= calls


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", ["qwen3", "seed_oss"])
def test_the_model_may_think_before(walker: Walker, name: str, inside: bool) -> None:
    """Between markers that are tokens of their own, or text."""
    tool, reasoning = TOOL_PARSERS.get("granite"), REASONING_PARSERS.get(name)
    assert (reasoning.closes[0] in walker.special) == (name == "qwen3")
    grammar = tool.grammar(TOOLS, RequiredCalls("now", reasoning=reasoning, inside=inside), walker.special)
    assert grammar is not None
    call = '<|tool_call|>[{"name": "now", "arguments": {}}]'
    said = f"{'' if inside else reasoning.opens[0]}I [think] {{so}}\n{reasoning.closes[0]}\n\n{call}"
    for text in (said, reasoning.closes[0] + call if inside else call):
        matcher = llguidance.LLMatcher(walker.vocabulary, llguidance.LLMatcher.grammar_from_lark(grammar))
        assert matcher.consume_tokens(walker.tokenizer.encode(text, add_special_tokens=False).ids)
        assert matcher.is_accepting()
        assert len(parse(text, tool, reasoning, TOOLS, inside).calls) == 1


def test_a_tool_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="no tool is named 'x'"):
        TOOL_PARSERS.get("hermes").grammar(TOOLS, RequiredCalls(named="x"))
    with pytest.raises(ValueError, match="calls need at least one tool"):
        TOOL_PARSERS.get("hermes").grammar([])


def test_a_name_that_could_not_be_read_back_has_no_grammar() -> None:
    assert TOOL_PARSERS.get("deepseek_v31").grammar([Tool("two words")]) is None
    assert TOOL_PARSERS.get("hermes").grammar([Tool('two "words"')]) is not None


def test_no_schema_makes_it_look_like_ebnf(walker: Walker) -> None:
    """The engine tells grammars of that kind by their sign."""
    tool = Tool(
        "f", {"properties": {"rule": {"const": "a ::= b"}}, "required": ["rule"], "additionalProperties": False}
    )
    grammar = TOOL_PARSERS.get("hermes").grammar([tool], RequiredCalls("f"), walker.special)
    assert grammar is not None
    assert "::=" not in grammar
    found = [parse(text, TOOL_PARSERS.get("hermes")) for text in walker.walks(grammar, seed=2)]
    assert {json.loads(call.arguments)["rule"] for each in found for call in each.calls} == {"a ::= b"}
