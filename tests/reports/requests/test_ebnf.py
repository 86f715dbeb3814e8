"""EBNF as llama.cpp and xgrammar write it. report 3, and "Not counted above" for the regex of a structural tag."""

import re

import pytest

from quintet.config import StructuredOutputsConfig
from quintet.sampling_params import ParameterError, StructuredOutputsParams
from quintet.structured_output.grammar_source import grammar_text
from tests.helpers.walks import vocabulary, walk

llguidance = pytest.importorskip(
    "llguidance", reason="structured_outputs are an extra: pip install 'quintet-llm[structured]'"
)

CASES = [
    ('root ::= "a"{3} "b"{1,2} ("c" | "d"){2}', "aaabb?[cd]{2}"),
    ('root ::= term ([-+*/] term){1,2}\nterm ::= [0-9] | "(" term ")"', r"[0-9(].*"),
    ('# first\nroot ::= "#a" [#] # last', "#a#"),
    ('root ::= (\n  "a" |\n  "b"\n) "c"', "[ab]c"),
    ('  root\t::= "a" x\r\n  x ::= "b"\r\n', "ab"),
    ('root ::= "a" |\n  "b"', "[ab]"),
    ('root ::= "a"\n  | "b"\n  | "c"', "[abc]"),
    ('root ::=\n    "a" x\n  | "b" x\nx ::= "!"', "[ab]!"),
    ('root ::= "a"\n  "b"\n\n  "c"', "abc"),
    (r"root ::= [a\-z]{2}", "[az-]{2}"),
    (r"root ::= [^\-<\]]{2}", r"[^-<\]]{2}"),
    (r"root ::= [\]\[^]{2}", r"[\]\[^]{2}"),
    (r'root ::= "\x41" [\x42] "\t"', "AB\t"),
    (r'root ::= "\u00e9!"', "é!"),
    (r'root ::= "\u004142"', "A42"),
    (r'root ::= "\u4e2d" "\U0001F600"', "中😀"),
    (r"root ::= [\u00e0-\u00fc] [\u4e2d]", "[à-ü]中"),
    (r"root ::= [\U0001F600-\U0001F64F]", "[\U0001f600-\U0001f64f]"),
    ('root ::= "x" start\nstart ::= "y"', "xy"),
    ('root ::= Rule rule RULE\nrule ::= "a"\nRule ::= "b"\nRULE ::= "c"', "bac"),
    ('root ::= EXPR\nEXPR ::= "(" EXPR ")" | "b"', r"\(*b\)*"),
    ('root ::= ("a" | ) "b"? "c"{,2}', "a?b?c{0,2}"),
    ('root ::= "\\"" ([^"\\\\\\x00-\\x1F] | "\\\\" (["\\\\/bfnrt] | "u" [0-9a-f]{4})){1,5} "\\""', '".*"'),
]


def text(**wanted: object) -> str:
    return grammar_text(StructuredOutputsParams(**wanted), StructuredOutputsConfig())  # type: ignore[arg-type]


@pytest.mark.parametrize(("grammar", "pattern"), CASES)
def test_texts_of_the_grammar_are_those_it_means(grammar: str, pattern: str) -> None:
    texts = [walk(text(grammar=grammar), seed, free=4, lean="b)", end=")") for seed in range(4)]
    assert all(re.fullmatch(pattern, each, re.DOTALL) for each in texts), texts


@pytest.mark.parametrize(("written", "whole"), [("aab", True), ("aabb", True), ("b", False), ("aa", False)])
def test_a_run_of_letters_ends_before_one_of_them(written: str, whole: bool) -> None:
    """A rule of texts and classes takes all that it can; where all rules are such, it gives back what follows."""
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), text(grammar='root ::= x "b"\nx ::= [a-z]+'))
    assert matcher.consume_tokens(list(written.encode())) and matcher.is_accepting() is whole


def test_it_is_served_within_a_structural_tag() -> None:
    inner = {"type": "grammar", "grammar": 'root ::= "<" [^\\-}]{2} x\nx ::=\n  "}"\n| "\\u00e9"'}
    grammar = text(structural_tag={"type": "structural_tag", "format": inner})
    assert all(re.fullmatch("<[^-}]{2}[}é]", walk(grammar, seed, free=3), re.DOTALL) for seed in range(4))


WRONG = [
    ('a ::= "b"', "no rule `root`"),
    ("root ::= x", "line 1: there is no rule 'x'"),
    ('root ::= "a"\nx ::= "b" )', "line 2"),
    ('root ::= ("a"', "not closed"),
    ('root ::= "a', "cannot be read"),
    ('root ::= "\\q"', "no escape"),
    ('root ::= "\\ud800"', "no character"),
    ("root ::= [z-a]", "ends before it begins"),
    ('root ::= * "a"', "nothing before it"),
    ('root ::= "a"\nroot ::= "b"', "another rule 'root'"),
    ("root ::= " + "(" * 500, "nested"),
]


@pytest.mark.parametrize(("grammar", "why"), WRONG)
def test_what_is_wrong_is_named(grammar: str, why: str) -> None:
    with pytest.raises(ParameterError, match=re.escape(why)):
        text(grammar=grammar)


@pytest.mark.parametrize("pattern", [r"a\/b", "a/b", r"a[\/]b", "a[/]b"])
def test_a_slash_in_the_regex_of_a_tag_is_a_slash(pattern: str) -> None:
    grammar = text(structural_tag={"type": "structural_tag", "format": {"type": "regex", "pattern": pattern}})
    matcher = llguidance.LLMatcher(vocabulary(), grammar, log_level=0)
    ids = vocabulary().tokenize_str("a/b")
    assert matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
