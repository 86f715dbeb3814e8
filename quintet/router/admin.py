"""/router/...: which servers there are and how they are; adds, drains and removes them."""

import asyncio
import logging
from typing import Any, Literal

import msgspec
from starlette.types import Scope

from quintet.clients.server_address import server_url
from quintet.router.backends import Pool, RouterBackend, RouterBackends
from quintet.router.health import Health
from quintet.router.queue import RequestQueue
from quintet.server.hosts import is_loopback
from quintet.server.http.errors import ApiError

logger = logging.getLogger(__name__)

PATHS = {
    "/router/backends": "GET",
    "/router/add": "POST",
    "/router/drain": "POST",
    "/router/undrain": "POST",
    "/router/remove": "POST",
}
_FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-real-ip")


class _AdminRequest(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    pool: Literal["all", "prefill", "decode", "encode"] | None = None


_DECODER = msgspec.json.Decoder(_AdminRequest)


def check_local_user(scope: Scope) -> None:
    """Checks that a local user sent the request: without an admin key, only those are administrators. A request that a
    proxy on this machine has forwarded is refused. ApiError 403."""
    client = scope.get("client")
    here = client is None or is_loopback(str(client[0]))  # None: a Unix socket
    if not here or any(name in _FORWARDED for name, _ in scope["headers"]):
        raise ApiError(
            403, f"{scope['path'][:200]} is for the administrator: start the router with --admin-api-key and bring "
            "that key, or ask from its own machine", code="admin_only",
        )  # fmt: skip


class Admin:
    """Administration of one router's servers."""

    def __init__(self, backends: RouterBackends, places: RequestQueue, health: Health) -> None:
        self._backends, self._places, self._health = backends, places, health

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        """Carries out a request and returns its answer. ApiError for what cannot be done."""
        if path == "/router/backends":
            return self.state()
        order = self._order(body)
        if path == "/router/add":
            return self._add(order)
        backend = self._find(order)
        if path == "/router/undrain":
            backend.draining = backend.leaving = False
        else:
            backend.draining = True
            backend.leaving = path == "/router/remove"
        what = {"/router/drain": "gets no new requests", "/router/undrain": "gets requests again"}.get(path, "leaves")
        logger.info("%s %s; it has %d", backend.url, what, backend.in_flight)
        if backend.leaving and not backend.in_flight:
            self._backends.remove(backend)
        self._places.wake_waiting()
        return self._state_of(backend)

    def state(self) -> dict[str, Any]:
        """Returns the state of all servers, and the numbers of requests."""
        return {
            "backends": [self._state_of(each) for each in self._backends],
            "in_flight": self._places.in_flight, "waiting": self._places.waiting,
        }  # fmt: skip

    def _state_of(self, backend: RouterBackend) -> dict[str, Any]:
        return backend.state(asyncio.get_running_loop().time())

    def _order(self, body: bytes) -> _AdminRequest:
        try:
            found = _DECODER.decode(body)
            return _AdminRequest(server_url(found.url), found.pool)
        except msgspec.MsgspecError as error:
            raise ApiError(
                400, f'the body must be JSON such as {{"url": "http://10.0.0.1:8000"}}: {error}', code="invalid_json"
            ) from None
        except ValueError as error:
            raise ApiError(400, f"url {error}", param="url", code="invalid_value") from None

    def _find(self, order: _AdminRequest) -> RouterBackend:
        found = self._backends.get(order.url)
        if found is None:
            there = ", ".join(each.url for each in self._backends) or "none"
            raise ApiError(404, f"there is no server {order.url}; there is {there}", param="url", code="not_found")
        return found

    def _add(self, order: _AdminRequest) -> dict[str, Any]:
        apart = self._backends.answering_pool is Pool.DECODE
        pool = Pool(order.pool or ("decode" if apart else "all"))
        if pool is not Pool.ENCODE and (pool is Pool.ALL) is apart:
            which = "prefill, decode or encode" if apart else "all or encode"
            raise ApiError(400, f"pool must be {which} with this router, not {pool.value}", param="pool")
        try:
            made = self._backends.add(order.url, pool)
        except ValueError as error:
            raise ApiError(409, str(error), param="url", code="conflict") from None
        self._health.watch(made)
        return self._state_of(made)
