"""Structural tags: free text whose tagged stretches follow their shapes, whatever is said."""

import json
import re
from typing import Any

import pytest

from quintet.config import StructuredOutputsConfig
from quintet.sampling_params import ParameterError, StructuredOutputsParams
from quintet.structured_output.grammar_source import grammar_text
from quintet.structured_output.structural_tag import as_lark
from tests.helpers.walks import walk

pytest.importorskip("llguidance", reason="structured_outputs are an extra: pip install 'quintet-llm[structured]'")

ONE_OR_TWO = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
SCHEMA = {"type": "json_schema", "json_schema": ONE_OR_TWO}
CALL = re.compile(r"<f=[xy]>(\{.*?\})</f>", re.DOTALL)


def written(tag: Any) -> str:
    return grammar_text(StructuredOutputsParams(structural_tag=tag), StructuredOutputsConfig())


def said(tag: Any, lean: str = "", free: int = 30, end: str = "") -> list[str]:
    grammar = written(tag)
    return [walk(grammar, seed, free=free, lean=lean, end=end) for seed in range(12)]


def form(**piece: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": piece}


TAGS = [{"begin": f"<f={name}>", "content": SCHEMA, "end": "</f>"} for name in "xy"]
LEGACY = {
    "type": "structural_tag",
    "structures": [{"begin": f"<f={name}>", "schema": ONE_OR_TWO, "end": "</f>"} for name in "xy"],
    "triggers": ["<f="],
}


@pytest.mark.parametrize("tag", [LEGACY, json.dumps(LEGACY), form(type="triggered_tags", triggers=["<f="], tags=TAGS)])
def test_text_is_free_until_a_trigger_and_then_follows_one_of_its_tags(tag: Any) -> None:
    texts = said(tag, lean="<f=a", free=150)
    called = [text for text in texts if "<f=" in text]
    assert len(called) > 3 and any(len(CALL.sub("", text)) > 20 for text in texts)
    for text in called:
        assert "<f=" not in CALL.sub("", text), "every trigger is the beginning of a whole tag"
        assert all(json.loads(inner)["a"] in (1, 2) for inner in CALL.findall(text))


def test_at_least_one_begins_with_a_tag_and_stop_after_first_ends_with_it() -> None:
    kind = {"type": "triggered_tags", "triggers": ["<f="], "tags": TAGS}
    assert all(CALL.match(text) for text in said(form(**kind, at_least_one=True)))
    both = said(form(**kind, at_least_one=True, stop_after_first=True))
    assert all(CALL.fullmatch(text) for text in both)


X = {"type": "regex", "pattern": "x"}
A, BB = {"type": "const_string", "value": "a"}, {"type": "regex", "pattern": "b{2}"}
PIECES: list[tuple[dict[str, Any], str]] = [
    ({"type": "const_string", "value": 'say "hi"\n'}, 'say "hi"\n'),
    ({"type": "regex", "pattern": "[a/]{3}\n?"}, "[a/]{3}\n?"),
    ({"type": "grammar", "grammar": 'root ::= "z" [0-9] tail\ntail ::= "!" | "?"'}, "z[0-9][!?]"),
    ({"type": "grammar", "grammar": 'start: "q" DIGIT\nDIGIT: /[0-9]/'}, "q[0-9]"),
    ({"type": "sequence", "elements": [A, BB]}, "abb"),
    ({"type": "or", "elements": [A, BB]}, "a|bb"),
    ({"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}, r"<t>(?:(?!</t>)[\s\S])*</t>"),
    ({"type": "tag", "begin": "(", "content": X, "end": [")", "]"]}, r"\(x[)\]]"),
    ({"type": "tags_with_separator", "separator": ";", "tags": [{"begin": "(", "content": X, "end": ")"}]},
     r"(\(x\)(;\(x\))*)?"),
    ({"type": "tags_with_separator", "separator": "", "at_least_one": True, "stop_after_first": True,
      "tags": [{"begin": "(", "content": X, "end": ""}]}, r"\(x"),
    ({"type": "any_text"}, r"[\s\S]*"),
]  # fmt: skip


@pytest.mark.parametrize(("piece", "pattern"), PIECES)
def test_each_piece_is_what_it_says(piece: dict[str, Any], pattern: str) -> None:
    texts = said(form(**piece), lean="</t>", end="</t>" if piece.get("begin") == "<t>" else "")
    assert all(re.fullmatch(pattern, text) for text in texts), texts


REFUSED: list[tuple[Any, str]] = [
    ({"type": "structural_tag"}, "`format`, or `structures`"),
    ({"structures": [3], "triggers": ["<"]}, "structures holds objects"),
    (form(type="poem"), "format.type 'poem' is not served; there are const_string"),
    (form(type="sequence", elements=[]), "format.elements must be a list"),
    (form(type="sequence", elements=[{"type": "const_string"}]), "format.elements[0].value must be text"),
    (form(type="any_text", excludes=["x"]), "format.excludes is not served"),
    (form(type="tag", begin="<", content={"type": "any_text"}, end=["a", "b"]), "format.end must be one text"),
    (
        form(type="triggered_tags", triggers=["<g"], tags=TAGS),
        "format.tags[0].begin must start with one of the triggers",
    ),
    (form(type="json_schema", json_schema="{}"), "format.json_schema must be a JSON schema"),
    ("[1]", "must be an object"),
    ("{", "no JSON"),
]


@pytest.mark.parametrize(("tag", "why"), REFUSED)
def test_a_piece_that_is_wrong_is_named(tag: Any, why: str) -> None:
    with pytest.raises(ParameterError, match=re.escape(why)):
        written(tag)


def test_lark_that_only_speaks_of_ebnf_stays_lark() -> None:
    assert as_lark('start: "a ::= b"') == 'start: "a ::= b"'
    assert as_lark('root ::= "a"') != 'root ::= "a"'


def test_a_tag_has_a_bound() -> None:
    many = [{"type": "const_string", "value": "a"}] * 5000
    with pytest.raises(ParameterError, match="may have 4096 pieces"):
        written(form(type="sequence", elements=many))
    nested: Any = {"type": "const_string", "value": "a"}
    for _ in range(5000):
        nested = {"type": "sequence", "elements": [nested]}
    with pytest.raises(ParameterError, match="nested too deep|4096 pieces"):
        written(form(**nested))


def test_a_grammar_of_blank_lines_is_looked_at_once() -> None:
    """Whoever looks for a rule's beginning over line breaks looks at each line again from each line before it."""
    assert as_lark("\n" * 200_000) == "\n" * 200_000  # hours, if it were so
    with pytest.raises(ValueError, match="may have 1048576 characters"):
        as_lark("\n" * (2**20 + 1))
