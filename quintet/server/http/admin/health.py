"""GET /health, /ready, /ping and /version, and POST /reset_prefix_cache: for those who keep the server running."""

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet import __version__
from quintet.server.http.admin.protocol import Sign, Version
from quintet.server.http.openapi import documents_route
from quintet.server.http.respond import app_state_of, json_response

router = APIRouter()


@router.get("/health")
@documents_route(answer=Sign)
async def health() -> Response:
    """Checks that this process answers; /ready checks that it can serve."""
    return json_response(Sign("alive"))


@router.get("/ready")
@documents_route(answer=Sign)
async def ready(http: HttpRequest) -> Response:
    """Checks that the engine takes requests; else 503 and the reason."""
    app_state_of(http).check_ready()
    return json_response(Sign("ready"))


@router.get("/ping")
@documents_route(answer=Sign)
async def ping() -> Response:
    """Alias of /health, which model hosting services ask for."""
    return json_response(Sign("alive"))


@router.get("/version")
@documents_route(answer=Version)
async def version() -> Response:
    """Returns the version of quintet."""
    return json_response(Version(__version__))


@router.post("/reset_prefix_cache")
@documents_route(answer=Sign)
async def reset_prefix_cache(http: HttpRequest) -> Response:
    """Empties the prefix cache; running requests continue."""
    service = app_state_of(http)
    service.check_ready()
    await service.backend.reset_prefix_cache()
    return json_response(Sign("reset"))
