"""Router without its HTTP app: the servers, their health checks, and the ways of a request to them."""

import asyncio
import contextlib
import ssl
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from quintet.clients.http_client import HttpClient
from quintet.clients.http_connection import Header, HttpTimeouts
from quintet.router import metrics
from quintet.router.admin import Admin
from quintet.router.backends import Pool, RouterBackends, address_of
from quintet.router.config import RouterConfig
from quintet.router.disaggregated import Disaggregated
from quintet.router.encoders import Encoders
from quintet.router.forward import Forwarder
from quintet.router.health import Health
from quintet.router.metrics import RouterCounts
from quintet.router.queue import RETRY_SOON, RequestQueue
from quintet.router.request_info import RequestInfo
from quintet.router.response_locations import ResponseLocations
from quintet.router.response_stream import ResponseStream
from quintet.router.stored_responses import StoredResponses
from quintet.server.http.errors import ApiError


class RouterCore:
    """Made before there is a loop; start() wants one."""

    def __init__(self, config: RouterConfig, key: str | None = None) -> None:
        """`key` is sent with health checks if there is no backend_api_key. ValueError for files of TLS that cannot be
        used."""
        self._config = config
        self.title = f"a router before {len(config.all_urls)} servers"
        self._times = HttpTimeouts(config.connect_timeout, config.first_byte_timeout, config.idle_timeout)
        self._context = _client_context(config.backend_ca_certs)
        self.key = _bearer(config.backend_api_key)  # in the place of the caller's; [] if that is passed on
        self.session_header = config.session_header.encode()
        self.totals, self.draining = RouterCounts(), False
        self.streams: set[ResponseStream] = set()  # of requests that are passed on
        self.backends = RouterBackends(self._connections, config.disaggregated)
        self.queue = RequestQueue(config, self.backends)
        self._health = Health(config, self.queue, self.key or _bearer(key))
        self.admin = Admin(self.backends, self.queue, self._health)
        self.forwarder = Forwarder(self.queue, self.totals, ResponseLocations(), config.max_retries)
        self._encoders = Encoders(self.forwarder) if config.encode else None
        self._apart = Disaggregated(self.forwarder, config.prefill_failure == "recompute")
        self._stored = StoredResponses(self.forwarder, self.backends)

    def start(self) -> None:
        """Begins to look at the servers."""
        config = self._config
        whole, apart = {Pool.ALL: config.backend}, {Pool.PREFILL: config.prefill, Pool.DECODE: config.decode}
        for pool, urls in {**whole, **apart, Pool.ENCODE: config.encode}.items():
            for url in urls:
                self._health.watch(self.backends.add(url, pool))

    def refuse_waiting(self, error: ApiError) -> None:
        """Ends with an error all requests whose answers have not begun."""
        for each in list(self.streams):
            each.refuse(error)

    def close(self) -> None:
        for each in self.backends:
            self.backends.remove(each)

    async def answer(self, ask: RequestInfo, pipe: ResponseStream, stored: str | None) -> None:
        """Has a server answer. `stored`: the id of the response that is asked for. ApiError if no server does."""
        pool = self.backends.answering_pool
        if self._encoders is not None and ask.route.has_media:
            await self._encoders.encode(ask)
        if stored is not None:
            await self._stored.forward(ask, pipe, stored)
        elif ask.route.continues_response and ask.fields.previous_response_id is not None:
            await self._stored.forward_next(ask, pipe, ask.fields.previous_response_id)
        elif ask.route.disaggregated and pool is Pool.DECODE:
            await self._apart.forward(ask, pipe)
        else:
            await self.forwarder.forward(ask, pool, pipe)

    def check_ready(self) -> None:
        """ApiError 503 with the reason, if no request would be answered."""
        if self.draining:
            raise ApiError(503, "the router ends and takes no new requests", code="draining")
        now = asyncio.get_running_loop().time()
        if not any(each.usable(now) for each in self.backends.in_pool(self.backends.answering_pool)):
            raise ApiError(503, "no server takes requests now", code="no_backend", headers=RETRY_SOON)

    def model_list(self, anthropic: bool) -> dict[str, Any]:
        """Returns the models of all servers. ApiError 503 before any server has listed its models."""
        models = self.backends.models()
        if not models and not any(each.was_checked for each in self.backends):
            raise ApiError(503, "no server has listed its models yet; try again", code="no_backend", headers=RETRY_SOON)
        if not anthropic:
            return {"object": "list", "data": list(models.values())}
        return models_for_anthropic(models)

    def model(self, name: str, anthropic: bool) -> dict[str, Any]:
        """ApiError 404 that says what there is."""
        models = self.backends.models()
        if name not in models:
            there = ", ".join(sorted(models)[:20]) or "none yet"
            raise ApiError(
                404, f"the model {name[:200]!r} is not served here; there is {there}", param="model",
                code="model_not_found",
            )  # fmt: skip
        return model_for_anthropic(name, models[name]) if anthropic else dict(models[name])

    async def administer(self, path: str, body: bytes) -> dict[str, Any]:
        """Carries out an administrator's request. ApiError for what cannot be done."""
        return self.admin.answer(path, body)

    async def metrics(self) -> bytes:
        places = self.queue
        return metrics.scrape(
            metrics.RouterSnapshot(list(self.backends), self.totals, places.in_flight, places.waiting)
        )

    def _connections(self, url: str) -> HttpClient:
        return HttpClient(address_of(url), times=self._times, context=self._context)


def _client_context(file: str | None) -> ssl.SSLContext:
    """Returns the TLS context that checks https servers. ValueError if the file cannot be used."""
    with contextlib.suppress(OSError, ssl.SSLError):
        return ssl.create_default_context(cafile=file)
    raise ValueError(f"the authorities in {file!r} cannot be used; give a file of PEM certificates")


def _bearer(key: str | None) -> list[Header]:
    return [] if key is None else [(b"authorization", b"Bearer " + key.encode())]


def models_for_anthropic(models: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns entries of /v1/models, by name, as Anthropic's list."""
    data = [model_for_anthropic(name, entry) for name, entry in models.items()]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"data": data, "has_more": False, "first_id": first, "last_id": last}


def model_for_anthropic(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    created = entry.get("created")
    when = datetime.fromtimestamp(created if isinstance(created, int) else 0, timezone.utc)
    return {"type": "model", "id": name, "display_name": name, "created_at": when.isoformat().replace("+00:00", "Z")}
