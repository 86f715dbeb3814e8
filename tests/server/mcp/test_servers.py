"""Tools of real MCP servers: listed and called over HTTP and as commands, and whatever they do wrong."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("mcp", reason="needs the extra mcp")

from quintet.server.config import ServerConfig
from quintet.server.mcp import server as bounds
from quintet.server.mcp import session
from quintet.server.mcp.server import ToolServerUnavailable
from quintet.server.mcp.servers import ToolServers
from tests.helpers.servers.tool_server import Served, Tools

ROOT = Path(__file__).parents[3]


def command_file(folder: Path) -> str:
    server = {"command": sys.executable, "args": ["-m", "tests.helpers.servers.tool_server", "stdio"], "cwd": str(ROOT)}
    (folder / "servers.json").write_text(json.dumps({"mcpServers": {"sums": server}}))
    return str(folder / "servers.json")


@pytest.fixture(params=["http", "json", "stateless", "sse", "stdio"])
async def where(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    """What --tool-server says of a server with all of Tools."""
    if request.param == "stdio":
        yield command_file(tmp_path)
        return
    how = {"json": {"json_response": True}, "stateless": {"stateless_http": True}}.get(request.param, {})
    async with Served(Tools(), sse=request.param == "sse", **how) as there:
        yield there.where if request.param == "sse" else there.url


@pytest.fixture
async def there() -> AsyncIterator[Served]:
    async with Served(Tools()) as made:
        yield made


async def test_tools_are_listed_and_called(where: str) -> None:
    servers = ToolServers(ServerConfig(tool_server=(where,), max_tool_result_bytes=100))
    try:
        await servers.connect()
        sums = await servers.server_named("sums")
        assert sums is not None
        assert await servers.server_named("others") is None
        add = next(each for each in await sums.tools() if each.name == "add")
        assert add.description == "The sum of two numbers."
        assert add.schema["required"] == ["a", "b"]
        assert await sums.call("add", {"a": 2, "b": 3}) == ("5", False)
        assert await sums.call("fail", {"why": "so"}) == ("Error executing tool fail: so", True)
        missing = await sums.call("add", {"a": 2})
        assert missing.failed
        assert "b" in missing.text
        unknown = await sums.call("subtract", {})
        assert unknown.failed
        assert "subtract" in unknown.text
        assert await sums.call("long", {"size": 100}) == ("x" * 100, False)
        assert await sums.call("long", {"size": 101}) == (
            "the tool's result has 101 bytes, and 100 can be read; ask it for less", True
        )  # fmt: skip
    finally:
        await servers.close()


async def test_calls_run_beside_each_other_and_a_slow_one_ends_in_time(there: Served) -> None:
    servers = ToolServers(ServerConfig(tool_server=(there.url,), tool_timeout=1.0))
    sums = await servers.server_named("sums")
    assert sums is not None
    slow = asyncio.create_task(sums.call("wait", {}))
    await there.tools.begun.wait()
    assert await sums.call("add", {"a": 1, "b": 1}) == ("2", False)
    assert await slow == ("the tool took longer than 1 s, and was ended", True)
    await there.tools.ended.wait()  # the server was told
    await servers.close()


async def test_a_caller_that_ends_ends_the_call(there: Served) -> None:
    servers = ToolServers(ServerConfig(tool_server=(there.url,)))
    sums = await servers.server_named("sums")
    assert sums is not None
    call = asyncio.create_task(sums.call("wait", {}))
    await there.tools.begun.wait()
    call.cancel()
    await asyncio.wait({call})
    assert call.cancelled()
    await there.tools.ended.wait()
    await servers.close()


async def test_a_query_is_told_to_nobody(there: Served) -> None:
    """It may hold a key. That server speaks no SSE, and says so with the URL that was asked for."""
    servers = ToolServers(ServerConfig(tool_server=(f"sums={there.url.removesuffix('/mcp')}/sse?key=hidden",)))
    sums = await servers.server_named("sums")
    assert sums is not None
    with pytest.raises(ToolServerUnavailable, match="/sse") as refused:
        await sums.tools()
    assert "hidden" not in str(refused.value)
    await servers.close()


async def test_a_server_may_go_and_come_back(there: Served) -> None:
    servers = ToolServers(ServerConfig(tool_server=(there.url,)))
    await servers.connect()
    sums = await servers.server_named("sums")
    assert sums is not None
    call = asyncio.create_task(sums.call("wait", {}))
    await there.tools.begun.wait()
    await there.__aexit__(None, None, None)
    assert (await call).failed
    with pytest.raises(ToolServerUnavailable, match=rf"tool server sums \({there.url}\) cannot be used"):
        await sums.tools()
    assert (await sums.call("add", {"a": 1, "b": 2})).failed
    async with Served(Tools(), port=there.port) as again:
        assert len(await sums.tools()) == 5
        assert await sums.call("add", {"a": 1, "b": 2}) == ("3", False)
        assert again.tools.calls == ["add 1 2"]
        await servers.close()


async def test_a_callers_words_forge_no_line_of_the_log(there: Served, caplog: pytest.LogCaptureFixture) -> None:
    servers = ToolServers(ServerConfig(tool_server=(there.url,)))
    await servers.connect()
    sums = await servers.server_named("sums")
    assert sums is not None
    await there.__aexit__(None, None, None)
    assert (await sums.call("add\nERROR all is lost", {})).failed
    [said] = [each.getMessage() for each in caplog.records if "was lost during" in each.getMessage()]
    assert "all is lost" in said and "\n" not in said
    await servers.close()


async def test_a_session_that_the_server_forgot_is_made_anew(there: Served) -> None:
    servers = ToolServers(ServerConfig(tool_server=(there.url,)))
    await servers.connect()
    sums = await servers.server_named("sums")
    assert sums is not None
    assert await sums.call("add", {"a": 1, "b": 2}) == ("3", False)
    await there.__aexit__(None, None, None)
    async with Served(Tools(), port=there.port) as again:
        results = [await sums.call("add", {"a": 1, "b": 2}) for _ in range(2)]
        assert results[-1] == ("3", False)
        assert len(again.tools.calls) == [each.failed for each in results].count(False)  # none has run twice
        await servers.close()


async def test_a_command_that_dies_is_started_again_and_ends_with_us(tmp_path: Path) -> None:
    servers = ToolServers(ServerConfig(tool_server=(command_file(tmp_path),)))
    await servers.connect()
    sums = await servers.server_named("sums")
    assert sums is not None
    assert await sums.call("die", {}) == ("the tool server was lost; whether the tool has run is not known", True)
    assert len(await sums.tools()) == 5
    assert await sums.call("add", {"a": 1, "b": 2}) == ("3", False)
    running = [each for each in psutil.Process().children(recursive=True) if "stdio" in each.cmdline()]
    assert len(running) == 1
    await servers.close()
    assert not running[0].is_running()


async def test_what_is_too_long_to_be_read_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_MESSAGE", 100_000)
    for how in ({"json_response": True}, {}):
        async with Served(Tools(), **how) as there:
            servers = ToolServers(ServerConfig(tool_server=(there.url,), max_tool_result_bytes=10**7))
            sums = await servers.server_named("sums")
            assert sums is not None
            found = await sums.call("long", {"size": 200_000})
            assert found.failed
            assert len(found.text) < 2100
            assert await sums.call("add", {"a": 1, "b": 2}) == ("3", False)
            await servers.close()


async def test_a_list_that_is_too_long_is_refused(there: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MAX_TOOLS", 4)
    servers = ToolServers(ServerConfig(tool_server=(there.url,)))
    sums = await servers.server_named("sums")
    assert sums is not None
    with pytest.raises(ToolServerUnavailable, match="it lists over 4 tools"):
        await sums.tools()
    await servers.close()


async def test_a_server_that_is_not_there_is_said_at_the_start(there: Served, tmp_path: Path) -> None:
    await there.__aexit__(None, None, None)
    (tmp_path / "s.json").write_text(json.dumps({"mcpServers": {"x": {"command": "/nowhere/at/all"}}}))
    for where in (there.url, there.where, str(tmp_path / "s.json")):
        servers = ToolServers(ServerConfig(tool_server=(where,)))
        with pytest.raises(ValueError, match=r"^tool server .* cannot be used: .*; start it, or leave it out") as said:
            await servers.connect()
        assert "\n" not in str(said.value)
        await servers.close()


async def test_two_of_one_name_are_refused(there: Served) -> None:
    async with Served(Tools()) as other:
        servers = ToolServers(ServerConfig(tool_server=(there.url, other.url)))
        with pytest.raises(ValueError, match="two servers that call themselves 'sums'"):
            await servers.connect()
        await servers.close()
