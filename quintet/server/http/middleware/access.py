"""Middleware of every request: access log, error responses, connection and body limits. Pure ASGI keeps streams."""

import logging
import re
import time
from collections.abc import Callable, Collection
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quintet.common.unknown_fields import collect_unknown
from quintet.server.config import BodyBytes
from quintet.server.http.capacity import CapacityLimiter, RequestCost
from quintet.server.http.errors import ApiError, ClientGone, anthropic_shape, as_api_error, ollama_shape, openai_shape
from quintet.server.http.ids import HEADER
from quintet.server.http.inputs.unknown_fields import HEADER as IGNORED
from quintet.server.http.inputs.unknown_fields import UnknownFieldLog, UnknownFields
from quintet.server.http.middleware.auth import is_public
from quintet.server.http.middleware.base import (
    HTTP,
    WEBSOCKET,
    HttpMiddleware,
    connection_of,
    route_path,
    wants_anthropic,
    wants_ollama,
)
from quintet.server.http.middleware.content_encoding import DecompressedReceive, coding_of
from quintet.server.http.respond import json_response
from quintet.server.http.usage import RequestUsage, usage_of

logger = logging.getLogger(__name__)
access = logging.getLogger("quintet.access")

PAGE_POLICY = "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_RESPONSE = re.compile(r"(resp_[^_/]*_)[^/]+")  # a response id; the log may show its process part
_LONGEST = 2000  # characters of an error message, which may quote a wrong value
_CLIENT_GONE = 499  # nginx's status for a closed connection; only the log has it


class AccessLog(HttpMiddleware):
    """Assigns request id and usage tally, adds common response headers, and writes the access log."""

    def __init__(self, app: ASGIApp, log: bool, quiet: Collection[str] = (), strict: bool = False) -> None:
        """`quiet`: paths that are not logged. `strict`: refuse requests with unknown fields."""
        super().__init__(app)
        self._log, self._quiet, self._strict = log, frozenset(quiet), strict
        self._notices = UnknownFieldLog()

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = time.perf_counter()
        tally = RequestUsage.for_request(HttpRequest(scope))
        scope.setdefault("state", {})["tally"] = tally
        strays = UnknownFields(self._strict)
        watch = _ObservedSend(send, tally, strays, is_public(scope))
        try:
            with collect_unknown(strays.add):
                await self._app(scope, receive, watch)
        finally:
            if strays:
                self._notices.log(route_path(scope), strays)
            if self._log and route_path(scope) not in self._quiet:
                access.info(_log_line(scope, tally, watch, begun))


class _ObservedSend:
    """Forwards messages; records the status and the time of the first byte."""

    def __init__(self, send: Send, tally: RequestUsage, strays: UnknownFields, is_page: bool) -> None:
        self._send, self._tally, self._unknown_fields, self._is_page = send, tally, strays, is_page
        self.status, self.first = 0, 0.0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers[HEADER] = self._tally.request_id
            if self._unknown_fields:
                headers[IGNORED] = self._unknown_fields.header_value()
            headers["x-content-type-options"] = "nosniff"
            if self._is_page:
                headers["content-security-policy"] = PAGE_POLICY
        elif not self.first:
            self.first = time.perf_counter()
        await self._send(message)


def _log_line(scope: Scope, tally: RequestUsage, watch: _ObservedSend, begun: float) -> str:
    """Returns the log line. It has no query (it may hold secrets), no prompt text, and no full id of a response."""
    client = scope.get("client")
    name = f"{client[0]}:{client[1]}" if client else "-"
    path = _RESPONSE.sub(r"\1*", quote(scope["path"]))[:200]
    first = f"{1000 * (watch.first - begun):.1f}" if watch.first else "-"
    return (
        f"{name} {scope['method']} {path} {watch.status} "
        f"{1000 * (time.perf_counter() - begun):.1f} ms, first byte {first} ms, {tally.prompt_tokens} prompt, "
        f"{tally.cached_tokens} cached, {tally.completion_tokens} completion tokens, request {tally.request_id}"
    )


