"""The ASGI app of a router: what it answers itself, and what it reads of a request before that is passed on."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quintet import __version__
from quintet.clients.http_connection import Header
from quintet.router import admin, routes
from quintet.router.core import RouterCore
from quintet.router.metrics import CONTENT_TYPE
from quintet.router.request_info import RequestFields, RequestInfo, read_body
from quintet.router.response_stream import HOP_BY_HOP, ResponseStream
from quintet.server.config import BodyBytes, ServerConfig
from quintet.server.http.errors import ApiError, ClientGone, as_api_error
from quintet.server.http.ids import HEADER, is_valid_id, new_id
from quintet.server.http.middleware.access import HeadAsGet, error_response
from quintet.server.http.middleware.access import RequestLimit as ConnectionPlaces
from quintet.server.http.middleware.auth import OWNER_HEADER, ApiKeys, LocalNames
from quintet.server.http.middleware.base import wants_anthropic
from quintet.server.http.middleware.content_encoding import DecompressedReceive, coding_of
from quintet.server.http.middleware.paths import TrailingSlash
from quintet.server.http.sse import encode

logger = logging.getLogger(__name__)
access = logging.getLogger("quintet.access")

_CLIENT_GONE = 499  # nginx's number for it; the log alone reads it
_RETRY_LATER = {"Retry-After": "5"}
_NAME, _OWNER = HEADER.encode(), OWNER_HEADER.encode()
# What a server reads of the connection to it, and what was settled here.
_NOT_FORWARDED = HOP_BY_HOP | {
    b"host", b"content-length", b"content-encoding", b"accept-encoding", b"origin", b"expect", _NAME, _OWNER,
    b"access-control-request-method", b"access-control-request-headers",
}  # fmt: skip
_KEYS = (b"authorization", b"x-api-key")


def make_app(router: "RouterApp", core: RouterCore, door: ServerConfig) -> ASGIApp:
    """The last one that is wrapped around is the first that a request meets."""
    app: ASGIApp = HeadAsGet(router)
    app = ConnectionPlaces(app, most=door.max_connections)
    app = ApiKeys(app, door, router.admin_paths if door.admin_api_key else ())
    app = LocalNames(app, door)
    app = ErrorAndLogMiddleware(app, core, door)
    if door.allowed_origins:
        app = CORSMiddleware(
            app, allow_origins=door.allowed_origins, allow_methods=["*"], allow_headers=["*"],
            expose_headers=[HEADER, "retry-after"],
        )  # fmt: skip
    return TrailingSlash(app)


@dataclass
class RequestState:
    """State of one request to the router, in its scope's state."""

    request_id: str
    started: float
    response_stream: ResponseStream | None = None
    status: int = 0  # of an answer of our own


class ErrorAndLogMiddleware:
    """Gives a request its name, an error its shape, and the log a line."""

    def __init__(self, app: ASGIApp, core: RouterCore, door: ServerConfig) -> None:
        self._app, self._core = app, core
        self._log, self._quiet = door.access_log, frozenset(door.disable_access_log_for_endpoints)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        given = next((value for name, value in scope["headers"] if name == _NAME), b"").decode("latin-1")
        visit = RequestState(given if is_valid_id(given) else new_id(), time.perf_counter())
        scope.setdefault("state", {})["visit"] = visit
        try:
            await self._app(scope, receive, send)
        except ClientGone:
            visit.status = self._gone()
        except asyncio.CancelledError:
            stream = visit.response_stream
            if stream is None or not (stream.client_gone or stream.refusal):
                raise
            if uncancel := getattr(asyncio.current_task(), "uncancel", None):  # Python 3.11 counts them
                uncancel()
            if stream.refusal is None or stream.client_gone:
                visit.status = self._gone()
            else:
                await self._fail(stream.refusal, visit, scope, receive, send)
        except Exception as error:
            await self._fail(error, visit, scope, receive, send)
        finally:
            if visit.response_stream is not None:
                visit.response_stream.unwatch()
            if self._log and scope["path"] not in self._quiet:
                access.info(_log_line(scope, visit))

    def _gone(self) -> int:
        self._core.totals.cancelled += 1
        return _CLIENT_GONE

    async def _fail(self, error: Exception, visit: RequestState, scope: Scope, receive: Receive, send: Send) -> None:
        failure = as_api_error(error)
        if not isinstance(error, ApiError):
            logger.error("request %s failed", visit.request_id, exc_info=error)
        if visit.response_stream is not None and visit.response_stream.started:
            raise error  # the connection is cut: the client sees that the answer is not whole
        visit.status = failure.status
        refused = self._core.totals.refused
        refused[failure.status] = refused.get(failure.status, 0) + 1
        response = error_response(scope, failure)
        response.headers[HEADER] = visit.request_id
        await response(scope, receive, send)


