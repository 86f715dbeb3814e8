"""An engine's own routes, asked by the server that has started it."""

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import httpx
import pytest

from quintet.router.models import engine
from quintet.router.models.engine import EngineChild
from quintet.router.models.engine_process import ModelOrders
from quintet.server.config import ServerConfig
from quintet.server.http.middleware.auth import ApiKeys
from tests.router.models.worlds import spec

KEY = "passed-on"


class SilentChild:
    """A child process that does nothing, with the orders that it got."""

    orders: ModelOrders
    killed = False

    def __init__(self, module: str, orders: ModelOrders, **streams: Any) -> None:
        SilentChild.orders = orders
        reader, self._writer = os.pipe()
        self.stdout: IO[bytes] = os.fdopen(reader, "rb")

    def follow(self, ended: Callable[[Any], object]) -> None:
        pass

    def kill(self) -> None:
        SilentChild.killed = True

    def close(self, seconds: float = 0.0) -> None:
        os.close(self._writer)


async def test_only_the_server_itself_can_put_an_engine_to_sleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: dict[str, str] = {}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            requests[head.split()[1]] = head.lower().partition("authorization: bearer ")[2].splitlines()[0]
            writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 17\r\nconnection: close\r\n\r\n{"server_load":1}')
            await writer.drain()

    monkeypatch.setattr(engine, "Child", SilentChild)
    path = str(tmp_path / "engine")
    server = await asyncio.start_unix_server(answer, path)
    child = EngineChild(spec("a"), None, (path, KEY), lambda why: None)
    try:
        assert await child.sleep() and await child.is_busy()
        await child.wake()
    finally:
        child.close()
        await child._log_task
        server.close()
    settings = ServerConfig(**SilentChild.orders.server)
    admin = str(settings.admin_api_key)
    assert requests == {"/sleep?level=1": admin.lower(), "/load": KEY, "/wake_up": admin.lower()}
    assert settings.api_key == (KEY,)


async def test_the_key_of_requests_that_are_passed_on_is_no_administrators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "Child", SilentChild)
    child = EngineChild(spec("a"), None, ("/none", KEY), lambda why: None)
    child.close()
    await child._log_task
    app = ApiKeys(_answer_all, ServerConfig(**SilentChild.orders.server))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        headers = {"authorization": f"Bearer {KEY}"}
        with pytest.raises(Exception, match="/sleep is for the administrator alone"):
            await client.post("/sleep", headers=headers)
        assert (await client.post("/v1/completions", headers=headers)).status_code == 204


async def _answer_all(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})
