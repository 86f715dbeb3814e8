"""One model's engine, seen from the server that starts it: its process, its log, and requests to its own routes."""

import asyncio
import logging
import re
import secrets
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from quintet.clients.http_client import HttpClient, ServerAddress
from quintet.clients.http_connection import ConnectFailed, ConnectionLost, Header, HttpProtocolError, HttpTimeout
from quintet.clients.http_connection import HttpTimeouts as Timeouts
from quintet.common.processes import Child, Exit
from quintet.router.models.config import ModelSpec
from quintet.router.models.engine_process import ModelOrders
from quintet.router.models.models_file import plain_fields

logger = logging.getLogger(__name__)

MODULE = "quintet.router.models.engine_process"
_POLL_SECONDS = 0.1  # seconds between two looks at /ready
_LOG_TAIL = 40  # lines that are kept to explain a failure
_LINE = 8 * 2**10  # characters of a line of the log
_MAX_BODY = 16 * 2**20  # bytes of an answer to one of our own requests
_SECONDS = 10.0  # for an answer to one of our own requests
_METRICS_SECONDS = 2.0  # for its metrics: a scrape waits for the slowest engine
_SLEEP_SECONDS = 120.0  # weights are copied to the host, and back
_USER_ERROR = re.compile(r"^quintet serve: error: (.+)$")
_UNREACHED = (ConnectFailed, ConnectionLost, HttpProtocolError, HttpTimeout)


class EngineFailed(Exception):
    """An engine that did not start, or does not answer; with its reason."""


class Engine(Protocol):
    """An engine that was started."""

    address: ServerAddress

    async def wait_ready(self, seconds: float) -> None:
        """Waits until it takes requests. EngineFailed if it does not."""

    async def is_gone(self) -> bool:
        """Returns whether it answers no more requests."""

    async def is_busy(self) -> bool:
        """Returns whether it works on a request, such as a background response that no connection waits for."""

    async def sleep(self) -> bool:
        """Puts it to sleep -> whether it sleeps."""

    async def wake(self) -> None:
        """EngineFailed if it cannot be woken."""

    async def metrics(self) -> str:
        """Returns its metrics in Prometheus' text format; "" if it does not answer."""

    async def end(self) -> None:
        """Ends it, once it runs no request, or after its drain_timeout."""

    def close(self, seconds: float = 0.0) -> None:
        """Ends it; at once, unless it ends by itself within `seconds`."""

    def ask_to_end(self) -> None:
        """Asks it to end, and does not wait."""


Starter = Callable[[ModelSpec, int | None, Callable[[str], None]], Engine]


class EngineStarter:
    """Starts engines as child processes."""

    def __init__(self, folder: Path, key: str, timeouts: Timeouts) -> None:
        """`folder`: of their sockets, which only this user can enter. `key`: which requests to them bring."""
        self._folder, self._key, self._timeouts, self._number = folder, key, timeouts, 0

    def __call__(self, spec: ModelSpec, kv_cache_bytes: int | None, ended: Callable[[str], None]) -> Engine:
        """Starts an engine. `ended` is called in the loop with the reason when its process has ended. OSError."""
        self._number += 1
        path = str(self._folder / f"engine{self._number}")
        return EngineChild(spec, kv_cache_bytes, (path, self._key), ended)


