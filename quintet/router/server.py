"""A router that runs: its listener and certificate, from the first connection to the last."""

import asyncio
import dataclasses
import logging
import socket
import time

from quintet.router.app import RouterApp, make_app
from quintet.router.core import RouterCore
from quintet.server.config import ServerConfig
from quintet.server.file_limits import fit_file_limit
from quintet.server.http.errors import ApiError
from quintet.server.tls import Certificates
from quintet.server.uvicorn_server import SHUTDOWN_SECONDS, UvicornServer

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.02  # seconds between two looks at whether all is done
_FORCED_SECONDS = 1.0  # seconds until connections are cut, when requests end at once


class RouterServer:
    """Serves until stop(): the first call lets running requests finish, the second cuts them."""

    def __init__(self, core: RouterCore, door: ServerConfig, app: type[RouterApp] = RouterApp) -> None:
        """ValueError for what cannot be used."""
        self._door, self.core = door, core
        self._has_page = app.has_page and door.playground and not door.uds
        self._certificates = Certificates(door) if door.ssl_certfile else None
        self._server = UvicornServer(make_app(app(core, door), core, door), door, self.stop)
        self._draining: asyncio.Task[None] | None = None
        self._forced = False  # requests that run are cut short

    async def run(self, listener: socket.socket) -> None:
        self.core.start()
        watching = None
        if self._certificates is not None:
            self._server.use_tls(self._certificates.context)
            if self._door.enable_ssl_refresh:
                watching = asyncio.get_running_loop().create_task(self._certificates.watch())
        port = 0 if self._door.uds else listener.getsockname()[1]
        url = _url(self._door, port)
        page = f", page at {url}/, API" if self._has_page else ""
        logger.info("ready: %s%s at %s", self.core.title, page, url)
        try:
            await self._server.serve([listener])
        finally:
            if watching is not None:
                watching.cancel()
            self.core.close()

    def stop(self, why: str = "shutdown requested") -> None:
        """In the loop."""
        running = self.core.queue.in_flight
        if self._draining is None:
            logger.info("%s: the server ends; %d requests run, and get up to %g s", why, running,
                        self._door.drain_timeout)  # fmt: skip
            self.core.draining = True
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        elif not self._forced:
            logger.info("%s again: %d requests are cut short", why, running)
            self._forced = True
            if self._server.should_exit:  # what is left are bodies on their way, and what no engine answers
                self._cut()

    def _cut(self) -> None:
        asyncio.get_running_loop().call_later(min(_FORCED_SECONDS, SHUTDOWN_SECONDS), self._server.disconnect_all)

    async def _drain(self) -> None:
        begun = time.monotonic()
        seconds = self._door.drain_timeout
        while self.core.queue.in_flight and not self._forced and time.monotonic() - begun < seconds:
            await asyncio.sleep(_POLL_SECONDS)
        left = self.core.queue.in_flight
        logger.info("ended after %.1f s: %s", time.monotonic() - begun,
                    f"{left} requests were cut short" if left else "all requests finished")  # fmt: skip
        self._server.should_exit = True
        if left:
            self.core.refuse_waiting(ApiError(503, "the server is shutting down", code="shutting_down"))
            self._cut()


def fit_connections(door: ServerConfig) -> ServerConfig:
    """Returns the settings with as many connections as the limit on open files allows: each has one to a server."""
    twice = dataclasses.replace(door, max_connections=2 * door.max_connections)
    return dataclasses.replace(door, max_connections=max(1, fit_file_limit(twice).max_connections // 2))


def _url(door: ServerConfig, port: int) -> str:
    return dataclasses.replace(door, port=port).url
