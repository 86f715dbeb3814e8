"""One API process: the HTTP app over the engine's wire, from the first connection to the last."""

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from quintet.common.logging_setup import install_server_log
from quintet.common.processes import follow_parent, read_orders
from quintet.server.config import ServerConfig
from quintet.server.http.app import make_app
from quintet.server.http.app_state import AppState
from quintet.server.http.endpoint_plugins import init_endpoint_plugins
from quintet.server.metrics.stat_loggers import StatLoggers, load_stat_loggers
from quintet.server.processes.messages import ApiOrders
from quintet.server.processes.remote_backend import RemoteBackend, may_serve
from quintet.server.tls import Certificates
from quintet.server.uvicorn_server import UvicornServer, run_loop

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.02  # seconds between two checks whether the engine has sent Hello
FORCED_SECONDS = 1  # seconds until connections are cut, when calls end at once


class ServerEnd(NamedTuple):
    """Reason and time of a server's end, and its log messages."""

    reason: str  # the signal, as a rule
    num_running: int  # calls when it came
    deadline: float = 0.0  # time.monotonic()

    def start_message(self, patience: float) -> str:
        waits = f"{self.num_running} requests run, and get up to {patience:g} s" if self.num_running else "nothing runs"
        return f"the server ends; {waits}"

    def end_message(self, num_ended: int) -> str:
        finished = max(0, self.num_running - num_ended)
        took = time.monotonic() - self.deadline
        ran = f"of {self.num_running} running requests {finished} finished, {num_ended} were cut short"
        return f"ended after {took:.1f} s ({self.reason}); {ran if self.num_running else 'no request was running'}"


class ApiServer:
    """Serves until stop(): the first call lets running requests finish, the second ends them with the reason."""

    def __init__(
        self,
        settings: ServerConfig,
        folder: Path,
        worker: int,
        stopping: Callable[[], None] = lambda: None,
        profiles: bool = False,
        num_engines: int = 1,
    ) -> None:
        self.backend = RemoteBackend(folder, worker, settings.step_timeout, num_engines)
        self.service = AppState(self.backend, settings, worker, profiles)
        self._app = make_app(self.service)
        self._server = UvicornServer(self._app, settings, self._on_signal)
        self._stat_loggers = StatLoggers([] if worker else load_stat_loggers())
        self._certificates = Certificates(settings) if settings.ssl_certfile else None
        self._has_parent = worker > 0  # signals are the parent's to answer
        self._stopping = stopping  # called by each stop()
        self.is_serving = False  # or it still waits for what it needs
        self.is_forced = False  # stop() was called a second time
        self._draining: asyncio.Task[None] | None = None
        self.end: ServerEnd | None = None  # once stop() was called
        metrics, peers = self.service.metrics, self.backend.peers
        metrics.connections = lambda: len(self._server.server_state.connections)
        metrics.gather_others, peers.rows = partial(peers.gather, settings.api_workers), metrics.rows

    async def run(self, listener: socket.socket) -> None:
        if self._has_parent:
            loop = asyncio.get_running_loop()
            follow_parent(lambda why: loop.call_soon_threadsafe(self._told, why))
        self.backend.start()
        recording = asyncio.get_running_loop().create_task(self._stat_loggers.run(self.backend))
        try:
            await init_endpoint_plugins(self._app)
            if self._has_parent:
                await self._wait_until_served()  # one that comes later connects to tool servers when they are asked for
            else:
                await self.service.tool_servers.connect()
            self.is_serving = True
            await self._serve(listener)
            if self._has_parent and self.end and self.end.num_running:
                logger.info(
                    "API process %s: %s", self.service.name[1:], self.end.end_message(len(self.service.ended_calls))
                )
        finally:
            recording.cancel()
            await self.service.tool_servers.close()
            self.backend.close()
            self.service.close()

    async def _serve(self, listener: socket.socket) -> None:
        certificates, watching = self._certificates, None
        if certificates is not None:
            self._server.use_tls(certificates.context)
            if self.service.settings.enable_ssl_refresh:
                watching = asyncio.get_running_loop().create_task(certificates.watch())
        try:
            await self._server.serve([listener])
        finally:
            if watching is not None:
                watching.cancel()

    def stop(self, why: str = "shutdown requested") -> None:
        """Lets running calls end; a second time, ends them."""
        loop = asyncio.get_running_loop()
        if self._draining is None:
            self.end = ServerEnd(why, len(self.service.calls), time.monotonic())
            self._say(f"{why}: {self.end.start_message(self.service.settings.drain_timeout)}")
            self.service.draining = True  # from now on a dead process is not replaced
            self._draining = loop.create_task(self._drain())
        else:
            self._say(f"{why} again: {len(self.service.calls)} requests are cut short")
            self.is_forced = self._server.should_exit = True
            self.service.end_calls()
            loop.call_later(FORCED_SECONDS, self._server.disconnect_all)
        self._stopping()

    def _say(self, what: str) -> None:
        if not self._has_parent:
            logger.info("%s", what)
        elif self.service.calls:
            logger.info("API process %s: %s", self.service.name.removeprefix("w"), what)

    def _told(self, why: str) -> None:
        self.fail(why) if why else self.stop()

    def _on_signal(self, name: str) -> None:
        if not self._has_parent:
            self.stop(name)

    def fail(self, why: str) -> None:
        """The engine is gone: calls end with the reason, and then the server."""
        self.service.fail(why)  # first: to the engine's client each request fails by itself
        self.backend.fail(why)
        self._server.should_exit = True

    async def _wait_until_served(self) -> None:
        """Leaves connections to the processes that know the model, until this one does."""
        while not may_serve(self.backend) and not self._server.should_exit:
            if self.backend.death_reason is not None:
                raise SystemExit(self.backend.death_reason)
            await asyncio.sleep(_POLL_SECONDS)

    async def _drain(self) -> None:
        await self.service.drain()
        self._server.should_exit = True


def main() -> int:
    """Runs an API process besides the first; the parent watches the engine."""
    orders = read_orders(ApiOrders)
    install_server_log(orders.server)
    listener, folder = socket.socket(fileno=orders.listen), Path(orders.folder)
    try:
        server = ApiServer(
            ServerConfig(**orders.server), folder, orders.worker, profiles=orders.profiles,
            num_engines=orders.num_engines,
        )  # fmt: skip
    except ValueError as error:  # what the first process could use, and this one cannot
        print(f"quintet serve: error: {error}", file=sys.stderr, flush=True)
        return 1
    run_loop(server.run(listener))
    return 0


if __name__ == "__main__":
    sys.exit(main())
