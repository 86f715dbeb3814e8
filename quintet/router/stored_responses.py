"""Requests for a response that one server keeps, and those that go on from one."""

import logging

from quintet.clients.http_connection import ConnectionLost, HttpProtocolError, HttpTimeout
from quintet.router.backends import RouterBackend, RouterBackends
from quintet.router.forward import BackendUnanswered, Forwarder
from quintet.router.request_info import RequestInfo
from quintet.router.response_locations import ResponseLocation
from quintet.router.response_stream import ResponseStream
from quintet.server.http.errors import ApiError
from quintet.server.http.middleware.auth import OWNER_HEADER

logger = logging.getLogger(__name__)

_MAX_BODY = 16 * 2**20  # bytes of a response that is looked for


_OWNER = OWNER_HEADER.encode()


class StoredResponses:
    """Finds the server that keeps a response; after a restart of the router, all servers are asked for it.

    Where callers have keys of their own, only a server that separates owners is believed then: another one would give
    the response to any caller.
    """

    def __init__(self, forwarder: Forwarder, backends: RouterBackends) -> None:
        self._forwarder, self._backends = forwarder, backends

    async def forward(self, ask: RequestInfo, pipe: ResponseStream, response_id: str) -> None:
        """GET, DELETE or cancel. ApiError 404 if no server has it."""
        backend = await self._keeper(ask, response_id)
        if backend is None:
            raise ApiError(404, f"there is no response {response_id[:200]!r} here", code="not_found")
        await self._forwarder.forward_to(ask, backend, pipe)

    async def forward_next(self, ask: RequestInfo, pipe: ResponseStream, response_id: str) -> None:
        """Sends a request to the server that keeps the response before it. If none does: to any, which may refuse;
        ApiError 404 where callers have keys of their own."""
        backend = await self._keeper(ask, response_id)
        if backend is None and ask.owner:
            raise ApiError(
                404, f"there is no response {response_id[:200]!r} here", param="previous_response_id",
                code="previous_response_not_found",
            )  # fmt: skip
        if backend is None:
            await self._forwarder.forward(ask, self._backends.answering_pool, pipe)
        else:
            await self._forwarder.forward_to(ask, backend, pipe)

    async def _keeper(self, ask: RequestInfo, response_id: str) -> RouterBackend | None:
        kept = self._forwarder.response_locations
        place = kept.find(response_id)
        if place is not None:
            backend = self._backends.get(place.url)
            return backend if place.owner == ask.owner else None
        for each in self._backends.in_pool(self._backends.answering_pool):
            if each.up and await self._has(each, ask, response_id):
                kept.put(response_id, ResponseLocation(each.url, ask.owner))
                return each
        return None

    async def _has(self, backend: RouterBackend, ask: RequestInfo, response_id: str) -> bool:
        look = RequestInfo(
            b"GET", b"/v1/responses/" + response_id.encode(), ask.headers, b"", ask.route, ask.request_id
        )
        try:
            answer = await self._forwarder.send(backend, look, b"")
        except BackendUnanswered:
            return False
        try:
            await answer.exchange.body(_MAX_BODY)
        except (ConnectionLost, HttpProtocolError, HttpTimeout) as error:
            logger.warning("%s: %s, when it was asked for a response", backend.url, error)
            return False
        finally:
            answer.exchange.close()
        return answer.head.status == 200 and (not ask.owner or bool(answer.head.get(_OWNER)))
