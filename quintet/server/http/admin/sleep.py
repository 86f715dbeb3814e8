"""Routes of sleep, with --enable-sleep-mode: they free device memory for other programs."""

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet.engine.sleep import check_tags
from quintet.server.backend import EngineRefusal
from quintet.server.http.admin.protocol import IsSleeping, Sign
from quintet.server.http.errors import ApiError
from quintet.server.http.openapi import documents_route
from quintet.server.http.respond import app_state_of, json_response

router = APIRouter()

Level = Annotated[int, Query(ge=1, le=2, description="1: weights are put aside on the host; 2: they are dropped")]
Tags = Annotated[list[str] | None, Query(description="what wakes: weights, then kv_cache; both if left out")]


@router.post("/sleep")
@documents_route(answer=Sign)
async def sleep(http: HttpRequest, level: Level = 1) -> Response:
    """Gives the device's memory back; refused while requests run. Asleep, the server takes none."""
    try:
        await app_state_of(http).backend.sleep(level)
    except EngineRefusal as error:
        raise ApiError(400, str(error), code="cannot_sleep") from None
    return json_response(Sign("asleep"))


@router.post("/wake_up")
@documents_route(answer=Sign)
async def wake_up(http: HttpRequest, tags: Tags = None) -> Response:
    """Takes memory again; after level 2 the weights are read from their folder as it is now."""
    try:
        check_tags(tags)
    except ValueError as error:
        raise ApiError(400, str(error), param="tags") from None
    try:
        await app_state_of(http).backend.wake_up(tags)
    except EngineRefusal as error:
        raise ApiError(503, f"the engine is still asleep: {error}", code="asleep") from None
    return json_response(Sign("awake"))


@router.post("/release_kv_cache_memory")
@documents_route(answer=Sign)
async def release_kv_cache_memory(http: HttpRequest) -> Response:
    """Gives the memory of the KV cache back, and keeps the weights; /wake_up with the tag kv_cache takes it again."""
    backend = app_state_of(http).backend
    try:
        await backend.sleep(1)
        await backend.wake_up(["weights"])
    except EngineRefusal as error:
        raise ApiError(400, str(error), code="cannot_sleep") from None
    return json_response(Sign("released"))


@router.get("/is_sleeping")
@documents_route(answer=IsSleeping)
async def is_sleeping(http: HttpRequest) -> Response:
    """Returns whether the engine was put to sleep."""
    return json_response(IsSleeping(app_state_of(http).sleep_level > 0))
