"""GET /live, /health, /ready, /readyz, /ping and /version, and POST routes that empty caches: for operators."""

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet import __version__
from quintet.server.http.admin.protocol import Sign, Version
from quintet.server.http.app_state import not_ready_error
from quintet.server.http.openapi import documents_route
from quintet.server.http.respond import app_state_of, json_response

router = APIRouter()


@router.get("/live")
@documents_route(answer=Sign)
async def live() -> Response:
    """Checks that this process answers, also while the model loads."""
    return json_response(Sign("alive"))


@router.get("/health")
@documents_route(answer=Sign)
async def health(http: HttpRequest) -> Response:
    """Checks that the engine lives and has loaded its model, as it still has asleep; else 503 and the reason."""
    if (why := app_state_of(http).backend.unavailable_reason()) is not None:
        raise not_ready_error(why)
    return json_response(Sign("alive"))


@router.get("/ready")
@router.get("/readyz")
@documents_route(answer=Sign)
async def ready(http: HttpRequest) -> Response:
    """Checks that the engine takes requests; else 503 and the reason."""
    app_state_of(http).check_ready()
    return json_response(Sign("ready"))


@router.get("/ping")
@documents_route(answer=Sign)
async def ping(http: HttpRequest) -> Response:
    """Alias of /health, which model hosting services ask for."""
    return await health(http)


@router.get("/version")
@documents_route(answer=Version)
async def version() -> Response:
    """Returns the version of quintet."""
    return json_response(Version(__version__))


@router.post("/reset_prefix_cache")
@router.post("/reset_mm_cache")
@router.post("/reset_encoder_cache")
@documents_route(answer=Sign)
async def reset_prefix_cache(http: HttpRequest) -> Response:
    """Empties the prefix cache, and what was computed of images, video and audio; running requests continue."""
    service = app_state_of(http)
    service.check_ready()
    await service.backend.reset_prefix_cache()
    return json_response(Sign("reset"))
