"""POST /inference/v1/generate: its request, its answer and its chunks, in vLLM's shapes."""

from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field

from quintet.outputs import Logprob
from quintet.server.http.inputs.body import Body, UnsupportedField
from quintet.server.http.openai.sampling_protocol import StreamOptions
from quintet.server.http.usage import RequestTimes, Usage

_MEDIA = "prompts of this route are token ids alone; send media to /v1/chat/completions"


class GenerateRequest(Body):
    """A prompt of token ids."""

    token_ids: list[int] = Field(fail_fast=True, description="of the prompt")
    sampling_params: dict[str, Any] = Field(
        description="fields of SamplingParams, without the model's own defaults; max_tokens is as far as the model "
        "goes if it is not given"
    )
    model: str | None = Field(None, description="the model's name; none is the one that is served")
    stream: bool | None = Field(None, description="answer in server-sent events, while it is made")
    stream_options: StreamOptions | None = None
    output_mode: Literal["tokens", "text"] = Field("tokens", description="text: with text, and logprobs with texts")
    return_token_ids: bool | None = Field(None, description="token ids of the prompt, too")
    priority: int | None = Field(
        None, ge=-(2**31), le=2**31 - 1, description="lower runs first, where the engine schedules by priority"
    )
    cache_salt: str | None = Field(
        None, min_length=1, max_length=1024, description="prompts share cached pages with those of the same salt alone"
    )
    kv_transfer_params: dict[str, Any] | None = Field(
        None, description="of engines that give each other pages, as in completions"
    )
    request_id: str | None = Field(None, description="the request's name, unless X-Request-Id has one")
    token_offsets: list[list[int]] | None = Field(None, description="accepted, not used")

    unsupported_fields: ClassVar[dict[str, UnsupportedField]] = {
        "features": UnsupportedField(_MEDIA),
        "content_parts": UnsupportedField(_MEDIA, ([],)),
        "ec_transfer_params": UnsupportedField(_MEDIA, ({},)),
        "reasoning_ended": UnsupportedField("structured outputs begin with the first token; leave it out", (True,)),
        "reasoning_parser_kwargs": UnsupportedField("structured outputs begin with the first token; leave it out"),
    }


class GenerateLogprob(msgspec.Struct):
    """A token at one position; `token` is "token_id:ID", or its text if output_mode is text."""

    token_id: int
    logprob: float
    rank: int | None
    token: str
    bytes: list[int] | UnsetType = UNSET  # of its text


class GenerateContent(GenerateLogprob):
    """The token of one position, and the likeliest there, the token first."""

    top_logprobs: list[GenerateLogprob] = []


class GenerateLogprobs(msgspec.Struct):
    """An entry for each token."""

    content: list[GenerateContent]


class GenerateChoice(msgspec.Struct, kw_only=True):
    """One output; in a chunk, what is new of it."""

    index: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int]
    text: str | UnsetType = UNSET
    logprobs: GenerateLogprobs | None = None
    routed_experts: str | None = None  # base64 of a .npy file: [tokens, layers, experts of a token]


class Generated(msgspec.Struct, kw_only=True):
    """The answer, and in a stream each chunk."""

    request_id: str
    model: str
    created: int
    output_mode: str
    choices: list[GenerateChoice]
    system_fingerprint: str | None
    usage: Usage | None = None
    metrics: RequestTimes | UnsetType = UNSET
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    prompt_token_id_logprobs: str | None = None  # base64 of a .npy file: float32 [rows, candidates]
    prompt_token_ids: list[int] | None = None
    kv_transfer_params: dict[str, Any] | None = None
