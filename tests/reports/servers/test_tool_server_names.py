"""A tool server's own name and words make no line of the log (attack A9)."""

import logging

import pytest

pytest.importorskip("mcp", reason="needs the extra mcp")

from quintet.server.config import ServerConfig
from quintet.server.mcp.servers import ToolServers
from tests.helpers.servers.tool_server import Served, Tools

FORGED = "evil\r\n2026-01-01T00:00:00 INFO    forged \x1b[31mline\u2028\x85\u202e" + "x" * 10_000


class Named(Served):
    """Served under a hostile name."""

    def __init__(self) -> None:
        super().__init__(Tools(), FORGED)


async def test_its_name_is_one_printable_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="quintet"):
        async with Named() as there:
            servers = ToolServers(ServerConfig(tool_server=(there.url,)))
            await servers.connect()
            [server] = servers.servers
            assert server.name is not None and server.name.isprintable() and len(server.name) <= 80
            assert server.name.startswith("evil 2026-01-01T00:00:00 INFO forged ?[31mline")
            assert str(server).isprintable() and str(server._unavailable(FORGED)).isprintable()
            await server.call(FORGED, {})
            await servers.close()
    assert caplog.messages and all(each.isprintable() and len(each) < 1000 for each in caplog.messages)


async def test_two_servers_of_one_name_are_still_refused() -> None:
    async with Named() as one, Named() as two:
        servers = ToolServers(ServerConfig(tool_server=(one.url, two.url)))
        with pytest.raises(ValueError, match="two servers that call themselves 'evil 2026") as refused:
            await servers.connect()
        await servers.close()
        assert str(refused.value).isprintable()
