"""Builds an answer of /api/chat or /api/generate: one object, or JSON lines."""

import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet.chat.output_parser import OutputFormat, OutputParser, is_cut_off
from quintet.outputs import CompletionOutput, RequestOutput
from quintet.parsers import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from quintet.server.http.app_state import AppState
from quintet.server.http.engine_call import EngineCall, PromptRequest
from quintet.server.http.errors import ApiError, ollama_shape
from quintet.server.http.inputs.body import read_body
from quintet.server.http.ollama.models import known_name
from quintet.server.http.ollama.protocol import Call, CalledFunction, ChatLine, ChatMessage, GenerateLine, ModelBody
from quintet.server.http.openai.logprobs import LogprobsWriter, json_list
from quintet.server.http.openai.messages import arguments_object, parse_all
from quintet.server.http.respond import app_state_of, stream_response, whole_response
from quintet.server.http.sse import encode
from quintet.server.http.usage import usage_of

_NANOSECONDS = 10**9

NamedBody = TypeVar("NamedBody", bound=ModelBody)


@dataclass
class Stopwatch:
    """Times of one HTTP request, in nanoseconds."""

    started: int
    loaded: int = 0  # when the model was ready

    @property
    def total(self) -> int:
        return time.monotonic_ns() - self.started

    @property
    def load(self) -> int:
        return self.loaded - self.started


async def read_request(http: HttpRequest, kind: type[NamedBody]) -> tuple[Stopwatch, AppState, NamedBody]:
    """Reads a body, and checks that its model is served and ready. Raises ApiError 400, 404 or 503."""
    watch, service = Stopwatch(time.monotonic_ns()), app_state_of(http)
    body = await read_body(http, kind, any_type=True)
    await service.choose_model(http, known_name(service, body.model))
    service.check_ready()
    watch.loaded = time.monotonic_ns()
    return watch, service, body


@dataclass
class MessagePart:
    """New part of a message: text, reasoning or complete calls."""

    content: str = ""
    thinking: str = ""
    calls: Sequence[Call] = ()


class MessageParts:
    """Converts parser events to parts of a message; a call is passed on when it is complete."""

    def __init__(self) -> None:
        self._begun: dict[int, tuple[CallBegin, list[str]]] = {}

    def parts(self, events: Iterable[Event]) -> list[MessagePart]:
        """Returns the parts of these events, in order; consecutive texts of one kind are joined."""
        parts: list[MessagePart] = []
        for event in events:
            match event:
                case Content(text):
                    if not (parts and parts[-1].content):
                        parts.append(MessagePart())
                    parts[-1].content += text
                case Reasoning(text):
                    if not (parts and parts[-1].thinking):
                        parts.append(MessagePart())
                    parts[-1].thinking += text
                case CallBegin():
                    self._begun[event.index] = event, []
                case CallArguments(index, text):
                    self._begun[index][1].append(text)
                case CallEnd(index, complete):
                    begin, pieces = self._begun.pop(index)
                    if complete:
                        called = CalledFunction(index, begin.name, arguments_object("".join(pieces)))
                        parts.append(MessagePart(calls=[Call(begin.id or "", called)]))
        return parts


def whole_part(parts: Sequence[MessagePart]) -> MessagePart:
    """Returns all parts as one."""
    return MessagePart(
        "".join(part.content for part in parts),
        "".join(part.thinking for part in parts),
        [call for part in parts for call in part.calls],
    )


class OllamaAnswer:
    """Builds the answer to one request. Durations are those that the engine measured, and the whole request's."""

    def __init__(
        self, http: HttpRequest, service: AppState, ask: PromptRequest, output_format: OutputFormat, watch: Stopwatch
    ) -> None:
        self._http, self._service, self._ask, self._watch = http, service, ask, watch
        self._format, self._tally, self._turns = output_format, usage_of(http), service.cooperative
        self._writer = LogprobsWriter(service.backend.tokenizer, service.cooperative, ask.params)
        self._is_chat, self._model = True, ""

    async def respond(self, model: str, stream: bool, is_chat: bool) -> Response:
        """Runs the request. `model`: its name in the answer; `is_chat`: the answer is a message, not `response`."""
        self._model, self._is_chat = model, is_chat
        asks = [self._ask]
        self._tally.count_prompts(asks)
        if not stream:
            return await whole_response(self._service, self._http, asks, self._whole)
        response = await stream_response(self._service, self._http, asks, self._lines, _failure)
        response.headers["content-type"] = "application/x-ndjson"
        return response

    async def _whole(self, outputs: Sequence[RequestOutput]) -> ChatLine | GenerateLine:
        [output] = outputs
        self._tally.count_output(0, output)
        [last] = output.outputs
        parser = OutputParser(self._format, whole=True)
        events = await parse_all(parser, last.text, self._turns, is_cut_off(last))
        line = self._line(whole_part(MessageParts().parts(events)))
        self._finish(line, output)
        await self._add_logprobs(line, last)
        return line

    async def _lines(self, call: EngineCall) -> AsyncIterator[bytes]:
        parser, parts = OutputParser(self._format), MessageParts()
        async for number, output in call:
            self._tally.count_output(number, output)
            [last] = output.outputs
            events = parser.feed(last.text, last.finish_reason is not None, is_cut_off(last))
            lines = [self._line(part) for part in parts.parts(events)]
            if last.logprobs:
                lines = lines or [self._line(MessagePart())]
                await self._add_logprobs(lines[0], last)
            for line in lines:
                yield encode(line) + b"\n"
            if last.finish_reason is not None:
                end = self._line(MessagePart())
                self._finish(end, output)
                yield encode(end) + b"\n"

    def _line(self, part: MessagePart) -> ChatLine | GenerateLine:
        return answer_line(self._model, part, self._is_chat)

    def _finish(self, line: ChatLine | GenerateLine, output: RequestOutput) -> None:
        times = output.metrics
        line.done, line.done_reason = True, output.outputs[0].finish_reason or "stop"
        line.total_duration, line.load_duration = self._watch.total, self._watch.load
        line.prompt_eval_count, line.eval_count = self._tally.prompt_tokens, self._tally.completion_tokens
        line.prompt_eval_duration = _nanoseconds(times.prefill_time)
        line.eval_duration = _nanoseconds(times.decode_time)

    async def _add_logprobs(self, line: ChatLine | GenerateLine, completion: CompletionOutput) -> None:
        if completion.logprobs is not None:
            line.logprobs = json_list(await self._writer.chat(completion.token_ids, completion.logprobs))


def answer_line(model: str, part: MessagePart, is_chat: bool) -> ChatLine | GenerateLine:
    """Returns a line with a part of the answer."""
    head: dict[str, Any] = {"model": model, "created_at": _now()}
    thinking: dict[str, Any] = {"thinking": part.thinking} if part.thinking else {}
    if not is_chat:
        return GenerateLine(response=part.content, **thinking, **head)
    calls: dict[str, Any] = {"tool_calls": list(part.calls)} if part.calls else {}
    return ChatLine(message=ChatMessage(content=part.content, **thinking, **calls), **head)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float | None) -> int:
    return 0 if seconds is None else max(0, round(seconds * _NANOSECONDS))


def _failure(error: ApiError) -> bytes:
    """Returns the last line of a stream that failed."""
    return encode(ollama_shape(error)) + b"\n"
