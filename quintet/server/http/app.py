"""The HTTP app of one API process: its routes, and what stands before them."""

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet.server.http import openapi, yours
from quintet.server.http.anthropic.routes import router as anthropic
from quintet.server.http.auth import ApiKeys, Neighbours
from quintet.server.http.errors import ApiError
from quintet.server.http.ids import HEADER
from quintet.server.http.middleware import BodyLimit, Failures, HeadAsGet, Observed, Places, failure
from quintet.server.http.responses.routes import router as responses
from quintet.server.http.routes import alive, chat, completions, models, page, profile, sleep, tokens
from quintet.server.http.service import Service
from quintet.server.metrics import routes as metrics
from quintet.server.metrics.counted import Counted
from quintet.server.settings import ServerConfig


def make_app(service: Service) -> FastAPI:
    """Serves what `service` holds; it is found at app.state.service. ValueError if a middleware cannot be used."""
    settings = service.settings
    app = FastAPI(docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service = service
    app.add_exception_handler(HTTPException, _refuse_path)
    app.add_exception_handler(RequestValidationError, _refuse_parameter)
    _add_routes(app, service)
    _add_middleware(app, settings)
    openapi.install(app, settings.root_path)
    yours.settle(app, settings.middleware)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    settings = service.settings
    for module in (alive, metrics, models, completions, chat, tokens):
        app.include_router(module.router)
    if settings.enable_sleep_mode:
        app.include_router(sleep.router)
    if service.profiles:
        app.include_router(profile.router)
    app.include_router(responses)
    app.include_router(anthropic)
    if settings.playground:
        app.include_router(page.router())


def _add_middleware(app: FastAPI, settings: ServerConfig) -> None:
    """The last one that is added is the first one that a request meets."""
    app.add_middleware(HeadAsGet)
    yours.add(app, yours.load(settings.middleware))  # what they read is bounded, and sent by who may call
    app.add_middleware(BodyLimit, most=settings.max_body_bytes, gate=app.state.service.gate)
    app.add_middleware(Places, most=settings.max_connections)
    app.add_middleware(ApiKeys, settings=settings)
    app.add_middleware(Neighbours, settings=settings)
    app.add_middleware(Failures)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.allowed_origins, allow_methods=["*"], allow_headers=["*"],
            expose_headers=[HEADER, "retry-after"],
        )  # fmt: skip
    app.add_middleware(Counted, service=app.state.service)
    app.add_middleware(Observed, log=settings.access_log, quiet=settings.disable_access_log_for_endpoints)


async def _refuse_path(http: HttpRequest, error: Exception) -> Response:
    """What the router itself says: no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    path, known = http.scope["path"][:200], error.status_code in (404, 405)
    what = "there is nothing at" if error.status_code == 404 else f"{http.method} does not work at"
    message = f"{what} {path!r}; /openapi.json lists what there is" if known else str(error.detail)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    return failure(http.scope, ApiError(error.status_code, message, code=code, headers=error.headers))


async def _refuse_parameter(http: HttpRequest, error: Exception) -> Response:
    """A parameter in path or query; bodies are read by the routes themselves."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])[:200]
    return failure(http.scope, ApiError(400, f"{name}: {first['msg']}", param=name, code="invalid_value"))
