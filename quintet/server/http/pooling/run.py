"""Runs the texts of one pooling request, and builds its response from the pooled outputs."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request as HttpRequest

from quintet.chat.prompts import Prompt
from quintet.outputs import RequestOutput
from quintet.pooling_params import PoolingParams
from quintet.server.http.app_state import AppState
from quintet.server.http.engine_call import PromptRequest
from quintet.server.http.errors import ApiError
from quintet.server.http.pooling.encoding_format import Numbers
from quintet.server.http.pooling.inputs import bounds_of
from quintet.server.http.pooling.protocol_responses import ApiVersion, InputTokens, Meta, PoolingUsage
from quintet.server.http.respond import WholeResponse
from quintet.server.http.sse import encode
from quintet.server.http.usage import CachedTokens, RequestUsage, usage_of


@dataclass(frozen=True)
class Binary:
    """A response of bytes instead of JSON."""

    content: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True)
class PoolingWork:
    """Checked prompts of one request, and their pooling params."""

    prompts: Sequence[Prompt]
    params: PoolingParams  # settled
    priority: int = 0

    def engine_requests(self, service: AppState) -> list[PromptRequest]:
        """Returns engine requests; a text longer than the model's context is split into chunks."""
        bounds = bounds_of(service)
        params = replace(self.params, truncate_prompt_tokens=None)  # already applied
        pieces = (piece for prompt in self.prompts for piece in _split_chunks(prompt, bounds.max_model_len))
        return [PromptRequest(piece, bounds.sampling_params, self.priority, "", params) for piece in pieces]

    def combine_chunks(self, service: AppState, found: Sequence[Numbers]) -> list[Numbers]:
        """Returns the output of each text: the mean of its chunks' outputs, weighted by their tokens, as in vLLM."""
        most, at, made = bounds_of(service).max_model_len, 0, []
        for prompt in self.prompts:
            lengths = [len(each.token_ids) for each in _split_chunks(prompt, most)]
            parts = found[at : at + len(lengths)]
            at += len(lengths)
            made.append(parts[0] if len(parts) == 1 else _mean(parts, lengths))
        return made


def _split_chunks(prompt: Prompt, most: int) -> list[Prompt]:
    """Splits a prompt into chunks of `most` tokens; the last may be shorter."""
    ids = prompt.token_ids
    if len(ids) <= most:
        return [prompt]
    return [replace(prompt, token_ids=ids[at : at + most], text=None) for at in range(0, len(ids), most)]


def _mean(parts: Sequence[Numbers], weights: Sequence[int]) -> Numbers:
    total = parts[0].astype("float64") * weights[0]
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        total += part.astype("float64") * weight
    return (total / sum(weights)).astype("float32")


async def respond(
    service: AppState,
    http: HttpRequest,
    work: PoolingWork,
    answer: Callable[[list[Numbers], RequestUsage], Awaitable[Any]],
) -> WholeResponse:
    """Waits for the outputs of all texts; the result of `answer` is encoded as JSON, unless it is Binary."""
    tally = usage_of(http)

    async def read(outputs: list[RequestOutput]) -> Any:
        for number, output in enumerate(outputs):
            tally.count_output(number, output)
        return await answer(work.combine_chunks(service, [_numbers(each) for each in outputs]), tally)

    return await run(service, http, work, read)


async def run(
    service: AppState, http: HttpRequest, work: PoolingWork, answer: Callable[[list[RequestOutput]], Awaitable[Any]]
) -> WholeResponse:
    """Like respond(), but passes RequestOutputs to `answer`, which may return bytes of JSON."""
    asks = work.engine_requests(service)
    usage_of(http).count_prompts(asks)
    call = service.call(http, asks)
    await call.__aenter__()
    try:
        made = await answer(await call.outputs())
        if isinstance(made, Binary):
            return WholeResponse(call, made.content, "application/octet-stream", made.headers)
        return WholeResponse(call, made if isinstance(made, bytes) else encode(made))
    except BaseException:
        call.close()
        raise


def _numbers(output: RequestOutput) -> Numbers:
    if output.pooled is None:
        raise ApiError(500, "the request failed: a text has no numbers", code="request_failed")
    return output.pooled


def usage(tally: RequestUsage) -> PoolingUsage:
    """Returns the usage of all texts."""
    tokens = tally.prompt_tokens
    return PoolingUsage(
        prompt_tokens=tokens, total_tokens=tokens, prompt_tokens_details=CachedTokens(tally.cached_tokens)
    )


def meta(tally: RequestUsage, version: str) -> Meta:
    """Returns the usage in Cohere's format."""
    tokens = InputTokens(tally.prompt_tokens)
    return Meta(ApiVersion(version), tokens, tokens)
