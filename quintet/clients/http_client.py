"""HTTP/1.1 client for many answers at once, streamed or whole: nothing stands between the socket and the clock."""

import asyncio
import re
import ssl
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from quintet.clients.http_connection import (
    ConnectFailed,
    ConnectionLost,
    Header,
    HttpConnection,
    HttpProtocolError,
    HttpTimeouts,
    ResponseHead,
    Sink,
)

T = TypeVar("T")

_SPACES = re.compile(rb"[\x00-\x20\x7f]")
MAX_IDLE_SECONDS = 4.0  # seconds after which a connection is not used again: uvicorn's servers close them after five
MAX_FREE = 512  # connections that are kept for the next requests
MAX_BODY = 256 * 2**20  # bytes of an answer that is kept whole
MAX_EVENT = 16 * 2**20  # bytes of one line of an event stream


def run(work: Coroutine[Any, Any, T]) -> T:
    """asyncio.run on the fastest loop that is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


@dataclass(frozen=True)
class ServerAddress:
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
class HttpResponse:
    """Status, headers (names in lower case), and the body where no sink took it."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class EventStreamParser:
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
            raise HttpProtocolError(f"a line of the event stream is longer than {MAX_EVENT} bytes")
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
    """Connections to one server, which are used for one exchange after the other."""

    def __init__(
        self,
        address: ServerAddress,
        headers: Mapping[str, str] | None = None,
        times: HttpTimeouts | None = None,
        context: ssl.SSLContext | None = None,
    ) -> None:
        """`headers` of request(); `context` for TLS, instead of the system's."""
        self.address, self._times = address, times or HttpTimeouts()
        self._context = (context or ssl.create_default_context()) if address.tls else None
        self._free: list[HttpConnection] = []
        self._host = address.authority.encode()
        fixed = {"accept-encoding": "identity", "user-agent": "quintet", **(headers or {})}
        self._headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fixed.items()]

    async def request(self, method: str, path: str, body: bytes = b"", sink: Sink | None = None) -> HttpResponse:
        """Runs one exchange. An answer of status 200 goes to the sink where there is one, as it comes. A connection
        that the server closed while it was kept is replaced.

        Raises Unreached, ConnectionLost, ProtocolError, Late, or what the sink raises.
        """
        headers = [*self._headers, (b"content-type", b"application/json")] if body else self._headers
        message = self.message(method.encode(), path.encode("latin-1"), headers, body)
        exchange = await self.send(message, sink=sink)
        try:
            return await exchange.answer()
        except ConnectionLost:
            if not exchange.is_stale:
                raise
        finally:
            exchange.close()
        self.close()  # the server ended connections that were not used: all the others are as old
        exchange = await self.send(message, fresh=True, sink=sink)
        try:
            return await exchange.answer()
        finally:
            exchange.close()

    async def send(
        self, message: bytes, fresh: bool = False, times: HttpTimeouts | None = None, sink: Sink | None = None
    ) -> "HttpExchange":
        """Sends a whole request, as message() writes it; on a new connection, if it has to be fresh.

        Raises Unreached. Later errors are raised by the exchange.
        """
        times = times or self._times
        connection = None if fresh else self._kept()
        reused = connection is not None
        if connection is None:
            connection = await self._connect(times.connect)
        connection.start_exchange(message, times, sink)
        return HttpExchange(self, connection, reused)

    def message(self, method: bytes, target: bytes, headers: list[Header], body: bytes = b"") -> bytes:
        """Returns a request's bytes. `headers` have neither host nor length, `target` is the path with its query.
        ValueError: the target has a space or a line's end, which would end the first line."""
        if _SPACES.search(target):
            raise ValueError(f"no path of a request: {target[:200]!r}")
        parts = [method, b" ", self.address.prefix.encode(), target, b" HTTP/1.1\r\nhost: ", self._host, b"\r\n"]
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

    def put_back(self, connection: HttpConnection) -> None:
        """Keeps a connection for the next request."""
        if len(self._free) < MAX_FREE:
            self._free.append(connection)
        else:
            connection.abort()

    def _kept(self) -> HttpConnection | None:
        """Returns the connection that was used last, if it is open and young."""
        now = time.perf_counter()
        while self._free:
            connection = self._free.pop()
            if not connection.closed and now - connection.last < MAX_IDLE_SECONDS:
                return connection
            connection.abort()
        return None

    async def _connect(self, seconds: float) -> HttpConnection:
        loop, address = asyncio.get_running_loop(), self.address
        connecting: Coroutine[Any, Any, tuple[Any, HttpConnection]]
        if address.uds:
            connecting = loop.create_unix_connection(HttpConnection, address.uds)
        else:
            connecting = loop.create_connection(HttpConnection, address.host, address.port, ssl=self._context)
        task = loop.create_task(connecting)
        try:  # wait_for() of Python 3.11 and older may take no notice of a cancellation that comes with the connection
            await asyncio.wait([task], timeout=seconds)
            if not task.done():
                raise ConnectFailed(f"no connection within {seconds:g} s")
            return task.result()[1]
        except asyncio.CancelledError:
            if task.done() and task.exception() is None:
                task.result()[1].abort()
            raise
        except OSError as error:
            if isinstance(error, ConnectFailed):
                raise
            raise ConnectFailed(f"no connection: {error.strerror or error}") from error
        finally:
            task.cancel()


class HttpExchange:
    """One request that was sent, and its answer. Has to be closed."""

    def __init__(self, client: HttpClient, connection: HttpConnection, reused: bool) -> None:
        self._client, self._reused, self._open = client, reused, True
        self._connection = connection

    @property
    def is_stale(self) -> bool:
        """Returns whether the connection was used before, and nothing of an answer came: the server may have closed it
        in the same moment."""
        return self._reused and not self._connection.heard

    @property
    def is_complete(self) -> bool:
        """Returns whether nothing more will come than what piece() has."""
        return self._connection.complete

    async def head(self) -> ResponseHead:
        """Raises ConnectionLost, ProtocolError, Late."""
        connection = self._connection
        while connection.head is None:
            await connection.wait()
        return connection.head

    async def next_chunk(self) -> bytes:
        """Returns what of the body has come, or comes next; b"" at its end. Raises as head() does."""
        connection = self._connection
        while not connection.pieces:
            if connection.complete:
                return b""
            await connection.wait()
        return connection.take_chunks()

    async def body(self, most: int) -> bytes:
        """Returns the whole body. ProtocolError if it is more than `most` bytes."""
        content = bytearray()
        while piece := await self.next_chunk():
            content += piece
            if len(content) > most:
                raise HttpProtocolError(f"its answer is longer than {most} bytes")
        return bytes(content)

    async def answer(self) -> HttpResponse:
        """Returns the whole answer; its body is empty where the sink took it."""
        body, head = await self.body(MAX_BODY), await self.head()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
        return HttpResponse(head.status, headers, body)

    def close(self) -> None:
        """Keeps the connection if the answer is whole; else ends it, so that the server sees that the client is
        gone."""
        if not self._open:
            return
        self._open, connection = False, self._connection
        del self._connection  # an answer to the next request cannot be read here
        connection.end_exchange()
        if connection.reusable:
            self._client.put_back(connection)
        else:
            connection.abort()
