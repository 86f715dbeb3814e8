"""Request body of POST /v1/responses: its fields, and fields that are refused, with reasons."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, create_model

from quintet.chat.reasoning_effort import read_effort
from quintet.chat.tool_choice import MAX_TOOLS
from quintet.chat.validation import object_of, one_of
from quintet.sampling_params import ParameterError
from quintet.server.http.inputs.body import Body, UnsupportedField
from quintet.server.http.openai.sampling_protocol import SAMPLING_FIELDS, SamplingBody
from quintet.server.http.responses.input_schema import INPUT

LOGPROBS = "message.output_text.logprobs"
SEALED = "reasoning.encrypted_content"
# Values of `include`. All but the first two refer to features that are not served here.
_INCLUDES = (
    LOGPROBS,
    SEALED,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
_EXCLUDED = (
    "n",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "truncation_side",
    "logprob_token_ids",
)  # a response is one answer; `truncation` cuts
SAMPLING = tuple(name for name in SAMPLING_FIELDS if name not in _EXCLUDED)

_OBJECT = {"anyOf": [{"type": "object"}, {"type": "null"}]}
_METADATA = 16  # entries, as OpenAI has it
_SUMMARIES = ("auto", "concise", "detailed")

_SHARED = (
    *SAMPLING,
    "model",
    "stream",
    "user",
    "priority",
    "cache_salt",
    "structured_outputs",
)  # with other completions
_fields: Any = {name: (SamplingBody.model_fields[name].annotation, SamplingBody.model_fields[name]) for name in _SHARED}
_Shared: Any = create_model("_Shared", __base__=Body, **_fields)


def _limit_entries(given: Any) -> Any:
    """Limits the number of entries: pydantic would validate them all before counting."""
    if isinstance(given, dict) and len(given) > _METADATA:
        raise ValueError(f"may have {_METADATA} entries, not {len(given)}")
    return given


class StreamOptions(Body):
    """Options of a streamed response."""

    include_obfuscation: bool | None = Field(None, description="accepted, not used")


class CreateResponse(_Shared):
    """OpenAI's request, with vLLM's additional sampling fields."""

    input: Annotated[Any, WithJsonSchema(INPUT)] = Field(description="text, or a list of messages")
    instructions: str | None = Field(None, description="a system message before all others, for this response alone")
    max_output_tokens: int | None = Field(None, description="most tokens of output")
    include: list[str] | None = Field(
        None, max_length=16, fail_fast=True, description=f"{LOGPROBS} and {SEALED} are served"
    )
    top_logprobs: int | None = Field(None, description="likeliest tokens to report at each position; needs include")
    stream_options: StreamOptions | None = None
    store: bool | None = Field(None, description="keep the response, so that it can be fetched and continued (true)")
    background: bool | None = Field(None, description="answer at once, and go on when the client hangs up")
    previous_response_id: str | None = Field(None, max_length=256, description="the response that this one continues")
    truncation: Literal["auto", "disabled"] | None = Field(None, description="auto drops the oldest messages")
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=_METADATA),
            BeforeValidator(_limit_entries),
        ]
        | None
    ) = Field(None, description="kept with the response")
    text: Annotated[Any, WithJsonSchema(_OBJECT)] = Field(
        None, description='{"format": ...}: text, json_object, or json_schema'
    )
    reasoning: Annotated[Any, WithJsonSchema(_OBJECT)] = Field(
        None, description='{"effort": ...}, if the chat template has a setting for it; a summary is never made'
    )
    include_reasoning: bool | None = Field(None, description="false: without items of reasoning")
    tools: list[dict[str, Any]] | None = Field(
        None, max_length=MAX_TOOLS, fail_fast=True,
        description='functions that the model may call: {"type": "function", "name": ..., "parameters": ...}; and tool '
        'servers of the operator: {"type": "mcp", "server_label": ..., "require_approval": "never"}; left out it means '
        '"always", and calls then end the response with an mcp_approval_request',
    )  # fmt: skip
    tool_choice: Any = Field(
        None, description='"auto" (where there are tools), "none", "required", or an object of type function or '
        "allowed_tools",
    )  # fmt: skip
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most")
    max_tool_calls: int | None = Field(
        None, ge=0, le=2**31 - 1, description="of tools of tool servers, in this response"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables that the chat template reads")
    prompt_cache_key: str | None = Field(None, description="accepted, not used; cache_salt keeps caches apart")
    prompt_cache_retention: Literal["in_memory", "24h"] | None = Field(None, description="accepted, not used")
    safety_identifier: str | None = Field(None, description="accepted, not used")
    service_tier: str | None = Field(None, description="accepted, not used: there is one")

    unsupported_fields: ClassVar[Mapping[str, UnsupportedField]] = {
        "conversation": UnsupportedField("conversations are not kept as such; use previous_response_id"),
        "prompt": UnsupportedField("prompt templates are not kept; send the text"),
        "context_management": UnsupportedField(
            "conversations are not compacted; truncation drops the oldest messages", ([],)
        ),
        "moderation": UnsupportedField("nothing is moderated"),
        "background_options": UnsupportedField("a response in the background starts as soon as it can", ({},)),
        "prompt_cache_options": UnsupportedField("the prefix cache needs no marks: what fits is found", ({},)),
        "image": UnsupportedField("images are parts of a message: input_image"),
        "access_programs": UnsupportedField("there are none"),
        "n": UnsupportedField("a response is one answer; send several requests, or use /v1/chat/completions", (1,)),
        "logprob_token_ids": UnsupportedField("use /v1/chat/completions, or top_logprobs for the likeliest"),
        "request_id": UnsupportedField(
            "a response's id is the server's own; the header X-Request-Id names the request in the log"
        ),
        "max_tokens": UnsupportedField("it is called max_output_tokens in this API"),
        "messages": UnsupportedField("it is called input in this API"),
        "response_format": UnsupportedField("it is called text.format in this API"),
    }


_COUNTED = (
    "model",
    "instructions",
    "previous_response_id",
    "truncation",
    "text",
    "reasoning",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "chat_template_kwargs",
)
_counted: Any = {
    name: (CreateResponse.model_fields[name].annotation, CreateResponse.model_fields[name]) for name in _COUNTED
}
_Counted: Any = create_model("_Counted", __base__=Body, **_counted)


class CountInput(_Counted):
    """Request fields that determine a response's input."""

    input: Annotated[Any, WithJsonSchema({"anyOf": [*INPUT["anyOf"], {"type": "null"}]})] = Field(
        None, description="text, or a list of messages; may be left out beside previous_response_id"
    )

    unsupported_fields: ClassVar[Mapping[str, UnsupportedField]] = {
        "conversation": CreateResponse.unsupported_fields["conversation"],
        "personality": UnsupportedField("a model has one; say in instructions how it shall talk"),
    }


