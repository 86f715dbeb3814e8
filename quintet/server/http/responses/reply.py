"""One response while it grows: the object that clients read, and the numbered events that tell of it."""

import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from quintet.outputs import CompletionOutput, RequestOutput
from quintet.server.http.errors import ApiError
from quintet.server.http.ids import new_id
from quintet.server.http.logprobs import listed
from quintet.server.http.responses.shapes import (
    Incomplete,
    InputDetails,
    OutputDetails,
    OutputMessage,
    OutputText,
    ResponseFailure,
    ResponseObject,
    ResponseUsage,
)
from quintet.server.http.sse import event

Score = Callable[[CompletionOutput], Awaitable[list[bytes]]]  # the log-probabilities of an output, to be listed()

_WHOLE = ("completed", "incomplete")


class Reply:
    """Outputs go in; the response and its parts come out."""

    def __init__(self, begun: ResponseObject, score: Score | None = None) -> None:
        self.id, self.status, self.item_id = begun.id, begun.status, f"msg_{new_id()}"
        self._begun, self._score = begun, score
        self._text: list[str] = []
        self._logprobs: list[bytes] = []  # as JSON
        self._failure: ResponseFailure | None = None
        self._finish_reason: str | None = None
        self._ended: int | None = None  # Unix time
        self._prompt_tokens = self._cached_tokens = self._tokens = 0

    @property
    def over(self) -> bool:
        return self.status not in ("queued", "in_progress")

    async def take(self, output: RequestOutput) -> tuple[str, list[bytes]]:
        """What the output adds: text and log-probabilities."""
        completion = output.outputs[0]
        scores = [] if self._score is None else await self._score(completion)
        self._text.append(completion.text)
        self._logprobs += scores
        self._tokens += len(completion.token_ids)
        self._prompt_tokens = len(output.prompt_token_ids)
        self._cached_tokens = output.num_cached_tokens
        self._finish_reason = completion.finish_reason
        return completion.text, scores

    def end(self) -> None:
        """All outputs were taken."""
        self.status = "incomplete" if self._finish_reason == "length" else "completed"
        self._ended = int(time.time())

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
            output=[self.message()] if whole or self._tokens else [],
            usage=self._usage() if whole else None,
        )

    def message(self) -> OutputMessage:
        """The one item of the output."""
        status = "completed" if self.status == "completed" else "incomplete" if self.over else "in_progress"
        return OutputMessage(id=self.item_id, status=status, content=[self.part()])

    def part(self) -> OutputText:
        """The one part of its content."""
        return OutputText(text="".join(self._text), logprobs=listed(self._logprobs))

    def _usage(self) -> ResponseUsage:
        return ResponseUsage(
            self._prompt_tokens,
            InputDetails(self._cached_tokens),
            self._tokens,
            OutputDetails(),
            self._prompt_tokens + self._tokens,
        )


class Events:
    """Writes the events of a reply in the order in which clients expect them."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self._number = 0
        self._place = {"item_id": reply.item_id, "output_index": 0, "content_index": 0}
        self._held: list[bytes] = []  # log-probabilities of tokens whose text has not come out yet

    def begin(self) -> list[bytes]:
        """Before the first output; a response that waits in the background says so."""
        made = [self._event("response.created", response=self.reply.object())]
        if self.reply.status == "queued":
            return [*made, self._event("response.queued", response=self.reply.object())]
        return [*made, *self.start()]

    def start(self) -> list[bytes]:
        """The engine works on it."""
        self.reply.status = "in_progress"
        item = OutputMessage(id=self.reply.item_id, status="in_progress", content=[])
        return [
            self._event("response.in_progress", response=self.reply.object()),
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **self._place, part=OutputText(text="")),
        ]

    async def take(self, output: RequestOutput) -> list[bytes]:
        """The event of an output, if it adds text."""
        text, scores = await self.reply.take(output)
        if scores:
            self._held += scores
        if not text:
            return []
        held, self._held = self._held, []
        return [self._event("response.output_text.delta", **self._place, delta=text, logprobs=listed(held))]

    def end(self) -> list[bytes]:
        reply = self.reply
        reply.end()
        part = reply.part()
        return [
            self._event("response.output_text.done", **self._place, text=part.text, logprobs=part.logprobs),
            self._event("response.content_part.done", **self._place, part=part),
            self._event("response.output_item.done", output_index=0, item=reply.message()),
            self._event(f"response.{reply.status}", response=reply.object()),
        ]

    def fail(self, error: ApiError) -> bytes:
        self.reply.fail(error)
        return self._event("response.failed", response=self.reply.object())

    def cancel(self) -> bytes:
        """OpenAI has no event for it; without one a reader could not tell it from a lost connection."""
        self.reply.cancel()
        message = "the response was cancelled"
        return self._event("error", code="response_cancelled", message=message, param=None)

    def _event(self, kind: str, **rest: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **rest}
        self._number += 1
        return event(data, kind)
