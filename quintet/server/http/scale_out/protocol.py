"""The render and derender routes: their requests and answers, in vLLM's shapes."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field

from quintet.server.http.inputs.body import Body
from quintet.server.http.openai.chat_protocol import ChatChunk, ChatRequest
from quintet.server.http.openai.completions_protocol import Completion, CompletionRequest


class RenderedRequest(msgspec.Struct, kw_only=True):
    """A request for /inference/v1/generate."""

    request_id: str
    token_ids: list[int]
    sampling_params: dict[str, Any]  # that differ from the route's own defaults
    model: str
    stream: bool = False
    stream_options: dict[str, bool] | UnsetType = UNSET
    return_token_ids: bool | UnsetType = UNSET
    cache_salt: str | UnsetType = UNSET
    priority: int = 0
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class TokensChoice(Body):
    """One output of /inference/v1/generate; in a chunk, what is new of it."""

    index: int = Field(0, ge=0)
    token_ids: list[int] | None = Field(None, fail_fast=True)
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class TokensAnswer(Body):
    """An answer of /inference/v1/generate, or a chunk of one."""

    request_id: str
    choices: list[TokensChoice] = Field(fail_fast=True)
    output_mode: Literal["tokens"] = Field("tokens", description="others have text already")
    prompt_token_ids: list[int] | None = Field(None, fail_fast=True)
    prompt_logprobs: list[dict[str, Any] | None] | None = Field(None, fail_fast=True)
    usage: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    created: int | None = Field(None, description="accepted, not used")
    model: str | None = Field(None, description="accepted, not used")
    system_fingerprint: str | None = Field(None, description="accepted, not used")
    prompt_token_id_logprobs: str | None = Field(None, description="accepted, not used")


class StreamState(Body):
    """State of a stream, which the client sends back with the next chunk: the tokens of one output so far."""

    output_token_ids: list[int] = Field([], fail_fast=True)
    output_chunk_lens: list[int] = Field([], fail_fast=True, description="tokens of each chunk")
    role_sent: bool = Field(False, description="the first delta was sent")


class _Derender(Body):
    """Fields of both routes."""

    model: str | None = Field(None, description="the model's name; none is the one that is served")
    stream: bool | None = Field(None, description="generate_chunk is given, one of a stream, in place of an answer")
    generate_chunk: TokensAnswer | None = Field(None, description="a chunk with one output at most")
    stream_state: StreamState | None = Field(None, description="of the chunk before; none for the first")


class DerenderChat(_Derender):
    """Tokens of an answer to a conversation."""

    generate_response: TokensAnswer | None = Field(None, description="the whole answer")
    chat_request: ChatRequest | None = Field(None, description="the conversation, as it was rendered")
    prompt_token_ids: list[int] | None = Field(None, fail_fast=True, description="of the rendered request")
    prompt_tokens: int | None = Field(None, ge=0, description="for the usage; else those of the conversation")


class DerenderCompletion(_Derender):
    """Tokens of completions."""

    generate_responses: list[TokensAnswer] | None = Field(None, fail_fast=True, description="one for each prompt")
    completion_request: CompletionRequest | None = Field(None, description="the request, as it was rendered")
    prompt_token_ids: list[Any] | None = Field(
        None, fail_fast=True, description="of each rendered request; with generate_chunk, of its only one"
    )
    prompt_tokens: list[int] | int | None = Field(None, description="for the usage, of each prompt")


class DerenderedChat(msgspec.Struct):
    """A chunk of a stream, and the state for the next."""

    chunk: ChatChunk
    stream_state: dict[str, Any]


class DerenderedCompletion(msgspec.Struct):
    """A chunk of a stream, and the state for the next."""

    chunk: Completion
    stream_state: dict[str, Any]
