"""POST /v1/chat/completions: a conversation gets its next message."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet.chat.output_parser import OutputParser, is_cut_off
from quintet.chat.prepare import ChatInput, FieldNames, PreparedChat, prepare
from quintet.chat.reasoning_effort import read_effort, read_thinking
from quintet.chat.tool_choice import read_tools
from quintet.outputs import CompletionOutput, RequestOutput
from quintet.sampling_params import SamplingParams
from quintet.server.http.app_state import AppState
from quintet.server.http.engine_call import EngineCall, PromptRequest
from quintet.server.http.inputs.body import read_body
from quintet.server.http.inputs.chat_input import chat_model, check_tools, read_chat
from quintet.server.http.inputs.response_format import format_of_body
from quintet.server.http.inputs.sampling_params import check_stream, invalid_field, sampling_params
from quintet.server.http.openai.beam_search import answers, beam_params, beam_response
from quintet.server.http.openai.chat_protocol import (
    AnswerMessage,
    BatchChatRequest,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    Delta,
)
from quintet.server.http.openai.logprobs import LogprobsWriter, json_list
from quintet.server.http.openai.messages import deltas_of, message_of, parse_all
from quintet.server.http.openapi import documents_route
from quintet.server.http.respond import AnswerHead, app_state_of, read_response, stream_response, whole_response
from quintet.server.http.sse import DONE, event
from quintet.server.http.usage import RequestUsage, Usage, request_times, set_request_name, usage_of, wants_usage

router = APIRouter()

_OF_ONE_CHAT = (
    "stream", "use_beam_search", "prompt_logprobs", "return_prompt_text", "return_token_ids",
    "kv_transfer_params",
)  # fmt: skip


@router.post("/v1/chat/completions")
@documents_route(body=ChatRequest, answer=ChatCompletion, stream=ChatChunk)
async def create_chat_completion(http: HttpRequest) -> Response:
    """Answers a conversation."""
    service = app_state_of(http)
    body = await read_body(http, ChatRequest)
    set_request_name(http, body.request_id)
    await service.choose_model(http, body.model)
    service.check_ready()
    prepared = await prepare(chat_input(service, body), chat_model(service))
    beams = beam_params(service, body, prepared.params)
    asks = [PromptRequest.of(prepared, body.priority)]
    tally = usage_of(http)
    tally.count_prompts(asks)
    answer = ChatAnswer(service, body, prepared, tally)
    if beams is not None:
        return await beam_response(service, http, asks, beams, answer.completion)
    if body.stream:
        return await stream_response(service, http, asks, answer.events)
    return await whole_response(service, http, asks, answer.completion)


@router.post("/v1/chat/completions/batch")
@documents_route(body=BatchChatRequest, answer=ChatCompletion)
async def create_chat_completions(http: HttpRequest) -> Response:
    """Answers several conversations at once: a choice for each, in their order."""
    service = app_state_of(http)
    body = await read_body(http, BatchChatRequest)
    set_request_name(http, body.request_id)
    await service.choose_model(http, body.model)
    service.check_ready()
    chats, most = body.messages, service.settings.max_prompts
    if not isinstance(chats, list) or not chats or not all(isinstance(each, list) for each in chats):
        raise invalid_field("messages", 'must be a list of lists of messages: [[{"role": "user", "content": "Hi"}]]')
    if len(chats) > most:
        raise invalid_field("messages", f"holds {len(chats)} conversations, and the server takes {most}; send several")
    for name in _OF_ONE_CHAT:
        if getattr(body, name) not in (None, False):
            raise invalid_field(name, "is not there for several conversations; send each to /v1/chat/completions")
    if (body.n or 1) != 1:
        raise invalid_field("n", "must be 1 for several conversations: each has one choice")
    prepared = []
    for number, each in enumerate(chats):
        chat = chat_input(service, body.model_copy(update={"messages": each}), f"messages.{number}")
        prepared.append(await prepare(chat, chat_model(service)))
    asks = [PromptRequest.of(each, body.priority) for each in prepared]
    tally = usage_of(http)
    tally.count_prompts(asks)
    writers = [ChatAnswer(service, body, each, tally) for each in prepared]

    async def read(call: EngineCall) -> ChatCompletion:
        outputs = await call.run_between(answers(call, asks))
        whole = [await each.completion([outputs[at]], at) for at, each in enumerate(writers)]
        for at, each in enumerate(whole):
            each.choices[0].index = at
        thought = [each.num_reasoning_tokens for each in writers]
        usage = tally.usage(None if None in thought else sum(each or 0 for each in thought))
        return msgspec.structs.replace(whole[0], choices=[each.choices[0] for each in whole], usage=usage)

    return await read_response(service, http, asks, read, waits=True)


def _params(service: AppState, body: ChatRequest) -> SamplingParams:
    check_stream(body)
    if body.top_logprobs and not body.logprobs:
        raise invalid_field("top_logprobs", "needs logprobs; set it to true")
    if body.logprob_token_ids is not None and not body.logprobs:
        raise invalid_field("logprob_token_ids", "needs logprobs; set it to true")
    own: dict[str, Any] = {"logprobs": (body.top_logprobs or 0) if body.logprobs else None}
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    if (most := getattr(body, name)) is not None:
        own["max_tokens"] = most
    return sampling_params(service, body, own, {"logprobs": "top_logprobs", "max_tokens": name})


def chat_input(service: AppState, body: ChatRequest, messages: str = "messages") -> ChatInput:
    """Returns the conversation of a checked request, with its sampling params."""
    params = _params(service, body)
    params.structured_outputs, form = format_of_body(body)
    tool_choice = read_tools(body.tools, body.tool_choice)
    check_tools(service, tool_choice)
    thinking = read_thinking(body.thinking, "thinking")
    if params.thinking_token_budget is None:
        params.thinking_token_budget = thinking.budget
    thinking = thinking.with_effort(read_effort(body.reasoning_effort, "reasoning_effort"))
    return read_chat(
        service,
        body,
        body.messages,
        params=params,
        tool_choice=tool_choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        thinking=thinking._replace(visible=body.include_reasoning is not False),
        add_special_tokens=bool(body.add_special_tokens),
        cache_salt=body.cache_salt,
        names=FieldNames(messages, form),
    )


class ChatAnswer:
    """Builds the answer to one request, whole or in chunks."""

    def __init__(
        self, service: AppState, body: ChatRequest, prepared: PreparedChat, tally: RequestUsage, answer_id: str = ""
    ) -> None:
        params, listening = prepared.params, prepared.output_format
        self._body, self._n, self._tally = body, params.n, tally
        self._listening, self._turns, self._settings = listening, service.cooperative, service.settings
        # Where a call may come there is none: for some clients a text begins with it, though it be empty.
        self._blank = "" if listening.tool is None else UNSET
        self._output_parsers = [OutputParser(listening, whole=not body.stream) for _ in range(params.n)]
        answer_id = answer_id or f"chatcmpl-{tally.request_id}"
        self.head = AnswerHead.for_answer(service, answer_id, body.model).fields()
        given = body.return_tokens_as_token_ids
        by_id = service.settings.return_tokens_as_token_ids if given is None else given
        self._writer = LogprobsWriter(service.backend.tokenizer, service.cooperative, params, by_id)

    async def completion(self, outputs: Sequence[RequestOutput], number: int = 0) -> ChatCompletion:
        """`number`: of the call's prompt."""
        [output] = outputs
        self._tally.count_output(number, output)
        choices = [await self._choice(each) for each in output.outputs]
        times = request_times(self._settings, outputs, self._n)
        answer = ChatCompletion(choices=choices, usage=self._usage(), metrics=times, **self.head)
        if self._body.return_token_ids:
            answer.prompt_token_ids = output.prompt_token_ids
        if self._body.return_prompt_text:
            answer.prompt_text = output.prompt
        if output.kv_transfer_params is not None:
            answer.kv_transfer_params = output.kv_transfer_params
        if self._body.prompt_logprobs is not None:
            answer.prompt_logprobs = await self._writer.prompt_logprobs(output.prompt_logprobs or [])
        return answer

    async def _choice(self, each: CompletionOutput) -> ChatChoice:
        speech = self._output_parsers[each.index]
        speech.count(each.token_ids)
        choice = ChatChoice(
            index=each.index,
            message=AnswerMessage(each.text)
            if self._listening.plain
            else message_of(await parse_all(speech, each.text, self._turns, is_cut_off(each))),
            finish_reason=speech.finish_reason_of(each.finish_reason),
            stop_reason=each.stop_reason,
        )
        await self._add_tokens(choice, each)
        return choice

    async def _add_tokens(self, choice: ChatChoice | ChatChunkChoice, each: CompletionOutput) -> None:
        if each.logprobs is not None:
            choice.logprobs = ChatLogprobs(json_list(await self._writer.chat(each.token_ids, each.logprobs)))
        if self._body.return_token_ids:
            choice.token_ids = list(each.token_ids)

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Reasoning tokens of all choices; None if they are not counted."""
        thought = [speech.num_reasoning_tokens for speech in self._output_parsers]
        counts = [each for each in thought if each is not None]
        return sum(counts) if len(counts) == len(thought) else None

    def _usage(self) -> Usage:
        return self._tally.usage(self.num_reasoning_tokens)

    async def events(self, call: EngineCall) -> AsyncIterator[bytes]:
        usage, steady = wants_usage(self._settings, self._body.stream_options)
        chunk = ChatChunk(choices=[], usage=None if usage else UNSET, **self.head)
        if self._body.return_token_ids:
            chunk.prompt_token_ids = call.requests[0].prompt.token_ids
        if self._body.return_prompt_text:
            chunk.prompt_text = call.requests[0].prompt.text
        for index in range(self._n):
            chunk.choices = [ChatChunkChoice(index=index, delta=Delta(role="assistant", content=self._blank))]
            if steady:
                chunk.usage = self._usage()
            yield event(chunk)
        chunk.prompt_token_ids = chunk.prompt_text = UNSET
        last: list[RequestOutput] = []
        async for number, output in call:
            last = [output]
            self._tally.count_output(number, output)
            for each in output.outputs:
                self._output_parsers[each.index].count(each.token_ids)
            if steady:
                chunk.usage = self._usage()
            for each in output.outputs:  # of every step, also where the text of its tokens is held back
                parts = await self.parts(each)
                for part in parts:
                    chunk.choices = [part]
                    ended = each.finish_reason and part is parts[-1]
                    chunk.kv_transfer_params = (ended and output.kv_transfer_params) or UNSET
                    yield event(chunk)
        if usage:
            times = request_times(self._settings, last, self._n)
            yield event(ChatChunk(choices=[], usage=self._usage(), metrics=times, **self.head))
        yield DONE

    async def parts(self, each: CompletionOutput) -> list[ChatChunkChoice]:
        """One for each change between reasoning, content and calls; tokens are in the first, the end in the last."""
        speech, deltas = self._output_parsers[each.index], [Delta(content=each.text)]
        if not self._listening.plain:
            events = speech.feed(each.text, each.finish_reason is not None, is_cut_off(each))
            deltas = deltas_of(events, self._blank)
        choices = [ChatChunkChoice(index=each.index, delta=delta) for delta in deltas]
        choices[-1].finish_reason = speech.finish_reason_of(each.finish_reason)
        if each.finish_reason is not None:
            choices[-1].stop_reason = each.stop_reason
        await self._add_tokens(choices[0], each)
        return choices
