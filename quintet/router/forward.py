"""Sends a request to a server, and to another where it was not answered; the answer goes to the client as it comes."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from quintet.clients.http_client import Exchange
from quintet.clients.http_connection import ConnectionLost, Head, Late, ProtocolError, Unreached
from quintet.router.backends import Backend, Pool
from quintet.router.metrics import Totals
from quintet.router.queue import SOON, RequestQueue
from quintet.router.request_info import RequestInfo
from quintet.router.response_locations import Finder, Place, ResponseLocations
from quintet.router.response_stream import ResponseStream
from quintet.server.http.errors import ApiError

logger = logging.getLogger(__name__)

Prepare = Callable[[RequestInfo], Awaitable[bytes]]  # the body for the next server that is asked

_NOT_TAKEN = (429, 502, 503)  # a server, or a proxy before it, has not taken the request on
_MID = {"broken": "the server ended the connection", "late": "nothing came of the server for too long"}


class Unanswered(Exception):
    """No answer has begun. `again`: another server may be asked."""

    def __init__(self, kind: str, again: bool) -> None:
        super().__init__(kind)
        self.kind, self.again = kind, again

    def told(self) -> ApiError:
        """Returns the error for the caller, without details of servers."""
        if self.kind == "unreached":
            return ApiError(503, "no server could be reached; try again", code="backend_unreachable", headers=SOON)
        if self.kind == "late":
            return ApiError(504, "the server did not begin to answer in time", code="backend_timeout")
        more = "" if self.again else "; it may have done what was asked"
        return ApiError(502, f"the server ended the connection before it answered{more}", code="backend_failed")


class Answer(NamedTuple):
    """Answer that a server has begun."""

    exchange: Exchange
    head: Head
    sent: float  # time.perf_counter()

    def not_taken(self, ask: RequestInfo) -> bool:
        """Returns whether the request was not carried out. 429 means that, and 503 with Retry-After; any other 502 or
        503 may come from a proxy which lost an answer, and counts only if the request is repeatable."""
        status = self.head.status
        if status not in _NOT_TAKEN:
            return False
        return ask.repeatable or status == 429 or (status == 503 and bool(self.head.get(b"retry-after")))


class Forwarder:
    """Forwards the requests of one router to its servers."""

    def __init__(self, places: RequestQueue, totals: Totals, kept: ResponseLocations, max_retries: int) -> None:
        self.places, self.totals, self.kept, self._retries = places, totals, kept, max_retries

    async def pass_on(self, ask: RequestInfo, pool: Pool, pipe: ResponseStream, prepare: Prepare | None = None) -> None:
        """Has the request answered. ApiError if no server does and nothing was sent to the client."""
        backend: Backend | None = await self.places.place(ask, pool)
        tried: list[Backend] = []
        while backend is not None:
            tried.append(backend)
            pipe.servers.append(backend.url)
            with self.places.at(backend):
                body = ask.body if prepare is None else await prepare(ask)
                backend = await self._answered(backend, (ask, body), pipe, lambda: self.other(ask, pool, tried))

    async def pass_to(self, ask: RequestInfo, backend: Backend, pipe: ResponseStream) -> None:
        """Sends the request to that server alone: it keeps what is asked for."""
        pipe.servers.append(backend.url)
        with self.places.at(self.places.pin(backend)):
            await self._answered(backend, (ask, ask.body), pipe, lambda: None)

    async def _answered(
        self,
        backend: Backend,
        what: tuple[RequestInfo, bytes],
        pipe: ResponseStream,
        other: Callable[[], Backend | None],
    ) -> Backend | None:
        """Returns None if the client has the answer; else the next server, from `other`, which then has the request."""
        ask, body = what
        try:
            answer = await self.ask(backend, ask, body)
        except Unanswered as error:
            after = other() if error.again else None
            if after is None:
                raise error.told() from None
            return after
        try:
            if answer.not_taken(ask) and (after := other()) is not None:
                backend.counts.failed("refused")
                return after
            await self._relay(answer, ask, pipe, backend)
        finally:
            answer.exchange.close()
        return None

    def other(self, ask: RequestInfo, pool: Pool, tried: list[Backend]) -> Backend | None:
        """Returns the server that is asked next, or None."""
        found = self.places.other(ask, pool, tried) if len(tried) <= self._retries else None
        self.totals.retries += found is not None
        return found

    async def ask(self, backend: Backend, ask: RequestInfo, body: bytes) -> Answer:
        """Sends a request. Raises Unanswered. A server that closed a connection just when it was used again is asked
        once more; a request that must not be sent twice gets a fresh connection."""
        message = backend.upstream.message(ask.method, ask.target, ask.headers, body)
        if ask.arrived:
            self.totals.overhead.observe(time.perf_counter() - ask.arrived)
            ask.arrived = 0.0
        try:
            return await self._once(backend, message, fresh=not ask.repeatable)
        except _Stale:
            pass
        except Unanswered as error:
            raise Unanswered(error.kind, error.again or (error.kind == "broken" and ask.repeatable)) from None
        try:
            return await self._once(backend, message, fresh=True)
        except Unanswered as error:
            raise Unanswered(error.kind, error.again or error.kind == "broken") from None

    async def _once(self, backend: Backend, message: bytes, fresh: bool) -> Answer:
        sent = time.perf_counter()
        now = asyncio.get_running_loop().time
        try:
            exchange = await backend.upstream.send(message, fresh)
        except Unreached as error:
            backend.counts.failed("unreached")
            backend.failed(now(), str(error))
            logger.warning("%s: %s", backend.url, error)
            raise Unanswered("unreached", again=True) from None
        try:
            head = await exchange.head()
        except (ConnectionLost, ProtocolError) as error:
            stale = exchange.stale
            exchange.close()
            if stale:
                raise _Stale from None
            backend.counts.failed("broken")
            backend.failed(now(), str(error))
            logger.warning("%s: %s before it answered", backend.url, error)
            raise Unanswered("broken", again=False) from None
        except Late as error:
            exchange.close()
            backend.counts.failed("late")
            logger.warning("%s: %s", backend.url, error)
            raise Unanswered("late", again=False) from None
        except BaseException:  # the client has gone
            exchange.close()
            raise
        if head.status in (502, 503):
            backend.failed(now(), f"it answers {head.status}")
        else:
            backend.worked()
        backend.counts.first_byte.observe(time.perf_counter() - sent)
        return Answer(exchange, head, sent)

    async def _relay(self, answer: Answer, ask: RequestInfo, pipe: ResponseStream, backend: Backend) -> None:
        exchange, head = answer.exchange, answer.head
        backend.counts.answered(head.status)
        finder = Finder(self.kept, Place(backend.url, ask.owner)) if ask.route.keeps and head.status < 300 else None
        await pipe.start(head.status, head.headers)
        try:
            while piece := await exchange.piece():
                if finder is not None:
                    finder.feed(piece)
                await pipe.body(piece, more=not exchange.whole)
            if not pipe.ended:
                await pipe.body(b"", more=False)
        except (ConnectionLost, ProtocolError, Late) as error:
            backend.counts.failed("mid_stream")
            logger.warning("%s: %s, in the middle of an answer (request %s)", backend.url, error, ask.request_id)
            why = _MID["late" if isinstance(error, Late) else "broken"]
            told = ApiError(502, f"{why} in the middle of the answer", code="backend_failed")
            await pipe.break_off(told, ask.route.speech)
        finally:
            backend.counts.whole.observe(time.perf_counter() - answer.sent)


class _Stale(Exception):
    """A connection that was kept is closed, and nothing of an answer came by it."""
