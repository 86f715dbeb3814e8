"""The app over a fake engine: in this process without a socket, or on a real port in a thread of its own."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import uvicorn

from quintet.server.config import ServerConfig
from quintet.server.http.app import make_app
from quintet.server.http.app_state import AppState
from quintet.server.http.middleware.slow_clients import ClientTimeouts, limited_protocol
from quintet.server.uvicorn_server import websocket_options
from tests.server.fakes import FakeBackend

HOST = "http://127.0.0.1"
WAIT = 60  # seconds after which a test has hung
_BUFFER = 2**14  # bytes

Result = TypeVar("Result")


def client(backend: FakeBackend | None = None, profiles: bool = False, **settings: Any) -> httpx.AsyncClient:
    """To be used in one event loop; a failure of the app itself is raised."""
    service = AppState(backend or FakeBackend(), ServerConfig(**settings), profiles=profiles)
    return httpx.AsyncClient(transport=httpx.ASGITransport(make_app(service)), base_url=HOST)


def events(text: str) -> list[Any]:
    """The data of server-sent events, which must end with [DONE]."""
    parts = text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""], text[-200:]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def chat(text: str = "Hi", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


@dataclass
class Live:
    """A server that listens."""

    backend: FakeBackend
    service: AppState
    port: int
    loop: asyncio.AbstractEventLoop
    wire: Any  # the class of its connections
    server: "_Server"

    @property
    def url(self) -> str:
        return f"{HOST}:{self.port}"

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """In the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT)

    def lose_patience(self, patience: ClientTimeouts) -> None:
        """From now on: a client that is slow because the machine is busy was waited for so far."""
        self.wire.timeouts = patience

    def wait_for_abort(self) -> None:
        self.run(asyncio.wait_for(self.backend.gone.wait(), WAIT))

    def go_on(self) -> None:
        self.loop.call_soon_threadsafe(self.backend.go_on.set)

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        """From that address. Buffers are small, so that who does not read is soon noticed."""
        wire = socket.socket()
        wire.bind((source, 0))
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        wire.settimeout(WAIT)
        wire.connect(("127.0.0.1", self.port))
        return wire

    def exchange(self, raw: bytes) -> bytes:
        """All that comes back until the server hangs up."""
        with self.connect() as wire:
            wire.sendall(raw)
            return read_all(wire)

    def begin(self, path: str, body: dict[str, Any], later: bytes = b"") -> socket.socket:
        """A request that was sent, with what comes behind it; the caller reads, or hangs up."""
        wire, raw = self.connect(), json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        wire.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw + later)
        return wire


def read_all(wire: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := wire.recv(65536):
            parts.append(part)
    return b"".join(parts)


@contextlib.contextmanager
def serving(
    backend: FakeBackend | None = None,
    patience: ClientTimeouts | None = None,
    run: Callable[[Coroutine[Any, Any, None]], object] = asyncio.run,
    **settings: Any,
) -> Iterator[Live]:
    """uvicorn with our protocol, as `quintet serve` starts it."""
    started, lives = threading.Event(), []
    config = ServerConfig(**settings)

    async def serve(listener: socket.socket) -> None:
        fake = backend or FakeBackend()
        service = AppState(fake, config)
        wire = limited_protocol(config, patience or ClientTimeouts())
        server = _Server(
            uvicorn.Config(
                make_app(service), http=wire, lifespan="off", log_config=None, access_log=False,
                root_path=config.root_path, server_header=False, timeout_graceful_shutdown=1,
                timeout_keep_alive=WAIT,  # a test that is slow finds its idle connection open
                **websocket_options(),
            ), started,
        )  # fmt: skip
        lives.append(Live(fake, service, listener.getsockname()[1], asyncio.get_running_loop(), wire, server))
        await server.serve([listener])
        for task in list(fake.running.values()):
            task.cancel()

    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        thread = threading.Thread(target=lambda: run(serve(listener)))
        thread.start()
        assert started.wait(WAIT)
        try:
            yield lives[0]
        finally:
            lives[0].server.should_exit = True
            thread.join(WAIT)
            assert not thread.is_alive()


class _Server(uvicorn.Server):
    """Says when it listens; leaves signals to pytest."""

    def __init__(self, config: uvicorn.Config, ready: threading.Event) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
