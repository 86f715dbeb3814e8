"""Health checks of servers: whether they take requests, and which models they have."""

import asyncio
import logging
from typing import Any

import msgspec

from quintet.clients.http_connection import (
    ConnectFailed,
    ConnectionLost,
    Header,
    HttpProtocolError,
    HttpTimeout,
    HttpTimeouts,
)
from quintet.router.backends import RouterBackend
from quintet.router.config import RouterConfig
from quintet.router.queue import RequestQueue

logger = logging.getLogger(__name__)

_DOWN_CHECK_SECONDS = 1.0  # seconds between two looks at a server that is down
_MAX_BODY = 4 * 2**20  # bytes of a list of models
_NO_ROUTE_STATUSES = (404, 405, 501)


class _Models(msgspec.Struct):
    data: list[dict[str, Any]]


_DECODER = msgspec.json.Decoder(_Models)


class Health:
    """Health checks of all servers, with one task for each."""

    def __init__(self, config: RouterConfig, places: RequestQueue, headers: list[Header]) -> None:
        """`headers`: the key that is sent to servers."""
        self._config, self._places = config, places
        seconds = config.health_check_timeout
        self._times = HttpTimeouts(seconds, seconds, seconds)
        self._headers = [*headers, (b"accept-encoding", b"identity"), (b"user-agent", b"quintet-router")]
        self._thresholds = (config.health_failure_threshold, config.health_success_threshold)

    def watch(self, backend: RouterBackend) -> None:
        backend.health_task = asyncio.get_running_loop().create_task(self._watch(backend))

    async def _watch(self, backend: RouterBackend) -> None:
        while True:
            await self.check(backend)
            pause = self._config.health_check_interval
            await asyncio.sleep(pause if backend.up and not backend.num_bad else min(pause, _DOWN_CHECK_SECONDS))

    async def check(self, backend: RouterBackend) -> None:
        """Checks a server once."""
        odd = ""
        try:
            trouble = await self._ready(backend)
            if not trouble:
                odd = await self._models(backend)
        except (ConnectFailed, ConnectionLost, HttpProtocolError, HttpTimeout) as error:
            trouble = str(error)
        except ValueError as error:
            trouble = f"its list of models cannot be read: {error}"
        if backend.record_health_check(self._thresholds, trouble):
            logger.log(
                logging.INFO if backend.up else logging.WARNING, "%s %s", backend.url,
                f"takes requests, for {', '.join(sorted(backend.models)) or 'any model'}" if backend.up
                else f"is left out: {trouble}",
            )  # fmt: skip
            if odd:
                logger.warning("%s: %s", backend.url, odd)
        if odd and backend.up:
            backend.unhealthy_reason = odd
        self._places.wake_waiting()

    async def _ready(self, backend: RouterBackend) -> str:
        """Returns why it takes no requests; "" if it does. quintet has /ready, vLLM /health alone."""
        status, _ = await self._get(backend, backend.ready_path)
        if status in _NO_ROUTE_STATUSES and backend.ready_path == "/ready":
            backend.ready_path = "/health"
            status, _ = await self._get(backend, backend.ready_path)
        return "" if status == 200 else f"{backend.ready_path} answers {status}"

    async def _models(self, backend: RouterBackend) -> str:
        """Reads which it has. What is odd about it: then it is asked for any."""
        status, body = await self._get(backend, "/v1/models")
        if status == 200:
            entries = _DECODER.decode(body).data
            backend.models = {each["id"]: each for each in entries if isinstance(each.get("id"), str)}
            return ""
        backend.models = {}
        if status in (401, 403):
            return f"/v1/models answers {status} without its API key, so it is asked for any model; give its key " \
                   "with --backend-api-key"  # fmt: skip
        return f"/v1/models answers {status}, so it is asked for any model"

    async def _get(self, backend: RouterBackend, path: str) -> tuple[int, bytes]:
        upstream = backend.upstream
        message = upstream.message(b"GET", path.encode(), self._headers)
        exchange = await upstream.send(message, fresh=True, times=self._times)
        try:
            head = await exchange.head()
            return head.status, await exchange.body(_MAX_BODY)
        finally:
            exchange.close()
