"""POST /v1/.../derender: token ids of /inference/v1/generate as an answer of the API; the engine is not asked.

Nothing is kept between two chunks of a stream: the client sends the tokens of the chunks before, which are read again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet.chat.output_parser import OutputFormat
from quintet.chat.prepare import PreparedChat, prepare
from quintet.chat.prompts import Prompt
from quintet.outputs import CompletionOutput, Logprob, LogprobsAt, RequestOutput
from quintet.sampling_params import SamplingParams
from quintet.server.http.app_state import AppState
from quintet.server.http.engine_call import PromptRequest
from quintet.server.http.inputs.body import read_body
from quintet.server.http.inputs.chat_input import chat_model
from quintet.server.http.inputs.prompts import need_tokenizer, run_in_thread
from quintet.server.http.inputs.sampling_params import invalid_field
from quintet.server.http.openai.chat import ChatAnswer, chat_input
from quintet.server.http.openai.chat_protocol import ChatChunk, ChatChunkChoice, ChatCompletion, ChatRequest, Delta
from quintet.server.http.openai.completions import ChoiceState, CompletionAnswer, completion_params
from quintet.server.http.openai.completions_protocol import Completion, CompletionRequest
from quintet.server.http.openapi import documents_route
from quintet.server.http.respond import app_state_of, json_response
from quintet.server.http.scale_out.protocol import (
    DerenderChat,
    DerenderCompletion,
    DerenderedChat,
    DerenderedCompletion,
    StreamState,
    TokensAnswer,
    TokensChoice,
)
from quintet.server.http.usage import RequestUsage
from quintet.tokenizers.detokenizer import Detokenizer

router = APIRouter()

_UNREADABLE = (KeyError, TypeError, AttributeError, ValueError, OverflowError)  # of entries that are none


@router.post("/v1/chat/completions/derender")
@documents_route(body=DerenderChat, answer=ChatCompletion)
async def derender_chat(http: HttpRequest) -> Response:
    """Returns the message of an answer in tokens, with its reasoning and calls; of a chunk, what is new of it."""
    service = app_state_of(http)
    body = await read_body(http, DerenderChat)
    await service.choose_model(http, body.model)
    service.check_ready()
    if body.stream:
        answer = _one(body.generate_chunk, "generate_chunk", body.generate_response)
    else:
        answer = _one(body.generate_response, "generate_response", body.generate_chunk)
    request = body.chat_request or ChatRequest.model_validate({"messages": []})
    request = request.model_copy(update={"stream": bool(body.stream), "stream_options": None, "model": body.model})
    request._size = body.size  # it decides whether the conversation is rendered in a thread
    _check_answers(service, [answer])
    _check_ids(service, body.prompt_token_ids or (), "prompt_token_ids")
    prepared = await _prepared(service, body, request)
    given = body.prompt_token_ids or prepared.prompt.token_ids
    counted = len(given) if body.prompt_tokens is None else body.prompt_tokens
    writer = ChatAnswer(service, request, prepared, RequestUsage(prompt_tokens=counted), answer.request_id)
    ids = given or answer.prompt_token_ids or []
    if not body.stream:
        output = await _output(service, answer, prepared.params, ids, prepared.prompt)
        return json_response(await writer.completion([output]))
    stream = _Stream(service, answer, body.stream_state, prepared.params, ids)
    parts = [await writer.parts(each) for each in await stream.outputs()]
    choices = [_joined(parts[-1], not stream.state.role_sent)] if parts else []
    chunk = ChatChunk(choices=choices, usage=answer.usage or UNSET, **writer.head)
    return json_response(DerenderedChat(chunk, stream.next_state()))


@router.post("/v1/completions/derender")
@documents_route(body=DerenderCompletion, answer=Completion)
async def derender_completion(http: HttpRequest) -> Response:
    """Returns the text of completions in tokens; of a chunk, what is new of it."""
    service = app_state_of(http)
    body = await read_body(http, DerenderCompletion)
    await service.choose_model(http, body.model)
    service.check_ready()
    pieces = [_one(body.generate_chunk, "generate_chunk", body.generate_responses)] if body.stream else None
    answers = pieces or body.generate_responses
    if not answers:
        raise invalid_field("generate_responses", "is missing; give an answer of the generate route for each prompt")
    _check_answers(service, answers)
    most = max((each.index + 1 for answer in answers for each in answer.choices), default=1)
    request = body.completion_request or CompletionRequest.model_validate({"n": most})
    request = request.model_copy(update={"stream": bool(body.stream), "stream_options": None, "model": body.model})
    params = completion_params(service, request)
    prompts = _prompts(service, body, answers)
    if request.echo and not all(prompts):
        raise invalid_field("prompt_token_ids", "is missing: echo shows the prompts; give the rendered token ids")
    counts = [len(ids) for ids in prompts] if body.prompt_tokens is None else _counts(body.prompt_tokens, answers)
    tally = RequestUsage(prompt_tokens=sum(counts))
    asks = [PromptRequest(Prompt(ids), params) for ids in prompts]
    writer = CompletionAnswer(service, request, asks, tally, answers[0].request_id)
    if not body.stream:
        found = zip(answers, prompts, strict=True)
        outputs = [await _output(service, answer, params, ids, Prompt(ids)) for answer, ids in found]
        return json_response(await writer.completion(outputs))
    [piece], [ids] = answers, prompts
    stream = _Stream(service, piece, body.stream_state, params, ids)
    line, choices = ChoiceState(piece.choices[0].index if piece.choices else 0), []
    for each in await stream.outputs():
        output = RequestOutput(piece.request_id, None, ids, None, [each], False)
        choices = [await writer.choice(line, 0, output, each)]
    chunk = Completion(choices=choices, usage=piece.usage or UNSET, **writer.head)  # type: ignore[arg-type]
    return json_response(DerenderedCompletion(chunk, stream.next_state()))


async def _prepared(service: AppState, body: DerenderChat, request: ChatRequest) -> PreparedChat:
    """Returns the conversation as it was rendered; without one, answers are plain text."""
    if body.chat_request is not None:
        return await prepare(chat_input(service, request), chat_model(service))
    if service.parsers.tool is not None or service.parsers.reasoning is not None:
        raise invalid_field(
            "chat_request", "is missing: answers of this model have calls or reasoning; give the rendered request"
        )
    return PreparedChat(Prompt(body.prompt_token_ids or []), SamplingParams(), "", OutputFormat())


def _one(given: Any, name: str, other: Any) -> Any:
    if given is None or other is not None:
        what = "of a stream" if name == "generate_chunk" else "of a whole answer"
        raise invalid_field(name, f"is wanted {what}, and nothing of the other kind; set stream to say which it is")
    return given


def _check_answers(service: AppState, answers: Sequence[TokensAnswer]) -> None:
    """ApiError 400 for answers that the generate route does not give."""
    if len(answers) > service.settings.max_prompts:
        most = service.settings.max_prompts
        raise invalid_field("generate_responses", f"has {len(answers)} answers, and the server takes {most}; send less")
    for answer in answers:
        if len({each.index for each in answer.choices}) < len(answer.choices):
            raise invalid_field("choices", "has an index twice; give each output once")
        _check_ids(service, answer.prompt_token_ids or (), "prompt_token_ids")


def _check_ids(service: AppState, ids: Sequence[int], name: str) -> None:
    """ApiError 400 where these are not tokens of the model, or more than it takes."""
    served = service.backend.model_info
    if len(ids) > served.max_model_len:
        raise invalid_field(name, f"has {len(ids)} tokens, more than the model's {served.max_model_len}; send less")
    if any(not 0 <= each < served.vocab_size for each in ids):
        raise invalid_field(name, f"must be in 0 .. {served.vocab_size - 1}")


def _prompts(service: AppState, body: DerenderCompletion, answers: Sequence[TokensAnswer]) -> list[list[int]]:
    given = body.prompt_token_ids
    if given is None:
        given = [None] * len(answers)
    elif body.stream:
        given = [given]
    if len(given) != len(answers):
        raise invalid_field("prompt_token_ids", f"has {len(given)} lists for {len(answers)} answers; give one for each")
    found = [each or answer.prompt_token_ids or [] for each, answer in zip(given, answers, strict=True)]
    for each in found:
        if not isinstance(each, list) or not all(type(token) is int for token in each):
            raise invalid_field("prompt_token_ids", "must be a list of token ids for each prompt")
        _check_ids(service, each, "prompt_token_ids")
    return found


def _counts(given: list[int] | int, answers: Sequence[TokensAnswer]) -> list[int]:
    counts = [given] if isinstance(given, int) else given
    if len(counts) != len(answers) or min(counts) < 0:
        raise invalid_field("prompt_tokens", f"must be {len(answers)} counts of 0 or more, one for each prompt")
    return counts


async def _output(
    service: AppState, answer: TokensAnswer, params: SamplingParams, ids: Sequence[int], prompt: Prompt
) -> RequestOutput:
    """Returns a whole answer as the engine gives it, with text."""
    choices = [await _Stream(service, _with(answer, each), None, params, ids).outputs() for each in answer.choices]
    scores = _prompt_scores(answer.prompt_logprobs, ids, service.backend.model_info.vocab_size)
    done = [replace(output, index=each.index) for each, [output] in zip(answer.choices, choices, strict=True)]
    output = RequestOutput(answer.request_id, prompt.text, list(ids), scores, done, True)
    output.kv_transfer_params = answer.kv_transfer_params
    return output


def _with(answer: TokensAnswer, choice: TokensChoice) -> TokensAnswer:
    return answer.model_copy(update={"choices": [choice]})


class _Stream:
    """The outputs of one sequence of tokens, chunk by chunk."""

    def __init__(
        self,
        service: AppState,
        piece: TokensAnswer,
        state: StreamState | None,
        params: SamplingParams,
        prompt_ids: Sequence[int],
    ) -> None:
        self.state = state or StreamState.model_validate({})
        self._service, self._piece, self._params = service, piece, params
        self._vocab_size = service.backend.model_info.vocab_size
        if len(piece.choices) > 1:
            raise invalid_field("generate_chunk", f"has {len(piece.choices)} outputs; send one at a time")
        tokens, lengths = self.state.output_token_ids, self.state.output_chunk_lens
        self._new = (piece.choices[0].token_ids or []) if piece.choices else []
        if piece.choices and piece.choices[0].index >= params.n:
            raise invalid_field("index", f"is {piece.choices[0].index}, and the request has n={params.n}")
        if sum(lengths) != len(tokens) or min(lengths, default=1) < 1:
            raise invalid_field("stream_state", "must be that of the answer before: its chunks do not add up")
        _check_ids(service, [*tokens, *self._new], "token_ids")
        self._detokenizer = Detokenizer(need_tokenizer(service), params, prompt_ids)

    def next_state(self) -> dict[str, Any]:
        """Returns what the client sends with the next chunk."""
        tokens, lengths, sent = self.state.output_token_ids, self.state.output_chunk_lens, self.state.role_sent
        if self._piece.choices:
            tokens, lengths, sent = [*tokens, *self._new], [*lengths, *[len(self._new)] * bool(self._new)], True
        return {"output_token_ids": tokens, "output_chunk_lens": lengths, "role_sent": sent}

    async def outputs(self) -> list[CompletionOutput]:
        """Returns one output for all chunks before, and one for this; none if it has none."""
        if not self._piece.choices:
            return []
        size = len(self.state.output_token_ids) + len(self._new)
        return await run_in_thread(self._service, size, self._outputs, "token_ids")

    def _outputs(self) -> list[CompletionOutput]:
        [choice], ids, before = self._piece.choices, self.state.output_token_ids, []
        if ids or self.state.role_sent:
            scored = choice.logprobs is not None
            scores = [{each: Logprob(0.0, 1)} for each in ids] if scored else None  # only their texts count
            before = [CompletionOutput(choice.index, self._detokenizer.add(ids), ids, logprobs=scores)]
        ended = choice.finish_reason
        by_token = ended == "stop" and not isinstance(choice.stop_reason, str)
        text = self._detokenizer.add(self._new, by_token and not self._params.include_stop_str_in_output)
        text += self._detokenizer.finish() if ended is not None else ""
        output = CompletionOutput(choice.index, text, self._new, finish_reason=ended, stop_reason=choice.stop_reason)
        if choice.logprobs is not None:
            output.logprobs = _positions(choice.logprobs, self._new, self._vocab_size)
        return [*before, output]


def _positions(given: Mapping[str, Any], ids: Sequence[int], vocab_size: int) -> list[LogprobsAt]:
    """Returns the log-probabilities of an output: those of each token first, then the likeliest."""
    content = given.get("content")
    if not isinstance(content, list) or len(content) != len(ids):
        raise invalid_field("logprobs", "must have an entry of content for each token")
    try:
        found = [dict(_scored(one) for one in (each, *(each.get("top_logprobs") or ()))) for each in content]
        same = all(_scored(each)[0] == token_id for each, token_id in zip(content, ids, strict=True))
    except _UNREADABLE:
        raise invalid_field("logprobs", "must have content of /inference/v1/generate") from None
    if not same:
        raise invalid_field("logprobs", "has content of other tokens than token_ids")
    return _known(found, "logprobs", vocab_size)


def _scored(entry: Mapping[str, Any]) -> tuple[int, Logprob]:
    """Returns the token of an entry and its score; vLLM's have the token in their text, as token_id:5."""
    token = entry["token_id"] if "token_id" in entry else str(entry["token"]).removeprefix("token_id:")
    return int(token), _score(entry)


