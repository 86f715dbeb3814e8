"""Builds a response from engine outputs: the response object, and its numbered stream events."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec

from quintet.chat.output_parser import OutputParser, is_cut_off
from quintet.outputs import CompletionOutput, RequestOutput
from quintet.parsers import Content, Event
from quintet.server.http.cooperative import CooperativeWork
from quintet.server.http.errors import ApiError
from quintet.server.http.openai.messages import parse_all
from quintet.server.http.responses.mcp.items import ResponseEvent
from quintet.server.http.responses.output import OutputBuilder
from quintet.server.http.responses.protocol import (
    Incomplete,
    InputDetails,
    OutputDetails,
    ResponseFailure,
    ResponseObject,
    ResponseUsage,
)
from quintet.server.http.sse import event

ScoreOutput = Callable[
    [CompletionOutput], Awaitable[list[bytes]]
]  # returns the log-probabilities of an output, for listed()

_FINAL_STATUSES = ("completed", "incomplete")


class ResponseReply:
    """Converts engine outputs to a response and its stream events."""

    def __init__(
        self,
        begun: ResponseObject,
        speech: OutputParser,
        turns: CooperativeWork,
        score: ScoreOutput | None = None,
        output: OutputBuilder | None = None,
    ) -> None:
        """`output`: without items."""
        self.id, self.status = begun.id, begun.status
        self._begun, self._speech, self._turns, self._score = begun, speech, turns, score
        self.output = output or OutputBuilder()
        self._failure: ResponseFailure | None = None
        self._finish_reason: str | None = None
        self._ended: int | None = None  # Unix time
        self._prompt_tokens = self._cached_tokens = self._tokens = 0
        self._earlier_prompts = self._earlier_cached = self._earlier_thought = 0  # tokens of the rounds before this one

    @property
    def is_over(self) -> bool:
        return self.status not in ("queued", "in_progress")

    @property
    def item_ids(self) -> tuple[str, ...]:
        """Ids of the output items so far."""
        return self.output.ids

    async def add_output(self, output: RequestOutput) -> list[ResponseEvent]:
        """Adds an engine output; returns its stream events."""
        completion = output.outputs[0]
        scores = [] if self._score is None else await self._score(completion)
        self._tokens += len(completion.token_ids)
        self._speech.count(completion.token_ids)
        self._prompt_tokens = len(output.prompt_token_ids)
        self._cached_tokens = output.num_cached_tokens
        self._finish_reason = completion.finish_reason
        return self.output.add_events(await self._heard(completion), scores)

    @property
    def has_calls_to_run(self) -> bool:
        """True if the ended round has tool calls to carry out."""
        return bool(self.output.waiting_calls) and self._finish_reason != "length"

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return self._tokens

    def begin_round(self, speech: OutputParser) -> None:
        """Begins another round."""
        self._earlier_thought += self._speech.num_reasoning_tokens or 0
        self._speech = speech
        self._earlier_prompts += self._prompt_tokens
        self._earlier_cached += self._cached_tokens
        self.output.begin_round()

    def end_incomplete(self) -> None:
        """Ends the response as incomplete: no tokens are left for another round."""
        self._finish_reason = "length"

    def end(self) -> list[ResponseEvent]:
        """Ends the response after its last output."""
        self.status = "incomplete" if self._finish_reason == "length" else "completed"
        self._ended = int(time.time())
        return self.output.end(self.status)

    def fail(self, error: ApiError) -> None:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"  # of those that OpenAI's clients know
        self.status, self._failure = "failed", ResponseFailure(code, error.message)

    def cancel(self) -> None:
        self.status = "cancelled"

    def response(self) -> ResponseObject:
        """The response as it is now."""
        whole = self.status in _FINAL_STATUSES
        return msgspec.structs.replace(
            self._begun,
            status=self.status,
            completed_at=self._ended if self.status == "completed" else None,
            error=self._failure,
            incomplete_details=Incomplete("max_output_tokens") if self.status == "incomplete" else None,
            output=self.output.items("incomplete" if self.is_over else "in_progress"),
            usage=self._usage() if whole else None,
        )

    async def _heard(self, completion: CompletionOutput) -> list[Event]:
        text, ended = completion.text, completion.finish_reason is not None
        if self._speech.output_format.plain:
            return [Content(text)] if text else []
        if ended:  # may be a whole long answer: parse in pieces
            return await parse_all(self._speech, text, self._turns, is_cut_off(completion))
        return self._speech.feed(text, ended)

    def _usage(self) -> ResponseUsage:
        """Usage of all rounds; each round reads the earlier output as prompt tokens again."""
        prompts = self._earlier_prompts + self._prompt_tokens
        return ResponseUsage(
            prompts,
            InputDetails(self._earlier_cached + self._cached_tokens),
            self._tokens,
            OutputDetails(self._earlier_thought + (self._speech.num_reasoning_tokens or 0)),
            prompts + self._tokens,
        )


class ResponseEventWriter:
    """Writes the events of a reply in the order that clients expect."""

    def __init__(self, reply: ResponseReply) -> None:
        self.reply = reply
        self._number = 0

    def begin(self) -> list[bytes]:
        """Returns the events before the first output; a background response begins as queued."""
        made = [self._event("created", response=self.reply.response())]
        if self.reply.status == "queued":
            return [*made, self._event("queued", response=self.reply.response())]
        return [*made, *self.start()]

    def start(self) -> list[bytes]:
        """Marks the response as in progress."""
        self.reply.status = "in_progress"
        return [self._event("in_progress", response=self.reply.response())]

    async def all_events(self, rounds: AsyncIterator[list[ResponseEvent]]) -> AsyncIterator[list[bytes]]:
        """Yields all further events, up to the last."""
        async for steps in rounds:
            start = self.start() if self.reply.status == "queued" else []
            yield [*start, *(self._event(kind, **fields) for kind, fields in steps)]
        yield self.end()

    def end(self) -> list[bytes]:
        steps = [self._event(kind, **fields) for kind, fields in self.reply.end()]
        return [*steps, self._event(self.reply.status, response=self.reply.response())]

    def fail(self, error: ApiError) -> bytes:
        self.reply.fail(error)
        return self._event("failed", response=self.reply.response())

    def cancel(self) -> bytes:
        """Cancels the response. OpenAI has no event for it; without one it would look like a lost connection."""
        self.reply.cancel()
        return self._write("error", code="response_cancelled", message="the response was cancelled", param=None)

    def _event(self, kind: str, **rest: Any) -> bytes:
        return self._write(f"response.{kind}", **rest)

    def _write(self, kind: str, **rest: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **rest}
        self._number += 1
        return event(data, kind)
