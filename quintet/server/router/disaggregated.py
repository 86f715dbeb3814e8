"""A prompt is computed by one server, and the answer written by another, which fetches the prompt's pages from it."""

import logging
import time

import msgspec
from msgspec import UNSET, Raw

from quintet.server.http.errors import ApiError
from quintet.server.http_stream import Broken, NotHttp
from quintet.server.router.asks import Ask, prefill_body, with_pages
from quintet.server.router.backends import Backend, Pool
from quintet.server.router.forward import Forwarder, Unanswered
from quintet.server.router.pipe import Pipe
from quintet.server.router.places import SOON
from quintet.server.router.upstream import Head, Late

logger = logging.getLogger(__name__)

_NULL = Raw(b"null")
_NOT_THE_CALLERS = (401, 403, 404, 408, 421, 429)  # what a server says of its own settings and load, not of the request
_MOST = 64 * 2**20  # bytes of what a server says when it has computed a prompt


class _Told(msgspec.Struct):
    kv_transfer_params: Raw = _NULL


_DECODER = msgspec.json.Decoder(_Told)


class _Verdict(Exception):
    """The request is wrong, in the words of the server that was to compute its prompt."""

    def __init__(self, head: Head, body: bytes) -> None:
        super().__init__(head.status)
        self.head, self.body = head, body


class Disaggregated:
    """vLLM's protocol: the first server is told to keep what it computed, its answer says where that is, and this goes
    unchanged to the second."""

    def __init__(self, forwarder: Forwarder, recompute: bool) -> None:
        """`recompute`: where no prompt is computed, the answering server does that; else the request fails."""
        self._forwarder, self._recompute = forwarder, recompute

    async def pass_on(self, ask: Ask, pipe: Pipe) -> None:
        """As Forwarder.pass_on(). The answering server has the request from the beginning: its load is known, and no
        prompt is computed for which there is no room. Another one that is asked gets pages of its own: the first may
        have had them fetched and given away."""
        if ask.read.kv_transfer_params not in (UNSET, _NULL):
            raise ApiError(
                400, "kv_transfer_params says where pages of another server are, which is this router's to say; leave "
                "it out", param="kv_transfer_params", code="unsupported_field",
            )  # fmt: skip
        alone = (ask.read.n or 1) > 1  # pages are given to one completion, and freed when it has them
        try:
            await self._forwarder.pass_on(ask, Pool.DECODE, pipe, None if alone else self._with_pages)
        except _Verdict as said:
            await pipe.start(said.head.status, said.head.headers)
            await pipe.body(said.body, more=False)

    async def _with_pages(self, ask: Ask) -> bytes:
        params = await self._compute(ask)
        if params is not None and params != _NULL:
            return with_pages(ask.body, bytes(params))
        if params is None and not self._recompute:
            raise ApiError(
                503, "no server computed the prompt; try again", code="prefill_failed", headers=SOON
            )  # fmt: skip
        self._forwarder.totals.recomputed += 1
        return ask.body

    async def _compute(self, ask: Ask) -> Raw | None:
        """What the other server needs to know; null if it needs nothing, None if no server could. Raises _Verdict."""
        forwarder, body, tried = self._forwarder, prefill_body(ask.body), list[Backend]()
        try:
            backend: Backend | None = await forwarder.places.place(ask, Pool.PREFILL)
        except ApiError as error:
            if error.code == "server_overloaded":  # the prompt's work elsewhere would not be less
                raise
            logger.warning("no prompt is computed: %s", error.message)
            return None
        while backend is not None:
            tried.append(backend)
            with forwarder.places.at(backend):
                found = await self._computed_by(backend, ask, body)
                if found is not None:
                    return found
                backend = forwarder.other(ask, Pool.PREFILL, tried)
        return None

    async def _computed_by(self, backend: Backend, ask: Ask, body: bytes) -> Raw | None:
        """None: it did not."""
        try:
            answer = await self._forwarder.ask(backend, ask, body)
        except Unanswered:
            return None
        head, exchange = answer.head, answer.exchange
        try:
            said = await exchange.body(_MOST)
        except (Broken, NotHttp, Late) as error:
            backend.counts.failed("mid_stream")
            logger.warning("%s: %s, in the middle of an answer (request %s)", backend.url, error, ask.request_id)
            return None
        finally:
            exchange.close()
            backend.counts.whole.observe(time.perf_counter() - answer.sent)
        backend.counts.answered(head.status)
        if head.status == 200:
            return _params(said, backend)
        if 400 <= head.status < 500 and head.status not in _NOT_THE_CALLERS:
            raise _Verdict(head, said)
        logger.warning("%s: it answers %d to a prompt (request %s)", backend.url, head.status, ask.request_id)
        return None


def _params(said: bytes, backend: Backend) -> Raw | None:
    try:
        return _DECODER.decode(said).kv_transfer_params
    except (msgspec.MsgspecError, UnicodeDecodeError):
        logger.warning("%s: its answer to a prompt is no JSON object", backend.url)
        return None
