"""One tool server: lists and calls its tools, with limits; reconnects after a lost connection."""

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from quintet.server.mcp.addresses import McpAddress
from quintet.server.mcp.results import ToolResult, one_line, result_of
from quintet.server.mcp.session import CONNECT, McpConnectionLost, McpSession

if TYPE_CHECKING:
    from mcp import MCPError
    from mcp.types import Tool as Listed

logger = logging.getLogger(__name__)

MAX_CALLS = 16  # concurrent calls of one server; more wait, within their own timeout
MAX_TOOLS = 1024
MAX_LISTED = 2**20  # bytes of JSON of all tools: they go into prompts
_MAX_PAGES = 100
_MAX_NAME = 80  # characters of a server's own name, which stands in lines of the log


class ToolCallLimits(NamedTuple):
    """Limits of one call."""

    seconds: float
    result_bytes: int


class ToolServerUnavailable(Exception):
    """A tool server does not work; the message has its name and the reason."""


@dataclass(frozen=True)
class ServedTool:
    """A tool as its server describes it."""

    name: str
    description: str
    schema: Mapping[str, Any]  # JSON schema of its arguments
    annotations: Mapping[str, Any] = field(default_factory=dict)  # hints such as readOnlyHint; not verified

    def size(self) -> int:
        return len(json.dumps([self.name, self.description, self.schema, self.annotations]))


class ToolServer:
    """Client of one tool server: connects on first use, and again after a lost connection."""

    def __init__(self, address: McpAddress, limits: ToolCallLimits) -> None:
        self.address, self.limits = address, limits
        self._own_name: str | None = None
        self._session: McpSession | None = None
        self._connecting = asyncio.Lock()
        self._places = asyncio.Semaphore(MAX_CALLS)
        self._closed = False

    def __str__(self) -> str:
        """Returns text for messages."""
        own = self._own_name if self.address.name is None else None
        return str(self.address) if own is None else f"{own} ({self.address})"

    @property
    def name(self) -> str | None:
        """The operator's name for it, or its own name; None if it never connected."""
        return self.address.name or self._own_name

    async def connect(self) -> None:
        """Connects. Raises Unavailable."""
        try:
            await self._connected()
        except McpConnectionLost as error:
            raise self._unavailable(error) from None

    async def tools(self) -> list[ServedTool]:
        """Lists its current tools. Raises Unavailable."""
        from mcp import MCPError

        try:
            return await asyncio.wait_for(self._list_tools_retry(), self.limits.seconds)
        except asyncio.TimeoutError:
            raise self._unavailable(f"no answer within {self.limits.seconds:g} s") from None
        except (McpConnectionLost, MCPError, ValueError, RuntimeError, OSError) as error:
            raise self._unavailable(error) from None

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Calls a tool. Every error becomes a failed result, except cancellation of the caller."""
        from mcp import MCPError

        try:
            return await asyncio.wait_for(self._call(tool, dict(arguments)), self.limits.seconds)
        except asyncio.TimeoutError:
            return ToolResult(f"the tool took longer than {self.limits.seconds:g} s, and was ended", failed=True)
        except McpConnectionLost as error:
            logger.warning("tool server %s was lost during a call of %r: %s", self, tool[:80], one_line(error, 300))
            return ToolResult("the tool server was lost; whether the tool has run is not known", failed=True)
        except (MCPError, ValueError, RuntimeError) as error:  # a server error, or a protocol or schema violation
            return ToolResult(f"the tool server refused: {one_line(error, 2000)}", failed=True)
        except Exception:  # any error of the MCP client: a response must not fail because of a tool
            logger.exception("tool server %s: a call of %r failed", self, tool[:80])
            return ToolResult("the tool server cannot be used", failed=True)

    async def close(self) -> None:
        """Closes the connection, and ends the process that was started for it."""
        self._closed = True
        async with self._connecting:
            session, self._session = self._session, None
            if session is not None:
                await session.close()

    # ------------------------------------------------------------------------------------------------------------

    async def _connected(self) -> McpSession:
        async with self._connecting:
            if self._session is not None and not self._session.is_lost:
                return self._session
            if self._closed:
                raise McpConnectionLost("the server ends")
            if self._session is not None:
                await self._session.close()
            self._session = None
            # Longer than any caller waits: the client notifies a server of a cancelled call, but not if its own timeout
            # expires at the same time.
            session = McpSession(self.address, self.limits.seconds + CONNECT)
            await session.open()
            self._session = session
            info = session.client.server_info
            own_name = one_line(info.name, _MAX_NAME) if info is not None and info.name else None
            self._own_name = self._own_name or own_name or self.address.url
            return session

    async def _forget(self, session: McpSession) -> None:
        """Closes a session that no longer works."""
        async with self._connecting:
            if self._session is session:
                self._session = None
                await session.close()

    async def _list_tools_retry(self) -> list[ServedTool]:
        """Lists the tools; retries once over a new connection, since listing has no side effects."""
        session = await self._connected()
        try:
            return await self._list_tools(session)
        except McpConnectionLost:
            return await self._list_tools(await self._connected())

    async def _list_tools(self, session: McpSession) -> list[ServedTool]:
        found: list[ServedTool] = []
        cursor: str | None = None
        for _ in range(_MAX_PAGES):
            page = await self._ask(session, session.client.list_tools(cursor=cursor))
            found += [_as_served_tool(each) for each in page.tools]
            cursor = page.next_cursor
            if len(found) > MAX_TOOLS or sum(each.size() for each in found) > MAX_LISTED:
                raise ValueError(f"it lists over {MAX_TOOLS} tools, or {MAX_LISTED} bytes of them")
            if cursor is None:
                return found
        raise ValueError(f"its list of tools has over {_MAX_PAGES} pages")

    async def _call(self, tool: str, arguments: dict[str, Any]) -> ToolResult:
        async with self._places:
            for attempt in range(2):
                session = await self._connected()
                try:
                    given = await self._ask(session, session.client.call_tool(tool, arguments))
                except _SessionUnknown:
                    if attempt:
                        raise
                else:
                    return result_of(given, self.limits.result_bytes)
        raise AssertionError("the second attempt returns or raises")

    async def _ask(self, session: McpSession, work: Any) -> Any:
        """Sends a request. Forgets the session and raises Lost if the connection is lost."""
        from mcp import MCPError

        try:
            return await session.run(work)
        except MCPError as error:
            lost = _as_connection_lost(error)
            if lost is None:
                raise
            await self._forget(session)
            raise lost from None
        except McpConnectionLost:
            await self._forget(session)
            raise

    def _unavailable(self, why: object) -> ToolServerUnavailable:
        return ToolServerUnavailable(f"tool server {self} cannot be used: {one_line(why, 300)}")


class _SessionUnknown(McpConnectionLost):
    """The server does not know the session, for example after its restart; the call did not run."""


def _as_connection_lost(error: "MCPError") -> McpConnectionLost | None:
    from mcp.types import CONNECTION_CLOSED, INVALID_REQUEST

    if error.code == INVALID_REQUEST and error.message == "Session terminated":  # the client's words for HTTP 404
        return _SessionUnknown(error.message)
    return McpConnectionLost(error.message) if error.code == CONNECTION_CLOSED else None


def _as_served_tool(listed: "Listed") -> ServedTool:
    hints = {} if listed.annotations is None else listed.annotations.model_dump(by_alias=True, exclude_none=True)
    return ServedTool(listed.name, listed.description or "", listed.input_schema, hints)