def _score(entry: Mapping[str, Any]) -> Logprob:
    value, rank = entry["logprob"], entry.get("rank")
    if type(value) not in (int, float) or type(rank) not in (int, type(None)):
        raise ValueError("no numbers")
    return Logprob(float(value), rank)


def _prompt_scores(
    given: Sequence[Mapping[str, Any] | None] | None, ids: Sequence[int], vocab_size: int
) -> list[LogprobsAt | None] | None:
    """Returns the log-probabilities of a prompt's tokens; of the first there are none."""
    if given is None:
        return None
    name = "prompt_logprobs"
    try:
        found = [None if at is None else {int(token): _score(each) for token, each in at.items()} for at in given]
    except _UNREADABLE:
        raise invalid_field(name, "must be those of /inference/v1/generate") from None
    wrong = len(found) != len(ids) or any(at is not None and i not in at for i, at in zip(ids, found, strict=True))
    if found and ids and wrong:
        raise invalid_field(name, "must have an entry for each token of the prompt, with that token")
    _known([at for at in found if at is not None], name, vocab_size)
    return found


def _known(found: list[LogprobsAt], name: str, vocab_size: int) -> list[LogprobsAt]:
    if any(not 0 <= token_id < vocab_size for at in found for token_id in at):
        raise invalid_field(name, f"must name tokens in 0 .. {vocab_size - 1}")
    return found


def _joined(parts: Sequence[ChatChunkChoice], first: bool) -> ChatChunkChoice:
    """Returns the parts of one chunk as one."""
    deltas = [each.delta for each in parts]
    delta = Delta(role="assistant") if first else Delta()
    for name in ("content", "reasoning", "reasoning_content", "tool_calls"):
        values = [value for each in deltas if (value := getattr(each, name)) is not UNSET]
        if values:
            setattr(delta, name, sum(values, []) if name == "tool_calls" else "".join(values))
    joined, last = parts[0], parts[-1]
    joined.delta, joined.finish_reason, joined.stop_reason = delta, last.finish_reason, last.stop_reason
    return joined
