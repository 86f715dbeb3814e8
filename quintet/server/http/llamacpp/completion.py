"""POST /completion, /completions and /infill: native completions of llama.cpp."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet.chat.prepare import compiled_grammar
from quintet.outputs import CompletionOutput, RequestOutput
from quintet.sampling_params import SamplingParams
from quintet.server.http.app_state import AppState
from quintet.server.http.engine_call import EngineCall, PromptRequest
from quintet.server.http.errors import ApiError, openai_shape
from quintet.server.http.inputs.prompts import completion_prompts, run_in_thread
from quintet.server.http.llamacpp.inputs import infill_prompt, read_params, read_prompts, read_request, text_size
from quintet.server.http.llamacpp.protocol import CompletionAnswer, CompletionBody, InfillBody, Timings
from quintet.server.http.openai.completions_protocol import CompletionRequest
from quintet.server.http.openai.logprobs import LogprobsWriter, json_list
from quintet.server.http.openapi import documents_route
from quintet.server.http.respond import app_state_of, stream_response, whole_response
from quintet.server.http.served_models import adapter_of
from quintet.server.http.sse import event
from quintet.server.http.usage import usage_of

router = APIRouter()

_ANSWERS = dict[str, Any] | list[dict[str, Any]]  # a CompletionAnswer, some fields of it, or a list
_MILLISECONDS = 1000.0


@router.post("/completion")
@router.post("/completions")
@documents_route(body=CompletionBody, answer=_ANSWERS, stream=CompletionAnswer)
async def create_completion(http: HttpRequest) -> Response:
    """Completes a prompt; of a list of prompts, the answer is a list."""
    service, body = await read_request(http, CompletionBody)
    size = text_size(body.prompt)
    prompts, is_list = await run_in_thread(service, size, partial(read_prompts, service, body.prompt), "prompt")
    return await _complete(http, body, read_params(service, body), prompts, is_list)


@router.post("/infill")
@documents_route(body=InfillBody, answer=_ANSWERS, stream=CompletionAnswer)
async def create_infill(http: HttpRequest) -> Response:
    """Fills the gap between two texts, with the model's FIM tokens."""
    service, body = await read_request(http, InfillBody)
    params = read_params(service, body)
    return await _complete(http, body, params, [infill_prompt(service, body, params)], is_list=False)


async def _complete(
    http: HttpRequest, body: CompletionBody, params: SamplingParams, given: Sequence[str | list[int]], is_list: bool
) -> Response:
    service = app_state_of(http)
    field = "json_schema" if body.grammar is None else "grammar"
    grammar = await compiled_grammar(service.backend.grammar_checks, params.structured_outputs, field)
    prompts = await completion_prompts(service, CompletionRequest(prompt=list(given)), params)
    asks = [PromptRequest(prompt, params, 0, grammar) for prompt in prompts]
    usage_of(http).count_prompts(asks)
    answer = _Completion(http, service, body, asks, is_list)
    if body.stream:
        return await stream_response(service, http, asks, answer.events, _failure)
    return await whole_response(service, http, asks, answer.whole)


@dataclass
class _Choice:
    """State of one completion."""

    index: int
    num_tokens: int = 0
    has_new_line: bool = False


