"""GET /health, /ready, /ping and /version, and POST /reset_prefix_cache: for those who keep the server running."""

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet import __version__
from quintet.server.http.answers import json_response, service_of
from quintet.server.http.openapi import documented
from quintet.server.http.protocol.tokens import Sign, Version

router = APIRouter()


@router.get("/health")
@documented(answer=Sign)
async def health() -> Response:
    """This process answers; whether it can serve, /ready says."""
    return json_response(Sign("alive"))


@router.get("/ready")
@documented(answer=Sign)
async def ready(http: HttpRequest) -> Response:
    """The engine takes requests; else 503 and the reason."""
    service_of(http).check_ready()
    return json_response(Sign("ready"))


@router.get("/ping")
@documented(answer=Sign)
async def ping() -> Response:
    """/health under another name, that hosts of models ask for."""
    return json_response(Sign("alive"))


@router.get("/version")
@documented(answer=Version)
async def version() -> Response:
    """Of quintet."""
    return json_response(Version(__version__))


@router.post("/reset_prefix_cache")
@documented(answer=Sign)
async def reset_prefix_cache(http: HttpRequest) -> Response:
    """Forgets the cached beginnings of prompts; what runs goes on."""
    service = service_of(http)
    service.check_ready()
    await service.backend.reset_prefix_cache()
    return json_response(Sign("reset"))
