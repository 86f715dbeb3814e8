"""Servers that a test writes the answers of, byte by byte, and a router before them, in one event loop."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from quintet.router.backends import RouterBackend
from quintet.router.config import RouterConfig
from quintet.router.core import RouterCore
from quintet.router.server import RouterServer
from quintet.server.config import ServerConfig
from quintet.server.listen import listen

LOOKS = 12000  # every 5 ms, after which a test has hung; no clock, for the whole process may stand still
EVENTS = [b'data: {"choices":[{"index":0,"delta":{"content":"%d"}}]}\n\n' % number for number in range(4)]
DONE = b"data: [DONE]\n\n"
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n" % len(data) + data + b"\r\n"


@dataclass
class Call:
    """One request as it came, and the way back."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes
    writer: asyncio.StreamWriter
    gone: asyncio.Event

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def header(self, name: str) -> str | None:
        return next((value for each, value in self.headers if each == name), None)

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def say(self, what: Any, status: int = 200, headers: str = "") -> None:
        body = json.dumps(what).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{headers}\r\n"
        await self.raw(head.encode() + body)

    async def stream(self, events: list[bytes]) -> None:
        await self.raw(SSE)
        for each in events:
            await self.raw(chunk(each))
        await self.raw(b"0\r\n\r\n")

    def cut(self) -> None:
        self.writer.transport.abort()


Behaviour = Callable[[Call], Awaitable[None]]


@dataclass
class Fake:
    """A server. `behave` answers what asks a model; what is asked of its health goes by `health` and `models`."""

    name: str = "a"
    models: tuple[str, ...] = ("m",)
    health: int = 200
    has_ready: bool = True
    behave: Behaviour | None = None
    calls: list[Call] = field(default_factory=list)
    looks: int = 0
    port: int = 0
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> "Fake":
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        """Dies: whoever is connected is cut off, and nobody is let in."""
        if self._server is not None:
            self._server.close()
        for each in list(self._writers):
            each.transport.abort()
        await asyncio.sleep(0)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while not writer.is_closing():
                call = await self._read(reader, writer)
                await self._answer(call)
        self._writers.discard(writer)
        writer.close()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Call:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head[:-4].split("\r\n")
        headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        length = int(dict(headers).get("content-length", "0"))
        return Call(*first.split()[:2], headers, await reader.readexactly(length), writer, asyncio.Event())

    async def _answer(self, call: Call) -> None:
        if call.path == "/v1/models":
            await call.say({"object": "list", "data": [{"id": each, "object": "model"} for each in self.models]})
        elif call.path in ("/ready", "/health"):
            self.looks += 1
            await call.say({}, self.health if self.has_ready or call.path == "/health" else 404)
        else:
            self.calls.append(call)
            await (self.behave(call) if self.behave else call.say({"by": self.name}))


@dataclass
class Routed:
    """A router that runs, and a client of it."""

    server: RouterServer
    client: httpx.AsyncClient
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def backend(self, fake: Fake) -> RouterBackend:
        found = self.server.core.backends.get(fake.url)
        assert found is not None
        return found

    async def post(self, path: str = "/v1/chat/completions", **more: Any) -> httpx.Response:
        more.setdefault("json", {"model": "m", "messages": []})
        return await self.client.post(path, **more)


@contextlib.asynccontextmanager
async def routed(
    *fakes: Fake, door: dict[str, Any] | None = None, wait: bool = True, **config: Any
) -> AsyncIterator[Routed]:
    """A router before the fakes, which are started; with wait, once it has found them all up."""
    for each in fakes:
        if not each.port:
            await each.start()
    for name in {"backend", "prefill", "decode", "encode"} & config.keys():
        config[name] = [each.url if isinstance(each, Fake) else each for each in config[name]]
    if not {"backend", "prefill"} & config.keys():
        config["backend"] = [each.url for each in fakes]
    settings = ServerConfig(port=0, **{"access_log": False, **(door or {})})
    key = settings.api_key[0] if settings.api_key else None
    server = RouterServer(RouterCore(RouterConfig(**{"health_check_interval": 0.05, **config}), key), settings)
    server._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    listener = listen(settings)
    running = asyncio.get_running_loop().create_task(server.run(listener))
    port = listener.getsockname()[1]
    headers = {"authorization": f"Bearer {settings.api_key[0]}"} if settings.api_key else {}
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=None, headers=headers) as client:
            routed = Routed(server, client, port)
            await until(lambda: bool(list(server.core.backends)))
            if wait:
                await until(lambda: all(each.up for each in server.core.backends))
            yield routed
    finally:
        server._server.should_exit = True
        server._server.disconnect_all()
        await until(running.done)
        running.result()
        for each in fakes:
            await each.stop()


async def until(true: Callable[[], bool]) -> None:
    """Waits for it."""
    for _ in range(LOOKS):
        if true():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come about")
