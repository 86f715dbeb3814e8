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
from quintet.server.http.inputs.sampling_params import invalid_field
from quintet.server.http.openai.sampling_protocol import SAMPLING_FIELDS, SamplingBody
from quintet.server.http.respond import WholeResponse, read_response
from quintet.tokenizers.detokenizer import Detokenizer

_FIELDS = frozenset({
    "n", "max_tokens", "temperature", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "logprobs",
    "spaces_between_special_tokens", "truncate_prompt_tokens", "keep_special_tokens", "seed", "output_kind",
    "detokenize",
})  # fmt: skip
_DEFAULTS = {each.name: each.default for each in dataclasses.fields(SamplingParams)}


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
    given = [name for name in SAMPLING_FIELDS if name not in _FIELDS and getattr(body, name) is not None]
    formats = [name for name in ("response_format", "structured_outputs") if getattr(body, name)]
    for name in (*given, *formats):
        if getattr(body, name) != _DEFAULTS.get(name):
            raise invalid_field(name, "does not go with use_beam_search; leave one of them out")
    if params.prompt_logprobs is not None:
        raise invalid_field("echo", "has no log-probabilities with use_beam_search; leave logprobs or echo out")
    try:
        found = BeamSearchParams(
            beam_width=params.n,
            max_tokens=served.max_model_len if params.max_tokens is None else params.max_tokens,
            ignore_eos=params.ignore_eos,
            temperature=0.0 if body.temperature is None else params.temperature,
            length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
            include_stop_str_in_output=params.include_stop_str_in_output,
        )
        check_beams(found, served.logprobs_mode, served.vocab_size, served.max_logprobs)
    except ParameterError as error:
        name = {"beam_width": "n"}.get(error.parameter, error.parameter)
        raise invalid_field(name, str(error).removeprefix(error.parameter).strip()) from None
    except ValueError as error:
        raise invalid_field("use_beam_search", f"is not there: {error}") from None
    return found


async def answers(call: EngineCall, asks: Sequence[PromptRequest]) -> list[RequestOutput]:
    """Returns the only outputs of requests that run beside each other, of a call that waits; for run_between()."""
    tasks = [asyncio.ensure_future(call.answer(ask)) for ask in asks]
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

    return await read_response(service, http, asks, read, waits=True)


async def _search(service: AppState, call: EngineCall, ask: PromptRequest, params: BeamSearchParams) -> RequestOutput:
    served, tokenizer = service.backend.model_info, service.backend.tokenizer
    prompt = ask.prompt
    if prompt.embeds or prompt.media or prompt.encoder is not None:
        raise invalid_field("use_beam_search", "goes on from token ids, and this prompt has embeddings or media")
    found = BeamSearch(prompt.token_ids, params, {*served.eos_ids, *(tokenizer.eos_ids if tokenizer else ())})
    one = replace(next_token_params(params, served.vocab_size), output_kind=RequestOutputKind.FINAL_ONLY)
    first: RequestOutput | None = None
    for _ in range(found.rounds(served.max_model_len)):
        if not found.beams:
            break
        grown = [replace(prompt, token_ids=beam.tokens, text=None) for beam in found.beams]
        outputs = await answers(call, [ask._replace(prompt=each, params=one, grammar="") for each in grown])
        first = outputs[0] if first is None else first
        assert one.logprobs is not None
        found.grow([likeliest(output.outputs[0], one.logprobs) for output in outputs])
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