class Failures(HttpMiddleware):
    """Converts exceptions to error responses in the format of the client's API."""

    scopes = (HTTP, WEBSOCKET)

    def __init__(self, app: ASGIApp, log_stack: bool = False) -> None:
        super().__init__(app)
        self._log_stack = log_stack

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientGone:
            if not started:
                await Response(status_code=_CLIENT_GONE)(scope, receive, send)
        except Exception as error:
            failure = as_api_error(error)
            if self._log_stack:
                request_id = usage_of(HTTPConnection(scope)).request_id
                logger.error("request %s is answered with %d", request_id, failure.status, exc_info=True)
            elif failure.status == 500 and not isinstance(error, ApiError):
                logger.exception("request %s failed", usage_of(HTTPConnection(scope)).request_id)
            elif not isinstance(error, ApiError):  # the caller's fault, as far as we know
                logger.debug("request %s was refused", usage_of(HTTPConnection(scope)).request_id, exc_info=True)
            if started:
                raise  # closes the connection: the client sees an incomplete response
            await error_response(scope, failure)(scope, receive, send)


def error_response(scope: Scope, error: ApiError) -> Response:
    """Returns the error response."""
    if len(error.message) > _LONGEST:
        error.message = error.message[:_LONGEST] + "…"
    shape = anthropic_shape if wants_anthropic(scope) else ollama_shape if wants_ollama(scope) else openai_shape
    response = json_response(shape(error), error.status)
    for name, value in error.headers.items():
        response.headers[name] = value
    return response


class RequestLimit(HttpMiddleware):
    """Limits connections of authenticated clients; probes need no place."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        super().__init__(app)
        self._most = most

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        wire = connection_of(scope)
        if wire is not None and not is_public(scope) and not wire.mark_authenticated():
            raise ApiError(
                503, f"the server has {self._most} connections and takes no more; try again",
                code="too_many_connections", headers={"Retry-After": "5", "Connection": "close"},
            )  # fmt: skip
        await self._app(scope, receive, send)


class BodyLimit(HttpMiddleware):
    """Refuses a too large body: by its Content-Length, or while it arrives. Received bytes count in the gate until the
    request is over, which limits the bodies of all clients together. For a compressed body the decompressed bytes
    count; the compressed bytes have the same limit.

    The connection stays open, and uvicorn reads and discards the rest of the body: a client that still sends gets
    the error response.
    """

    def __init__(self, app: ASGIApp, most: Callable[[str], BodyBytes], gate: CapacityLimiter) -> None:
        """`most`: the limit of a route's path."""
        super().__init__(app)
        self._limit_of, self._gate = most, gate

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit = self._limit_of(route_path(scope))
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isascii() and announced.isdigit() and (len(announced) > 18 or int(announced) > limit.bytes):
            raise _too_large(limit)
        coding = coding_of(Headers(scope=scope)) if scope["method"] == "POST" else None
        source = receive if coding is None else DecompressedReceive(_bounded(receive, limit), coding)
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await source()
            came = len(message.get("body", b""))
            if size + came > limit.bytes:
                raise _too_large(limit)
            self._gate.acquire(RequestCost(body_bytes=came))
            size += came
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._gate.release(RequestCost(body_bytes=size))


def _bounded(receive: Receive, limit: BodyBytes) -> Receive:
    """Limits the compressed bytes: they may decompress to nothing, and would otherwise be unlimited."""
    size = 0

    async def counted() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > limit.bytes:
            raise _too_large(limit)
        return message

    return counted


def _too_large(limit: BodyBytes) -> ApiError:
    return ApiError(
        413, f"the body is larger than {limit.bytes} bytes; send less, or start the server with {limit.flag}",
        code="request_too_large",
    )  # fmt: skip


class HeadAsGet(HttpMiddleware):
    """Answers HEAD as GET, without the body."""

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def bare(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, bare)
