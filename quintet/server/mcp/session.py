"""One connection to an MCP server, held open by a task: the client's scopes must end in the task where they began."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from quintet import __version__
from quintet.server.mcp.addresses import McpAddress

if TYPE_CHECKING:
    import httpx2
    from mcp import Client

T = TypeVar("T")

MAX_MESSAGE = 4 * 2**20  # bytes of one message over HTTP; not for commands, which run on this machine
CONNECT = 15.0  # seconds to connect and agree on a version; a command may import much
CLOSE = 8.0  # seconds to close: the client gives a command 2 s to exit, and 2 s after SIGTERM


class McpConnectionLost(Exception):
    """The connection was lost. It is unknown whether a call in flight has run."""


class McpSession:
    """A connection, open from open() to close() unless lost before. Many tasks may use it concurrently."""

    def __init__(self, address: McpAddress, timeout: float) -> None:
        """`timeout`: seconds, maximum of one request, even if its caller waits longer."""
        self._address, self._timeout = address, timeout
        self._ending = asyncio.Event()
        self._opened: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    @property
    def client(self) -> "Client":
        return self._opened.result()

    @property
    def is_lost(self) -> bool:
        return self._task is None or self._task.done()

    async def open(self) -> None:
        """Opens the connection. Raises Lost with the reason."""
        task = self._task = asyncio.get_running_loop().create_task(self._hold())
        try:
            either: set[asyncio.Future[Any]] = {task, self._opened}
            await asyncio.wait(either, timeout=CONNECT, return_when=asyncio.FIRST_COMPLETED)
            if not self._opened.done():
                late = not task.done()
                await self.close()
                raise McpConnectionLost(f"no answer within {CONNECT:g} s" if late else self._why(task))
        except asyncio.CancelledError:
            await self.close()
            raise

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Waits for `work` while the connection exists. Raises Lost when that ends."""
        assert self._task is not None
        task = asyncio.get_running_loop().create_task(work)
        try:
            await asyncio.wait({task, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise McpConnectionLost(self._why(self._task))
        finally:
            task.cancel()
            await asyncio.wait({task})
            task.cancelled() or task.exception()  # marks the exception as retrieved

    async def close(self) -> None:
        """Closes the connection and its process, if any, and waits for that. A second call does nothing."""
        self._ending.set()
        task = self._task
        if task is None:
            return
        if not self._opened.done():
            task.cancel()  # it may never open
        await asyncio.wait({task}, timeout=CLOSE)
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=CLOSE)
        if task.done():
            task.cancelled() or task.exception()  # retrieved: errors while closing do not matter

    def _why(self, ended: "asyncio.Task[None]") -> str:
        error = None if ended.cancelled() else ended.exception()
        return self._address.without_query(_first_reason(error))[:300]

    async def _hold(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            client = await stack.enter_async_context(_client(self._address, self._timeout))
            if not self._opened.done():
                self._opened.set_result(client)
            await self._ending.wait()


def _first_reason(error: BaseException | None) -> str:
    """Returns the first reason, in one line."""
    while error is not None and getattr(error, "exceptions", None):
        error = error.exceptions[0]  # type: ignore[attr-defined]
    if error is None:
        return "it ended the connection"
    return " ".join(str(error).split()) or type(error).__name__


@contextlib.asynccontextmanager
async def _client(address: McpAddress, timeout: float) -> "AsyncIterator[Client]":
    from mcp import Client, StdioServerParameters, stdio_client
    from mcp.client.sse import sse_client
    from mcp.client.streamable_http import streamable_http_client
    from mcp.types import Implementation

    async with contextlib.AsyncExitStack() as stack:
        if address.command:
            program, *arguments = address.command
            transport = stdio_client(
                StdioServerParameters(command=program, args=arguments, env=dict(address.env), cwd=address.cwd)
            )
        elif address.sse:
            transport = sse_client(address.url, dict(address.headers), httpx_client_factory=_bounded)
        else:
            http = await stack.enter_async_context(_bounded(dict(address.headers)))
            transport = streamable_http_client(address.url, http_client=http, max_sse_event_size=MAX_MESSAGE)
        client = Client(
            transport, read_timeout_seconds=timeout, client_info=Implementation(name="quintet", version=__version__),
            mode="legacy" if address.sse else "auto", cache=None,
        )  # fmt: skip
        yield await stack.enter_async_context(client)


# --------------------------------------------------------------------------------------------------- bounded bodies


def _bounded(
    headers: dict[str, str] | None = None,
    timeout: "httpx2.Timeout | None" = None,
    auth: "httpx2.Auth | None" = None,
) -> "httpx2.AsyncClient":
    """Returns an HTTP client that reads no body over MAX_MESSAGE. In event streams, each event is limited.

    A stream may be silent while no call is in flight: there is no read timeout, each call has its own.
    """
    import httpx2

    class Bounded(httpx2.AsyncByteStream):
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for piece in self._stream:
                size += len(piece)
                if size > MAX_MESSAGE:
                    raise httpx2.StreamError(f"the answer has over {MAX_MESSAGE} bytes")
                yield piece

        async def aclose(self) -> None:
            await self._stream.aclose()

    async def bound(response: httpx2.Response) -> None:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise httpx2.DecodingError("the answer is compressed, which was not asked for")
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            response.stream = Bounded(response.stream)

    return httpx2.AsyncClient(
        headers={**(headers or {}), "accept-encoding": "identity"}, auth=auth,
        timeout=httpx2.Timeout(CONNECT, read=None), event_hooks={"response": [bound]},
    )  # fmt: skip
