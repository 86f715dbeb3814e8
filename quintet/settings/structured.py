"""How answers are held to a schema or a grammar."""

from dataclasses import dataclass
from typing import Any, ClassVar

from quintet.settings.option import Nested, option
from quintet.values import one_of, truth


def _backend(value: Any) -> str:
    if value in ("xgrammar", "outlines", "lm-format-enforcer"):
        raise ValueError(f"{value!r} is not there; leave it out: guidance takes EBNF and structural tags as well")
    return str(one_of("auto", "guidance")(value))


@dataclass(frozen=True)
class StructuredOutputsConfig(Nested):
    """How answers are held to a schema or a grammar; vLLM's names."""

    name: ClassVar[str] = "structured_outputs_config"

    backend: str = option(
        "auto", _backend, "who compiles schemas and grammars; auto: guidance", group="sampling",
        choices=("auto", "guidance"),
    )  # fmt: skip
    disable_any_whitespace: bool = option(False, truth, "no whitespace between the parts of JSON", group="sampling")
    disable_additional_properties: bool = option(
        False, truth, "objects have the properties that their schema names, and no more", group="sampling"
    )