def check_count(body: CountInput) -> None:
    """Checks constraints that the types do not express. Raises ParameterError."""
    if body.input is None and body.previous_response_id is None:
        raise ParameterError("input", "is missing; give it, or previous_response_id")
    _check_text(body.text)
    _check_reasoning(body.reasoning)


def check_body(body: CreateResponse) -> None:
    """Checks constraints that the types do not express. Raises ParameterError."""
    _check_text(body.text)
    _check_reasoning(body.reasoning)
    for place, each in enumerate(body.include or ()):
        one_of(each, f"include[{place}]", _INCLUDES)
    if body.top_logprobs and not wants_logprobs(body):
        raise ParameterError("top_logprobs", f"needs include to have {LOGPROBS!r}; add it, or leave top_logprobs out")
    if body.background and body.store is False:
        raise ParameterError("background", "needs the response to be stored; leave store out")


def wants_sealed(body: CreateResponse) -> bool:
    """True if the request asks for reasoning as opaque text that a client can send back."""
    return SEALED in (body.include or ())


def wants_logprobs(body: CreateResponse) -> bool:
    return LOGPROBS in (body.include or ())


def _check_text(text: Any) -> None:
    if text is None:
        return
    object_of(text, "text", ("format", "verbosity"))
    if text.get("verbosity") not in (None, "medium"):
        raise ParameterError("text.verbosity", "is not served: say in the input how long the answer should be")


def _check_reasoning(reasoning: Any) -> None:
    if reasoning is None:
        return
    object_of(reasoning, "reasoning", ("effort", "summary", "generate_summary", "context", "mode"))
    read_effort(reasoning.get("effort"), "reasoning.effort")
    if reasoning.get("summary") is not None:
        one_of(reasoning["summary"], "reasoning.summary", _SUMMARIES)
    if reasoning.get("mode") not in (None, "standard"):
        raise ParameterError("reasoning.mode", "is not served: there is one way to answer")
