"""What the Messages API gives: the message and its parts. Source: Anthropic's API reference, "Messages"."""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class TextBlock(msgspec.Struct, tag="text"):
    """The text of an answer."""

    text: str


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    """What the model thinks. Nothing is signed here: whoever sends it back is believed."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    """A call; `input` is empty where the answer ended within it."""

    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct, kw_only=True):
    """Tokens of one message. What came from the prefix cache counts beside the input, not within it."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    service_tier: str = "standard"


class ContextManagement(msgspec.Struct):
    """What was edited of the conversation, for those who ask: nothing is."""

    applied_edits: list[dict[str, Any]]


class MessageAnswer(msgspec.Struct, kw_only=True):
    """What the model says."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[Block]
    stop_reason: str | None = None  # end_turn, max_tokens, stop_sequence, tool_use or model_context_window_exceeded
    stop_sequence: str | None = None
    usage: MessageUsage
    context_management: ContextManagement | UnsetType = UNSET


class TokenCount(msgspec.Struct):
    """Of a prompt."""

    input_tokens: int


class MessageErrorDetail(msgspec.Struct):
    """What went wrong."""

    type: str
    message: str


class MessageError(msgspec.Struct):
    """Anthropic's shape of an error."""

    type: str
    error: MessageErrorDetail
