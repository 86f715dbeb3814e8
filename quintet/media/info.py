"""Media that a served model takes, and what its operator allows callers to give."""

from dataclasses import dataclass, field
from typing import Any

from quintet.media.kinds import AUDIO, IMAGE, VIDEO

DEFAULT_ITEMS = 999  # of each kind in a prompt; vLLM's number. Bytes and pixels are bounded besides
TIMEOUTS = {IMAGE: 5.0, VIDEO: 30.0, AUDIO: 10.0}  # seconds to fetch one; vLLM's


@dataclass(frozen=True)
class MediaInfo:
    """Media of a model's prompts. Plain data: it crosses processes."""

    limits: dict[str, int] = field(default_factory=dict)  # kinds that the model takes -> most items in a prompt
    # kind -> text in the place of an item, for chat templates that take text alone
    placeholders: dict[str, str] = field(default_factory=dict)
    embeds_width: int = 0  # numbers of a row that a caller may give in the place of an encoder's output; 0: none
    local_path: str | None = None  # folder whose files file:// URLs may name
    domains: tuple[str, ...] = ()  # hosts that http and https URLs may name
    io_options: dict[str, dict[str, Any]] = field(default_factory=dict)  # kind -> options of decoding
    processor_options: dict[str, Any] = field(default_factory=dict)  # mm_processor_kwargs
    timeouts: dict[str, float] = field(default_factory=lambda: dict(TIMEOUTS))  # kind -> seconds to fetch one

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds that a prompt may have."""
        return tuple(kind for kind, most in self.limits.items() if most)

    @property
    def without_text(self) -> bool:
        """True if a prompt is a text or an item: nothing stands for one in a text."""
        return "" in self.placeholders.values()
