"""A request's sampling fields over the model's own defaults, checked before anything costs time."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from quintet.engine.elsewhere.handoff import NAME as HANDOFF
from quintet.engine.elsewhere.handoff import check_handoff
from quintet.engine.strays import sift
from quintet.sampling_params import ParameterError, RepetitionDetectionParams, RequestOutputKind, SamplingParams
from quintet.server.http.errors import ApiError
from quintet.server.http.protocol.sampling import SAMPLING_FIELDS, SamplingBody
from quintet.server.http.service import Service

_CIRCLES = tuple(each.name for each in dataclasses.fields(RepetitionDetectionParams))
_ROUTES = {"embed": "/v1/embeddings", "classify": "/classify", "score": "/score and /rerank"}  # by task
MAX_EXTRA_BYTES = 2**16  # of extra_args as the engine gets them: every request that waits there holds its own


def sampling_params(
    service: Service, body: SamplingBody, own: Mapping[str, Any], names: Mapping[str, str] | None = None
) -> SamplingParams:
    """`own` are fields of SamplingParams that the endpoint settles; `names` say what they are called in the request.

    Raises ApiError 400 that blames the request's field.
    """
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    given = {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    return checked_params(service, {**given, **own, "output_kind": kind}, names or {})


def checked_params(service: Service, fields: Mapping[str, Any], names: Mapping[str, str]) -> SamplingParams:
    """The model's defaults with these fields of SamplingParams."""
    served = service.backend.served
    if served.pooling is not None:
        there = ", ".join(_ROUTES[task] for task in served.pooling.tasks if task in _ROUTES) or "/pooling"
        raise ApiError(
            400, f"this server's model gives numbers ({', '.join(served.pooling.tasks)}) and generates no text; ask "
            f"{there}, or start the server with a model that generates", code="unsupported",
        )  # fmt: skip
    params = service.backend.default_params()
    fields, names = _together(fields, names)
    params.max_tokens = served.defaults.get("max_tokens")
    try:
        for name, value in fields.items():
            setattr(params, name, value)
        params.check(served.vocab_size, served.max_model_len, served.max_logprobs)
        _check_extra(params.extra_args)
        check_handoff(params, served.transfers)
        if params.n > service.settings.max_n:
            raise ParameterError("n", f"must be at most {service.settings.max_n} on this server, not {params.n}")
    except ParameterError as error:
        raise _blame(error, names) from None
    return params


def _together(fields: Mapping[str, Any], names: Mapping[str, str]) -> tuple[dict[str, Any], Mapping[str, str]]:
    """Both kinds of arguments for logits processors as one, and objects without what is not known."""
    fields = dict(fields)
    pages = fields.pop(HANDOFF, None)
    theirs, ours = fields.pop("vllm_xargs", None), fields.get("extra_args")
    if isinstance(circles := fields.get("repetition_detection"), dict):
        sift(circles, _CIRCLES, "repetition_detection")
    if not isinstance(ours, dict | None):  # it is refused by its own check
        return fields, names
    if pages:
        theirs = {**(theirs or {}), HANDOFF: pages}
    if theirs is None:
        return fields, names
    both = sorted(theirs.keys() & (ours or {}))
    if both:
        raise refuse("vllm_xargs", f"has {both[0][:80]!r}, and so has extra_args; leave one of them out")
    fields["extra_args"] = {**(ours or {}), **theirs}
    return fields, names if ours else {**names, "extra_args": "vllm_xargs"}


def _check_extra(given: dict[str, Any] | None) -> None:
    """Whether they can go to the engine, and are not too large for it."""
    try:
        size = len(msgspec.msgpack.encode(given))
    except OverflowError:
        raise ParameterError(
            "extra_args", "must not hold whole numbers of more than 64 bits; give such a number as text"
        ) from None
    if size > MAX_EXTRA_BYTES:
        raise ParameterError("extra_args", f"may take {MAX_EXTRA_BYTES} bytes, not {size}; send less")


def _blame(error: ParameterError, names: Mapping[str, str]) -> ApiError:
    name = names.get(error.parameter, error.parameter)
    return ApiError(400, name + str(error).removeprefix(error.parameter), param=name, code="invalid_value")


def refuse(field: str, why: str) -> ApiError:
    """To be raised for a field whose value cannot be served."""
    return ApiError(400, f"{field} {why}", param=field, code="invalid_value")


def check_stream(body: SamplingBody) -> None:
    """What only streams may ask for, and what they may not."""
    options = body.stream_options
    if options is not None and not body.stream:
        raise refuse("stream_options", "belongs to a stream; set stream to true, or leave it out")
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise refuse("stream_options", "continuous_usage_stats needs include_usage")
    if body.stream and getattr(body, "prompt_logprobs", None) is not None:
        raise refuse("prompt_logprobs", "is not streamed; set stream to false, or use echo with logprobs")
