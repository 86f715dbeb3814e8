"""Sends a request to a server, and to another where it was not answered; the answer goes to the client as it comes."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from quintet.clients.http_client import HttpExchange
from quintet.clients.http_connection import ConnectFailed, ConnectionLost, HttpProtocolError, HttpTimeout, ResponseHead
from quintet.router.backends import Pool, RouterBackend
from quintet.router.metrics import RouterCounts
from quintet.router.queue import RETRY_SOON, RequestQueue
from quintet.router.request_info import RequestInfo
from quintet.router.response_locations import ResponseIdFinder, ResponseLocation, ResponseLocations
from quintet.router.response_stream import ResponseStream
from quintet.server.http.errors import ApiError

logger = logging.getLogger(__name__)

IsGone = Callable[[], Awaitable[bool]]
Prepare = Callable[[RequestInfo], Awaitable[bytes]]  # the body for the next server that is asked

_RETRY_STATUSES = (429, 502, 503)  # a server, or a proxy before it, has not taken the request on
_MID_STREAM_MESSAGES = {"broken": "the server ended the connection", "late": "nothing came of the server for too long"}


class BackendUnanswered(Exception):
    """No answer has begun. `again`: another server may be asked."""

    def __init__(self, kind: str, again: bool) -> None:
        super().__init__(kind)
        self.kind, self.retry = kind, again

    def client_error(self) -> ApiError:
        """Returns the error for the caller, without details of servers."""
        if self.kind == "unreached":
            return ApiError(
                503, "no server could be reached; try again", code="backend_unreachable", headers=RETRY_SOON
            )
        if self.kind == "late":
            return ApiError(504, "the server did not begin to answer in time", code="backend_timeout")
        more = "" if self.retry else "; it may have done what was asked"
        return ApiError(502, f"the server ended the connection before it answered{more}", code="backend_failed")


class BackendResponse(NamedTuple):
    """Answer that a server has begun."""

    exchange: HttpExchange
    head: ResponseHead
    sent: float  # time.perf_counter()

    def is_rejected(self, ask: RequestInfo) -> bool:
        """Returns whether the request was not carried out. 429 means that, and 503 with Retry-After; any other 502 or
        503 may come from a proxy which lost an answer, and counts only if the request is repeatable."""
        status = self.head.status
        if status not in _RETRY_STATUSES:
            return False
        return ask.is_repeatable or status == 429 or (status == 503 and bool(self.head.get(b"retry-after")))


class Forwarder:
    """Forwards the requests of one router to its servers."""

    def __init__(self, places: RequestQueue, totals: RouterCounts, kept: ResponseLocations, max_retries: int) -> None:
        self.queue, self.totals, self.response_locations, self._retries = places, totals, kept, max_retries

    async def forward(self, ask: RequestInfo, pool: Pool, pipe: ResponseStream, prepare: Prepare | None = None) -> None:
        """Has the request answered. ApiError if no server does and nothing was sent to the client."""
        backend: RouterBackend | None = await self.queue.acquire_backend(ask, pool)
        tried: list[RouterBackend] = []
        while backend is not None:
            tried.append(backend)
            pipe.servers.append(backend.url)
            with self.queue.releasing(backend):
                body = ask.body if prepare is None else await prepare(ask)
                backend = await self._answered(backend, (ask, body), pipe, lambda: self.next_backend(ask, pool, tried))

    async def forward_to(
        self, ask: RequestInfo, backend: RouterBackend, pipe: ResponseStream, is_gone: IsGone | None = None
    ) -> None:
        """Sends the request to that server alone. `is_gone`: returns whether the server has ended, and is asked when it
        rejects the request. ApiError, with the code backend_unreachable where the request was not carried out."""
        pipe.servers.append(backend.url)
        with self.queue.releasing(self.queue.acquire_pinned(backend)):
            try:
                answer = await self.send(backend, ask, ask.body)
            except BackendUnanswered as error:
                ended = error.retry and is_gone is not None and await is_gone()
                raise (BackendUnanswered("unreached", again=True) if ended else error).client_error() from None
            try:
                if is_gone is not None and answer.is_rejected(ask) and await is_gone():
                    backend.counts.count_failure("refused")
                    raise BackendUnanswered("unreached", again=True).client_error()
                await self._relay(answer, ask, pipe, backend)
            finally:
                answer.exchange.close()

    async def _answered(
        self,
        backend: RouterBackend,
        what: tuple[RequestInfo, bytes],
        pipe: ResponseStream,
        other: Callable[[], RouterBackend | None],
    ) -> RouterBackend | None:
        """Returns None if the client has the answer; else the next server, from `other`, which then has the request."""
        ask, body = what
        try:
            answer = await self.send(backend, ask, body)
        except BackendUnanswered as error:
            after = other() if error.retry else None
            if after is None:
                raise error.client_error() from None
            return after
        try:
            if answer.is_rejected(ask) and (after := other()) is not None:
                backend.counts.count_failure("refused")
                return after
            await self._relay(answer, ask, pipe, backend)
        finally:
            answer.exchange.close()
        return None

    def next_backend(self, ask: RequestInfo, pool: Pool, tried: list[RouterBackend]) -> RouterBackend | None:
        """Returns the server that is asked next, or None."""
        found = self.queue.other_backend(ask, pool, tried) if len(tried) <= self._retries else None
        self.totals.retries += found is not None
        return found

    async def send(self, backend: RouterBackend, ask: RequestInfo, body: bytes) -> BackendResponse:
        """Sends a request. Raises Unanswered. A server that closed a connection just when it was used again is asked
        once more; a request that must not be sent twice gets a fresh connection."""
        message = backend.upstream.message(ask.method, ask.target, ask.headers, body)
        if ask.arrived:
            self.totals.overhead.observe(time.perf_counter() - ask.arrived)
            ask.arrived = 0.0
        try:
            return await self._once(backend, message, fresh=not ask.is_repeatable)
        except _StaleConnection:
            pass
        except BackendUnanswered as error:
            raise BackendUnanswered(error.kind, error.retry or (error.kind == "broken" and ask.is_repeatable)) from None
        try:
            return await self._once(backend, message, fresh=True)
        except BackendUnanswered as error:
            raise BackendUnanswered(error.kind, error.retry or error.kind == "broken") from None

    async def _once(self, backend: RouterBackend, message: bytes, fresh: bool) -> BackendResponse:
        sent = time.perf_counter()
        now = asyncio.get_running_loop().time
        try:
            exchange = await backend.upstream.send(message, fresh)
        except ConnectFailed as error:
            backend.counts.count_failure("unreached")
            backend.record_failure(now(), str(error))
            logger.warning("%s: %s", backend.url, error)
            raise BackendUnanswered("unreached", again=True) from None
        try:
            head = await exchange.head()
        except (ConnectionLost, HttpProtocolError) as error:
            stale = exchange.is_stale
            exchange.close()
            if stale:
                raise _StaleConnection from None
            backend.counts.count_failure("broken")
            backend.record_failure(now(), str(error))
            logger.warning("%s: %s before it answered", backend.url, error)
            raise BackendUnanswered("broken", again=False) from None
        except HttpTimeout as error:
            exchange.close()
            backend.counts.count_failure("late")
            logger.warning("%s: %s", backend.url, error)
            raise BackendUnanswered("late", again=False) from None
        except BaseException:  # the client has gone
            exchange.close()
            raise
        if head.status in (502, 503):
            backend.record_failure(now(), f"it answers {head.status}")
        else:
            backend.record_success()
        backend.counts.first_byte.observe(time.perf_counter() - sent)
        return BackendResponse(exchange, head, sent)

    async def _relay(
        self, answer: BackendResponse, ask: RequestInfo, pipe: ResponseStream, backend: RouterBackend
    ) -> None:
        exchange, head = answer.exchange, answer.head
        backend.counts.count_status(head.status)
        finder = (
            ResponseIdFinder(self.response_locations, ResponseLocation(backend.url, ask.owner))
            if ask.route.stores_response and head.status < 300
            else None
        )
        await pipe.start(head.status, head.headers)
        try:
            while piece := await exchange.next_chunk():
                if finder is not None:
                    finder.feed(piece)
                await pipe.body(piece, more=not exchange.is_complete)
            if not pipe.ended:
                await pipe.body(b"", more=False)
        except (ConnectionLost, HttpProtocolError, HttpTimeout) as error:
            backend.counts.count_failure("mid_stream")
            logger.warning("%s: %s, in the middle of an answer (request %s)", backend.url, error, ask.request_id)
            why = _MID_STREAM_MESSAGES["late" if isinstance(error, HttpTimeout) else "broken"]
            failure = ApiError(502, f"{why} in the middle of the answer", code="backend_failed")
            await pipe.abort(failure, ask.route.dialect)
        finally:
            backend.counts.total_time.observe(time.perf_counter() - answer.sent)


class _StaleConnection(Exception):
    """A connection that was kept is closed, and nothing of an answer came by it."""
