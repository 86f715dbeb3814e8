"""Name and token counts of one HTTP request, for the access log, metrics and the usage in answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import HTTPConnection
from starlette.requests import Request as HttpRequest

from quintet.outputs import RequestOutput
from quintet.server.config import ServerConfig
from quintet.server.http.engine_call import PromptRequest
from quintet.server.http.errors import ApiError
from quintet.server.http.ids import HEADER, is_valid_id, new_id


class CachedTokens(msgspec.Struct):
    """Tokens of prompts that were found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """Reasoning tokens of answers, without the markers around them."""

    reasoning_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of one answer, all of its prompts and choices together."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class RequestTimes(msgspec.Struct, kw_only=True):
    """Times of a request; vLLM's names. None where they are not known."""

    time_to_first_token_ms: float | None = None  # since its first step was planned
    generation_time_ms: float | None = None  # from the first token to the last
    queue_time_ms: float | None = None
    mean_itl_ms: float | None = None  # between two tokens
    tokens_per_second: float | None = None  # since its first step was planned


@dataclass
class RequestUsage:
    """Name and token counts of one HTTP request, in its scope's state."""

    request_id: str = field(default_factory=new_id)
    has_name: bool = False  # by the client
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached: dict[int, int] = field(default_factory=dict)  # number of the ask -> tokens

    @classmethod
    def for_request(cls, http: HttpRequest) -> "RequestUsage":
        """Named by the header, if that is sane."""
        given = http.headers.get(HEADER)
        return cls() if given is None or not is_valid_id(given) else cls(given, has_name=True)

    @property
    def cached_tokens(self) -> int:
        return sum(self.cached.values())

    def count_prompts(self, asks: list[PromptRequest]) -> None:
        """Counts the prompts."""
        self.prompt_tokens += sum(ask.prompt.num_tokens for ask in asks)

    def count_output(self, number: int, output: RequestOutput) -> None:
        """Counts an output of ask `number`: a delta, or the only one."""
        if output.num_cached_tokens:
            self.cached[number] = output.num_cached_tokens
        for each in output.outputs:
            self.completion_tokens += len(each.token_ids)

    def usage(self, thought: int | None = None) -> Usage:
        """Returns the usage so far. `thought`: reasoning tokens, where they are counted."""
        return Usage(
            completion_tokens_details=UNSET if thought is None else CompletionTokensDetails(thought),
            prompt_tokens=self.prompt_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
            completion_tokens=self.completion_tokens,
            prompt_tokens_details=CachedTokens(self.cached_tokens),
        )


def wants_usage(settings: ServerConfig, options: Any) -> tuple[bool, bool]:
    """Returns whether a stream ends with its usage, and whether each chunk has it. `options`: its stream_options."""
    wanted = settings.enable_force_include_usage or (options is not None and bool(options.include_usage))
    return wanted, wanted and options is not None and bool(options.continuous_usage_stats)


def request_times(settings: ServerConfig, outputs: Sequence[RequestOutput], n: int) -> "RequestTimes | UnsetType":
    """Returns the times of an answer with one output, if the server gives them."""
    if not settings.enable_per_request_metrics:
        return UNSET
    if len(outputs) != 1 or n != 1:
        return RequestTimes()
    metrics = outputs[0].metrics
    tokens, decode, inference = metrics.num_generation_tokens, metrics.decode_time, metrics.inference_time
    return RequestTimes(
        time_to_first_token_ms=_ms(metrics.prefill_time),
        generation_time_ms=_ms(decode),
        queue_time_ms=_ms(metrics.time_in_queue),
        mean_itl_ms=None if decode is None or tokens < 2 else decode / (tokens - 1) * 1000,
        tokens_per_second=tokens / inference if inference else None,
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def usage_of(http: HTTPConnection) -> RequestUsage:
    """The request's own."""
    tally: RequestUsage = http.scope.setdefault("state", {}).setdefault("tally", RequestUsage())
    return tally


def set_request_name(http: HttpRequest, given: str | None) -> None:
    """The name that a body gives its request; the header's goes before it, as in vLLM. Raises ApiError 400."""
    if given is None:
        return
    if not is_valid_id(given):
        raise ApiError(
            400, "request_id must be 1 to 128 letters, digits and ._:- that begin with a letter or a digit",
            param="request_id", code="invalid_value",
        )  # fmt: skip
    tally = usage_of(http)
    if not tally.has_name:
        tally.request_id, tally.has_name = given, True
