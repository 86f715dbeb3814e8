"""POST /v1/chat/completions: its request, its answer and its chunks."""

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field, WithJsonSchema

from quintet.chat.messages import ROLES
from quintet.chat.tool_choice import MAX_TOOLS
from quintet.outputs import Logprob
from quintet.server.http.inputs.body import Body, UnsupportedField
from quintet.server.http.openai.sampling_protocol import UNSUPPORTED_FIELDS, SamplingBody
from quintet.server.http.usage import RequestTimes, Usage

MAX_DOCUMENTS = 1024

_TEXT = {"type": "string"}
_PART = {
    "type": "object",
    "properties": {"type": {"type": "string", "enum": ["text"]}, "text": _TEXT},
    "required": ["type", "text"],
}
_URL = {"type": "object", "properties": {"url": _TEXT, "detail": _TEXT}, "required": ["url"]}
_MEDIA_PART = {
    "type": "object",
    "description": "where the model takes images, video or audio; a URL is a data: URL, or of a host that is allowed",
    "properties": {
        "type": {"type": "string", "enum": ["image_url", "video_url", "audio_url", "input_audio"]},
        "image_url": _URL,
        "video_url": _URL,
        "audio_url": _URL,
        "input_audio": {"type": "object", "properties": {"data": _TEXT, "format": _TEXT}, "required": ["data"]},
        "uuid": _TEXT,
    },
    "required": ["type"],
}
_CONTENT: list[dict[str, Any]] = [_TEXT, {"type": "array", "items": {"anyOf": [_PART, _MEDIA_PART]}}]
_OTHER_MESSAGE = {
    "type": "object",
    "description": "Any but the assistant's; the role may also be one that the chat template names.",
    "properties": {
        "role": {"type": "string", "enum": [role for role in ROLES if role != "assistant"]},
        "content": {"anyOf": _CONTENT},
        "name": _TEXT,
        "tool_call_id": _TEXT,
    },
    "required": ["role", "content"],
}
_ASSISTANT_MESSAGE = {
    "type": "object",
    "description": "The assistant's.",
    "properties": {
        "role": {"type": "string", "enum": ["assistant"]},
        "content": {"anyOf": [*_CONTENT, {"type": "null"}]},
        "name": _TEXT,
        "tool_calls": {"type": "array", "items": {"type": "object"}},
        "reasoning_content": _TEXT,
    },
    "required": ["role"],
}
_MESSAGE = {"anyOf": [_OTHER_MESSAGE, _ASSISTANT_MESSAGE]}
# Checked where they are rendered, against the template; pydantic would say less.
_CHAT = {"type": "array", "items": _MESSAGE, "minItems": 1}
Messages = Annotated[Any, WithJsonSchema(_CHAT)]


class MediaFields(Body):
    """Options of images, video and audio in a conversation."""

    mm_processor_kwargs: dict[str, Any] | None = Field(
        None, description="options of the model's processor of images, video and audio"
    )
    media_io_kwargs: dict[str, Any] | None = Field(
        None, description='how media are decoded, by kind, such as {"video": {"num_frames": 16}}'
    )


