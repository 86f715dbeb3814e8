"""The servers behind a router: what is known of each, and which there are."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

from quintet.clients.http_client import HttpClient, ServerAddress
from quintet.engine.data_parallel.prefix_affinity import PrefixIndex
from quintet.router.metrics import BackendCounts

# chunks of beginnings that are remembered of each server: 16 MiB of text or more, in 8 MiB of memory
MAX_KNOWN_CHUNKS = 1 << 16
_MIN_BACKOFF, _MAX_BACKOFF = (
    0.5,
    30.0,
)  # seconds without requests after a failed connection, doubled each time


class Pool(str, Enum):
    """Role of a server: whole requests, prefill, decode, or media of chats."""

    ALL = "all"
    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"


def address_of(url: str) -> ServerAddress:
    """`url` as server_url() gives it."""
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    return ServerAddress(parts.hostname or "", parts.port or (443 if tls else 80), tls, None, parts.path)


@dataclass(eq=False)
class RouterBackend:
    """One server. Used in one event loop."""

    url: str
    pool: Pool
    upstream: HttpClient
    up: bool = False  # by its health checks
    was_checked: bool = False  # it was up at some time
    draining: bool = False  # it gets no new requests
    leaving: bool = False  # and is forgotten when it has none
    in_flight: int = 0
    unhealthy_reason: str = "was not looked at yet"  # why it is not up, or what is odd about it
    models: dict[str, Any] = field(default_factory=dict)  # id -> its latest entry of /v1/models
    num_good: int = 0  # looks in a row
    num_bad: int = 0
    ready_path: str = "/ready"  # /health for servers that have none
    backoff_until: float = 0.0  # the loop's time
    failures: int = 0  # of connections, in a row
    prefixes: PrefixIndex = field(default_factory=lambda: PrefixIndex(MAX_KNOWN_CHUNKS))
    counts: BackendCounts = field(default_factory=BackendCounts)
    health_task: "asyncio.Task[None] | None" = None

    def usable(self, now: float, most: int = 0) -> bool:
        """Returns whether it may get a request. `most` that it has at once; 0: any number."""
        return self.up and not self.draining and now >= self.backoff_until and not (most and self.in_flight >= most)

    def serves_model(self, model: str | None) -> bool:
        """Returns whether it serves a model. A server that lists no models is asked for any."""
        return model is None or not self.models or model in self.models

    def record_failure(self, now: float, why: str) -> None:
        """Records a connection that failed, or broke before an answer: the server gets no requests for a while."""
        self.backoff_until = now + min(_MAX_BACKOFF, _MIN_BACKOFF * 2 ** min(self.failures, 16))
        self.failures += 1
        self.unhealthy_reason = why

    def record_success(self) -> None:
        """Records that it has begun to answer."""
        if self.failures:
            self.failures, self.backoff_until, self.unhealthy_reason = 0, 0.0, ""

    def record_health_check(self, thresholds: tuple[int, int], trouble: str) -> bool:
        """Records a health check ("" is good); `thresholds`: how many bad and good ones count -> whether up has
        changed."""
        before, (most_bad, least_good) = self.up, thresholds
        self.num_good, self.num_bad = (0, self.num_bad + 1) if trouble else (self.num_good + 1, 0)
        self.unhealthy_reason = trouble
        if self.num_bad >= most_bad or (trouble and not self.was_checked):
            self.up = False
        elif not trouble and (not self.was_checked or self.num_good >= least_good):
            self.up = self.was_checked = True
        if self.up and not before:
            self.failures, self.backoff_until = 0, 0.0
        return self.up != before

    def state(self, now: float) -> dict[str, Any]:
        """Returns the state that /router/backends shows."""
        return {
            "url": self.url, "pool": self.pool.value, "up": self.up, "draining": self.draining,
            "drained": self.draining and not self.in_flight, "resting": now < self.backoff_until,
            "in_flight": self.in_flight, "models": sorted(self.models), "trouble": self.unhealthy_reason or None,
        }  # fmt: skip


class RouterBackends:
    """All servers of a router."""

    def __init__(self, make: Callable[[str], HttpClient], apart: bool) -> None:
        """`make`: of a URL, connections. `apart`: prompts and answers are computed by different servers."""
        self._make = make
        self.answering_pool = Pool.DECODE if apart else Pool.ALL  # the servers that answer callers
        self._all: dict[str, RouterBackend] = {}

    def __iter__(self) -> Iterator[RouterBackend]:
        return iter(list(self._all.values()))

    def get(self, url: str) -> RouterBackend | None:
        return self._all.get(url)

    def add(self, url: str, pool: Pool) -> RouterBackend:
        """ValueError if it is there."""
        if url in self._all:
            raise ValueError(f"{url} is there already")
        made = self._all[url] = RouterBackend(url, pool, self._make(url))
        return made

    def remove(self, backend: RouterBackend) -> None:
        """Removes a server that has no requests."""
        if self._all.get(backend.url) is backend:
            del self._all[backend.url]
        if backend.health_task is not None:
            backend.health_task.cancel()
        backend.upstream.close()

    def in_pool(self, pool: Pool) -> list[RouterBackend]:
        return [each for each in self._all.values() if each.pool is pool]

    def models(self) -> dict[str, Any]:
        """Returns the entries of /v1/models of servers that answer callers; the first one of each model."""
        found: dict[str, Any] = {}
        for each in self.in_pool(self.answering_pool):
            for name, entry in each.models.items():
                found.setdefault(name, entry)
        return found