class EngineChild:
    """Engine in a child process. It ends with this process, however that ends."""

    def __init__(
        self, spec: ModelSpec, kv_cache_bytes: int | None, access: tuple[str, str], ended: Callable[[str], None]
    ) -> None:
        path, key = access
        engine, server = plain_fields(spec.engine), plain_fields(spec.server)
        if kv_cache_bytes is not None:
            engine["kv_cache_memory_bytes"] = kv_cache_bytes
        admin = new_key()  # of this object alone: requests that are passed on have the other key
        server.update(uds=path, api_key=(key,), admin_api_key=admin, enable_sleep_mode=True,
                      enable_server_load_tracking=True, access_log=False, playground=False)  # fmt: skip
        self.name, self.address = spec.name, ServerAddress("engine", 80, uds=path)
        self._headers, self._admin_headers = _headers(key), _headers(admin)
        self._client = HttpClient(self.address, times=Timeouts(_SECONDS, _SECONDS, _SECONDS))
        self._json_log = spec.server.log_format == "json"
        self._drain = spec.server.drain_timeout
        self._tail: deque[str] = deque(maxlen=_LOG_TAIL)
        self._loop, self._ended = asyncio.get_running_loop(), ended
        self._exit = asyncio.Event()
        self._child = Child(MODULE, ModelOrders(engine, server), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self._child.follow(self._call_in_loop(self._on_exit))
        self._log_task = self._loop.create_task(self._read_log())

    def _call_in_loop(self, call: Callable[[Exit], None]) -> Callable[[Exit], None]:
        def later(how: Exit) -> None:
            try:
                self._loop.call_soon_threadsafe(call, how)
            except RuntimeError:
                logger.debug("an engine ended after the loop")

        return later

    def _on_exit(self, how: Exit) -> None:
        self._exit.set()
        self._loop.create_task(self._report(how))

    async def _report(self, how: Exit) -> None:
        await asyncio.wait([self._log_task], timeout=1.0)  # its last lines have the reason
        self._ended(self._reason(how))

    def _reason(self, how: Exit) -> str:
        for line in reversed(self._tail):
            if error := _USER_ERROR.match(line):
                return error[1]
        return str(how)

    async def _read_log(self) -> None:
        """Prints its log, each line with the model's name."""
        reader = asyncio.StreamReader(limit=_LINE)
        transport, _ = await self._loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._child.stdout
        )
        try:
            while True:
                try:
                    line = await reader.readline()
                except ValueError:  # longer than the limit
                    line = await reader.read(_LINE)
                if not line:
                    return
                words = line.decode(errors="replace").rstrip("\n")
                self._tail.append(words)
                print(words if self._json_log else f"{self.name} | {words}", file=sys.stderr, flush=True)
        finally:
            transport.close()

    async def wait_ready(self, seconds: float) -> None:
        end = self._loop.time() + seconds
        while not self._exit.is_set():
            try:
                status, _ = await self._ask(b"GET", "/ready")
                if status == 200:
                    return
            except _UNREACHED:
                pass
            if self._loop.time() > end:
                raise EngineFailed(f"it was not ready after {seconds:g} s; raise --load-timeout")
            with_exit = asyncio.ensure_future(self._exit.wait())
            await asyncio.wait([with_exit], timeout=_POLL_SECONDS)
            with_exit.cancel()
        await asyncio.wait([self._log_task], timeout=1.0)
        raise EngineFailed(self._reason(self._child.exit or Exit(1)))

    async def is_gone(self) -> bool:
        try:
            status, _ = await self._ask(b"GET", "/ready")
        except _UNREACHED:
            return True
        return status != 200

    async def is_busy(self) -> bool:
        try:
            _, body = await self._ask(b"GET", "/load")
            return bool(msgspec.json.decode(body)["server_load"])
        except (*_UNREACHED, msgspec.DecodeError, KeyError, TypeError):
            return False

    async def sleep(self) -> bool:
        try:
            status, body = await self._ask(b"POST", "/sleep?level=1", _SLEEP_SECONDS, self._admin_headers)
        except _UNREACHED as error:
            logger.warning("%s does not sleep: %s", self.name, error)
            return False
        if status != 200:
            logger.info("%s does not sleep: %s", self.name, body[:500].decode(errors="replace"))
        return status == 200

    async def wake(self) -> None:
        try:
            status, body = await self._ask(b"POST", "/wake_up", _SLEEP_SECONDS, self._admin_headers)
        except _UNREACHED as error:
            raise EngineFailed(f"it does not wake: {error}") from None
        if status != 200:
            raise EngineFailed(f"it does not wake: {body[:500].decode(errors='replace')}")

    async def metrics(self) -> str:
        try:
            status, body = await self._ask(b"GET", "/metrics", _METRICS_SECONDS)
        except _UNREACHED:
            return ""
        return body.decode(errors="replace") if status == 200 else ""

    async def end(self) -> None:
        self.ask_to_end()
        try:
            await asyncio.wait_for(self._exit.wait(), self._drain + _SECONDS)
        except (asyncio.TimeoutError, TimeoutError):
            logger.warning("%s has not ended within %g s; it is killed", self.name, self._drain + _SECONDS)
        self._client.close()
        await self._loop.run_in_executor(None, self._child.close)  # waits for a process that does not end

    def ask_to_end(self) -> None:
        self._child.ask_to_end()

    def close(self, seconds: float = 0.0) -> None:
        self._client.close()
        if not seconds:  # it may load libraries, and would notice nothing meanwhile
            self._child.kill()
        self._child.close(seconds)

    async def _ask(
        self, method: bytes, path: str, seconds: float = _SECONDS, headers: list[Header] | None = None
    ) -> tuple[int, bytes]:
        message = self._client.message(method, path.encode(), headers or self._headers)
        times = Timeouts(min(_SECONDS, seconds), seconds, seconds)
        exchange = await self._client.send(message, fresh=True, times=times)
        try:
            head = await exchange.head()
            return head.status, await exchange.body(_MAX_BODY)
        finally:
            exchange.close()


def _headers(key: str) -> list[Header]:
    return [(b"authorization", b"Bearer " + key.encode()), (b"accept-encoding", b"identity")]


def new_key() -> str:
    """Returns a key for requests to engines."""
    return secrets.token_urlsafe()
