"""Markers of reasoning, if the model's reasoning parser does not define them."""

from dataclasses import dataclass
from typing import ClassVar

from quintet.common.value_parsers import optional, text
from quintet.config.schema.fields import Nested, option


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
