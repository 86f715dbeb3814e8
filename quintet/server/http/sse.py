"""Server-sent events: a response that is written while its call runs. Source: WHATWG HTML, "Server-sent events"."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quintet.server.http.engine_call import EngineCall
from quintet.server.http.errors import ApiError, ClientGone, as_api_error, openai_shape

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"

encode = msgspec.json.Encoder().encode


def event(data: Any, name: str | None = None) -> bytes:
    """One event; `data` becomes JSON."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + encode(data) + b"\n\n"


def openai_failure(error: ApiError) -> bytes:
    """Returns the events that end a failed stream, in the form that OpenAI's clients expect."""
    return event(openai_shape(error)) + DONE


async def with_comments(events: AsyncIterator[bytes], seconds: float) -> AsyncIterator[bytes]:
    """Yields the events, and a comment after each stretch of so many seconds without one. One task awaits the next
    event throughout: a timeout must not cancel it. That task has ended when this has."""
    coming = asyncio.ensure_future(anext(events, None))
    try:
        while True:
            done, _ = await asyncio.wait({coming}, timeout=seconds)
            if not done:
                yield COMMENT
                continue
            if (chunk := coming.result()) is None:
                return
            yield chunk
            coming = asyncio.ensure_future(anext(events, None))
    finally:
        coming.cancel()
        await asyncio.wait({coming})
        if not coming.cancelled():
            coming.exception()  # the stream has ended: what it failed with has no reader
        await _close(events)


async def _close(events: AsyncIterator[bytes]) -> None:
    """Ends what is not read to its end; a generator's `finally` runs now, not when it is collected."""
    if (close := getattr(events, "aclose", None)) is not None:
        await close()


class EventStream(Response):
    """Sends what `events` yields, then closes the call, however that ends. The call is open and has been peeked at."""

    media_type = "text/event-stream"

    def __init__(
        self,
        call: EngineCall,
        events: AsyncIterator[bytes],
        failure: Callable[[ApiError], bytes] = openai_failure,
        keep_alive: float = 0.0,
    ) -> None:
        """`keep_alive`: seconds without an event after which a comment is sent; 0: never."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._call, self._failure = call, failure
        self._events = with_comments(events, keep_alive) if keep_alive else events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope.get("http_version") == "1.0":  # which has no chunks, so that a length must go before
                whole = b"".join([chunk async for chunk in self._chunks()])
                self.headers["content-length"] = str(len(whole))
                await self._start(send)
                await send({"type": "http.response.body", "body": whole, "more_body": False})
                return
            await self._start(send)
            async with aclosing(self._chunks()) as chunks:
                async for chunk in chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientGone:
            return
        finally:
            try:
                await _close(self._events)  # it asks the call for its next output
            finally:
                self._call.close()

    async def _start(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        """The events; what goes wrong is the last."""
        try:
            async for chunk in self._events:
                yield chunk
        except ClientGone:
            raise
        except Exception as error:
            if not isinstance(error, ApiError):
                logger.exception("a stream failed")
            yield self._failure(as_api_error(error))
