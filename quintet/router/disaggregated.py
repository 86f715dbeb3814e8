"""Disaggregated prefill: one server computes a prompt, another fetches its KV pages and writes the answer."""

import logging
import time

import msgspec
from msgspec import Raw

from quintet.clients.http_connection import ConnectionLost, HttpProtocolError, HttpTimeout, ResponseHead
from quintet.router.backends import Pool, RouterBackend
from quintet.router.forward import BackendUnanswered, Forwarder
from quintet.router.queue import RETRY_SOON
from quintet.router.request_info import RequestInfo, prefill_body, transfer_field, with_pages
from quintet.router.response_stream import ResponseStream
from quintet.server.http.errors import ApiError

logger = logging.getLogger(__name__)

_NULL = Raw(b"null")
_NOT_CLIENT_ERRORS = (
    401,
    403,
    404,
    408,
    421,
    429,
)  # what a server says of its own settings and load, not of the request
_MAX_BODY = 64 * 2**20  # bytes of what a server says when it has computed a prompt


class _PrefillResponse(msgspec.Struct):
    kv_transfer_params: Raw = _NULL


_DECODER = msgspec.json.Decoder(_PrefillResponse)


class _PrefillRejected(Exception):
    """The request is wrong, in the words of the server that was to compute its prompt."""

    def __init__(self, head: ResponseHead, body: bytes) -> None:
        super().__init__(head.status)
        self.head, self.body = head, body


class Disaggregated:
    """vLLM's protocol: the prefill server keeps the pages that it computed, its answer has their location
    (kv_transfer_params), and this goes unchanged to the decode server."""

    def __init__(self, forwarder: Forwarder, recompute: bool) -> None:
        """`recompute`: where no prompt is computed, the answering server does that; else the request fails."""
        self._forwarder, self._recompute = forwarder, recompute

    async def forward(self, ask: RequestInfo, pipe: ResponseStream) -> None:
        """As Forwarder.pass_on(). The decode server has the request from the beginning: its load is known, and no
        prompt is computed for which there is no room. For another one that is asked, the prompt is computed again: the
        first may have fetched the pages, which frees them."""
        if (given := transfer_field(ask.fields)) is not None:
            raise ApiError(
                400, "kv_transfer_params says where pages of another server are, which is this router's to say; leave "
                "it out", param=given, code="unsupported_field",
            )  # fmt: skip
        alone = (ask.fields.n or 1) > 1  # pages are given to one completion, and freed when it has them
        try:
            await self._forwarder.forward(ask, Pool.DECODE, pipe, None if alone else self._add_pages)
        except _PrefillRejected as rejected:
            await pipe.start(rejected.head.status, rejected.head.headers)
            await pipe.body(rejected.body, more=False)

    async def _add_pages(self, ask: RequestInfo) -> bytes:
        params = await self._compute(ask)
        if params is not None and params != _NULL:
            return with_pages(ask.body, bytes(params))
        if params is None and not self._recompute:
            raise ApiError(
                503, "no server computed the prompt; try again", code="prefill_failed", headers=RETRY_SOON
            )  # fmt: skip
        self._forwarder.totals.recomputed += 1
        return ask.body

    async def _compute(self, ask: RequestInfo) -> Raw | None:
        """Returns kv_transfer_params for the decode server; null if it needs none, None if no server could. Raises
        _Verdict."""
        forwarder, body, tried = self._forwarder, prefill_body(ask.body), list[RouterBackend]()
        try:
            backend: RouterBackend | None = await forwarder.queue.acquire_backend(ask, Pool.PREFILL)
        except ApiError as error:
            if error.code == "server_overloaded":  # recomputing on the decode server would be no less work
                raise
            logger.warning("no prompt is computed: %s", error.message)
            return None
        while backend is not None:
            tried.append(backend)
            with forwarder.queue.releasing(backend):
                found = await self._prefill_on(backend, ask, body)
                if found is not None:
                    return found
                backend = forwarder.next_backend(ask, Pool.PREFILL, tried)
        return None

    async def _prefill_on(self, backend: RouterBackend, ask: RequestInfo, body: bytes) -> Raw | None:
        """Returns kv_transfer_params of a server's answer; None if it did not compute the prompt."""
        try:
            answer = await self._forwarder.send(backend, ask, body)
        except BackendUnanswered:
            return None
        head, exchange = answer.head, answer.exchange
        try:
            payload = await exchange.body(_MAX_BODY)
        except (ConnectionLost, HttpProtocolError, HttpTimeout) as error:
            backend.counts.count_failure("mid_stream")
            logger.warning("%s: %s, in the middle of an answer (request %s)", backend.url, error, ask.request_id)
            return None
        finally:
            exchange.close()
            backend.counts.total_time.observe(time.perf_counter() - answer.sent)
        backend.counts.count_status(head.status)
        if head.status == 200:
            return _params(payload, backend)
        if 400 <= head.status < 500 and head.status not in _NOT_CLIENT_ERRORS:
            raise _PrefillRejected(head, payload)
        logger.warning("%s: it answers %d to a prompt (request %s)", backend.url, head.status, ask.request_id)
        return None


def _params(payload: bytes, backend: RouterBackend) -> Raw | None:
    try:
        return _DECODER.decode(payload).kv_transfer_params
    except (msgspec.MsgspecError, UnicodeDecodeError):
        logger.warning("%s: its answer to a prompt is no JSON object", backend.url)
        return None
