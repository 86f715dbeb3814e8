"""Limits for incomplete requests and slow clients: bytes of the head, seconds, connections."""

import asyncio
import weakref
from http import HTTPStatus
from typing import Any, ClassVar, NamedTuple

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quintet.common.unauthenticated import SPARE_CONNECTIONS, UnauthenticatedConnections
from quintet.server.config import ServerConfig
from quintet.server.http.errors import ApiError, openai_shape
from quintet.server.http.sse import encode

REALTIME = "/v1/realtime"  # path of WebSockets
MAX_PIPELINED = 16  # requests of one connection that wait for the first response


class ClientTimeouts(NamedTuple):
    """Seconds that the server waits for a client."""

    head: float = 30.0  # from the first byte (for a new connection: from its start) until the head is complete
    body: float = 120.0  # from the complete head until the body is complete
    reader: float = 120.0  # without reading its response, while the send buffer is full


CLIENT_TIMEOUTS = ClientTimeouts()


def limited_protocol(settings: ServerConfig, patience: ClientTimeouts = CLIENT_TIMEOUTS) -> type[HttpToolsProtocol]:
    """Returns uvicorn's protocol class with these limits; uvicorn makes one object per connection."""
    limits = {
        "max_head": settings.max_header_bytes, "max_body": settings.max_body_bytes, "timeouts": patience,
        "max_connections": settings.max_connections,
        "unauthenticated": UnauthenticatedConnections(settings.max_connections),
    }  # fmt: skip
    return type("BoundedProtocol", (_UpgradableProtocol,), limits)


