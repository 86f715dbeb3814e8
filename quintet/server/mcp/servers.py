"""All tool servers of one API process, by the names that requests use."""

import asyncio
import logging

from quintet.common.distribution import install_hint
from quintet.server.config import ServerConfig
from quintet.server.mcp.addresses import read_addresses
from quintet.server.mcp.server import ToolCallLimits, ToolServer, ToolServerUnavailable

logger = logging.getLogger(__name__)


class ToolServers:
    """All tool servers; empty if the operator names none, and then free of cost."""

    def __init__(self, settings: ServerConfig) -> None:
        """Raises ValueError for an invalid address, or if the MCP client is not installed."""
        addresses = read_addresses(settings.tool_server)
        if addresses:
            _need_client()
        limits = ToolCallLimits(settings.tool_timeout, settings.max_tool_result_bytes)
        self.servers = [ToolServer(address, limits) for address in addresses]

    def __bool__(self) -> bool:
        return bool(self.servers)

    @property
    def names(self) -> list[str]:
        """Names of the servers that have one."""
        return [each.name for each in self.servers if each.name is not None]

    async def connect(self) -> None:
        """Connects at startup, so that a missing server fails then and not in a user's request. Raises ValueError."""
        try:
            await asyncio.gather(*(each.connect() for each in self.servers))
        except ToolServerUnavailable as error:
            raise ValueError(f"{error}; start it, or leave it out of --tool-server") from None
        twice = next((name for name in self.names if self.names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"tool_server has two servers that call themselves {twice!r}; write NAME= before one")
        for each in self.servers:
            logger.info("tool server %s", each)

    async def server_named(self, name: str) -> ToolServer | None:
        """Returns the server of that name. Also connects to servers without a known name: one may have it."""
        if name not in self.names:
            unknown = [each.connect() for each in self.servers if each.name is None]
            await asyncio.gather(*unknown, return_exceptions=True)
        return next((each for each in self.servers if each.name == name), None)

    async def close(self) -> None:
        """Closes all connections, and ends their processes."""
        await asyncio.gather(*(each.close() for each in self.servers), return_exceptions=True)


def _need_client() -> None:
    """Imports the MCP client at startup: the import blocks the process for most of a second."""
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        raise ValueError(f"tool_server needs the MCP client ({error}); run: {install_hint('mcp')}") from None
