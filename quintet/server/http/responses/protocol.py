"""Response types of the Responses API. Source: OpenAI's API reference, "The response object"."""

from collections.abc import Mapping
from typing import Any

import msgspec

from quintet.server.http.openai.chat_protocol import TokenLogprob

Item = dict[str, Any]  # of the conversation, as the API shows it


class OutputText(msgspec.Struct, kw_only=True):
    """The text of an answer."""

    type: str = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class OutputMessage(msgspec.Struct, kw_only=True, tag="message"):
    """A message of the model."""

    id: str
    status: str  # in_progress, completed or incomplete
    role: str = "assistant"
    content: list[OutputText]


class ReasoningText(msgspec.Struct, kw_only=True):
    """Reasoning text of the model."""

    type: str = "reasoning_text"
    text: str


class ReasoningItem(msgspec.Struct, kw_only=True, tag="reasoning"):
    """A reasoning item. `encrypted_content` holds the same text again if the request includes it; see seal()."""

    id: str
    status: str  # as of a message
    summary: list[Any] = []  # always empty: summaries are not made
    content: list[ReasoningText]
    encrypted_content: str | None = None


class FunctionCall(msgspec.Struct, kw_only=True, tag="function_call"):
    """A function call. An incomplete one was cut off or is malformed: do not use its arguments."""

    id: str
    status: str  # as of a message
    call_id: str
    name: str
    arguments: str  # the text of a JSON object


class McpTool(msgspec.Struct, kw_only=True):
    """A tool as its tool server describes it."""

    name: str
    description: str
    input_schema: Mapping[str, Any]
    annotations: Mapping[str, Any]


class McpListTools(msgspec.Struct, kw_only=True, tag="mcp_list_tools"):
    """The tools of a tool server that the model may call."""

    id: str
    server_label: str
    tools: list[McpTool]
    error: str | None = None


class McpCall(msgspec.Struct, kw_only=True, tag="mcp_call"):
    """A call that this server sends to a tool server."""

    id: str
    server_label: str
    name: str
    arguments: str  # the text of a JSON object, unless the status is incomplete
    status: str  # in_progress, completed, failed, or incomplete: cut off, or broken
    output: str | None = None
    error: dict[str, Any] | None = None
    approval_request_id: str | None = None


class McpApprovalRequest(msgspec.Struct, kw_only=True, tag="mcp_approval_request"):
    """A call that is carried out when the next request approves it."""

    id: str
    server_label: str
    name: str
    arguments: str  # the text of a JSON object


OutputItem = OutputMessage | ReasoningItem | FunctionCall | McpListTools | McpCall | McpApprovalRequest


class InputDetails(msgspec.Struct):
    """Input tokens that came from the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    """Output tokens that are reasoning; 0 if they cannot be counted."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """Tokens of one response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFailure(msgspec.Struct):
    """Why a response failed."""

    code: str
    message: str


class Incomplete(msgspec.Struct):
    """Reason why a response is incomplete."""

    reason: str


class ResponseObject(msgspec.Struct, kw_only=True):
    """One response. The first fields are copied from the request."""

    id: str
    object: str = "response"
    created_at: int
    model: str
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: dict[str, dict[str, Any]] = msgspec.field(default_factory=lambda: {"format": {"type": "text"}})
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: str
    user: str | None

    status: str  # queued, in_progress, completed, incomplete, failed or cancelled
    completed_at: int | None = None
    error: ResponseFailure | None = None
    incomplete_details: Incomplete | None = None
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None


class ResponseDeleted(msgspec.Struct, kw_only=True):
    """Confirms that a response was deleted."""

    id: str
    object: str = "response"
    deleted: bool = True


class ItemList(msgspec.Struct, kw_only=True):
    """A page of the input items of a response."""

    object: str = "list"
    data: list[Item]
    first_id: str
    last_id: str
    has_more: bool


class InputTokens(msgspec.Struct, kw_only=True):
    """Number of input tokens of a response."""

    object: str = "response.input_tokens"
    input_tokens: int
