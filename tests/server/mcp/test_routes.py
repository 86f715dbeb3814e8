"""/v1/tool_servers: what the page has of tool servers, behind the same checks as everything."""

import asyncio
from collections.abc import AsyncIterator

import pytest

pytest.importorskip("mcp", reason="needs the extra mcp")

from tests.helpers.servers.tool_server import Served, Tools
from tests.server.http.serving import client

LIST, CALL = "/v1/tool_servers", "/v1/tool_servers/call"
ADD = {"server": "sums", "name": "add", "arguments": {"a": 2, "b": 3}}


@pytest.fixture
async def there() -> AsyncIterator[Served]:
    async with Served(Tools()) as made:
        yield made


async def test_tools_are_listed_and_called(there: Served) -> None:
    async with client(tool_server=(there.url,)) as http:
        [sums] = (await http.get(LIST)).json()["data"]
        assert sums["name"] == "sums" and sums["error"] is None
        add = next(each for each in sums["tools"] if each["name"] == "add")
        assert add["description"] == "The sum of two numbers." and add["parameters"]["required"] == ["a", "b"]
        assert (await http.post(CALL, json=ADD)).json() == {"output": "5", "failed": False}
        failed = (await http.post(CALL, json={**ADD, "arguments": {}})).json()
        assert failed["failed"] and "a" in failed["output"]
        wrong = await http.post(CALL, json={**ADD, "server": "others"})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "server"
        page = await http.get("/")
        assert "<body data-tool-servers>" in page.text
        await there.__aexit__(None, None, None)
        [gone] = (await http.get(LIST)).json()["data"]
        assert gone["tools"] == [] and "does not answer" in gone["error"] and str(there.port) not in gone["error"]


async def test_the_same_checks_stand_before_them(there: Served) -> None:
    async with client(tool_server=(there.url,), api_key=("secret",)) as http:
        for made in (await http.get(LIST), await http.post(CALL, json=ADD)):
            assert made.status_code == 401
        keyed = {"Authorization": "Bearer secret"}
        assert (await http.post(CALL, json=ADD, headers={**keyed, "Origin": "http://evil.example"})).status_code == 403
        assert (await http.post(CALL, json=ADD, headers={**keyed, "Host": "evil.example"})).status_code == 421
        assert there.tools.calls == []
        assert (await http.post(CALL, json=ADD, headers=keyed)).status_code == 200


async def test_without_tool_servers_there_is_no_such_thing() -> None:
    async with client() as http:
        assert (await http.get(LIST)).status_code == 404
        assert (await http.post(CALL, json=ADD)).status_code == 404
        assert "data-tool-servers" not in (await http.get("/")).text


async def test_a_caller_that_hangs_up_ends_the_call(there: Served) -> None:
    async with client(tool_server=(there.url,)) as http:
        asked = asyncio.create_task(http.post(CALL, json={"server": "sums", "name": "wait"}))
        await there.tools.begun.wait()
        assert not there.tools.ended.is_set()
        asked.cancel()
        await there.tools.ended.wait()
        with pytest.raises(asyncio.CancelledError):
            await asked
