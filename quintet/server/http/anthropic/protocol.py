"""Response types of the Messages API. Source: Anthropic's API reference, "Messages"."""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class TextBlock(msgspec.Struct, tag="text"):
    """The text of an answer."""

    text: str


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    """Thinking of the model. It has no signature: the server accepts any thinking that a client sends back."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    """A tool call; `input` is empty if the answer ended within the call."""

    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct, kw_only=True):
    """Tokens of one message. input_tokens does not include tokens from the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    service_tier: str = "standard"


class ContextManagement(msgspec.Struct):
    """Context edits, for requests with context_management; always empty."""

    applied_edits: list[dict[str, Any]]


class MessageAnswer(msgspec.Struct, kw_only=True):
    """A message of the model."""

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
    """Token count of a prompt."""

    input_tokens: int


class MessageErrorDetail(msgspec.Struct):
    """Type and message of an error."""

    type: str
    message: str


class MessageError(msgspec.Struct):
    """An error response in Anthropic's format."""

    type: str
    error: MessageErrorDetail
