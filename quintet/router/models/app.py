"""ASGI app of a server of several models: its own answers, and the routes that an engine answers."""

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quintet.router import routes
from quintet.router.app import RouterApp, respond
from quintet.router.models import ollama
from quintet.router.models.core import ModelsCore
from quintet.router.request_info import RequestFields, read_body
from quintet.router.routes import stored_response_id
from quintet.server.config import ServerConfig
from quintet.server.http.admin import page
from quintet.server.http.errors import ApiError
from quintet.server.http.middleware.auth import ADMIN_PATHS
from quintet.server.http.sse import encode
from quintet.server.pdf.extract import PdfExtractor

ADMIN = {"/models/loaded": "GET", "/models/load": "POST", "/models/unload": "POST"}
# lists of all models, for APIs besides OpenAI's: path -> its JSON
LISTINGS: dict[str, Callable[[ModelsCore], Any]] = {
    "/models": lambda core: core.model_list(False),
    "/api/tags": ollama.tags,
    "/api/ps": ollama.running,
    "/api/version": ollama.version,
}
# Routes that an engine answers; every other path is answered here, and loads no model. An exact path holds no character
# that would end the line of the request to the engine, and is no admin route of it.
_ENGINE_GETS = frozenset(("/props", "/slots", "/lora-adapters", "/tokenizer_info", "/openapi.json"))
_NAMED = frozenset(("/api/show", "/api/pull"))  # their bodies may have `name` instead of `model`
_ENGINE_POSTS = frozenset((
    *routes.POSTS, "/completion", "/completions", "/infill", "/apply-template", "/embedding", "/embeddings",
    "/api/chat", "/api/generate", "/api/embed", "/api/embeddings", *_NAMED,
))  # fmt: skip
_MULTIPART = b"multipart/form-data"


class _NameFields(msgspec.Struct):
    """Names of a model in Ollama's bodies."""

    model: str | None = None
    name: str | None = None


_NAMES = msgspec.json.Decoder(_NameFields)


class ModelsApp(RouterApp):
    """Passes on what one engine answers, by the model in the body or in the query; without one, to the first."""

    admin_paths: Mapping[str, str] = ADMIN
    has_page = True
    _core: ModelsCore

    def __init__(self, core: ModelsCore, door: ServerConfig) -> None:
        super().__init__(core, door)
        self._page = page.read_page() if door.playground else {}
        self._pdf = PdfExtractor()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if path in ADMIN:
            await self._administer(scope, receive, send)
        elif method == "GET" and (answer := await self._own(path, scope)) is not None:
            await respond(answer, scope, receive, send)
        elif method == "POST" and path == page.PDF_TEXT and self._page:
            await respond(await self._pdf_text(scope, receive), scope, receive, send)
        elif path in ADMIN_PATHS:
            raise ApiError(
                404, f"{path} concerns one engine, and is not passed on; POST /models/unload ends a model's engine, "
                "which the next request starts again", code="not_passed_on",
            )  # fmt: skip
        elif path in {"GET": _ENGINE_GETS, "POST": _ENGINE_POSTS}.get(method, ()) or stored_response_id(method, path):
            await self._pass_on(scope, receive, send)
        else:
            there = ", ".join(each.name for each in self._core.manager.models[:20])
            raise ApiError(
                404, f"there is nothing at {path[:200]!r}; models: {there} (GET /v1/models)", code="not_found"
            )

    async def _own(self, path: str, scope: Scope) -> Response | None:
        if path in LISTINGS:
            return Response(encode(LISTINGS[path](self._core)), media_type="application/json")
        name = "index.html" if path == "/" else path.removeprefix("/page/") if path.startswith("/page/") else None
        if name is not None and self._page:
            return page.page_response(self._page, name, HttpRequest(scope))
        return await super()._own(path, scope)

    async def _pdf_text(self, scope: Scope, receive: Receive) -> Response:
        self.refuse_while_draining()
        content = await self._body(scope, receive)
        try:
            await self._core.queue.acquire()  # shutdown waits for it as for other requests
            try:
                return await page.pdf_response(self._pdf, content, HttpRequest(scope, receive))
            finally:
                self._core.queue.release()
        finally:
            self._held -= len(content)

    def _route(self, path: str) -> routes.RouteInfo:
        return routes.POSTS.get(path, routes.OTHER)

    def _fields(self, scope: Scope, body: bytes) -> RequestFields:
        headers = dict(scope["headers"])
        if body and not headers.get(b"content-type", b"").startswith(_MULTIPART):
            found = read_body(body)
            if found.model is None and scope["path"] in _NAMED:
                found.model = _NAMES.decode(body).name
            return found
        named = parse_qs(scope["query_string"].decode("latin-1")).get("model")
        # the model's own name: there is no body in which an alias would be replaced
        return RequestFields(model=self._core.find(named[0]).name if named else None)
