"""The HTTP app of one API process: its routes, and what stands before them."""

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import iter_route_contexts
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet.server.config import ServerConfig
from quintet.server.http import openapi
from quintet.server.http.admin import docs_page, load, lora, page, profile, sleep, tokenizer_info, training, workers
from quintet.server.http.admin import health as alive
from quintet.server.http.admin import mcp_servers as tool_servers
from quintet.server.http.admin import tokenize as tokens
from quintet.server.http.anthropic.routes import router as anthropic
from quintet.server.http.app_state import AppState
from quintet.server.http.audio import realtime
from quintet.server.http.audio.routes import router as audio
from quintet.server.http.endpoint_plugins import attach_endpoint_plugins, load_endpoint_plugins
from quintet.server.http.errors import ApiError
from quintet.server.http.ids import HEADER
from quintet.server.http.inputs.unknown_fields import HEADER as IGNORED
from quintet.server.http.llamacpp import completion as llamacpp_completion
from quintet.server.http.llamacpp import server as llamacpp_server
from quintet.server.http.middleware import custom as yours
from quintet.server.http.middleware.access import (
    AccessLog,
    BodyLimit,
    Failures,
    HeadAsGet,
    RequestLimit,
    error_response,
)
from quintet.server.http.middleware.auth import ApiKeys, LocalNames
from quintet.server.http.middleware.base import route_path
from quintet.server.http.middleware.load_header import LoadReport
from quintet.server.http.middleware.paths import TrailingSlash, path_suggestion
from quintet.server.http.ollama import chat as ollama_chat
from quintet.server.http.ollama import embed as ollama_embed
from quintet.server.http.ollama import models as ollama_models
from quintet.server.http.openai import chat, completions, generate, generative_scoring, invocations, models
from quintet.server.http.pooling import cohere, scores
from quintet.server.http.pooling import routes as pooling
from quintet.server.http.responses.routes import router as responses
from quintet.server.http.scale_out import derender, render
from quintet.server.metrics import routes as metrics
from quintet.server.metrics.http_metrics import HttpMetrics


def make_app(service: AppState) -> FastAPI:
    """Returns the app of `service`, which is at app.state.service. ValueError if a middleware or an endpoint plug-in
    cannot be used."""
    settings = service.settings
    app = FastAPI(docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service = service
    app.add_exception_handler(HTTPException, _refuse_path)
    app.add_exception_handler(RequestValidationError, _refuse_parameter)
    _add_routes(app, service)
    attach_endpoint_plugins(app, load_endpoint_plugins(settings.endpoint_plugins))
    _add_middleware(app, settings)
    openapi.install(app, settings.root_path)
    yours.build_middlewares(app, settings.middleware)
    return app


def _add_routes(app: FastAPI, service: AppState) -> None:
    settings = service.settings
    generating = (completions, chat, generate, generative_scoring)
    for module in (alive, metrics, models, lora, *generating, tokens, pooling, scores, cohere, invocations):
        app.include_router(module.router)
    asked_for = {
        sleep: settings.enable_sleep_mode,
        training: settings.enable_rl_routes,
        workers: settings.enable_rl_routes,
        load: settings.enable_server_load_tracking,
        tokenizer_info: settings.enable_tokenizer_info_endpoint,
        profile: bool(service.profiles),
        tool_servers: bool(service.tool_servers),
    }
    for module, asked in asked_for.items():
        if asked:
            app.include_router(module.router)
    for module in (render, derender, docs_page):
        app.include_router(module.router)
    app.include_router(audio)
    app.include_router(realtime.router)
    app.include_router(responses)
    app.include_router(anthropic)
    for module in (ollama_chat, ollama_embed, ollama_models, llamacpp_completion, llamacpp_server):
        app.include_router(module.router)
    root = page.router(tool_servers=bool(service.tool_servers)) if settings.playground else ollama_models.root
    app.include_router(root)


def _add_middleware(app: FastAPI, settings: ServerConfig) -> None:
    """The last one that is added is the first one that a request meets."""
    app.add_middleware(HeadAsGet)
    app.add_middleware(LoadReport, service=app.state.service)
    yours.add_middlewares(
        app, yours.load_middlewares(settings.middleware)
    )  # what they read is bounded, and sent by who may call
    app.add_middleware(BodyLimit, most=app.state.service.media_calls.body_limit, gate=app.state.service.capacity)
    app.add_middleware(RequestLimit, most=settings.max_connections)
    app.add_middleware(ApiKeys, settings=settings)
    app.add_middleware(LocalNames, settings=settings)
    app.add_middleware(Failures, log_stack=settings.log_error_stack)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.allowed_origins, allow_methods=["*"], allow_headers=["*"],
            expose_headers=[HEADER, IGNORED, "retry-after"],
        )  # fmt: skip
    app.add_middleware(HttpMetrics, service=app.state.service)
    app.add_middleware(
        AccessLog, log=settings.access_log, quiet=settings.disable_access_log_for_endpoints,
        strict=settings.strict_requests,
    )  # fmt: skip
    app.add_middleware(TrailingSlash)


async def _refuse_path(http: HttpRequest, error: Exception) -> Response:
    """Answers the router's own errors: no such path, or a method that the path does not have."""
    assert isinstance(error, HTTPException)
    path, known = http.scope["path"][:200], error.status_code in (404, 405)
    what, hint = f"{http.method} does not work at", "/openapi.json lists what there is"
    if error.status_code == 404:
        there = (getattr(route, "path_format", "") for route in iter_route_contexts(http.app.routes))
        what, hint = "there is nothing at", path_suggestion(route_path(http.scope), there)
    message = f"{what} {path!r}; {hint}" if known else str(error.detail)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    return error_response(http.scope, ApiError(error.status_code, message, code=code, headers=error.headers))


async def _refuse_parameter(http: HttpRequest, error: Exception) -> Response:
    """Answers a wrong parameter in path or query; bodies are read by the routes themselves."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])[:200]
    return error_response(http.scope, ApiError(400, f"{name}: {first['msg']}", param=name, code="invalid_value"))