class _LimitedProtocol(HttpToolsProtocol):
    """Connection in one of three states: in a head (or idle), in a body, or refused (input is ignored)."""

    max_head: ClassVar[int]
    max_body: ClassVar[int]
    max_connections: ClassVar[int]
    unauthenticated: ClassVar[UnauthenticatedConnections["_LimitedProtocol"]]
    timeouts: ClassVar[ClientTimeouts]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.limit_concurrency = None  # uvicorn's answer would be plain text
        self._in_head, self._head_bytes = True, 0
        self._ignores_input = 0  # bytes of a body that came after the answer
        self._refused = False
        self._farewell: ApiError | None = None  # the last answer, once those before it are complete
        self._timer: asyncio.TimerHandle | None = None
        self._reader: asyncio.TimerHandle | None = None  # runs while the client does not read
        self._answered: RequestResponseCycle | None = None  # the request that is being answered, or was last

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        surplus = self.unauthenticated.add(self, self.client[0] if self.client else "")
        if surplus is not None:
            surplus.close_unauthenticated()
        if len(self.connections) > self.max_connections + SPARE_CONNECTIONS:
            self.unauthenticated.oldest.close_unauthenticated()
        self._start_timer(self.timeouts.head)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_reader()
        self.unauthenticated.remove(self)
        self._leave()
        super().connection_lost(exc)

    def close_unauthenticated(self) -> None:
        """Closes this unauthenticated connection, for a newer one."""
        self.unauthenticated.remove(self)
        self.connections.discard(self)  # it closes in the loop's next iteration
        self.transport.abort()

    def mark_authenticated(self) -> bool:
        """Gives an authenticated client a place until it disconnects; returns False if there is none."""
        if self in self.unauthenticated and len(self.connections) - len(self.unauthenticated) < self.max_connections:
            self.unauthenticated.remove(self)
        return self not in self.unauthenticated

    @property
    def is_stuck(self) -> bool:
        return self.flow.write_paused

    def disconnect(self) -> None:
        self.transport.abort()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _leave(self) -> None:
        """Marks the request that is being answered as disconnected. uvicorn marks only the last one: an earlier
        pipelined request would continue and write to a closed handle, which uvloop reports as our error."""
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._in_head:
            self._head_bytes += len(data)
            self._start_timer(self.timeouts.head)
        elif self.cycle.response_complete and self in self.unauthenticated:
            self._ignores_input += len(data)
            if self._ignores_input > self.max_body:
                return self.transport.abort()
        super().data_received(data)
        if self._in_head and self._head_bytes > self.max_head:
            self._refuse(self._too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._refused:
            return
        self.scope["state"]["wire"] = weakref.ref(self)
        self._in_head, self._ignores_input = True, 0
        self._start_timer(self.timeouts.head)

    def on_headers_complete(self) -> None:
        if self._refused:
            return
        self._in_head, self._head_bytes = False, 0
        self._stop_timer()
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.max_head:
            self._refuse(self._too_large())
        elif len(self.pipeline) >= MAX_PIPELINED:
            message = f"more than {MAX_PIPELINED} requests wait on this connection; send fewer before their answers"
            self._refuse(ApiError(503, message, code="too_many_pipelined", headers={"Retry-After": "1"}))
        else:
            super().on_headers_complete()
            self._start_timer(self.timeouts.body)

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._refused:
            return
        self._stop_timer()
        self._in_head, self._head_bytes = True, 0
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_reader()
        self._reader = self.loop.call_later(self.timeouts.reader, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_reader()
        super().resume_writing()

    def _stop_reader(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None

    def send_400_response(self, msg: str) -> None:
        """Refuses a head or body that is not HTTP; uvicorn calls this."""
        error = ApiError(400, "this is no HTTP that the server understands", code="invalid_http")
        self._refuse(error, in_body=not self._in_head)

    def _too_large(self) -> ApiError:
        return ApiError(
            431, f"request line and headers have more than {self.max_head} bytes; send less, or start the server with "
            "--max-header-bytes", code="headers_too_large",
        )  # fmt: skip

    def _start_timer(self, seconds: float) -> None:
        """Starts the timer for the head or body; a running timer is kept."""
        if self._timer is None:
            self._timer = self.loop.call_later(seconds, self._late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self._in_head and self.cycle is not None and not self.cycle.response_complete:
            self._start_timer(self.timeouts.head)  # the previous response is still being sent
        elif self._in_head:
            self._refuse(ApiError(408, f"the request's head was not complete in {self.timeouts.head:g} s"))
        else:
            self.transport.close()  # the route waits for the body, and gets a disconnect

    def _refuse(self, error: ApiError, in_body: bool = False) -> None:
        """Sends the error after the responses to the requests before it, and closes the connection. in_body: the last
        of these requests is at fault, and the error is its response, unless that has begun."""
        if self._refused:
            return
        self._refused, self._farewell = True, error
        self._stop_timer()
        cycle = self.cycle
        if in_body and cycle is not None and not cycle.response_complete:
            if self.pipeline and self.pipeline[0][0] is cycle:
                self.pipeline.popleft()
            elif cycle.response_started:
                return self.transport.close()
            else:
                self._leave()
        self._end_if_answered()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._farewell is not None:
            self._end_if_answered()

    def _end_if_answered(self) -> None:
        """Sends the last answer, once no other is in progress or waits."""
        cycle = self._answered
        if self.pipeline or not (cycle is None or cycle.response_complete or cycle.disconnected):
            return
        if self._farewell is not None and not self.transport.is_closing():
            self.transport.write(_response(self._farewell))
            self.transport.close()


def _response(error: ApiError) -> bytes:
    body = encode(openai_shape(error))
    headers = {
        "content-type": "application/json", "content-length": str(len(body)), "connection": "close", **error.headers,
    }  # fmt: skip
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii") + body


class _UpgradableProtocol(_LimitedProtocol):
    """Connection that may become a WebSocket, whose limits are uvicorn's options then."""

    def _should_upgrade(self) -> bool:
        """Other paths have no WebSocket; a client that asks for one gets the answer to a plain request."""
        return self.url.partition(b"?")[0].rstrip(b"/").endswith(REALTIME.encode()) and super()._should_upgrade()

    def handle_websocket_upgrade(self) -> None:
        self._stop_timer()
        self._stop_reader()
        self.unauthenticated.remove(self)
        super().handle_websocket_upgrade()
