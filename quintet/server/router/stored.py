"""Requests for a response that one server keeps, and those that go on from one."""

import logging

from quintet.server.http.errors import ApiError
from quintet.server.http_stream import Broken, NotHttp
from quintet.server.router.asks import Ask
from quintet.server.router.backends import Backend, Backends
from quintet.server.router.forward import Forwarder, Unanswered
from quintet.server.router.kept import Place
from quintet.server.router.pipe import Pipe
from quintet.server.router.upstream import Late

logger = logging.getLogger(__name__)

_MOST = 16 * 2**20  # bytes of a response that is looked for


class Stored:
    """Who keeps a response is remembered; after a restart of the router, all servers are asked for it."""

    def __init__(self, forwarder: Forwarder, backends: Backends) -> None:
        self._forwarder, self._backends = forwarder, backends

    async def pass_on(self, ask: Ask, pipe: Pipe, response_id: str) -> None:
        """GET, DELETE or cancel. ApiError 404 if no server has it."""
        backend = await self._keeper(ask, response_id)
        if backend is None:
            raise ApiError(404, f"there is no response {response_id[:200]!r} here", code="not_found")
        await self._forwarder.pass_to(ask, backend, pipe)

    async def go_on(self, ask: Ask, pipe: Pipe, response_id: str) -> None:
        """A new one goes to who keeps the one before it. Where nobody does, anybody may say so."""
        backend = await self._keeper(ask, response_id)
        if backend is None:
            await self._forwarder.pass_on(ask, self._backends.answering, pipe)
        else:
            await self._forwarder.pass_to(ask, backend, pipe)

    async def _keeper(self, ask: Ask, response_id: str) -> Backend | None:
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

    async def _has(self, backend: Backend, ask: Ask, response_id: str) -> bool:
        look = Ask(b"GET", b"/v1/responses/" + response_id.encode(), ask.headers, b"", ask.route, ask.request_id)
        try:
            answer = await self._forwarder.ask(backend, look, b"")
        except Unanswered:
            return False
        try:
            await answer.exchange.body(_MOST)
        except (Broken, NotHttp, Late) as error:
            logger.warning("%s: %s, when it was asked for a response", backend.url, error)
            return False
        finally:
            answer.exchange.close()
        return answer.head.status == 200
