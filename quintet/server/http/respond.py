"""Parts that all answers share: JSON bodies, streams over a call, and the fields that all chunks repeat."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quintet import __version__
from quintet.engine.observability.stats import Stats
from quintet.engine.processes.model_info import ModelInfo
from quintet.outputs import RequestOutput
from quintet.server.http.app_state import AppState
from quintet.server.http.engine_call import EngineCall, PromptRequest
from quintet.server.http.errors import ApiError, ClientGone
from quintet.server.http.sse import EventStream, encode, openai_failure

Result = TypeVar("Result")
_PIECE = 2**18  # bytes of an answer that are handed on at once; the next when they are on their way


@dataclass(frozen=True)
class AnswerHead:
    """The fields that all chunks of an answer repeat."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None

    @classmethod
    def for_answer(cls, service: AppState, answer_id: str, model: str | None) -> "AnswerHead":
        """`model` is the name that was asked for."""
        backend, settings = service.backend, service.settings
        mark: str | None = settings.fingerprint_value
        if settings.fingerprint_mode in ("full", "hash"):
            mark = fingerprint(backend.model_info, backend.stats() if settings.fingerprint_mode == "full" else None)
        return cls(answer_id, int(time.time()), model or service.model_names[0], mark)

    def fields(self) -> dict[str, Any]:
        return {"id": self.id, "created": self.created, "model": self.model,
                "system_fingerprint": self.system_fingerprint}  # fmt: skip


def fingerprint(served: ModelInfo, stats: Stats | None = None) -> str:
    """The same for the same model, settings and version: equal seeds then give equal outputs. Weights that came while
    the engine runs add their version: fp_..._VERSION."""
    facts = (__version__, served.model, served.vocab_size, served.max_model_len, served.seed, served.processors)
    mark = "fp_" + hashlib.blake2b(repr(facts).encode(), digest_size=6).hexdigest()
    if stats is None or not stats.weights.weight_updates:
        return mark
    return f"{mark}_{stats.weights.weight_version}"


def json_response(value: Any, status: int = 200) -> Response:
    return Response(encode(value), status, media_type="application/json")


def app_state_of(http: HttpRequest) -> AppState:
    service: AppState = http.app.state.service
    return service


class WholeResponse(Response):
    """An answer that is sent as fast as it is read. Its call keeps its place until then: what waits for slow readers is
    counted, too."""

    media_type = "application/json"

    def __init__(
        self, call: EngineCall, content: bytes, media_type: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        """The body is JSON if no `media_type` is given."""
        super().__init__(content, headers=headers, media_type=media_type)
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for start in range(0, len(self.body), _PIECE):
                piece = bytes(self.body[start : start + _PIECE])
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._call.close()


async def whole_response(
    service: AppState,
    http: HttpRequest,
    asks: Sequence[PromptRequest],
    answer: Callable[[list[RequestOutput]], Awaitable[Any]],
) -> WholeResponse:
    """Waits for the last output of each ask; what `answer` makes of them becomes JSON."""

    async def read(call: EngineCall) -> Any:
        return await answer(await call.outputs())

    return await read_response(service, http, asks, read)


async def read_response(
    service: AppState,
    http: HttpRequest,
    asks: Sequence[PromptRequest],
    read: Callable[[EngineCall], Awaitable[Any]],
    waits: bool = False,
) -> WholeResponse:
    """Returns what `read` makes of the open call, as JSON. `waits`: see Call."""
    call = service.call(http, asks, waits=waits)
    await call.__aenter__()
    try:
        return WholeResponse(call, encode(await read(call)))
    except BaseException:
        call.close()
        raise


async def stream_response(
    service: AppState,
    http: HttpRequest,
    asks: Sequence[PromptRequest],
    events: Callable[[EngineCall], AsyncIterator[bytes]],
    failure: Callable[[ApiError], bytes] = openai_failure,
    waits: bool = False,
) -> EventStream:
    """Opens the call and waits for its first output, so that what fails until then has a status of its own. `waits`:
    see Call."""
    call = service.call(http, asks, waits=waits)
    await call.__aenter__()
    try:
        await call.peek()
    except BaseException:
        call.close()
        raise
    return EventStream(call, events(call), failure, service.settings.sse_keep_alive_interval)


async def while_connected(http: HttpRequest, work: Awaitable[Result]) -> Result:
    """Returns the result of `work`; cancels it and raises ClientGone if the client disconnects before. The body was
    read: the next message is that the client has gone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(http.receive())
    both: set[asyncio.Future[Any]] = {task, gone}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone()
        return task.result()
    finally:
        for each in both:
            each.cancel()
        await asyncio.wait(both)
