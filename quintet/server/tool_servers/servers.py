"""All tool servers of one API process, by the names that requests use."""

import asyncio
import logging

from quintet.server.settings import ServerConfig
from quintet.server.tool_servers.addresses import read_addresses
from quintet.server.tool_servers.server import Limits, ToolServer, Unavailable

logger = logging.getLogger(__name__)


class ToolServers:
    """None, where the operator names none; then nothing of this costs anything."""

    def __init__(self, settings: ServerConfig) -> None:
        """Raises ValueError for an address that is none, or without the client."""
        addresses = read_addresses(settings.tool_server)
        if addresses:
            _need_client()
        limits = Limits(settings.tool_timeout, settings.max_tool_result_bytes)
        self.all = [ToolServer(address, limits) for address in addresses]

    def __bool__(self) -> bool:
        return bool(self.all)

    @property
    def names(self) -> list[str]:
        """Of those that are known by one."""
        return [each.name for each in self.all if each.name is not None]

    async def connect(self) -> None:
        """At the start, so that a server that is not there is not found out about by a user. Raises ValueError."""
        try:
            await asyncio.gather(*(each.connect() for each in self.all))
        except Unavailable as error:
            raise ValueError(f"{error}; start it, or leave it out of --tool-server") from None
        twice = next((name for name in self.names if self.names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"tool_server has two servers that call themselves {twice!r}; write NAME= before one")
        for each in self.all:
            logger.info("tool server %s", each)

    async def named(self, name: str) -> ToolServer | None:
        """Looks after those that were not there yet, too: one may turn out to have that name."""
        if name not in self.names:
            unknown = [each.connect() for each in self.all if each.name is None]
            await asyncio.gather(*unknown, return_exceptions=True)
        return next((each for each in self.all if each.name == name), None)

    async def close(self) -> None:
        """All connections end, and the processes behind them."""
        await asyncio.gather(*(each.close() for each in self.all), return_exceptions=True)


def _need_client() -> None:
    """Imports it now: that takes most of a second, in which nothing else of this process would go on."""
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        raise ValueError(f"tool_server needs the MCP client ({error}); run: pip install quintet[mcp]") from None