def _log_line(scope: Scope, visit: RequestState) -> str:
    """Returns the line of the access log: no query, no text of prompts, and no id that opens a stored response."""
    client, pipe = scope.get("client"), visit.response_stream
    path = "/v1/responses/*" if routes.stored_response_id(scope["method"], scope["path"]) else scope["path"][:200]
    where = "" if pipe is None or not pipe.servers else f", by {' then '.join(pipe.servers)}"
    return (
        f"{f'{client[0]}:{client[1]}' if client else '-'} {scope['method']} {path!r} "
        f"{visit.status or (pipe.status if pipe else 0)} {1000 * (time.perf_counter() - visit.started):.1f} ms{where}, "
        f"request {visit.request_id}"
    )


class RouterApp:
    """Dispatches requests that passed authentication: own answers, administration, or forwarding to a server."""

    admin_paths: Mapping[str, str] = admin.PATHS  # path -> method
    has_page = False  # serves the chat page

    def __init__(self, core: RouterCore, door: ServerConfig) -> None:
        self._core, self._door = core, door
        self._held = 0  # bytes of bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if method == "POST" and path in routes.POSTS:
            await self._pass_on(scope, receive, send)
        elif path in self.admin_paths:
            await self._administer(scope, receive, send)
        elif method == "GET" and (own := await self._own(path, scope)) is not None:
            await respond(own, scope, receive, send)
        elif routes.stored_response_id(method, path) is not None or (method == "POST" and path.startswith("/v1/")):
            await self._pass_on(scope, receive, send)
        else:
            routes.check_refused(path)
            if path in routes.POSTS:
                raise ApiError(
                    405, f"{method} does not work at {path!r}; POST does", code="method_not_allowed",
                    headers={"Allow": "POST"},
                )  # fmt: skip
            raise routes.not_found_error(path)

    async def _own(self, path: str, scope: Scope) -> Response | None:
        """Returns the router's own answer; None if the path has none."""
        core = self._core
        if path in ("/live", "/health", "/ping"):
            return _json({"status": "alive"})
        if path == "/ready":
            core.check_ready()
            return _json({"status": "ready"})
        if path == "/version":
            return _json({"version": __version__})
        if path == "/metrics":
            return Response(await core.metrics(), headers={"Content-Type": CONTENT_TYPE})
        if path == "/v1/models":
            return _json(core.model_list(wants_anthropic(scope)))
        if path.startswith("/v1/models/"):
            return _json(core.model(path.removeprefix("/v1/models/"), wants_anthropic(scope)))
        return None

    async def _administer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if method != (right := self.admin_paths[path]):
            raise ApiError(405, f"{method} does not work at {path}; {right} does", headers={"Allow": right})
        if self._door.admin_api_key is None:
            admin.check_local_user(scope)
        body = await self._body(scope, receive)
        self._held -= len(body)
        await respond(_json(await self._core.administer(path, body)), scope, receive, send)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        core = self._core
        self.refuse_while_draining()
        path, visit = scope["path"], scope["state"]["visit"]
        stored = routes.stored_response_id(scope["method"], path)
        route = routes.OTHER if stored is not None else self._route(path)
        body = await self._body(scope, receive)
        stream = visit.response_stream = ResponseStream(scope, receive, send, visit.request_id)
        try:
            self.refuse_while_draining()  # the body may have taken long
            ask = self._ask(scope, body, route)
            ask.arrived = time.perf_counter()
            if stored is None:
                ask.fields = self._fields(scope, body)
                ask.session = self._session(scope) or ask.fields.user or ""
            stream.watch()
            core.streams.add(stream)
            if not await core.queue.acquire():
                ask.arrived = 0.0
            try:
                await core.answer(ask, stream, stored)
            finally:
                core.queue.release()
        finally:
            core.streams.discard(stream)
            self._held -= len(body)

    def refuse_while_draining(self) -> None:
        """ApiError 503 once the router ends."""
        if self._core.draining:
            raise ApiError(
                503, "the router ends and takes no new requests", code="draining",
                headers={**_RETRY_LATER, "Connection": "close"},
            )  # fmt: skip

    def _route(self, path: str) -> routes.RouteInfo:
        """ApiError 404 for a path that is not passed on."""
        return routes.post_route(path)

    def _ask(self, scope: Scope, body: bytes, route: routes.RouteInfo) -> RequestInfo:
        """Returns the request as a server gets it."""
        name, query = scope["state"]["visit"].request_id.encode(), scope["query_string"]
        target = scope["path"].encode() + (b"?" + query if query else b"")
        headers = _forwarded_headers(scope["headers"], self._core.key)
        headers += ((b"accept-encoding", b"identity"), (_NAME, name))
        owner = scope["state"].get("owner", "")
        headers += ((_OWNER, owner.encode()),) if owner else ()
        return RequestInfo(scope["method"].encode(), target, headers, body, route, name.decode(), owner=owner)

    def _fields(self, scope: Scope, body: bytes) -> RequestFields:
        """Returns the fields of a body that matter to the router. ApiError 400."""
        return read_body(body)

    def _session(self, scope: Scope) -> str:
        wanted = self._core.session_header
        return next((value.decode("latin-1") for name, value in scope["headers"] if name == wanted), "")

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """Returns the whole body, unpacked. Its bytes count as held until the request is over. ApiError 413, 429;
        ClientGone."""
        if scope["method"] == "GET":
            return b""
        limit = self._door.body_limit(scope["path"], media=True)  # the servers know their models
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if len(length) > 18 or int(length) > limit.bytes:  # the HTTP library has seen that it is a number
            raise _too_large(limit)
        if any(name == b"content-encoding" for name, _ in scope["headers"]):
            coding = coding_of(Headers(scope=scope))
            receive = receive if coding is None else DecompressedReceive(receive, coding)
        found, held = bytearray(), 0
        try:
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise ClientGone
                found += message.get("body", b"")
                if len(found) > limit.bytes:
                    raise _too_large(limit)
                self._hold(len(found) - held)
                held = len(found)
                if not message.get("more_body", False):
                    return bytes(found)
        except BaseException:
            self._held -= held
            raise

    def _hold(self, size: int) -> None:
        if self._held + size > self._door.max_queued_bytes:
            raise ApiError(
                429, f"the router holds {self._held} bytes of requests and takes {self._door.max_queued_bytes}; try "
                "again", code="server_overloaded", headers={"Retry-After": "1"},
            )  # fmt: skip
        self._held += size


def _too_large(limit: BodyBytes) -> ApiError:
    return ApiError(
        413, f"the body is larger than {limit.bytes} bytes; send less, or start the router with {limit.flag}",
        code="request_too_large",
    )  # fmt: skip


def _forwarded_headers(headers: list[Header], key: list[Header]) -> list[Header]:
    """Returns the headers that are sent on: without those of this connection, and with the key for servers. A caller's
    key is for the server, though the caller may list it in Connection."""
    listed: set[bytes] = set()
    for name, value in headers:
        if name == b"connection":
            listed.update(each.strip().lower() for each in value.split(b","))
    left_out = _NOT_FORWARDED.union(listed.difference(_KEYS), _KEYS if key else ())
    return [each for each in headers if each[0] not in left_out] + key


def _json(what: Any) -> Response:
    return Response(encode(what), media_type="application/json")


async def respond(response: Response, scope: Scope, receive: Receive, send: Send) -> None:
    visit: RequestState = scope["state"]["visit"]
    visit.status = response.status_code
    response.headers[HEADER] = visit.request_id
    with contextlib.suppress(ClientGone):
        await response(scope, receive, send)
