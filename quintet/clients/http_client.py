"""A small HTTP/1.1 client for many streamed answers at once: nothing stands between the socket and the clock."""

import asyncio
import ssl
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
Sink = Callable[[bytes, float], None]  # a piece of the body, and time.perf_counter() when it was read

CONNECT_SECONDS = 30.0
MAX_HEAD = 64 * 2**10  # bytes of an answer's status line and headers
MAX_BODY = 256 * 2**20  # bytes of an answer that is kept whole
MAX_EVENT = 16 * 2**20  # bytes of one line of an event stream


class ProtocolError(ValueError):
    """The received bytes are no HTTP, or more than a limit allows."""


class ConnectionLost(ConnectionError):
    """The connection ended before the answer did."""


def run(work: Coroutine[Any, Any, T]) -> T:
    """asyncio.run on the fastest loop that is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


@dataclass(frozen=True)
class Address:
    """Address of a server."""

    host: str
    port: int
    tls: bool = False
    uds: str | None = None  # a socket's path, instead of host and port
    prefix: str = ""  # of every path

    @property
    def authority(self) -> str:
        """Value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


@dataclass
class Answer:
    """Status, headers (names in lower case), and the body where no sink took it."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class Events:
    """Cuts an event stream into the data of its events, in pieces of any size, at a line or two per event."""

    def __init__(self, on_event: Callable[[bytes], None]) -> None:
        self._on_event = on_event
        self._held = b""  # a line without its end
        self._data: bytes | None = None  # of an event without its blank line

    def feed(self, piece: bytes) -> None:
        """Calls on_event for each event that is whole. ValueError where a line has no end in sight."""
        lines = (self._held + piece if self._held else piece).split(b"\n")
        self._held = lines.pop()
        if len(self._held) > MAX_EVENT:
            raise ProtocolError(f"a line of the event stream is longer than {MAX_EVENT} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[6:] if line.startswith(b"data: ") else line[5:]
                self._data = data if self._data is None else self._data + b"\n" + data
            elif (not line or line == b"\r") and self._data is not None:
                data, self._data = self._data, None
                self._on_event(data.replace(b"\r", b""))

    def finish(self) -> None:
        """The stream has ended. Servers may leave out the last blank line, so what is held is an event too."""
        self.feed(b"\n\n")


class HttpClient:
    """Connections to one server, each used again when its answer is whole."""

    def __init__(self, address: Address, headers: Mapping[str, str] | None = None, idle_seconds: float = 600.0) -> None:
        """`idle_seconds` without a byte end a request with TimeoutError."""
        self._address = address
        self._idle_seconds = idle_seconds
        self._free: list[_Connection] = []
        self._tls = ssl.create_default_context() if address.tls else None
        fixed = {"host": address.authority, "accept-encoding": "identity", "user-agent": "quintet", **(headers or {})}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in fixed.items())

    async def request(self, method: str, path: str, body: bytes = b"", sink: Sink | None = None) -> Answer:
        """One exchange. An answer of status 200 goes to the sink where there is one, as it comes.

        Raises OSError where no connection comes about, Broken, NotHttp, TimeoutError, or what the sink raises.
        """
        message = self._message(method, path, body)
        while self._free:
            connection = self._free.pop()
            if connection.closed:
                continue
            try:
                return await self._exchange(connection, message, sink)
            except ConnectionError:
                if connection.heard:
                    raise
                self.close()  # the server ended connections that were not used: all the others are as old
        return await self._exchange(await self._connect(), message, sink)

    def close(self) -> None:
        """Ends the connections that are not in use."""
        for connection in self._free:
            connection.abort()
        self._free.clear()

    def _message(self, method: str, path: str, body: bytes) -> bytes:
        length = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n" if body else ""
        return f"{method} {self._address.prefix}{path} HTTP/1.1\r\n{self._headers}{length}\r\n".encode("latin-1") + body

    async def _connect(self) -> "_Connection":
        loop, address = asyncio.get_running_loop(), self._address
        connecting: Coroutine[Any, Any, tuple[Any, _Connection]]
        if address.uds:
            connecting = loop.create_unix_connection(_Connection, address.uds)
        else:
            connecting = loop.create_connection(_Connection, address.host, address.port, ssl=self._tls)
        try:
            _, connection = await asyncio.wait_for(connecting, CONNECT_SECONDS)
        except (asyncio.TimeoutError, TimeoutError):
            raise ConnectionError(f"no connection within {CONNECT_SECONDS:g} s") from None
        return connection

    async def _exchange(self, connection: "_Connection", message: bytes, sink: Sink | None) -> Answer:
        try:
            answer = await connection.exchange(message, sink, self._idle_seconds)
        except BaseException:  # also cancelled: the server shall see that the client is gone
            connection.abort()
            raise
        if connection.reusable:
            self._free.append(connection)
        else:
            connection.abort()
        return answer


class _Connection(asyncio.Protocol):
    """One connection, and the exchange that is under way on it. The callbacks of httptools are methods here."""

    def __init__(self) -> None:
        import httptools

        self._errors: type[Exception] = httptools.HttpParserError
        self._parser = httptools.HttpResponseParser(self)
        self._transport: Any = None
        self._done: asyncio.Future[Answer] | None = None
        self.closed = False
        self.reusable = False
        self.heard = False  # whether any of the answer came
        self._begin(None)

    def _begin(self, sink: Sink | None) -> None:
        self._answer, self._sink = Answer(), sink
        self._pieces: list[bytes] = []
        self._size = self._head = 0  # bytes of the body that is kept, and of the head
        self._in_head = True
        self._until_close = self.heard = self.reusable = False
        self._now = time.perf_counter()

    async def exchange(self, message: bytes, sink: Sink | None, idle_seconds: float) -> Answer:
        """Sends one request, and waits until its answer is whole."""
        loop = asyncio.get_running_loop()
        self._begin(sink)
        self._done = loop.create_future()
        self._transport.write(message)
        self._timer = loop.call_later(idle_seconds, self._watch, loop, idle_seconds)
        try:
            return await self._done
        finally:
            self._timer.cancel()
            self._done = None

    def abort(self) -> None:
        """Ends the connection without waiting for anything."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def _watch(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        """One timer per request, however many pieces come."""
        left = self._now + seconds - time.perf_counter()
        if left <= 0:
            self._fail(TimeoutError(f"nothing came for {seconds:g} s"))
        else:
            self._timer = loop.call_later(left, self._watch, loop, seconds)

    def _fail(self, error: BaseException) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    # ---------------------------------------------------------------------------------------------- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self.heard = True
        if self._in_head:
            self._head += len(data)
        try:
            self._parser.feed_data(data)
        except self._errors as error:
            self._fail(ProtocolError(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__))
            self.abort()
        if self._in_head and self._head > MAX_HEAD:
            self._fail(ProtocolError(f"its headers are longer than {MAX_HEAD} bytes"))
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if self._until_close and error is None:
            self.on_message_complete()
        self._fail(ConnectionLost(str(error) if error else "it was closed"))

    # ---------------------------------------------------------------------------------------------------- httptools

    def on_message_begin(self) -> None:
        if self._done is None or self._done.done():  # more than was asked for: the next answer would be out of step
            self._begin(None)
            self.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._answer.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status, headers = self._parser.get_status_code(), self._answer.headers
        if status < 200:  # "continue" and its kind announce the answer
            self._answer = Answer()
            return
        self._answer.status = status
        self._in_head = False
        self._until_close = not ({"content-length", "transfer-encoding"} & headers.keys()) and status not in (204, 304)
        if status != 200:
            self._sink = None

    def on_body(self, data: bytes) -> None:
        if self._sink is None:
            self._pieces.append(data)
            self._size += len(data)
            if self._size > MAX_BODY:
                self._fail(ProtocolError(f"its answer is longer than {MAX_BODY} bytes"))
                self.abort()
            return
        try:
            self._sink(data, self._now)
        except Exception as error:  # httptools would make a parser's error of it
            self._fail(error)
            self.abort()
            self._sink = None

    def on_message_complete(self) -> None:
        if self._in_head or self._done is None or self._done.done():
            return
        self.reusable = self._parser.should_keep_alive() and not self._until_close and not self.closed
        self._answer.body = b"".join(self._pieces)
        self._done.set_result(self._answer)
