"""Requests for a response that one server keeps, and those that go on from one."""

import logging

from quintet.clients.http_connection import ConnectionLost, Late, ProtocolError
from quintet.router.backends import Backend, Backends
from quintet.router.forward import Forwarder, Unanswered
from quintet.router.request_info import RequestInfo
from quintet.router.response_locations import Place
from quintet.router.response_stream import ResponseStream
from quintet.server.http.errors import ApiError

logger = logging.getLogger(__name__)

_MOST = 16 * 2**20  # bytes of a response that is looked for


class Stored:
    """Finds the server that keeps a response; after a restart of the router, all servers are asked for it."""

    def __init__(self, forwarder: Forwarder, backends: Backends) -> None:
        self._forwarder, self._backends = forwarder, backends

    async def pass_on(self, ask: RequestInfo, pipe: ResponseStream, response_id: str) -> None:
        """GET, DELETE or cancel. ApiError 404 if no server has it."""
        backend = await self._keeper(ask, response_id)
        if backend is None:
            raise ApiError(404, f"there is no response {response_id[:200]!r} here", code="not_found")
        await self._forwarder.pass_to(ask, backend, pipe)

    async def go_on(self, ask: RequestInfo, pipe: ResponseStream, response_id: str) -> None:
        """Sends a request to the server that keeps the response before it; if none does, to any, which may refuse."""
        backend = await self._keeper(ask, response_id)
        if backend is None:
            await self._forwarder.pass_on(ask, self._backends.answering, pipe)
        else:
            await self._forwarder.pass_to(ask, backend, pipe)

    async def _keeper(self, ask: RequestInfo, response_id: str) -> Backend | None:
        kept = self._forwarder.kept
        place = kept.find(response_id)
        if place is not None:
            backend = self._backends.get(place.url)
            return backend if place.owner == ask.owner else None
        for each in self._backends.of(self._backends.answering):
            if each.up and await self._has(each, ask, response_id):
                kept.put(response_id, Place(each.url, ask.owner))
                return each
        return None

    async def _has(self, backend: Backend, ask: RequestInfo, response_id: str) -> bool:
        look = RequestInfo(
            b"GET", b"/v1/responses/" + response_id.encode(), ask.headers, b"", ask.route, ask.request_id
        )
        try:
            answer = await self._forwarder.ask(backend, look, b"")
        except Unanswered:
            return False
        try:
            await answer.exchange.body(_MOST)
        except (ConnectionLost, ProtocolError, Late) as error:
            logger.warning("%s: %s, when it was asked for a response", backend.url, error)
            return False
        finally:
            answer.exchange.close()
        return answer.head.status == 200
