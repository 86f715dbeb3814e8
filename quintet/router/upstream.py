"""Connections to one server: an answer's head is handed over when it is there, and its body piece by piece."""

import asyncio
import contextlib
import ssl
from typing import Any, NamedTuple

import httptools

from quintet.clients.http_client import MAX_HEAD, Address, ConnectionLost, ProtocolError

IDLE = 4.0  # seconds after which a connection is not used again: uvicorn's servers close them after five
MAX_FREE = 512  # connections that are kept for the next requests
HELD = 256 * 2**10  # bytes of an answer that wait for a slow client; then the server has to wait, too
Header = tuple[bytes, bytes]


class Unreached(ConnectionError):
    """No connection came about: nothing was sent."""


class Late(TimeoutError):
    """Nothing came for too long."""


class Times(NamedTuple):
    """Seconds that a server has: to take a connection, to begin an answer, to go on with it."""

    connect: float
    first_byte: float
    idle: float


class Head(NamedTuple):
    """Head of an answer; names of headers are in lower case."""

    status: int
    headers: list[Header]

    def get(self, name: bytes) -> bytes:
        """The first value; b"" if there is none."""
        return next((value for each, value in self.headers if each == name), b"")


class Upstream:
    """One server's connections. They are used for one exchange after the other."""

    def __init__(self, address: Address, times: Times, context: ssl.SSLContext | None = None) -> None:
        """`context` where the address has TLS."""
        self.address, self._times, self._context = address, times, context
        self._free: list[_Connection] = []
        self.host = address.authority.encode()

    async def send(self, message: bytes, fresh: bool = False, times: Times | None = None) -> "Exchange":
        """Sends a whole request, as message() writes it; on a new connection, if it has to be fresh.

        Raises Unreached. Later errors are raised by the exchange.
        """
        patience = times or self._times
        connection = None if fresh else self._kept()
        reused = connection is not None
        if connection is None:
            connection = await self._connect(patience.connect)
        connection.begin(message, patience)
        return Exchange(self, connection, reused)

    def message(self, method: bytes, target: bytes, headers: list[Header], body: bytes = b"") -> bytes:
        """A request's bytes. `headers` have neither host nor length, `target` is the path with its query."""
        parts = [method, b" ", self.address.prefix.encode(), target, b" HTTP/1.1\r\nhost: ", self.host, b"\r\n"]
        for name, value in headers:
            parts += (name, b": ", value, b"\r\n")
        if body or method != b"GET":
            parts += (b"content-length: ", str(len(body)).encode(), b"\r\n")
        return b"".join((*parts, b"\r\n", body))

    def close(self) -> None:
        """Ends the connections that are not in use."""
        for each in self._free:
            each.abort()
        self._free.clear()

    def keep(self, connection: "_Connection") -> None:
        """Keeps a connection for the next request."""
        if len(self._free) < MAX_FREE:
            self._free.append(connection)
        else:
            connection.abort()

    def _kept(self) -> "_Connection | None":
        """Returns the connection that was used last, if it is open and young."""
        now = asyncio.get_running_loop().time()
        while self._free:
            found = self._free.pop()
            if not found.closed and now - found.last < IDLE:
                return found
            found.abort()
        return None

    async def _connect(self, seconds: float) -> "_Connection":
        loop, address = asyncio.get_running_loop(), self.address
        try:
            made = loop.create_connection(_Connection, address.host, address.port, ssl=self._context)
            _, connection = await asyncio.wait_for(made, seconds)
        except (asyncio.TimeoutError, TimeoutError):
            raise Unreached(f"no connection within {seconds:g} s") from None
        except (OSError, ssl.SSLError) as error:
            raise Unreached(f"no connection: {error.strerror or error}") from None
        return connection


class Exchange:
    """One request that was sent, and its answer. Has to be closed."""

    def __init__(self, upstream: Upstream, connection: "_Connection", reused: bool) -> None:
        self._upstream, self._connection = upstream, connection
        self.reused = reused  # the connection, which the server may have closed in the same moment

    @property
    def heard(self) -> bool:
        """True once any byte of an answer came."""
        return self._connection.heard

    @property
    def whole(self) -> bool:
        """True if nothing more will come than what piece() has."""
        return self._connection.complete

    async def head(self) -> Head:
        """Raises Broken, NotHttp, Late."""
        connection = self._connection
        while connection.head is None:
            await connection.wait()
        return connection.head

    async def piece(self) -> bytes:
        """Returns what of the body has come, or comes next; b"" at its end. Raises as head() does."""
        connection = self._connection
        while not connection.pieces:
            if connection.complete:
                return b""
            await connection.wait()
        return connection.take()

    async def body(self, most: int) -> bytes:
        """Returns the whole body. NotHttp if it is more than `most` bytes."""
        found = bytearray()
        while piece := await self.piece():
            found += piece
            if len(found) > most:
                raise ProtocolError(f"its answer is longer than {most} bytes")
        return bytes(found)

    def close(self) -> None:
        """Keeps the connection if the answer is whole; else ends it, so that the server sees that the client is
        gone."""
        connection, self._connection = self._connection, _NONE
        if connection is _NONE:
            return
        connection.end()
        if connection.reusable:
            self._upstream.keep(connection)
        else:
            connection.abort()


