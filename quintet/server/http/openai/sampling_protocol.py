"""The sampling fields of a request body, made from those of SamplingParams, and vLLM's other additions."""

import dataclasses
import typing
from typing import Annotated, Any

from pydantic import Field, SkipValidation, WithJsonSchema, create_model

from quintet.sampling_params import SamplingParams
from quintet.server.http.inputs.body import Body, UnsupportedField

# Of SamplingParams, those that an endpoint settles itself, and what is there offline alone.
_EXCLUDED = (
    "max_tokens", "logprobs", "output_kind", "detokenize", "structured_outputs", "flat_logprobs",
    "trace_decode_token_ids", "prompt_logprob_token_ids", "prompt_logprob_start",
    "routed_experts_prompt_start",
)  # fmt: skip
_HINTS: dict[str, Any] = {"stop": str | list[str] | None, "repetition_detection": dict[str, int]}

_PARAMS = tuple(each.name for each in dataclasses.fields(SamplingParams) if each.name not in _EXCLUDED)
SAMPLING_FIELDS = (*_PARAMS, "vllm_xargs", "kv_transfer_params")


def _fields() -> dict[str, Any]:
    """Types are for the documentation: SamplingParams checks the values, and says more about them."""
    hints = {**typing.get_type_hints(SamplingParams), **_HINTS}
    helps = {each.name: each.metadata["help"] for each in dataclasses.fields(SamplingParams)}
    return {
        name: (Annotated[hints[name] | None, SkipValidation], Field(default=None, description=helps[name]))
        for name in _PARAMS
    }


class StreamOptions(Body):
    """Options of a stream, such as token usage in its chunks."""

    include_usage: bool | None = Field(None, description="end with a chunk that has the usage and no choices")
    continuous_usage_stats: bool | None = Field(
        None, description="the usage so far in every chunk; needs include_usage"
    )
    include_obfuscation: bool | None = Field(None, description="accepted, not used")


_OBJECT = {"anyOf": [{"type": "object"}, {"type": "null"}]}
_Sampling: Any = create_model("_Sampling", __base__=Body, **_fields())


class SamplingBody(_Sampling):
    """Fields that completions and chat completions share."""

    model: str | None = Field(None, description="the model's name; none is the one that is served")
    stream: bool | None = Field(None, description="answer in server-sent events, while it is made")
    stream_options: StreamOptions | None = None
    priority: int | None = Field(
        None, ge=-(2**31), le=2**31 - 1, description="lower runs first, where the engine schedules by priority"
    )
    cache_salt: str | None = Field(
        None, min_length=1, max_length=1024, description="prompts share cached pages with those of the same salt alone"
    )
    add_special_tokens: bool | None = Field(
        None, description="let the tokenizer add its own to the prompt; completions do, chats have them in the template"
    )
    return_token_ids: bool | None = Field(None, description="token ids of prompt and output beside the text")
    return_tokens_as_token_ids: bool | None = Field(
        None, description='tokens of logprobs as "token_id:123" instead of text'
    )
    response_format: Annotated[Any, WithJsonSchema(_OBJECT)] = Field(
        None, description='what the answer must look like: {"type": "json_schema", "json_schema": {"schema": {...}}}, '
        '{"type": "json_object"} or {"type": "structural_tag", ...}',
    )  # fmt: skip
    structured_outputs: Annotated[Any, WithJsonSchema(_OBJECT)] = Field(
        None, description="the same, as vLLM says it: an object with one of json, regex, choice, grammar, json_object "
        "and structural_tag",
    )  # fmt: skip
    use_beam_search: bool | None = Field(
        None, description="search for the n likeliest outputs, n candidates at a time; not streamed"
    )
    length_penalty: float | None = Field(
        None, ge=-100, le=100, description="of beam search: scores are divided by length to this power (1)"
    )
    vllm_xargs: dict[str, Any] | None = Field(None, description="extra_args under vLLM's name; both are taken together")
    kv_transfer_params: dict[str, Any] | None = Field(
        None, description="of engines that give each other pages (--kv-transfer-config): do_remote_decode, or the "
        "kv_transfer_params of another engine's answer, unchanged",
    )  # fmt: skip
    request_id: str | None = Field(
        None, description="the request's name in the answer's id, headers and the log, unless X-Request-Id has one"
    )
    session_id: str | None = Field(None, description="accepted, not used")
    user: str | None = Field(None, description="accepted, not used")
    metadata: dict[str, Any] | None = Field(None, description="accepted, not used")
    service_tier: str | None = Field(None, description="accepted, not used")


_RENAMED = "it is called {} in structured_outputs, as in today's vLLM"
_TEXT = "models here take and give text alone"

UNSUPPORTED_FIELDS: dict[str, UnsupportedField] = {
    "store": UnsupportedField("answers are not kept; leave it out or set it to false", (False,)),
    "guided_json": UnsupportedField(_RENAMED.format("json")),
    "guided_regex": UnsupportedField(_RENAMED.format("regex")),
    "guided_choice": UnsupportedField(_RENAMED.format("choice")),
    "guided_grammar": UnsupportedField(_RENAMED.format("grammar")),
    "guided_decoding_backend": UnsupportedField("it is chosen when the server starts (--structured-outputs-config)"),
    "guided_whitespace_pattern": UnsupportedField(_RENAMED.format("whitespace_pattern")),
    "structural_tag": UnsupportedField(_RENAMED.format("structural_tag")),
    "logits_processors": UnsupportedField(
        "the server loads them when it starts (--logits-processors); extra_args reaches them"
    ),
    "detokenize": UnsupportedField("answers are text; return_token_ids gives the ids, too", (True,)),
    "early_stopping": UnsupportedField(
        "beam search ends when no other candidate can be better; leave it out", (False,)
    ),
    "ec_transfer_params": UnsupportedField(_TEXT, ({},)),
    "mm_processor_kwargs": UnsupportedField(_TEXT, ({},)),
    "media_io_kwargs": UnsupportedField(_TEXT, ({},)),
    "watermarking": UnsupportedField("texts are not marked", (False,)),
    "flat_logprobs": UnsupportedField("log-probabilities have one form; leave it out", (False,)),
    "prompt_logprob_token_ids": UnsupportedField(
        "send it to /inference/v1/generate; or use prompt_logprobs, for the likeliest"
    ),
    "prompt_logprob_start": UnsupportedField("it belongs to prompt_logprob_token_ids", (0,)),
    "routed_experts_prompt_start": UnsupportedField("experts of tokens are returned by /inference/v1/generate", (0,)),
    "trace_decode_token_ids": UnsupportedField(
        "it is there offline alone (SamplingParams); for the log-probabilities of given tokens use prompt_logprobs"
    ),
    "skip_reading_prefix_cache": UnsupportedField("give a cache_salt of its own, which finds nothing there", (False,)),
}
