"""A router without its door: the servers, who looks at them, and the ways of a request to them."""

import asyncio
from datetime import datetime, timezone
from typing import Any

from quintet.server.http.errors import ApiError
from quintet.server.router import metrics
from quintet.server.router.admin import Admin
from quintet.server.router.asks import Ask
from quintet.server.router.backends import Backends, Pool, address_of
from quintet.server.router.disaggregated import Disaggregated
from quintet.server.router.forward import Forwarder
from quintet.server.router.health import Health
from quintet.server.router.kept import Kept
from quintet.server.router.metrics import Totals
from quintet.server.router.pipe import Pipe
from quintet.server.router.places import SOON, Places
from quintet.server.router.settings import RouterConfig
from quintet.server.router.stored import Stored
from quintet.server.router.upstream import Header, Times, Upstream, client_context


class Core:
    """Made before there is a loop; start() wants one."""

    def __init__(self, config: RouterConfig, key: str | None = None) -> None:
        """`key` is shown to servers where nobody has one of his own: when they are looked at. ValueError for files of
        TLS that cannot be used."""
        self._config = config
        self._times = Times(config.connect_timeout, config.first_byte_timeout, config.idle_timeout)
        self._context = client_context(config.backend_ca_certs)
        self.key = _bearer(config.backend_api_key)  # in the place of the caller's; [] if that is passed on
        self.session_header = config.session_header.encode()
        self.totals, self.draining = Totals(), False
        self.backends = Backends(self._connections, config.disaggregated)
        self.places = Places(config, self.backends)
        self._health = Health(config, self.places, self.key or _bearer(key))
        self.admin = Admin(self.backends, self.places, self._health)
        self._forwarder = Forwarder(self.places, self.totals, Kept(), config.max_retries)
        self._apart = Disaggregated(self._forwarder, config.prefill_failure == "recompute")
        self._stored = Stored(self._forwarder, self.backends)

    def start(self) -> None:
        """Begins to look at the servers."""
        config = self._config
        for pool, urls in ((Pool.ALL, config.backend), (Pool.PREFILL, config.prefill), (Pool.DECODE, config.decode)):
            for url in urls:
                self._health.watch(self.backends.add(url, pool))

    def close(self) -> None:
        for each in self.backends:
            self.backends.forget(each)

    async def answer(self, ask: Ask, pipe: Pipe, stored: str | None) -> None:
        """Has it answered. `stored`: the id of the response that is asked for. ApiError if nobody does."""
        pool = self.backends.answering
        if stored is not None:
            await self._stored.pass_on(ask, pipe, stored)
        elif ask.route.keeps and ask.read.previous_response_id is not None:
            await self._stored.go_on(ask, pipe, ask.read.previous_response_id)
        elif ask.route.disaggregated and pool is Pool.DECODE:
            await self._apart.pass_on(ask, pipe)
        else:
            await self._forwarder.pass_on(ask, pool, pipe)

    def check_ready(self) -> None:
        """ApiError 503 with the reason, if no request would be answered."""
        if self.draining:
            raise ApiError(503, "the router ends and takes no new requests", code="draining")
        now = asyncio.get_running_loop().time()
        if not any(each.usable(now) for each in self.backends.of(self.backends.answering)):
            raise ApiError(503, "no server takes requests now", code="no_backend", headers=SOON)

    def model_list(self, anthropic: bool) -> dict[str, Any]:
        """Of all servers together. ApiError 503 before any has told."""
        models = self.backends.models()
        if not models and not any(each.seen for each in self.backends):
            raise ApiError(503, "no server has told its models yet; try again", code="no_backend", headers=SOON)
        if not anthropic:
            return {"object": "list", "data": list(models.values())}
        data = [_for_anthropic(name, entry) for name, entry in models.items()]
        first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        return {"data": data, "has_more": False, "first_id": first, "last_id": last}

    def model(self, name: str, anthropic: bool) -> dict[str, Any]:
        """ApiError 404 that says what there is."""
        models = self.backends.models()
        if name not in models:
            there = ", ".join(sorted(models)[:20]) or "none yet"
            raise ApiError(
                404, f"the model {name[:200]!r} is not served here; there is {there}", param="model",
                code="model_not_found",
            )  # fmt: skip
        return _for_anthropic(name, models[name]) if anthropic else dict(models[name])

    def metrics(self) -> bytes:
        places = self.places
        return metrics.scrape(metrics.Now(list(self.backends), self.totals, places.in_flight, places.waiting))

    def _connections(self, url: str) -> Upstream:
        address = address_of(url)
        return Upstream(address, self._times, self._context if address.tls else None)


def _bearer(key: str | None) -> list[Header]:
    return [] if key is None else [(b"authorization", b"Bearer " + key.encode())]


def _for_anthropic(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    created = entry.get("created")
    when = datetime.fromtimestamp(created if isinstance(created, int) else 0, timezone.utc)
    return {"type": "model", "id": name, "display_name": name, "created_at": when.isoformat().replace("+00:00", "Z")}