class _Completion:
    """Builds the answer to one request, whole or in events."""

    def __init__(
        self, http: HttpRequest, service: AppState, body: CompletionBody, asks: Sequence[PromptRequest], is_list: bool
    ) -> None:
        self._service, self._body, self._asks, self._tally = service, body, asks, usage_of(http)
        self._params = asks[0].params
        self._is_list = is_list or self._params.n > 1
        adapter = adapter_of(http)
        self._model = body.model or (service.model_names[0] if adapter is None else adapter.name)
        self._writer = LogprobsWriter(service.backend.tokenizer, service.cooperative, self._params)
        most = body.max_tokens if body.n_predict is None else body.n_predict
        self._is_silent = most == 0  # only the prompt is computed

    async def whole(self, outputs: Sequence[RequestOutput]) -> Any:
        answers = []
        for number, output in enumerate(outputs):
            self._tally.count_output(number, output)
            for completion in output.outputs:
                answers.append(await self._answer(self._choice(number, completion), number, output, completion))
        selected = [self._selected(answer) for answer in answers]
        return selected if self._is_list else selected[0]

    async def events(self, call: EngineCall) -> AsyncIterator[bytes]:
        choices: dict[int, _Choice] = {}
        async for number, output in call:
            self._tally.count_output(number, output)
            for completion in output.outputs:
                choice = self._choice(number, completion)
                choice = choices.setdefault(choice.index, choice)
                answer = await self._answer(choice, number, output, completion)
                if answer.stop or answer.content or answer.tokens:
                    yield event(self._selected(answer))

    def _choice(self, number: int, completion: CompletionOutput) -> _Choice:
        return _Choice(number * self._params.n + completion.index)

    async def _answer(
        self, choice: _Choice, number: int, output: RequestOutput, completion: CompletionOutput
    ) -> CompletionAnswer:
        """Returns an answer or event; the last event of a stream has its text and all facts."""
        text, ids = ("", []) if self._is_silent else (completion.text, list(completion.token_ids))
        choice.num_tokens += len(ids)
        choice.has_new_line = choice.has_new_line or "\n" in text
        ended, body = completion.finish_reason is not None, self._body
        answer = CompletionAnswer(
            index=choice.index,
            content=text,
            tokens=ids if body.stream or body.return_tokens else [],
            stop=ended,
            tokens_predicted=choice.num_tokens,
            tokens_evaluated=len(output.prompt_token_ids),
        )
        if completion.logprobs is not None and not self._is_silent:
            written = await self._writer.chat(completion.token_ids, completion.logprobs, has_ids=True)
            answer.completion_probabilities = json_list(written)
        if ended or body.timings_per_token:
            answer.timings = timings(output, choice.num_tokens)
        if ended:
            self._finish(answer, choice, number, output, completion)
        return answer

    def _finish(
        self, answer: CompletionAnswer, choice: _Choice, number: int, output: RequestOutput, end: CompletionOutput
    ) -> None:
        answer.model, answer.has_new_line, answer.truncated = self._model, choice.has_new_line, False
        settings = generation_settings(self._service, self._params, bool(self._body.stream))
        answer.generation_settings = {**settings, "n_predict": 0, "max_tokens": 0} if self._is_silent else settings
        answer.prompt = self._prompt_text(number, output)
        word = end.stop_reason if isinstance(end.stop_reason, str) else ""
        answer.stopping_word = "" if self._is_silent else word
        is_eos = end.finish_reason == "stop" and not self._is_silent
        answer.stop_type = ("word" if word else "eos") if is_eos else "limit"
        answer.tokens_cached = output.num_cached_tokens

    def _prompt_text(self, number: int, output: RequestOutput) -> str:
        text, tokenizer = self._asks[number].prompt.text, self._service.backend.tokenizer
        if text is None and tokenizer is not None:
            text = tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
        return text or ""

    def _selected(self, answer: CompletionAnswer) -> Any:
        """Returns the fields of response_fields; one with slashes gets the whole path as its name."""
        if not self._body.response_fields:
            return answer
        fields, found = msgspec.to_builtins(answer), {}
        for path in self._body.response_fields:
            value: Any = fields
            for name in path.split("/"):
                value = value.get(name, msgspec.UNSET) if isinstance(value, dict) else msgspec.UNSET
            if value is not msgspec.UNSET:
                found[path] = value
        return found


def timings(output: RequestOutput, predicted: int) -> Timings:
    """Returns the times of a request so far."""
    times = output.metrics
    prompt, cached = len(output.prompt_token_ids), output.num_cached_tokens
    prompt_ms = _MILLISECONDS * max(0.0, times.prefill_time or 0.0)
    predicted_ms = _MILLISECONDS * max(0.0, times.decode_time or 0.0)
    return Timings(
        cache_n=cached,
        prompt_n=prompt - cached,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=_ratio(prompt_ms, prompt - cached),
        prompt_per_second=_ratio(_MILLISECONDS * (prompt - cached), prompt_ms),
        predicted_n=predicted,
        predicted_ms=predicted_ms,
        predicted_per_token_ms=_ratio(predicted_ms, predicted),
        predicted_per_second=_ratio(_MILLISECONDS * predicted, predicted_ms),
    )


def _ratio(amount: float, parts: float) -> float:
    return amount / parts if parts else 0.0


def generation_settings(service: AppState, params: SamplingParams, stream: bool) -> dict[str, Any]:
    """Returns sampling parameters under llama.cpp's names."""
    most = -1 if params.max_tokens is None else params.max_tokens
    return {
        "n_ctx": service.backend.model_info.max_model_len,
        "n_predict": most,
        "max_tokens": most,
        "seed": -1 if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": max(params.top_k, 0),
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        "repeat_last_n": -1,  # all of the text
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": list(params.stop or ()),
        "ignore_eos": params.ignore_eos,
        "logit_bias": [{"token": token, "bias": bias} for token, bias in (params.logit_bias or {}).items()],
        "n_probs": params.logprobs or 0,
        "stream": stream,
    }


def _failure(error: ApiError) -> bytes:
    """Returns the event that ends a stream that failed."""
    return event(openai_shape(error))
