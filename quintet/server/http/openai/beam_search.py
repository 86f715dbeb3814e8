"""Beam search of completions and chats: vLLM's `use_beam_search`, with n candidates."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request as HttpRequest

from quintet.beam_search import BeamSearch, BeamSearchSequence, check_beams, likeliest, next_token_params
from quintet.outputs import CompletionOutput, RequestOutput
from quintet.sampling_params import BeamSearchParams, ParameterError, RequestOutputKind, SamplingParams
from quintet.server.http.app_state import AppState
from quintet.server.http.engine_call import EngineCall, PromptRequest
from quintet.server.http.inputs.response_format import format_of_body
from quintet.server.http.inputs.sampling_params import invalid_field
from quintet.server.http.openai.sampling_protocol import SamplingBody
from quintet.server.http.respond import WholeResponse, read_response
from quintet.tokenizers.detokenizer import Detokenizer

_FIELDS = frozenset({
    "n", "max_tokens", "temperature", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "logprobs",
    "spaces_between_special_tokens", "truncate_prompt_tokens", "keep_special_tokens", "seed", "output_kind",
    "detokenize",
})  # fmt: skip
_OTHERS = [each.name for each in dataclasses.fields(SamplingParams) if each.name not in _FIELDS]
_PLAIN, _OFF = SamplingParams(), {"top_k": -1}  # values that change nothing
_API_NAMES = {"beam_width": "n", "prompt_logprobs": "echo", "thinking_token_budget": "thinking"}


def beam_params(service: AppState, body: SamplingBody, params: SamplingParams) -> BeamSearchParams | None:
    """Returns the search that a body asks for; None: it asks for none. ApiError 400 names a field that does not go with
    it: scores are the model's log-probabilities alone."""
    if not body.use_beam_search:
        if body.length_penalty not in (None, 1.0):
            raise invalid_field("length_penalty", "belongs to beam search; set use_beam_search, or leave it out")
        return None
    served = service.backend.model_info
    if body.stream:
        raise invalid_field("stream", "must be false for beam search, which settles its tokens at the end")
    for name in _OTHERS:
        value = getattr(params, name)
        if _is_set(body, name) and value and value not in (getattr(_PLAIN, name), _OFF.get(name)):
            raise invalid_field(_shown(body, name), "does not go with use_beam_search; leave one of them out")
    form, field = format_of_body(body)
    if form is not None:
        raise invalid_field(field, "does not go with use_beam_search; leave one of them out")
    most = (body.max_tokens, getattr(body, "max_completion_tokens", 0), served.defaults.get("max_tokens"))
    if params.max_tokens is None or most == (None, None, None):
        raise invalid_field("max_tokens", "is missing: beam search computes so many tokens of each candidate")
    if served.media_model is not None and served.media_model.max_prefix:
        raise invalid_field("use_beam_search", "is not there: tokens of this model's prompts see all of them")
    try:
        found = BeamSearchParams(
            beam_width=params.n,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            temperature=0.0 if body.temperature is None else params.temperature,
            length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
            include_stop_str_in_output=params.include_stop_str_in_output,
        )
        check_beams(found, served.logprobs_mode, served.vocab_size, served.max_logprobs)
    except ParameterError as error:
        name = _API_NAMES.get(error.parameter, error.parameter)
        raise invalid_field(name, str(error).removeprefix(error.parameter).strip()) from None
    except ValueError as error:
        raise invalid_field("use_beam_search", f"is not there: {error}") from None
    return found


def _is_set(body: SamplingBody, name: str) -> bool:
    """Returns whether a request says something about a parameter; others are the model's defaults."""
    return getattr(body, name, None) is not None or name in _API_NAMES


def _shown(body: SamplingBody, name: str) -> str:
    """Returns the name in the request of a parameter that is set."""
    return name if getattr(body, name, None) is not None else _API_NAMES[name]


async def answers(call: EngineCall, asks: Sequence[PromptRequest], counted: bool = True) -> list[RequestOutput]:
    """Returns the only outputs of requests that run beside each other, of a call that waits; for run_between().
    `counted`: whether they are requests in metrics."""
    tasks = [asyncio.ensure_future(call.answer(ask, counted)) for ask in asks]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def beam_response(
    service: AppState,
    http: HttpRequest,
    asks: Sequence[PromptRequest],
    params: BeamSearchParams,
    answer: Callable[[list[RequestOutput]], Awaitable[Any]],
) -> WholeResponse:
    """Searches for the outputs of each prompt, one after the other; what `answer` makes of them becomes JSON."""
    if any(ask.grammar for ask in asks):
        raise invalid_field("tool_choice", "fixes the form of the output, and use_beam_search looks at scores alone")

    async def read(call: EngineCall) -> Any:
        return await answer([await call.run_between(_search(service, call, ask, params)) for ask in asks])

    steps = [replace(ask.params, n=1, logprobs=2 * params.beam_width) for ask in asks]  # of each candidate
    held = [ask._replace(params=each) for ask, each in zip(asks, steps, strict=True) for _ in range(params.beam_width)]
    return await read_response(service, http, held, read, waits=True)


async def _search(service: AppState, call: EngineCall, ask: PromptRequest, params: BeamSearchParams) -> RequestOutput:
    served, tokenizer = service.backend.model_info, service.backend.tokenizer
    prompt = ask.prompt
    if prompt.embeds or prompt.media or prompt.encoder is not None:
        raise invalid_field("use_beam_search", "goes on from token ids, and this prompt has embeddings or media")
    found = BeamSearch(prompt.token_ids, params, {*served.eos_ids, *(tokenizer.eos_ids if tokenizer else ())})
    one = replace(next_token_params(params, served.vocab_size), output_kind=RequestOutputKind.FINAL_ONLY)
    one.logprobs = number = max(one.logprobs or 0, ask.params.logprobs or 0)
    first: RequestOutput | None = None
    for _ in range(found.rounds(served.max_model_len)):
        if not found.beams:
            break
        grown = [replace(prompt, token_ids=beam.tokens, text=None) for beam in found.beams]
        asks = [ask._replace(prompt=each, params=one, grammar="") for each in grown]
        outputs = await answers(call, asks, counted=first is None)
        first = outputs[0] if first is None else first
        found.grow([likeliest(output.outputs[0], number) for output in outputs])
    completions = [_completion(service, index, beam, ask, params) for index, beam in enumerate(found.best())]
    assert first is not None, "a search has at least one round"
    return replace(first, prompt=prompt.text, prompt_token_ids=list(prompt.token_ids), outputs=completions)


def _completion(
    service: AppState, index: int, beam: BeamSearchSequence, ask: PromptRequest, params: BeamSearchParams
) -> CompletionOutput:
    tokenizer, ids = service.backend.tokenizer, ask.prompt.token_ids
    tokens, text = beam.tokens[len(ids) :], ""
    if tokenizer is not None:
        ended = beam.stop_reason is not None and not params.include_stop_str_in_output
        detokenizer = Detokenizer(tokenizer, ask.params, ids)
        detokenizer.add(tokens, hide_last=ended)
        detokenizer.finish()
        text = detokenizer.text
    return CompletionOutput(
        index=index, text=text, token_ids=tokens, cumulative_logprob=beam.cum_logprob,
        logprobs=None if ask.params.logprobs is None else beam.logprobs, finish_reason=beam.finish_reason,
    )  # fmt: skip
