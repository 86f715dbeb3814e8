"""Answer to a client: head and body, a client that leaves, and an answer that breaks off."""

import asyncio
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from quintet.clients.http_connection import Header
from quintet.router.routes import ApiDialect
from quintet.server.http.errors import ApiError, ClientGone, anthropic_shape
from quintet.server.http.ids import HEADER
from quintet.server.http.middleware.auth import OWNER_HEADER
from quintet.server.http.middleware.base import connection_of
from quintet.server.http.sse import event, openai_failure

HOP_BY_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
    b"trailer", b"transfer-encoding", b"upgrade",
})  # fmt: skip
_OURS = HOP_BY_HOP | {b"date", b"server", HEADER.encode(), OWNER_HEADER.encode()}
_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")  # of an event


class ResponseStream:
    """Answer to one request. While it is watched, a client that leaves ends the task that answers it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._name = (HEADER.encode(), request_id.encode())
        self._task: asyncio.Task[Any] | None = None  # that answers the request
        self._watch_task: asyncio.Task[None] | None = None
        self.started = self.ended = self.client_gone = False
        self.refusal: ApiError | None = None  # given while the request ran
        self.status = 0
        self.servers: list[str] = []  # that were asked, in order
        self._events = False  # the answer is a stream of them
        self._tail = b"\n\n"  # the last bytes that went out

    def watch(self) -> None:
        """Starts to watch for a client that leaves; to be called once the body has come."""
        self._task = asyncio.current_task()
        self._watch_task = asyncio.get_running_loop().create_task(self._watch())

    def unwatch(self) -> None:
        if self._watch_task is not None:
            self._watch_task.cancel()

    def refuse(self, error: ApiError) -> None:
        """Ends the request with an error, unless its answer has begun."""
        if not self.started and self.refusal is None and self._task is not None:
            self.refusal = error
            self._task.cancel()

    async def start(self, status: int, headers: list[Header]) -> None:
        """Sends the head, as the server gave it, without headers of the connection to the server."""
        out = [each for each in headers if each[0] not in _OURS]
        for name, value in headers:
            if name == b"connection":
                listed = {each.strip().lower() for each in value.split(b",")}
                out = [each for each in out if each[0] not in listed]
            elif name == b"content-type":
                self._events = value.startswith(b"text/event-stream")
        self.started, self.status = True, status
        await self._say({"type": "http.response.start", "status": status, "headers": [*out, self._name]})

    async def body(self, piece: bytes, more: bool) -> None:
        if piece:
            self._tail = (self._tail + piece)[-4:]
        self.ended = not more
        await self._say({"type": "http.response.body", "body": piece, "more_body": more})

    async def abort(self, error: ApiError, speech: ApiDialect) -> None:
        """Ends an answer that has begun and does not go on: with an error event, if an event has just ended; else the
        connection is cut, so that the client does not take the answer for whole."""
        if self._events and self._tail.endswith(_ENDS):
            await self.body(_error_event(error, speech), more=False)
            return
        wire = connection_of(self._scope)
        if wire is None:
            raise error
        wire.disconnect()
        if self._watch_task is not None:
            await asyncio.wait([self._watch_task])

    async def _say(self, message: Message) -> None:
        if self.client_gone:
            raise ClientGone
        await self._send(message)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self.ended and self._task is not None:
            self.client_gone = True
            self._task.cancel()


def _error_event(error: ApiError, speech: ApiDialect) -> bytes:
    if speech is ApiDialect.ANTHROPIC:
        return event(anthropic_shape(error), "error")
    if speech is ApiDialect.RESPONSES:
        return event({"type": "error", "code": error.code, "message": error.message, "param": error.param}, "error")
    return openai_failure(error)