class _Connection(asyncio.Protocol):
    """One connection, and the exchange that is under way on it. The callbacks of httptools are methods here."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._transport: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._error: Exception | None = None
        self._paused = self._busy = False
        self.closed = False
        self.last = 0.0  # the loop's time when something came, or was sent
        self._reset()

    def _reset(self) -> None:
        self.head: Head | None = None
        self._headers: list[Header] = []
        self.pieces: list[bytes] = []
        self._size = self._head_size = 0
        self.heard = self.complete = self.reusable = self._until_close = False

    def begin(self, message: bytes, times: Times) -> None:
        """Sends a request."""
        self._reset()
        assert self._loop is not None
        self._busy, self._times, self.last = True, times, self._loop.time()
        self._transport.write(message)
        self._timer = self._loop.call_later(times.first_byte, self._watch)

    def end(self) -> None:
        """Ends the exchange."""
        self._busy = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def abort(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    async def wait(self) -> None:
        """Waits until something has come. Raises what went wrong."""
        if self._error is not None:
            raise self._error
        assert self._loop is not None
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self._error is not None and not (self.pieces or self.complete):
            raise self._error

    def take(self) -> bytes:
        """Returns the pieces that have come."""
        found = self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces)
        self.pieces.clear()
        self._size = 0
        if self._paused and not self.closed:
            assert self._loop is not None
            self._paused, self.last = False, self._loop.time()
            self._transport.resume_reading()
        return found

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self._error is None and not self.complete:
            self._error = error
        self._wake()

    def _watch(self) -> None:
        """One timer for each exchange, however many pieces come."""
        assert self._loop is not None
        limit = self._times.idle if self.heard else self._times.first_byte
        left = limit if self._paused else self.last + limit - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._watch)
        else:
            self._fail(Late(f"nothing came for {limit:g} s"))
            self.abort()

    # ---------------------------------------------------------------------------------------------- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._loop = transport, asyncio.get_running_loop()
        self.last = self._loop.time()

    def data_received(self, data: bytes) -> None:
        assert self._loop is not None
        if not self._busy:  # more than was asked for: the next answer would be out of step
            self.abort()
            return
        if not self.heard:
            self.heard = True
            if self._timer is not None and self._times.idle < self._times.first_byte:
                self._timer.cancel()
                self._timer = self._loop.call_later(self._times.idle, self._watch)
        self.last = self._loop.time()
        if self.head is None:
            self._head_size += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(ProtocolError(f"its answer is no HTTP ({type(error).__name__})"))
            self.abort()
        if self.head is None and self._head_size > MAX_HEAD:
            self._fail(ProtocolError(f"its headers are longer than {MAX_HEAD} bytes"))
            self.abort()
        if self._size > HELD and not self._paused and not self.closed:
            self._paused = True
            self._transport.pause_reading()
        if self.head is not None:
            self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed, self.reusable = True, False
        if self._until_close and error is None:
            self.complete = True
        self._fail(ConnectionLost(f"the connection ended ({error})" if error else "it ended the connection"))

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
            self._fail(ProtocolError(f"its headers are longer than {MAX_HEAD} bytes"))
            self.abort()
            return
        names = {name for name, _ in self._headers}
        self._until_close = not ({b"content-length", b"transfer-encoding"} & names) and status not in (204, 304)
        self.head = Head(status, self._headers)

    def on_body(self, data: bytes) -> None:
        if not self.complete:
            self.pieces.append(data)
            self._size += len(data)

    def on_message_complete(self) -> None:
        if self.head is None or self.complete:
            return
        self.complete = True
        self.reusable = self._parser.should_keep_alive() and not self._until_close and not self.closed


_NONE: Any = object()


def client_context(file: str | None) -> ssl.SSLContext:
    """Returns the TLS context that checks https servers. ValueError if the file cannot be used."""
    with contextlib.suppress(OSError, ssl.SSLError):
        return ssl.create_default_context(cafile=file)
    raise ValueError(f"the authorities in {file!r} cannot be used; give a file of PEM certificates")
