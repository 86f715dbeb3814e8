"""How thoughts are marked, where the model's parser does not say it."""

from dataclasses import dataclass
from typing import ClassVar

from quintet.settings.option import Nested, option
from quintet.values import optional, text


@dataclass(frozen=True)
class ReasoningConfig(Nested):
    """What thinking_token_budget counts from, and says in the place of a thought that is too long; vLLM's names."""

    name: ClassVar[str] = "reasoning_config"

    reasoning_start_str: str | None = option(
        None, optional(text), "what begins a thought; the reasoning parser's marker if not given", group="sampling"
    )
    reasoning_end_str: str | None = option(
        None, optional(text), "what ends one that is too long, such as 'Time is up.</think>'; its marker if not given",
        group="sampling",
    )  # fmt: skip
