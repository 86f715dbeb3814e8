"""Request bodies and answers of llama.cpp's own routes."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BaseModel, Field, SkipValidation, WithJsonSchema, create_model

from quintet.server.http.inputs.body import Body, UnsupportedField
from quintet.server.http.inputs.llama_sampling import LlamaSampling, Whole, accepted
from quintet.server.http.openai.chat_protocol import Messages, TemplateFields, TokenLogprob

MAX_EXTRAS = 256  # files of input_extra
MAX_RESPONSE_FIELDS = 256
MAX_LORA_SCALES = 4096  # entries of lora
_NO_MEDIA = "this route takes text alone; images go to /v1/chat/completions"

_Accepted: Any = create_model(
    "_Accepted",
    __base__=LlamaSampling,
    **accepted(
        ("cache_prompt", "id_slot", "n_keep", "n_discard", "n_indent", "n_cache_reuse", "t_max_predict_ms",
         "t_max_prompt_ms", "samplers", "sse_ping_interval", "slot_id", "user")
    ),
)  # fmt: skip

_TOKENS = {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "integer"}]}}
_PROMPT = {"anyOf": [{"type": "string"}, _TOKENS, {"type": "array", "items": {"anyOf": [{"type": "string"}, _TOKENS]}}]}
_BIAS = {"anyOf": [{"type": "array"}, {"type": "object"}, {"type": "null"}]}


class LoRAScale(BaseModel):
    """An adapter of /lora-adapters, and how much it counts."""

    id: int
    scale: float = 0.0


class LoRAAdapterFacts(msgspec.Struct):
    """An adapter, by its number in requests to /completion."""

    id: int
    path: str
    scale: float  # of requests that do not choose
    name: str  # of requests, as their model


class CompletionBody(_Accepted):
    """Request of /completion."""

    model: str | None = Field(None, description="the model's name; none is the one that is served")
    prompt: Annotated[Any, WithJsonSchema(_PROMPT)] = Field(
        None, description="text, token ids, a list of both (one prompt), or a list of prompts"
    )
    n_predict: Whole = Field(None, description="most tokens of output; -1: as far as the context goes; 0: none")
    max_tokens: Whole = Field(None, description="the same; n_predict goes before it")
    n_cmpl: Whole = Field(None, description="completions of each prompt")
    stream: bool | None = Field(None, description="answer in server-sent events, while it is made")
    ignore_eos: bool | None = Field(None, description="go on after the end-of-text token")
    logit_bias: Annotated[Any, WithJsonSchema(_BIAS)] = Field(
        None, description="[[token id or text, bias], ...], or an object; false is -100"
    )
    n_probs: Annotated[int | None, SkipValidation] = Field(
        None, description="likeliest tokens to report at each position, as log-probabilities"
    )
    json_schema: dict[str, Any] | None = Field(None, description="JSON schema that the output follows")
    grammar: str | None = Field(None, description="grammar that the output follows: GBNF, from its rule `root`")
    lora: list[LoRAScale] | None = Field(
        None, max_length=MAX_LORA_SCALES, fail_fast=True, description="the adapter of /lora-adapters that answers, "
        "with the scale 1; others have 0",
    )  # fmt: skip
    return_tokens: bool | None = Field(None, description="give the token ids of the output")
    timings_per_token: bool | None = Field(None, description="timings in each event of a stream")
    response_fields: list[str] | None = Field(
        None, max_length=MAX_RESPONSE_FIELDS, fail_fast=True, description="fields of the answer, such as "
        "generation_settings/n_predict; all if not given",
    )  # fmt: skip

    unsupported_fields: ClassVar[Mapping[str, UnsupportedField]] = {
        **LlamaSampling.unsupported_fields,
        "post_sampling_probs": UnsupportedField("log-probabilities are those of the model", (False,)),
        "return_progress": UnsupportedField("the progress of prompts is not reported", (False,)),
        "image_data": UnsupportedField(_NO_MEDIA, ([],)),
        "multimodal_data": UnsupportedField(_NO_MEDIA, ([],)),
        "input_prefix": UnsupportedField("/infill has it", ("",)),
        "input_suffix": UnsupportedField("/infill has it", ("",)),
    }


class ExtraFile(msgspec.Struct):
    """A file of input_extra."""

    text: str
    filename: str = ""


_EXTRA = {"type": "object", "properties": {"filename": {"type": "string"}, "text": {"type": "string"}},
          "required": ["text"]}  # fmt: skip


class InfillBody(CompletionBody):
    """Request of /infill: fields of /completion, and the text around the gap."""

    prompt: str | None = Field(None, description="beginning of the output, after the FIM tokens")
    input_prefix: str | None = Field(None, description="text before the gap")
    input_suffix: str | None = Field(None, description="text after the gap")
    input_extra: Annotated[list[dict[str, Any]] | None, WithJsonSchema({"type": "array", "items": _EXTRA})] = Field(
        None, max_length=MAX_EXTRAS, description="other files of the project: objects with filename and text"
    )

    unsupported_fields: ClassVar[Mapping[str, UnsupportedField]] = {
        name: field for name, field in CompletionBody.unsupported_fields.items() if not name.startswith("input_")
    }


_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array"}]}


class EmbeddingBody(Body):
    """Request of /embedding."""

    model: str | None = Field(None, description="the model's name; none is the one that is served")
    content: Annotated[Any, WithJsonSchema(_TEXTS)] = Field(None, description="text, token ids, or a list of either")
    input: Annotated[Any, WithJsonSchema(_TEXTS)] = Field(None, description="the same under OpenAI's name")
    embd_normalize: int | None = Field(None, description="2: embeddings of length 1 (default); -1: as they are")


class TemplateBody(TemplateFields):
    """Request of /apply-template."""

    model: str | None = Field(None, description="the model's name; none is the one that is served")
    messages: Messages


class Rendered(msgspec.Struct):
    """Answer of /apply-template."""

    prompt: str


class Timings(msgspec.Struct, kw_only=True):
    """Times that the engine measured, in milliseconds."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class CompletionAnswer(msgspec.Struct, kw_only=True):
    """Answer of /completion, or an event of its stream; fields that are not set are left out."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int = -1
    stop: bool
    model: str | UnsetType = UNSET
    tokens_predicted: int
    tokens_evaluated: int
    generation_settings: dict[str, Any] | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    has_new_line: bool | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: str | UnsetType = UNSET  # eos, limit or word
    stopping_word: str | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    completion_probabilities: list[TokenLogprob] | UnsetType = UNSET


class EmbeddingAnswer(msgspec.Struct):
    """An entry of /embedding's list."""

    index: int
    embedding: list[list[float]]


class Props(msgspec.Struct, kw_only=True):
    """Answer of /props."""

    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    bos_token: str
    eos_token: str
    modalities: dict[str, bool]
    build_info: str
    is_sleeping: bool


class Slot(msgspec.Struct, kw_only=True):
    """A place for a request."""

    id: int
    n_ctx: int
    speculative: bool = False
    is_processing: bool
