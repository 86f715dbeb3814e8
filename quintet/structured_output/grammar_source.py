"""Builds llguidance grammars from a request's structured output parameters."""

import json
from typing import TYPE_CHECKING, Any

from quintet.common.distribution import install_hint
from quintet.config import StructuredOutputsConfig
from quintet.parsers.schema import WHITESPACE
from quintet.sampling_params import ParameterError, StructuredOutputsParams
from quintet.structured_output.json_schema import supported_schema
from quintet.structured_output.structural_tag import MAX_SIZE, as_lark, structural_lark
from quintet.structured_output.xgrammar_source import guidance_text, with_xgrammar

if TYPE_CHECKING:
    from quintet.tokenizers.tokenizer import Tokenizer


def grammar_text(
    wanted: StructuredOutputsParams, config: StructuredOutputsConfig, tokenizer: "Tokenizer | None" = None
) -> str:
    """One text for all who ask for the same; with the tokenizer, grammars and structural tags may name its tokens.
    ParameterError if it is too large, or no JSON where it should be."""
    library = llguidance()
    try:
        text = _written(library.LLMatcher, wanted, config, tokenizer)
        if config.backend == "xgrammar":
            text = with_xgrammar(text, wanted, config)
    except (ValueError, RecursionError, OverflowError) as error:
        why = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise ParameterError("structured_outputs", f"cannot be served: {why}") from None
    if len(text) > MAX_SIZE:
        raise ParameterError("structured_outputs", f"may have {MAX_SIZE} characters as a grammar, not {len(text)}")
    return text


def grammar_after(grammar: str, before: str) -> str:
    """The Lark grammar `before`, in which @answer stands for the other. ParameterError if the two are too large."""
    grammar = guidance_text(grammar)
    written = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    answer, *others = written
    text = json.dumps({"grammars": [{"lark_grammar": before}, {**answer, "name": "answer"}, *others]})
    if len(text) > 2 * MAX_SIZE:
        raise ParameterError("structured_outputs", f"may have {2 * MAX_SIZE} characters as a grammar, not {len(text)}")
    return text


class GrammarWriter:
    """Writes grammars for an engine that compiles them itself."""

    def __init__(self, config: StructuredOutputsConfig, tokenizer: "Tokenizer | None" = None) -> None:
        self.config, self.tokenizer = config, tokenizer
        self._last: tuple[StructuredOutputsParams | None, str] = (None, "")  # conversations of a call share theirs

    async def grammar(self, wanted: StructuredOutputsParams) -> str:
        """As grammar_text()."""
        if wanted is not self._last[0]:
            self._last = wanted, grammar_text(wanted, self.config, self.tokenizer)
        return self._last[1]

    async def grammar_after(self, grammar: str, before: str) -> str:
        """As behind()."""
        return grammar_after(grammar, before)


def llguidance() -> Any:
    """The library; ParameterError where it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise ParameterError(
            "structured_outputs", f"need the package llguidance, which is not here: {install_hint('structured')}"
        ) from None
    return llguidance


def _written(
    make: Any, wanted: StructuredOutputsParams, config: StructuredOutputsConfig, tokenizer: "Tokenizer | None"
) -> str:
    if wanted.regex is not None:
        return str(make.grammar_from_regex(wanted.regex))
    if wanted.choice is not None:
        return str(make.grammar_from_lark("start: " + " | ".join(json.dumps(each) for each in wanted.choice)))
    if wanted.grammar is not None:
        return str(make.grammar_from_lark(as_lark(wanted.grammar, tokenizer.added if tokenizer else {})))
    if wanted.structural_tag is not None:
        tag = wanted.structural_tag
        special = {text: i for text, i in tokenizer.added.items() if i in tokenizer.special_ids} if tokenizer else {}
        return str(make.grammar_from_lark(structural_lark(_parsed(tag) if isinstance(tag, str) else tag, special)))
    return _json(make, {"type": "object"} if wanted.json is None else wanted.json, wanted, config)


def _json(make: Any, schema: Any, wanted: StructuredOutputsParams, config: StructuredOutputsConfig) -> str:
    if isinstance(schema, str):
        schema = _parsed(schema)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("a JSON schema is an object")
    closed = wanted.disable_additional_properties or config.disable_additional_properties
    schema = supported_schema(schema, closed=bool(closed))
    bare = wanted.disable_any_whitespace or config.disable_any_whitespace
    options: dict[str, Any] = {"whitespace_flexible": not bare}
    if not bare:
        options["whitespace_pattern"] = WHITESPACE
    if wanted.whitespace_pattern is not None:
        options["whitespace_pattern"] = wanted.whitespace_pattern
    return str(make.grammar_from_json_schema(json.dumps(schema), defaults=options))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"the schema is no JSON: {error}") from None
