"""Sends a request to a server, and to another where it was not answered; the answer goes to the client as it comes."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from quintet.server.http.errors import ApiError
from quintet.server.http_stream import Broken, NotHttp
from quintet.server.router.asks import Ask
from quintet.server.router.backends import Backend, Pool
from quintet.server.router.kept import Finder, Kept, Place
from quintet.server.router.metrics import Totals
from quintet.server.router.pipe import Pipe
from quintet.server.router.places import SOON, Places
from quintet.server.router.upstream import Exchange, Head, Late, Unreached

logger = logging.getLogger(__name__)

Prepare = Callable[[Ask], Awaitable[bytes]]  # the body for the next server that is asked

_NOT_TAKEN = (429, 502, 503)  # a server, or a proxy before it, has not taken the request on
_MID = {"broken": "the server ended the connection", "late": "nothing came of the server for too long"}


class Unanswered(Exception):
    """No answer has begun. `again`: another server may be asked."""

    def __init__(self, kind: str, again: bool) -> None:
        super().__init__(kind)
        self.kind, self.again = kind, again

    def told(self) -> ApiError:
        """For the caller, who learns nothing about servers."""
        if self.kind == "unreached":
            return ApiError(503, "no server could be reached; try again", code="backend_unreachable", headers=SOON)
        if self.kind == "late":
            return ApiError(504, "the server did not begin to answer in time", code="backend_timeout")
        more = "" if self.again else "; it may have done what was asked"
        return ApiError(502, f"the server ended the connection before it answered{more}", code="backend_failed")


class Answer(NamedTuple):
    """What a server has begun to say."""

    exchange: Exchange
    head: Head
    sent: float  # time.perf_counter()

    def not_taken(self, ask: Ask) -> bool:
        """Whether it says that it did not do what was asked. 429 does, and 503 that says when to come again; any other
        502 or 503 may come from a proxy which lost an answer, and counts for what may be done twice."""
        status = self.head.status
        if status not in _NOT_TAKEN:
            return False
        return ask.repeatable or status == 429 or (status == 503 and bool(self.head.get(b"retry-after")))


class Forwarder:
    """Of one router."""

    def __init__(self, places: Places, totals: Totals, kept: Kept, max_retries: int) -> None:
        self.places, self.totals, self.kept, self._retries = places, totals, kept, max_retries

    async def pass_on(self, ask: Ask, pool: Pool, pipe: Pipe, prepare: Prepare | None = None) -> None:
        """Has the request answered. ApiError if nobody does and nothing was sent to the client."""
        backend: Backend | None = await self.places.place(ask, pool)
        tried: list[Backend] = []
        while backend is not None:
            tried.append(backend)
            pipe.servers.append(backend.url)
            with self.places.at(backend):
                body = ask.body if prepare is None else await prepare(ask)
                backend = await self._answered(backend, (ask, body), pipe, lambda: self.other(ask, pool, tried))

    async def pass_to(self, ask: Ask, backend: Backend, pipe: Pipe) -> None:
        """To that server alone: it keeps what is asked for."""
        pipe.servers.append(backend.url)
        with self.places.at(self.places.pin(backend)):
            await self._answered(backend, (ask, ask.body), pipe, lambda: None)

    async def _answered(
        self, backend: Backend, what: tuple[Ask, bytes], pipe: Pipe, other: Callable[[], Backend | None]
    ) -> Backend | None:
        """None: the client has the answer; else who is asked next, of `other`, and has the request."""
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

    def other(self, ask: Ask, pool: Pool, tried: list[Backend]) -> Backend | None:
        """Who is asked next, if anybody is."""
        found = self.places.other(ask, pool, tried) if len(tried) <= self._retries else None
        self.totals.retries += found is not None
        return found

    async def ask(self, backend: Backend, ask: Ask, body: bytes) -> Answer:
        """Raises Unanswered. A server that closed a connection just when it was used again is asked once more; who may
        not be asked twice gets a connection of his own."""
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
        except (Broken, NotHttp) as error:
            stale = exchange.reused and not exchange.heard
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

    async def _relay(self, answer: Answer, ask: Ask, pipe: Pipe, backend: Backend) -> None:
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
        except (Broken, NotHttp, Late) as error:
            backend.counts.failed("mid_stream")
            logger.warning("%s: %s, in the middle of an answer (request %s)", backend.url, error, ask.request_id)
            why = _MID["late" if isinstance(error, Late) else "broken"]
            told = ApiError(502, f"{why} in the middle of the answer", code="backend_failed")
            await pipe.break_off(told, ask.route.speech)
        finally:
            backend.counts.whole.observe(time.perf_counter() - answer.sent)


class _Stale(Exception):
    """A connection that was kept is closed, and nothing of an answer came by it."""
