"""uvicorn as we run it: our bounds on connections, a signal that begins the draining, the fastest loop."""

import asyncio
import importlib.util
import signal
import socket
import ssl
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from quintet.server.config import ServerConfig
from quintet.server.http.middleware.slow_clients import limited_protocol

MAX_MESSAGE_BYTES = 2**20  # of a client's event in a WebSocket: 24 s of sound in base64
SHUTDOWN_SECONDS = 5  # seconds that connections get after the last call, to take in their answers


class UvicornServer(uvicorn.Server):
    """uvicorn's, but a signal begins the draining instead of closing connections."""

    def __init__(self, app: Any, settings: ServerConfig, stop: Callable[[str], None]) -> None:
        """`app` is ASGI; `stop` gets the name of the signal, in the loop."""
        super().__init__(uvicorn.Config(app, **_options(settings)))
        self._stop = stop

    def use_tls(self, context: ssl.SSLContext) -> None:
        """For TLS, in the place of one that uvicorn makes of the files."""
        self.config.load()
        self.config.ssl = context

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._loop.call_soon_threadsafe(self._stop, signal.Signals(sig).name)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Cuts off clients that do not read their answer in time; uvicorn would cancel, and log a trace for each."""
        cut = self._loop.call_later(SHUTDOWN_SECONDS, self.disconnect_all)
        await super().shutdown(sockets)
        cut.cancel()

    def disconnect_all(self) -> None:
        """Ends the connections that there are; what writes to them then ends by itself."""
        for each in list(self.server_state.connections):
            each.transport.abort()


def _options(settings: ServerConfig) -> dict[str, Any]:
    return {
        "http": limited_protocol(settings),
        **websocket_options(),
        "lifespan": "off",
        "log_config": None,
        "access_log": False,  # ours counts tokens
        "server_header": False,
        "proxy_headers": False,
        "root_path": settings.root_path,
        "limit_concurrency": settings.max_connections,
        "timeout_graceful_shutdown": SHUTDOWN_SECONDS + 1,
        "ssl_certfile": settings.ssl_certfile,
        "ssl_keyfile": settings.ssl_keyfile,
    }


def websocket_options() -> dict[str, Any]:
    """uvicorn's options for WebSockets, where the package that speaks them is installed (the extra `audio`)."""
    installed = importlib.util.find_spec("websockets") is not None
    return {
        "ws": "websockets-sansio" if installed else "none",
        "ws_max_size": MAX_MESSAGE_BYTES,
        "ws_per_message_deflate": False,  # what it expands to would not be bounded
    }


def run_loop(main: Any) -> None:
    """On uvloop, where it is installed."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)
