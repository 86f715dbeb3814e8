"""Options of structured output and of reasoning."""

from dataclasses import dataclass
from typing import Any, ClassVar

from quintet.common.value_parsers import boolean, one_of, optional, text
from quintet.config.schema.fields import Nested, option

_BACKENDS = ("auto", "guidance", "xgrammar")


def _backend(value: Any) -> str:
    if value in ("outlines", "lm-format-enforcer"):
        raise ValueError(f"{value!r} is not there; leave it out: guidance takes EBNF and structural tags as well")
    return str(one_of(*_BACKENDS)(value))


@dataclass(frozen=True)
class StructuredOutputsConfig(Nested):
    """Structured output: answers that follow a schema or a grammar; vLLM's names."""

    name: ClassVar[str] = "structured_outputs_config"

    backend: str = option(
        "auto", _backend, "what compiles schemas and grammars; auto: guidance", group="sampling", choices=_BACKENDS,
    )  # fmt: skip
    disable_any_whitespace: bool = option(False, boolean, "no whitespace between the parts of JSON", group="sampling")
    disable_additional_properties: bool = option(
        False, boolean, "objects have the properties that their schema names, and no more", group="sampling"
    )
    enable_in_reasoning: bool = option(
        False,
        boolean,
        "the shape holds from the first token on, and not behind what the model thinks",
        group="sampling",
    )
    reasoning_parser: str | None = option(
        None, optional(text), "how the model marks its thoughts, where --reasoning-parser does not say it",
        group="sampling", metavar="NAME",
    )  # fmt: skip
    reasoning_parser_plugin: str | None = option(
        None, optional(text), "Python file that registers reasoning parsers, if --reasoning-parser-plugin names none",
        group="sampling", metavar="FILE",
    )  # fmt: skip


@dataclass(frozen=True)
class ReasoningConfig(Nested):
    """Text that thinking_token_budget counts from, and text that ends reasoning over the budget; vLLM's names."""

    name: ClassVar[str] = "reasoning_config"

    reasoning_start_str: str | None = option(
        None, optional(text), "what begins a thought; the reasoning parser's marker if not given", group="sampling"
    )
    reasoning_end_str: str | None = option(
        None, optional(text), "what ends one that is too long, such as 'Time is up.</think>'; its marker if not given",
        group="sampling",
    )  # fmt: skip
