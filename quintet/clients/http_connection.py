"""One HTTP/1.1 connection of a client: reads answers with httptools, in limits of size and time."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, NamedTuple

CONNECT_SECONDS = 30.0
MAX_HEAD = 64 * 2**10  # bytes of an answer's status line and headers
MAX_BUFFERED = 256 * 2**10  # bytes of an answer that wait for a slow reader; then the server has to wait, too
Header = tuple[bytes, bytes]
Sink = Callable[[bytes, float], None]  # a piece of the body, and time.perf_counter() when it was read


class HttpProtocolError(ValueError):
    """The received bytes are no HTTP, or more than a limit allows."""


class ConnectFailed(ConnectionError):
    """No connection came about: nothing was sent."""


class ConnectionLost(ConnectionError):
    """The connection ended before the answer did."""


class HttpTimeout(TimeoutError):
    """Nothing came for too long."""


class HttpTimeouts(NamedTuple):
    """Seconds that a server has: to take a connection, to begin an answer, to go on with it."""

    connect: float = CONNECT_SECONDS
    first_byte: float = 600.0
    idle: float = 600.0


class ResponseHead(NamedTuple):
    """Head of an answer; names of headers are in lower case."""

    status: int
    headers: list[Header]

    def get(self, name: bytes) -> bytes:
        """Returns the first value; b"" if there is none."""
        return next((value for each, value in self.headers if each == name), b"")


class HttpConnection(asyncio.Protocol):
    """One connection, and the exchange that is under way on it. The callbacks of httptools are methods here."""

    def __init__(self) -> None:
        import httptools

        self._errors = (httptools.HttpParserError, httptools.HttpParserUpgrade)
        self._parser = httptools.HttpResponseParser(self)
        self._transport: Any = None
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._error: Exception | None = None
        self._paused = self._busy = False
        self.closed = False
        self._reset(None)

    def _reset(self, sink: Sink | None) -> None:
        self.head: ResponseHead | None = None
        self._sink = sink
        self._headers: list[Header] = []
        self.pieces: list[bytes] = []
        self._size = self._head_size = 0
        self.heard = self.complete = self.reusable = self._until_close = False
        self.last = time.perf_counter()  # when something came, or was sent

    def start_exchange(self, message: bytes, times: HttpTimeouts, sink: Sink | None) -> None:
        """Sends a request. The body of an answer with status 200 goes to the sink, if there is one, as it comes."""
        self._reset(sink)
        self._busy, self._times = True, times
        self._transport.write(message)
        self._timer = self._loop.call_later(times.first_byte, self._watch)

    def end_exchange(self) -> None:
        """Ends the exchange."""
        self._busy = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def abort(self) -> None:
        """Ends the connection without waiting for anything."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    async def wait(self) -> None:
        """Waits until something has come for the reader. Raises what went wrong."""
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self._error is not None and not (self.pieces or self.complete):
            raise self._error

    def take_chunks(self) -> bytes:
        """Returns the pieces that have come."""
        content = self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces)
        self.pieces.clear()
        self._size = 0
        if self._paused and not self.closed:
            self._paused, self.last = False, time.perf_counter()
            self._transport.resume_reading()
        return content

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self._error is None and not self.complete:
            self._error = error
        self._wake()

    def _watch(self) -> None:
        """Ends an exchange that is silent; one timer for each, however many pieces come."""
        limit = self._times.idle if self.heard else self._times.first_byte
        left = limit if self._paused else self.last + limit - time.perf_counter()
        if left > 0:
            self._timer = self._loop.call_later(left, self._watch)
        else:
            self._fail(HttpTimeout(f"nothing came for {limit:g} s"))
            self.abort()

    # ---------------------------------------------------------------------------------------------- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if not self._busy:  # more than was asked for: the next answer would be out of step
            self.abort()
            return
        self.last = time.perf_counter()
        if not self.heard:
            self.heard = True
            if self._timer is not None and self._times.idle < self._times.first_byte:
                self._timer.cancel()
                self._timer = self._loop.call_later(self._times.idle, self._watch)
        if self.head is None:
            self._head_size += len(data)
        try:
            self._parser.feed_data(data)
        except self._errors as error:
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            self._disconnect(f"its answer is no HTTP ({reason})")
        if self.head is None and self._head_size > MAX_HEAD:
            self._disconnect(f"its headers are longer than {MAX_HEAD} bytes")
        if self._size > MAX_BUFFERED and not (self._paused or self.closed or self.complete):
            self._paused = True
            self._transport.pause_reading()
        if self.pieces or self.complete:
            self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed, self.reusable = True, False
        if self._until_close and error is None and self._error is None:
            self.complete = True
        self._fail(ConnectionLost(f"the connection ended ({error})" if error else "it ended the connection"))

    def _disconnect(self, why: str) -> None:
        self._fail(HttpProtocolError(why))
        self.abort()

    # ---------------------------------------------------------------------------------------------------- httptools

    def on_message_begin(self) -> None:
        if self.complete:  # a second answer to one request
            self.reusable = False
            self.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.complete:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # "continue" and its kind announce the answer
            self._headers = []
            return
        if self.head is not None:
            return
        if sum(len(name) + len(value) for name, value in self._headers) > MAX_HEAD:
            self._disconnect(f"its headers are longer than {MAX_HEAD} bytes")
            return
        names = {name for name, _ in self._headers}
        self._until_close = not ({b"content-length", b"transfer-encoding"} & names) and status not in (204, 304)
        self.head = ResponseHead(status, self._headers)
        if status != 200:
            self._sink = None
        self._wake()

    def on_body(self, data: bytes) -> None:
        if self.complete or self._error is not None:
            return
        if self._sink is None:
            self.pieces.append(data)
            self._size += len(data)
            return
        try:
            self._sink(data, self.last)
        except Exception as error:  # httptools would make a parser's error of it
            self._fail(error)
            self.abort()

    def on_message_complete(self) -> None:
        if self.head is None or self.complete or self._error is not None:
            return
        self.complete = True
        self.reusable = self._parser.should_keep_alive() and not self._until_close and not self.closed
