"""Request bodies and answers of Ollama's API."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field, WithJsonSchema, create_model

from quintet.chat.tool_choice import MAX_TOOLS
from quintet.server.http.inputs.body import Body, UnsupportedField
from quintet.server.http.inputs.llama_sampling import LlamaSampling, Whole, accepted
from quintet.server.http.openai.chat_protocol import TokenLogprob

MAX_IMAGES = 1024  # of one prompt of /api/generate
_OF_THE_SERVER = "accepted, not used: the server's flags set it at its start"
_TOO_LONG = "a prompt that is too long is refused, not cut, and the output ends where the context does"

_Loading: Any = create_model(
    "_Loading",
    __base__=LlamaSampling,
    **accepted(
        ("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only",
         "use_mmap", "use_mlock", "embedding_only", "num_thread", "numa", "draft_num_predict"), _OF_THE_SERVER
    ),
)  # fmt: skip


class Options(_Loading):
    """Ollama's `options`: sampling fields have an effect, those of loading a model have none."""

    num_predict: Whole = Field(None, description="most tokens of output; 0 and less: as far as the context goes")


_OPTIONS = {"anyOf": [{"type": "object"}, {"type": "null"}]}
_FORMAT = {"anyOf": [{"type": "string", "enum": ["", "json"]}, {"type": "object"}, {"type": "null"}]}
_THINK = {"anyOf": [{"type": "boolean"}, {"type": "string"}, {"type": "null"}]}
_MESSAGES = {"type": "array", "items": {"type": "object", "properties": {
    "role": {"type": "string", "enum": ["system", "user", "assistant", "tool"]}, "content": {"type": "string"},
    "images": {"type": "array", "items": {"type": "string"}, "description": "in base64"},
}}}  # fmt: skip


class ModelBody(Body):
    """Request that names a model."""

    model: str = Field(min_length=1, description="the model's name, with or without `:latest`")
    options: Annotated[dict[str, Any] | None, WithJsonSchema(_OPTIONS)] = Field(
        None, description="sampling parameters under Ollama's names"
    )
    keep_alive: Any = Field(None, description="accepted, not used: the server decides (--keep-alive)")


class OutputBody(ModelBody):
    """Fields that /api/chat and /api/generate share."""

    stream: bool | None = Field(None, description="false: one object; else JSON lines while the answer is made")
    format: Annotated[Any, WithJsonSchema(_FORMAT)] = Field(None, description='"json", or a JSON schema')
    think: Annotated[Any, WithJsonSchema(_THINK)] = Field(
        None, description="true or false, or an effort such as low, for templates that read it"
    )
    logprobs: bool | None = Field(None, description="report log-probabilities of the tokens")
    top_logprobs: int | None = Field(None, description="likeliest tokens to report at each position; needs logprobs")

    unsupported_fields: ClassVar[Mapping[str, UnsupportedField]] = {
        "template": UnsupportedField("the chat template is the model's, or the server's --chat-template", ("",)),
        "truncate": UnsupportedField(_TOO_LONG, (False,)),
        "shift": UnsupportedField(_TOO_LONG, (False,)),
        "context": UnsupportedField("token ids of an earlier answer are not read; send messages to /api/chat", ([],)),
        **dict.fromkeys(("width", "height", "steps"), UnsupportedField("models here give text alone", (0,))),
    }


class ChatBody(OutputBody):
    """Request of /api/chat."""

    messages: Annotated[Any, WithJsonSchema(_MESSAGES)] = Field(
        None, description="the conversation; a last message of the assistant is continued; none: the model is loaded"
    )
    tools: list[dict[str, Any]] | None = Field(
        None, max_length=MAX_TOOLS, fail_fast=True, description="functions that the model may call"
    )


class GenerateBody(OutputBody):
    """Request of /api/generate."""

    prompt: str | None = Field(None, description="what the model answers; none: the model is loaded")
    suffix: str | None = Field(None, description="what follows the output: the model fills in (FIM)")
    images: list[str] | None = Field(
        None, max_length=MAX_IMAGES, fail_fast=True, description="images in base64, before the prompt"
    )
    system: str | None = Field(None, description="system message before the prompt")
    raw: bool | None = Field(None, description="true: the prompt is not put into the chat template")


_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}


class EmbedBody(ModelBody):
    """Request of /api/embed."""

    input: Annotated[Any, WithJsonSchema(_TEXTS)] = Field(None, description="text, or a list of texts")
    truncate: bool | None = Field(None, description="false: a text that is too long is an error; else it is cut")
    dimensions: int | None = Field(
        None, description="numbers of each embedding: its first ones, where the model was made so"
    )


class EmbeddingsBody(ModelBody):
    """Request of /api/embeddings."""

    prompt: str | None = Field(None, description="the text")


class NameBody(Body):
    """Request of /api/show and /api/pull."""

    model: str | None = Field(None, description="the model's name")
    name: str | None = Field(None, description="the same under its old name")
    stream: bool | None = Field(None, description="of a pull: false is one object")
    verbose: bool | None = Field(None, description="accepted, not used")
    insecure: bool | None = Field(None, description="accepted, not used")


class OllamaError(msgspec.Struct):
    """Ollama's form of an error."""

    error: str


class CalledFunction(msgspec.Struct):
    """The function of a call."""

    index: int
    name: str
    arguments: dict[str, Any]


class Call(msgspec.Struct):
    """A call that is complete."""

    id: str
    function: CalledFunction


class ChatMessage(msgspec.Struct, kw_only=True):
    """Message of the model; in a stream, what is new of it."""

    role: str = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[Call] | UnsetType = UNSET


class Timings(msgspec.Struct, kw_only=True):
    """Counts and durations of a whole answer; durations in nanoseconds."""

    model: str
    created_at: str
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class ChatLine(Timings, kw_only=True):
    """Answer of /api/chat, or a line of its stream."""

    message: ChatMessage


class GenerateLine(Timings, kw_only=True):
    """Answer of /api/generate, or a line of its stream."""

    response: str = ""
    thinking: str | UnsetType = UNSET


class Embedded(msgspec.Struct, kw_only=True):
    """Answer of /api/embed."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OneEmbedding(msgspec.Struct):
    """Answer of /api/embeddings."""

    embedding: list[float]


class Details(msgspec.Struct, kw_only=True):
    """Details of a model. Parameter count and quantization are not known to the API process, and empty."""

    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str = ""
    quantization_level: str = ""


class ModelEntry(msgspec.Struct, kw_only=True):
    """A model of /api/tags, or with its last two fields of /api/ps."""

    name: str
    model: str
    modified_at: str | UnsetType = UNSET
    size: int  # bytes of the weights on one device
    digest: str
    details: Details
    capabilities: list[str] | UnsetType = UNSET
    expires_at: str | UnsetType = UNSET
    context_length: int | UnsetType = UNSET


class ModelEntries(msgspec.Struct):
    """Answer of /api/tags and /api/ps."""

    models: list[ModelEntry]


class Shown(msgspec.Struct, kw_only=True):
    """Answer of /api/show."""

    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class Version(msgspec.Struct):
    """Answer of /api/version."""

    version: str


class Status(msgspec.Struct):
    """A line of /api/pull."""

    status: str
