"""POST /v1/completions: its request, its answer and its chunks."""

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field, SkipValidation

from quintet.outputs import Logprob
from quintet.server.http.inputs.body import UnsupportedField
from quintet.server.http.openai.sampling_protocol import UNSUPPORTED_FIELDS, SamplingBody
from quintet.server.http.usage import RequestTimes, Usage

TokenId = Annotated[int, Field(ge=0)]
DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionRequest(SamplingBody):
    """OpenAI's, with vLLM's additions."""

    prompt: Annotated[str | list[str] | list[TokenId] | list[list[TokenId]] | None, SkipValidation] = Field(
        None, description="text, token ids, or a list of either"
    )
    prompt_embeds: Annotated[str | list[str] | None, SkipValidation] = Field(
        None,
        description="embeddings [tokens, hidden], or a list of such: each a prompt, before those of `prompt`; base64 "
        "of safetensors with one tensor, or of what torch.save writes of one; needs --enable-prompt-embeds",
    )
    max_tokens: int | None = Field(None, description=f"most tokens of output; {DEFAULT_MAX_TOKENS} if not given; "
                                                     "0 with echo gives the prompt alone")  # fmt: skip
    logprobs: int | None = Field(None, description="likeliest tokens to report at each position")
    echo: bool | None = Field(None, description="give the prompt before the output")
    best_of: int | None = Field(None, description="accepted where it equals n")

    suffix: str | None = Field(
        None, description="what follows the output: the model fills in, if its tokenizer has tokens for that"
    )

    unsupported_fields: ClassVar[dict[str, UnsupportedField]] = UNSUPPORTED_FIELDS


class CompletionLogprobs(msgspec.Struct):
    """Four lists, one entry for each token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One output; in a chunk, what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[int, Logprob] | None] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """The answer, and in a stream each chunk."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str | None
    usage: Usage | None | UnsetType = UNSET
    metrics: RequestTimes | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
