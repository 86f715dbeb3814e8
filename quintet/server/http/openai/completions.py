"""POST /v1/completions: text completion."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet.chat.prepare import compiled_grammar
from quintet.outputs import CompletionOutput, LogprobsAt, RequestOutput
from quintet.sampling_params import SamplingParams
from quintet.server.http.app_state import AppState
from quintet.server.http.engine_call import EngineCall, PromptRequest
from quintet.server.http.inputs.body import read_body
from quintet.server.http.inputs.prompts import completion_prompts
from quintet.server.http.inputs.response_format import format_of_body
from quintet.server.http.inputs.sampling_params import check_stream, invalid_field, sampling_params
from quintet.server.http.openai.beam_search import beam_params, beam_response
from quintet.server.http.openai.completions_protocol import (
    DEFAULT_MAX_TOKENS,
    Completion,
    CompletionChoice,
    CompletionRequest,
)
from quintet.server.http.openai.logprobs import LogprobsWriter, Offsets, ScoredTokens
from quintet.server.http.openapi import documents_route
from quintet.server.http.respond import AnswerHead, app_state_of, stream_response, whole_response
from quintet.server.http.sse import DONE, event
from quintet.server.http.usage import RequestTimes, RequestUsage, request_times, set_request_name, usage_of, wants_usage

router = APIRouter()


@router.post("/v1/completions")
@documents_route(body=CompletionRequest, answer=Completion, stream=Completion)
async def create_completion(http: HttpRequest) -> Response:
    """Completes one or more prompts."""
    service = app_state_of(http)
    body = await read_body(http, CompletionRequest)
    set_request_name(http, body.request_id)
    await service.choose_model(http, body.model)
    service.check_ready()
    params = completion_params(service, body)
    beams = beam_params(service, body, params)
    asks = await completion_requests(service, body, params)
    tally = usage_of(http)
    tally.count_prompts(asks)
    answer = CompletionAnswer(service, body, asks, tally)
    if beams is not None:
        return await beam_response(service, http, asks, beams, answer.completion)
    if body.stream:
        return await stream_response(service, http, asks, answer.events)
    return await whole_response(service, http, asks, answer.completion)


async def completion_requests(
    service: AppState, body: CompletionRequest, params: SamplingParams
) -> list[PromptRequest]:
    """Returns a request for each prompt, with its structured output."""
    params.structured_outputs, field = format_of_body(body)
    grammar = await compiled_grammar(service.backend.grammar_checks, params.structured_outputs, field)
    prompts = await completion_prompts(service, body, params)
    return [PromptRequest(prompt, params, body.priority or 0, grammar) for prompt in prompts]


def completion_params(service: AppState, body: CompletionRequest) -> SamplingParams:
    """Returns the checked sampling params of a request."""
    check_stream(body)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise invalid_field("best_of", f"must equal n ({body.n or 1}): every completion is given, none is left out")
    default = service.backend.model_info.defaults.get("max_tokens", DEFAULT_MAX_TOKENS)
    most = default if body.max_tokens is None else body.max_tokens
    own: dict[str, Any] = {"max_tokens": 1 if body.echo and most == 0 else most, "logprobs": body.logprobs}
    if body.logprob_token_ids is not None and body.logprobs is None:
        raise invalid_field("logprob_token_ids", "needs logprobs; set it to 0 or more")
    if body.logprob_token_ids is not None and body.echo and most == 0:
        raise invalid_field(
            "logprob_token_ids", "is about the output, and echo with max_tokens 0 gives none; leave it out"
        )
    if body.echo and body.logprobs is not None:
        if body.prompt_logprobs is not None and body.prompt_logprobs != body.logprobs:
            raise invalid_field("prompt_logprobs", "must equal logprobs where echo is set; leave it out")
        if body.stream and (body.n or 1) != 1:
            raise invalid_field("echo", "with logprobs is streamed for n=1 alone; set stream to false")
        own["prompt_logprobs"] = body.logprobs
    return sampling_params(service, body, own)


@dataclass
class ChoiceState:
    """One choice of a stream."""

    index: int
    offsets: Offsets = field(default_factory=Offsets)
    started: bool = False


class CompletionAnswer:
    """Builds the answer to one request, whole or in chunks."""

    def __init__(
        self,
        service: AppState,
        body: CompletionRequest,
        asks: Sequence[PromptRequest],
        tally: RequestUsage,
        answer_id: str = "",
    ) -> None:
        params = asks[0].params
        self._asks, self._body, self._n, self._tally = asks, body, params.n, tally
        self._settings, given = service.settings, body.return_tokens_as_token_ids
        self.head = AnswerHead.for_answer(service, answer_id or f"cmpl-{tally.request_id}", body.model).fields()
        self._tokenizer, self._skip = service.backend.tokenizer, params.skip_special_tokens
        by_id = service.settings.return_tokens_as_token_ids if given is None else given
        self._writer = LogprobsWriter(self._tokenizer, service.cooperative, params, by_id)
        self._silent = bool(body.echo) and body.max_tokens == 0  # the prompt alone is wanted

    async def completion(self, outputs: Sequence[RequestOutput]) -> Completion:
        choices = []
        for number, output in enumerate(outputs):
            self._take(number, output)
            wanted = self._body.prompt_logprobs is not None
            scores = await self._writer.prompt_logprobs(output.prompt_logprobs or []) if wanted else UNSET
            for each in output.outputs:
                line = ChoiceState(number * self._n + each.index)
                choices.append(await self.choice(line, number, output, each))
                choices[-1].prompt_logprobs = scores
        pages = outputs[0].kv_transfer_params if len(outputs) == 1 else None
        answer = Completion(choices=choices, usage=self._tally.usage(), **self.head)
        answer.kv_transfer_params, answer.metrics = pages or UNSET, self._times(outputs)
        return answer

    def _times(self, outputs: Sequence[RequestOutput]) -> RequestTimes | UnsetType:
        return request_times(self._settings, outputs, self._n * len(self._asks))

    async def events(self, call: EngineCall) -> AsyncIterator[bytes]:
        lines = [ChoiceState(index) for index in range(len(self._asks) * self._n)]
        usage, steady = wants_usage(self._settings, self._body.stream_options)
        chunk = Completion(choices=[], usage=None if usage else UNSET, **self.head)
        last: list[RequestOutput] = []
        async for number, output in call:
            last = [output]
            self._take(number, output)
            if steady:
                chunk.usage = self._tally.usage()
            for each in output.outputs:
                choice = await self.choice(lines[number * self._n + each.index], number, output, each)
                if choice.finish_reason and len(self._asks) == 1:
                    chunk.kv_transfer_params = output.kv_transfer_params or UNSET
                if choice.text or choice.finish_reason or each.token_ids:  # held back as its text may be
                    chunk.choices = [choice]
                    yield event(chunk)
        if usage:
            yield event(Completion(choices=[], usage=self._tally.usage(), metrics=self._times(last), **self.head))
        yield DONE

    def _take(self, number: int, output: RequestOutput) -> None:
        if self._silent:
            for each in output.outputs:
                _drop(each)
        self._tally.count_output(number, output)

    async def choice(
        self, line: ChoiceState, number: int, output: RequestOutput, each: CompletionOutput
    ) -> CompletionChoice:
        choice = CompletionChoice(
            index=line.index, text=each.text, finish_reason=each.finish_reason, stop_reason=each.stop_reason
        )
        scored: list[ScoredTokens] = []
        if not line.started:
            line.started = True
            scored += self._begin(choice, line, number, output)
        if each.logprobs is not None and self._body.logprobs is not None:
            scored.append(ScoredTokens(each.token_ids, each.logprobs, line.offsets))
        if scored:
            choice.logprobs = await self._writer.completion(*scored)
        if self._body.return_token_ids:
            choice.token_ids = list(each.token_ids)
        return choice

    def _begin(
        self, choice: CompletionChoice, line: ChoiceState, number: int, output: RequestOutput
    ) -> list[ScoredTokens]:
        """Adds the prompt to a choice's first part, where it is wanted. Returns its tokens with log-probabilities."""
        if self._body.return_token_ids:
            choice.prompt_token_ids = output.prompt_token_ids
        if not self._body.echo:
            return []
        text = self._prompt_text(number, output)
        choice.text = text + choice.text
        if self._body.logprobs is None:
            return []
        scores: Sequence[LogprobsAt | None] = output.prompt_logprobs or [None] * len(output.prompt_token_ids)
        line.offsets = Offsets(len(text))
        return [ScoredTokens(output.prompt_token_ids, scores, Offsets(), sampled=False)]

    def _prompt_text(self, number: int, output: RequestOutput) -> str:
        text = self._asks[number].prompt.text
        if text is None and self._tokenizer is not None:
            text = self._tokenizer.decode(output.prompt_token_ids, self._skip)
        return text or ""


def _drop(each: CompletionOutput) -> None:
    """Drops the token that the engine had to draw and the caller did not ask for."""
    each.text, each.token_ids, each.stop_reason = "", [], None
    each.logprobs = None if each.logprobs is None else []
    each.finish_reason = None if each.finish_reason is None else "length"
