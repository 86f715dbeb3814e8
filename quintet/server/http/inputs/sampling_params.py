"""Merges a request's sampling fields with the model's defaults, and checks them before other work."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from quintet.common.unknown_fields import drop_unknown
from quintet.engine.kv_transfer_params import NAME as HANDOFF
from quintet.engine.kv_transfer_params import check_transfer_params
from quintet.sampling_params import ParameterError, RepetitionDetectionParams, RequestOutputKind, SamplingParams
from quintet.server.http.app_state import AppState
from quintet.server.http.errors import ApiError
from quintet.server.http.openai.sampling_protocol import SAMPLING_FIELDS, SamplingBody

_REPETITION_FIELDS = tuple(each.name for each in dataclasses.fields(RepetitionDetectionParams))
_ROUTES = {"embed": "/v1/embeddings", "classify": "/classify", "score": "/score and /rerank"}  # by task
MAX_EXTRA_BYTES = 2**16  # of encoded extra_args: each waiting request in the engine holds its own


def sampling_params(
    service: AppState, body: SamplingBody, own: Mapping[str, Any], names: Mapping[str, str] | None = None
) -> SamplingParams:
    """Builds params. `own`: fields that the endpoint sets; `names`: SamplingParams field -> name in the request.

    Raises ApiError 400 for the request's field.
    """
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    given = {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    return checked_params(service, {**given, **own, "output_kind": kind}, names or {})


def checked_params(
    service: AppState, fields: Mapping[str, Any], names: Mapping[str, str], defaults: SamplingParams | None = None
) -> SamplingParams:
    """Returns defaults, the model's own if none are given, updated with these fields of SamplingParams."""
    served = service.backend.model_info
    if served.pooling is not None:
        there = ", ".join(_ROUTES[task] for task in served.pooling.tasks if task in _ROUTES) or "/pooling"
        raise ApiError(
            400, f"this server's model gives numbers ({', '.join(served.pooling.tasks)}) and generates no text; ask "
            f"{there}, or start the server with a model that generates", code="unsupported",
        )  # fmt: skip
    if service.models.speech is not None:
        raise ApiError(
            400, "this server's model transcribes audio and answers no prompts; send audio to /v1/audio/transcriptions "
            "or /v1/audio/translations, or start the server with a model that generates text", code="unsupported",
        )  # fmt: skip
    params = service.backend.default_params() if defaults is None else defaults
    fields, names = _merge_extra_args(fields, names)
    params.max_tokens = served.defaults.get("max_tokens")
    try:
        for name, value in fields.items():
            setattr(params, name, value)
        params.check(served.vocab_size, served.max_model_len, served.max_logprobs)
        _check_extra(params.extra_args)
        check_transfer_params(params, served.transfers)
        if params.n > service.settings.max_n:
            raise ParameterError("n", f"must be at most {service.settings.max_n} on this server, not {params.n}")
    except ParameterError as error:
        raise _error_for_field(error, names) from None
    return params


def _merge_extra_args(fields: Mapping[str, Any], names: Mapping[str, str]) -> tuple[dict[str, Any], Mapping[str, str]]:
    """Merges vllm_xargs, KV transfer params and extra_args; removes unknown fields of repetition_detection."""
    fields = dict(fields)
    pages = fields.pop(HANDOFF, None)
    theirs, ours = fields.pop("vllm_xargs", None), fields.get("extra_args")
    if isinstance(circles := fields.get("repetition_detection"), dict):
        drop_unknown(circles, _REPETITION_FIELDS, "repetition_detection")
    for name, given in (("extra_args", ours), ("vllm_xargs", theirs)):
        if isinstance(given, dict) and HANDOFF in given:
            raise invalid_field(name, f"has {HANDOFF}, which is a field of the request; give it there")
    if not isinstance(ours, dict | None):  # SamplingParams.check refuses it
        return fields, names
    if pages:
        theirs = {**(theirs or {}), HANDOFF: pages}
    if theirs is None:
        return fields, names
    both = sorted(theirs.keys() & (ours or {}))
    if both:
        raise invalid_field("vllm_xargs", f"has {both[0][:80]!r}, and so has extra_args; leave one of them out")
    fields["extra_args"] = {**(ours or {}), **theirs}
    return fields, names if ours else {**names, "extra_args": "vllm_xargs"}


def _check_extra(given: dict[str, Any] | None) -> None:
    """Checks that extra_args can be encoded, and are at most MAX_EXTRA_BYTES."""
    try:
        size = len(msgspec.msgpack.encode(given))
    except OverflowError:
        raise ParameterError(
            "extra_args", "must not hold whole numbers of more than 64 bits; give such a number as text"
        ) from None
    if size > MAX_EXTRA_BYTES:
        raise ParameterError("extra_args", f"may take {MAX_EXTRA_BYTES} bytes, not {size}; send less")


def _error_for_field(error: ParameterError, names: Mapping[str, str]) -> ApiError:
    name = names.get(error.parameter, error.parameter)
    return ApiError(400, name + str(error).removeprefix(error.parameter), param=name, code="invalid_value")


def invalid_field(field: str, why: str) -> ApiError:
    """Returns the error for a field with an unsupported value; the caller raises it."""
    return ApiError(400, f"{field} {why}", param=field, code="invalid_value")


def check_stream(body: SamplingBody) -> None:
    """Refuses stream options without a stream, and fields that cannot be streamed."""
    options = body.stream_options
    if options is not None and not body.stream:
        raise invalid_field("stream_options", "belongs to a stream; set stream to true, or leave it out")
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise invalid_field("stream_options", "continuous_usage_stats needs include_usage")
    if body.stream and getattr(body, "prompt_logprobs", None) is not None:
        raise invalid_field("prompt_logprobs", "is not streamed; set stream to false, or use echo with logprobs")
