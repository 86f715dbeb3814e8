"""A server that speaks OpenAI's HTTP badly on request: its behaviour is named by the model that is asked for."""

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

KEY = "sesame"


@dataclass
class Asked:
    """One request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    connection: int


class Reply:
    """Writes one answer."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def whole(self, status: int, body: Any, kind: str = "application/json", **headers: str) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self._head(status, kind, {"content-length": str(len(data)), **headers})
        self._writer.write(data)
        await self._writer.drain()

    def begin(self) -> None:
        self._head(200, "text/event-stream; charset=utf-8", {"transfer-encoding": "chunked"})

    async def piece(self, data: bytes) -> None:
        self._writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await self._writer.drain()

    async def raw(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def event(self, data: Any) -> None:
        await self.piece(b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n")

    async def end(self, done: bytes = b"data: [DONE]\n\n") -> None:
        if done:
            await self.piece(done)
        await self.raw(b"0\r\n\r\n")

    def _head(self, status: int, kind: str, headers: dict[str, str]) -> None:
        lines = [f"HTTP/1.1 {status} x", f"content-type: {kind}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self._writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())


@dataclass
class Fake:
    """The server, and what it was asked."""

    port: int = 0
    uds: str = ""
    key: str | None = None
    models: list[str] = field(default_factory=lambda: ["echo", "other"])
    asked: list[Asked] = field(default_factory=list)
    busy: int = 0  # how many requests for "busy" are told to come again
    retry_after: str = "0"
    under_way: int = 0
    most_under_way: int = 0
    gone: threading.Event = field(default_factory=threading.Event)  # a client left in the middle of an answer
    proceed: threading.Event = field(default_factory=threading.Event)  # lets "held" go on
    connections: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def bodies(self) -> list[Any]:
        return [asked.body for asked in self.asked if asked.method == "POST"]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        try:
            while (asked := await _read(reader, number)) is not None:
                self.asked.append(asked)
                self.under_way += 1
                self.most_under_way = max(self.most_under_way, self.under_way)
                try:
                    if not await self._answer(asked, Reply(writer), writer):
                        return
                finally:
                    self.under_way -= 1
        except (ConnectionError, asyncio.IncompleteReadError):
            self.gone.set()
        finally:
            writer.write(b"HTTP/1.1 400 x\r\n\r\n" if not self.asked else b"")
            writer.close()

    async def _answer(self, asked: Asked, reply: Reply, writer: asyncio.StreamWriter) -> bool:
        """False: the connection ends here."""
        if self.key and asked.headers.get("authorization") != f"Bearer {self.key}":
            await reply.whole(401, {"error": {"message": "who are you?", "type": "auth", "code": None}})
        elif asked.path == "/ready":
            await reply.whole(200, {})
        elif asked.path == "/v1/models":
            await reply.whole(200, {"object": "list", "data": [{"id": name} for name in self.models]})
        elif asked.path not in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
            await reply.whole(404, "<html>no such page</html>", "text/html")
        else:
            name = asked.body.get("model", "echo").replace("-", "_")
            behaviour = getattr(self, f"_{name}", None)
            if behaviour is None:
                message = {"error": {"message": f"The model {name!r} does not exist.", "code": "model_not_found"}}
                await reply.whole(404, message)
            else:
                return bool(await behaviour(asked, reply))
        return True

    # ------------------------------------------------------------------------------------------------- behaviours

    async def _echo(self, asked: Asked, reply: Reply, usage: bool = True) -> bool:
        words = [f" {at}" for at in range(asked.body.get("max_tokens", 4))]
        counts = {"prompt_tokens": 7, "completion_tokens": len(words), "total_tokens": 7 + len(words)}
        if not asked.body.get("stream"):
            said = {"echo": asked.body, "choices": [{"index": 0, "text": "".join(words)}], "usage": counts}
            await reply.whole(200, said, x_request_id="req-1")
            return True
        chat = "messages" in asked.body
        reply.begin()
        if chat:
            await reply.event(_chunk({"delta": {"role": "assistant", "content": ""}}))
        for at, word in enumerate(words):
            reason = "length" if at == len(words) - 1 else None
            await reply.event(_chunk({"delta": {"content": word}} if chat else {"text": word}, reason))
        if usage:
            await reply.event({"choices": [], "usage": counts})
        await reply.end()
        return True

    async def _calls(self, asked: Asked, reply: Reply) -> bool:
        """Thinks, and calls add(1, 2) until it has a result, then says it; forever, if it is asked so."""
        told = [each["content"] for each in asked.body["messages"] if each["role"] == "tool"]
        reply.begin()
        if told and "forever" not in asked.body["messages"][0]["content"]:
            await reply.event(_chunk({"delta": {"content": f"It is {told[-1]}."}}, "stop"))
            await reply.end()
            return True
        begin = {"index": 0, "id": "c1", "type": "function", "function": {"name": "add", "arguments": ""}}
        await reply.event(_chunk({"delta": {"reasoning_content": "Hm."}}))
        await reply.event(_chunk({"delta": {"tool_calls": [begin]}}))
        for text in ('{"a": 1,', ' "b": 2}'):
            await reply.event(_chunk({"delta": {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}}))
        await reply.event(_chunk({"delta": {}}, "tool_calls"))
        await reply.end()
        return True

    async def _other(self, asked: Asked, reply: Reply) -> bool:
        return await self._echo(asked, reply)

    async def _no_usage(self, asked: Asked, reply: Reply) -> bool:
        return await self._echo(asked, reply, usage=False)

    async def _held(self, asked: Asked, reply: Reply) -> bool:
        """Gives one token, and goes on when it may, or when the client is gone."""
        reply.begin()
        await reply.event(_chunk({"text": "one", "delta": {"content": "one"}}))
        while not self.proceed.is_set():
            await reply.piece(b": still here\n\n")
            await asyncio.sleep(0.01)
        await reply.end()
        return True

    async def _breaks_off(self, asked: Asked, reply: Reply) -> bool:
        reply.begin()
        await reply.event(_chunk({"text": "half", "delta": {"content": "half"}}))
        return False

    async def _ends_early(self, asked: Asked, reply: Reply) -> bool:
        reply.begin()
        await reply.event(_chunk({"text": "half", "delta": {"content": "half"}}))
        await reply.end(b"")
        return True

    async def _fails_midway(self, asked: Asked, reply: Reply) -> bool:
        reply.begin()
        await reply.event(_chunk({"text": "half", "delta": {"content": "half"}}))
        await reply.event({"error": {"message": "out of pages", "type": "server_error", "code": 500}})
        await reply.end()
        return True

    async def _bad_chunk(self, asked: Asked, reply: Reply) -> bool:
        reply.begin()
        await reply.event(_chunk({"text": "half", "delta": {"content": "half"}}))
        await reply.raw(b"zzz\r\nnot a size\r\n")
        return False

    async def _bad_event(self, asked: Asked, reply: Reply) -> bool:
        reply.begin()
        await reply.piece(b"data: {nonsense\n\n")
        await reply.end()
        return True

    async def _html(self, asked: Asked, reply: Reply) -> bool:
        await reply.whole(200, "<html>hello</html>", "text/html")
        return True

    async def _fault(self, asked: Asked, reply: Reply) -> bool:
        await reply.whole(500, {"error": {"message": "it broke", "type": "server_error"}})
        return True

    async def _busy(self, asked: Asked, reply: Reply) -> bool:
        if self.busy > 0:
            self.busy -= 1
            error = {"error": {"message": "come again", "code": "overloaded"}}
            await reply.whole(429, error, retry_after=self.retry_after)
            return True
        return await self._echo(asked, reply)

    async def _hangs_up(self, asked: Asked, reply: Reply) -> bool:
        return False

    async def _silent(self, asked: Asked, reply: Reply) -> bool:
        reply.begin()
        await reply.event(_chunk({"text": "half", "delta": {"content": "half"}}))
        await asyncio.sleep(60)
        return False

    async def _drips(self, asked: Asked, reply: Reply) -> bool:
        """Every byte of the body a chunk of its own, lines ended as on Windows, no last blank line."""
        reply.begin()
        data = json.dumps(_chunk({"text": "ö", "delta": {"content": "ö"}}, "stop"), ensure_ascii=False)
        for byte in f": hello\r\n\r\ndata:{data}\r\n\r\ndata: [DONE]".encode():
            await reply.piece(bytes([byte]))
        await reply.end(b"")
        return True

    async def _until_close(self, asked: Asked, reply: Reply) -> bool:
        """No length and no chunks: the answer ends with the connection, as in HTTP/1.0."""
        await reply.raw(b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        await reply.raw(b"data: " + json.dumps(_chunk({"text": "all"}, "stop")).encode() + b"\n\ndata: [DONE]\n\n")
        return False


def _chunk(choice: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, **choice, "finish_reason": reason}]}


async def _read(reader: asyncio.StreamReader, connection: int) -> Asked | None:
    begin = await reader.read(1)
    if not begin or not begin.isalpha():  # the end, or TLS
        return None
    head = begin + await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode().strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = int(headers.get("content-length", 0))
    body = json.loads(await reader.readexactly(length)) if length else None
    method, path, _ = first.split()
    return Asked(method, path, headers, body, connection)


async def _serve(fake: Fake, ready: threading.Event, stop: asyncio.Event) -> None:
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    local = await asyncio.start_unix_server(fake.serve, fake.uds)
    fake.port = server.sockets[0].getsockname()[1]
    ready.set()
    await stop.wait()
    server.close()
    local.close()


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    """The server, in a thread."""
    made, ready = Fake(uds=str(tmp_path / "socket")), threading.Event()
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    def work() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(_serve(made, ready, stop))
        rest = asyncio.all_tasks(loop)
        for task in rest:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*rest, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    assert ready.wait(60)
    yield made
    loop.call_soon_threadsafe(stop.set)
    thread.join(60)
    assert not thread.is_alive()


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No key and no proxy of the machine's; the log as it was."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # whoever heeds it fails
    log = logging.getLogger("quintet")
    level, handlers = log.level, [*log.handlers]
    yield
    log.setLevel(level)
    log.handlers[:] = handlers
