"""One response while it grows: the object that clients read, and the numbered events that tell of it."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec

from quintet.engine.speech import Speech
from quintet.outputs import CompletionOutput, RequestOutput
from quintet.parsers import Content, Event
from quintet.server.http.errors import ApiError
from quintet.server.http.responses.output import Output
from quintet.server.http.responses.served_items import Step
from quintet.server.http.responses.shapes import (
    Incomplete,
    InputDetails,
    OutputDetails,
    ResponseFailure,
    ResponseObject,
    ResponseUsage,
)
from quintet.server.http.sse import event
from quintet.server.http.told import hear_all
from quintet.server.http.turns import Turns

Score = Callable[[CompletionOutput], Awaitable[list[bytes]]]  # the log-probabilities of an output, to be listed()

_WHOLE = ("completed", "incomplete")


class Reply:
    """Outputs go in; the response and its parts come out."""

    def __init__(
        self,
        begun: ResponseObject,
        speech: Speech,
        turns: Turns,
        score: Score | None = None,
        output: Output | None = None,
    ) -> None:
        """`output`: an empty one."""
        self.id, self.status = begun.id, begun.status
        self._begun, self._speech, self._turns, self._score = begun, speech, turns, score
        self.said = output or Output()
        self._failure: ResponseFailure | None = None
        self._finish_reason: str | None = None
        self._ended: int | None = None  # Unix time
        self._prompt_tokens = self._cached_tokens = self._tokens = 0
        self._earlier_prompts = self._earlier_cached = self._earlier_thought = 0  # tokens of the rounds before this one

    @property
    def over(self) -> bool:
        return self.status not in ("queued", "in_progress")

    @property
    def item_ids(self) -> tuple[str, ...]:
        """Of what was said so far."""
        return self.said.ids

    async def take(self, output: RequestOutput) -> list[Step]:
        """What the output adds."""
        completion = output.outputs[0]
        scores = [] if self._score is None else await self._score(completion)
        self._tokens += len(completion.token_ids)
        self._speech.count(completion.token_ids)
        self._prompt_tokens = len(output.prompt_token_ids)
        self._cached_tokens = output.num_cached_tokens
        self._finish_reason = completion.finish_reason
        return self.said.take(await self._heard(completion), scores)

    @property
    def goes_on(self) -> bool:
        """Whether the round that has ended called tools that are to be carried out."""
        return bool(self.said.waiting) and self._finish_reason != "length"

    @property
    def num_tokens(self) -> int:
        """Of the output so far."""
        return self._tokens

    def again(self, speech: Speech) -> None:
        """A further round begins."""
        self._earlier_thought += self._speech.thought or 0
        self._speech = speech
        self._earlier_prompts += self._prompt_tokens
        self._earlier_cached += self._cached_tokens
        self.said.begin_round()

    def cut_short(self) -> None:
        """No tokens are left for a further round."""
        self._finish_reason = "length"

    def end(self) -> list[Step]:
        """All outputs were taken."""
        self.status = "incomplete" if self._finish_reason == "length" else "completed"
        self._ended = int(time.time())
        return self.said.end(self.status)

    def fail(self, error: ApiError) -> None:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"  # of those that OpenAI's clients know
        self.status, self._failure = "failed", ResponseFailure(code, error.message)

    def cancel(self) -> None:
        self.status = "cancelled"

    def object(self) -> ResponseObject:
        """The response as it is now."""
        whole = self.status in _WHOLE
        return msgspec.structs.replace(
            self._begun,
            status=self.status,
            completed_at=self._ended if self.status == "completed" else None,
            error=self._failure,
            incomplete_details=Incomplete("max_output_tokens") if self.status == "incomplete" else None,
            output=self.said.items("incomplete" if self.over else "in_progress"),
            usage=self._usage() if whole else None,
        )

    async def _heard(self, completion: CompletionOutput) -> list[Event]:
        text, ended = completion.text, completion.finish_reason is not None
        if self._speech.listening.plain:
            return [Content(text)] if text else []
        if ended:  # it may be all of a long answer
            return await hear_all(self._speech, text, self._turns)
        return self._speech.hear(text, ended)

    def _usage(self) -> ResponseUsage:
        """Of all rounds: each reads what was said before it."""
        prompts = self._earlier_prompts + self._prompt_tokens
        return ResponseUsage(
            prompts,
            InputDetails(self._earlier_cached + self._cached_tokens),
            self._tokens,
            OutputDetails(self._earlier_thought + (self._speech.thought or 0)),
            prompts + self._tokens,
        )


class Events:
    """Writes the events of a reply in the order in which clients expect them."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self._number = 0

    def begin(self) -> list[bytes]:
        """Before the first output; a response that waits in the background says so."""
        made = [self._event("created", response=self.reply.object())]
        if self.reply.status == "queued":
            return [*made, self._event("queued", response=self.reply.object())]
        return [*made, *self.start()]

    def start(self) -> list[bytes]:
        """The engine works on it."""
        self.reply.status = "in_progress"
        return [self._event("in_progress", response=self.reply.object())]

    async def told(self, rounds: AsyncIterator[list[Step]]) -> AsyncIterator[list[bytes]]:
        """All further ones, up to the last."""
        async for steps in rounds:
            start = self.start() if self.reply.status == "queued" else []
            yield [*start, *(self._event(kind, **fields) for kind, fields in steps)]
        yield self.end()

    def end(self) -> list[bytes]:
        steps = [self._event(kind, **fields) for kind, fields in self.reply.end()]
        return [*steps, self._event(self.reply.status, response=self.reply.object())]

    def fail(self, error: ApiError) -> bytes:
        self.reply.fail(error)
        return self._event("failed", response=self.reply.object())

    def cancel(self) -> bytes:
        """OpenAI has no event for it; without one a reader could not tell it from a lost connection."""
        self.reply.cancel()
        return self._write("error", code="response_cancelled", message="the response was cancelled", param=None)

    def _event(self, kind: str, **rest: Any) -> bytes:
        return self._write(f"response.{kind}", **rest)

    def _write(self, kind: str, **rest: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **rest}
        self._number += 1
        return event(data, kind)
