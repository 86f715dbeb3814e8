"""JSON with a shape may be pretty, and a model that likes whitespace comes to its end all the same."""

import json
import re

import pytest

from quintet.config import StructuredOutputsConfig
from quintet.parsers import TOOL_PARSERS, RequiredCalls, Tool
from quintet.sampling_params import StructuredOutputsParams
from quintet.structured_output.grammar_source import grammar_text, llguidance

pytest.importorskip("llguidance", reason="structured_outputs are an extra: pip install 'quintet-llm[structured]'")

from tests.helpers.walks import vocabulary, walk

ONE_OR_TWO = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
TAG = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": ONE_OR_TWO}}
ENDLESS = re.compile(r"[ \t]{3}|\n\s*\n")


def written(shape: str) -> str:
    if shape == "call":
        parser = TOOL_PARSERS.get("json")
        return "%llguidance {}\n" + str(
            parser.grammar((Tool("f", ONE_OR_TWO),), RequiredCalls("f", parallel=False), {})
        )
    asked = {
        "json": {"json": ONE_OR_TWO},
        "json text": {"json": json.dumps(ONE_OR_TWO)},
        "tag": {"structural_tag": TAG},
    }
    return grammar_text(StructuredOutputsParams(**asked[shape]), StructuredOutputsConfig())


@pytest.mark.parametrize("shape", ["json", "json text", "tag", "call"])
def test_whitespace_ends(shape: str) -> None:
    texts = [walk(written(shape), seed, lean=" \n", free=200) for seed in range(8)]
    assert any("\n" in text for text in texts) and any("  " in text for text in texts)
    within = [re.sub(r"\n[ \t]{0,32}", "\n", text) for text in texts]
    assert not any(ENDLESS.search(text) for text in within), texts


@pytest.mark.parametrize("indent", [None, 2, 4, "\t"])
def test_json_may_be_pretty(indent: int | str | None) -> None:
    nested: dict[str, object] = {"type": "integer"}
    value: object = 1
    for _ in range(6):
        nested, value = {"type": "array", "items": nested}, [value]
    text = json.dumps({"a": value, "b": {}}, indent=indent)
    schema = {"type": "object", "properties": {"a": nested, "b": {"type": "object"}}, "required": ["a", "b"]}
    grammar = grammar_text(StructuredOutputsParams(json=schema), StructuredOutputsConfig())
    for form in (text, text.replace("\n", "\r\n")):
        matcher = llguidance().LLMatcher(vocabulary(), grammar, log_level=0)
        tokens = vocabulary().tokenize_str(form)
        assert matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