class TemplateFields(Body):
    """Fields that control how a conversation is rendered into a prompt."""

    tools: list[dict[str, Any]] | None = Field(
        None, max_length=MAX_TOOLS, fail_fast=True, description="functions that the model may call"
    )
    chat_template: str | None = Field(
        None, description="Jinja text instead of the model's own; where the server allows it"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables that the template reads")
    documents: list[dict[str, Any]] | None = Field(
        None, max_length=MAX_DOCUMENTS, fail_fast=True, description="texts for a chat template that reads documents, "
        "each such as {\"title\": ..., \"text\": ...}",
    )  # fmt: skip
    add_generation_prompt: bool | None = Field(None, description="end with the beginning of the next message (true)")
    continue_final_message: bool | None = Field(None, description="go on with the last message")


MEDIA_FIELDS = ("mm_processor_kwargs", "media_io_kwargs")
_OLD_FUNCTIONS = "it is called tools and tool_choice today"

CHAT_UNSUPPORTED: dict[str, UnsupportedField] = {
    **{name: why for name, why in UNSUPPORTED_FIELDS.items() if name not in MEDIA_FIELDS},
    "prompt_embeds": UnsupportedField("a chat is text; /v1/completions takes them"),
    "audio": UnsupportedField("models here give text alone"),
    "modalities": UnsupportedField("models here give text alone", (["text"],)),
    "functions": UnsupportedField(_OLD_FUNCTIONS, ([],)),
    "function_call": UnsupportedField(_OLD_FUNCTIONS, ("none",)),
    "prediction": UnsupportedField("there is no predicted output; leave it out"),
    "web_search_options": UnsupportedField("the model searches nothing; leave it out"),
    "verbosity": UnsupportedField("say in the messages how long the answer should be", ("medium",)),
    "echo": UnsupportedField("/v1/completions has it", (False,)),
    "best_of": UnsupportedField("use n", (1,)),
    "moderation": UnsupportedField("nothing is moderated here; leave it out"),
}


class ChatRequest(MediaFields, TemplateFields, SamplingBody):
    """OpenAI's, with vLLM's additions."""

    messages: Messages
    max_completion_tokens: int | None = Field(
        None, description="most tokens of output; what the context leaves if not given"
    )
    max_tokens: int | None = Field(
        None, description="the same under its old name; max_completion_tokens goes before it"
    )
    logprobs: bool | None = Field(None, description="report log-probabilities of the tokens")
    top_logprobs: int | None = Field(None, description="likeliest tokens to report at each position; needs logprobs")
    tool_choice: Any = Field(
        None,
        description='"auto" (where there are tools), "none", "required", or one by name: {"type": "function", ...}',
    )
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most")
    reasoning_effort: str | None = Field(
        None,
        description="how much the model thinks, for templates that read it; none: not at all, if they can say so",
    )
    thinking: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "boolean"}, {"type": "null"}]})] = (
        Field(None, description='whether the model thinks, as {"type": "enabled", "budget_tokens": 100}, or disabled')
    )
    include_reasoning: bool | None = Field(None, description="false: thoughts are left out of the answer")
    return_prompt_text: bool | None = Field(None, description="the text of the prompt that the template made")
    prompt_cache_key: str | None = Field(None, description="accepted, not used; cache_salt keeps caches apart")
    safety_identifier: str | None = Field(None, description="accepted, not used")

    unsupported_fields: ClassVar[dict[str, UnsupportedField]] = CHAT_UNSUPPORTED


class BatchChatRequest(ChatRequest):
    """vLLM's: several conversations, with the other fields for all of them."""

    messages: Annotated[Any, WithJsonSchema({"type": "array", "items": _CHAT, "minItems": 1})]


class TopLogprob(msgspec.Struct):
    """A token and how likely it was."""

    token: str
    logprob: float
    bytes: list[int]
    id: int | UnsetType = UNSET  # llama.cpp's


class TokenLogprob(msgspec.Struct):
    """The token that was drawn, and the likeliest."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]
    id: int | UnsetType = UNSET  # llama.cpp's


class ChatLogprobs(msgspec.Struct):
    """One entry for each token of the content."""

    content: list[TokenLogprob]
    refusal: None = None


class FunctionPart(msgspec.Struct):
    """The function of a call, or what is new of it."""

    name: str | UnsetType = UNSET
    arguments: str = ""  # all pieces together: the text of a JSON object


class CallPart(msgspec.Struct, kw_only=True):
    """A call, or in a stream what is new of one."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionPart


class AnswerMessage(msgspec.Struct):
    """Message of the model; its reasoning is under both names that clients read."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallPart] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The answer to a chat."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: RequestTimes | UnsetType = UNSET
    system_fingerprint: str | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | None | UnsetType = UNSET
    prompt_logprobs: list[dict[int, Logprob] | None] | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class Delta(msgspec.Struct, kw_only=True):
    """New part of a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallPart] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """New part of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a streamed chat."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str | None
    usage: Usage | None | UnsetType = UNSET
    metrics: RequestTimes | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | None | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
