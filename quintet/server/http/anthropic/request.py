"""Request bodies of POST /v1/messages and count_tokens: fields, and fields that are refused, with reasons."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from quintet.chat.reasoning_effort import read_effort, read_thinking
from quintet.chat.tool_choice import MAX_TOOLS
from quintet.chat.validation import kind_of, object_of, one_of
from quintet.sampling_params import ParameterError
from quintet.server.http.inputs.body import Body, UnsupportedField

_TEXT = {
    "type": "object",
    "properties": {"type": {"type": "string", "enum": ["text"]}, "text": {"type": "string", "minLength": 1}},
    "required": ["type", "text"],
}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT, "minItems": 1}]}
_MESSAGE = {
    "type": "object",
    "properties": {"role": {"type": "string", "enum": ["user", "assistant", "system"]}, "content": _CONTENT},
    "required": ["role", "content"],
}
_OBJECT = {"anyOf": [{"type": "object"}, {"type": "null"}]}
# On this error Anthropic's tool runner sends all messages instead of a thread.
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
_UNSUPPORTED: dict[str, UnsupportedField] = {
    "mcp_servers": UnsupportedField("this server calls no other one", ([],)),
    "container": UnsupportedField("no code is run by this server"),
    "compaction": UnsupportedField("conversations are not compacted; send what the model shall read"),
    "inference_geo": UnsupportedField("it runs where this server runs"),
    "speed": UnsupportedField("there is one speed", ("standard",)),
    "diagnostics": UnsupportedField("there are none; /metrics has the prefix cache's"),
    "fallbacks": UnsupportedField("this server has one model", ([],)),
    "thread": UnsupportedField("conversations are not kept; send all messages", details=_NO_THREADS),
    "stop": UnsupportedField("it is called stop_sequences in this API"),
    "max_completion_tokens": UnsupportedField("it is called max_tokens in this API"),
}


class MessageBody(Body):
    """Fields that determine the prompt."""

    model: str | None = Field(None, description="the model's name; none is the one that is served")
    messages: Annotated[Any, WithJsonSchema({"type": "array", "items": _MESSAGE, "minItems": 1})] = Field(
        description="the conversation; a last message of the assistant is continued"
    )
    system: Annotated[Any, WithJsonSchema(_CONTENT)] = Field(None, description="text before all messages")
    cache_control: Annotated[Any, WithJsonSchema(_OBJECT)] = Field(
        None, description="accepted, not used: the prefix cache needs no marks"
    )
    thinking: Annotated[Any, WithJsonSchema(_OBJECT)] = Field(
        None,
        description='{"type": "enabled", "budget_tokens": 2000}: the model thinks, where its template can say so, so '
        "many tokens at most; disabled: it does not",
    )
    tools: list[dict[str, Any]] | None = Field(
        None, max_length=MAX_TOOLS, fail_fast=True, description="functions that the model may call"
    )
    tool_choice: dict[str, Any] | None = Field(
        None, description='{"type": "auto"} (where there are tools), any, none, or {"type": "tool", "name": ...}'
    )
    output_config: Annotated[Any, WithJsonSchema(_OBJECT)] = Field(
        None, description='{"format": {"type": "json_schema", "schema": {...}}, "effort": "low"}'
    )
    output_format: Annotated[Any, WithJsonSchema(_OBJECT)] = Field(None, description="output_config.format of before")
    context_management: Annotated[Any, WithJsonSchema(_OBJECT)] = Field(
        None, description="accepted: nothing is edited, and the answer's applied_edits is empty"
    )
    user_profile_id: str | None = Field(None, description="accepted, not used")
    workspace_id: str | None = Field(None, description="accepted, not used")

    unsupported_fields: ClassVar[Mapping[str, UnsupportedField]] = _UNSUPPORTED


class CountTokens(MessageBody):
    """Request to count the tokens of a prompt."""


class Metadata(Body):
    """Metadata of a request."""

    user_id: str | None = Field(None, description="accepted, not used")


class CreateMessage(MessageBody):
    """Anthropic's request, with cache_salt, priority and seed in addition."""

    max_tokens: int = Field(description="most tokens of output")
    temperature: float | None = Field(None, ge=0, le=1, description="0 is greedy; the model's own if not given")
    top_p: float | None = Field(None, description="draw from the fewest tokens whose probabilities add up to this")
    top_k: int | None = Field(None, ge=0, description="draw from this many most likely tokens; 0: all")
    stop_sequences: list[str] | None = Field(
        None, max_length=1024, fail_fast=True, description="text that ends the output"
    )
    stream: bool | None = Field(None, description="answer in server-sent events, while it is made")
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = Field(None, description="accepted, not used: there is one")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=1024, description="prompts share cached pages with those of the same salt alone"
    )
    priority: int | None = Field(
        None, ge=-(2**31), le=2**31 - 1, description="lower runs first, where the engine schedules by priority"
    )
    seed: int | None = Field(None, description="of the random numbers")


def check_body(body: MessageBody) -> None:
    """Checks constraints that the types do not express. Raises ParameterError."""
    check_cache_control(body.cache_control, "cache_control")
    if body.context_management is not None:
        edits = object_of(body.context_management, "context_management", ("edits",)).get("edits")
        if not isinstance(edits, list | None):
            raise ParameterError("context_management.edits", f"must be a list, not {kind_of(edits)}")
    if body.output_config is not None:
        object_of(body.output_config, "output_config", ("format", "effort"))
        read_effort(body.output_config.get("effort"), "output_config.effort")
    if body.thinking is not None:
        object_of(body.thinking, "thinking", ("type", "budget_tokens", "display"))
    read_thinking(body.thinking, "thinking")


def check_cache_control(given: Any, where: str) -> None:
    """Checks the form of cache_control, which has no effect."""
    if given is not None:
        object_of(given, where, ("type", "ttl"))
        one_of(given.get("type"), f"{where}.type", ("ephemeral",))
        if given.get("ttl") is not None:
            one_of(given["ttl"], f"{where}.ttl", ("5m", "1h"))
