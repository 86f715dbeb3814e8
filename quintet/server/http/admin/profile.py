"""POST /start_profile and /stop_profile, where the engine's profiler_config allows traces."""

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet.server.backend import Refused
from quintet.server.http.admin.protocol import Sign, TraceFile
from quintet.server.http.errors import ApiError
from quintet.server.http.openapi import documented
from quintet.server.http.respond import json_response, service_of

router = APIRouter()


@router.post("/start_profile")
@documented(answer=Sign, conflict=True)
async def start_profile(http: HttpRequest) -> Response:
    """Begins a trace of the engine's steps and kernels; it takes no body. 409 while one runs."""
    try:
        await service_of(http).backend.traces.start()
    except Refused as error:
        raise ApiError(409, str(error), code="cannot_trace") from None
    return json_response(Sign("tracing"))


@router.post("/stop_profile")
@documented(answer=TraceFile, conflict=True)
async def stop_profile(http: HttpRequest) -> Response:
    """Ends the trace, and names its file in the operator's folder. 409 if there is none."""
    try:
        name, steps, ended = await service_of(http).backend.traces.stop()
    except Refused as error:
        raise ApiError(409, str(error), code="cannot_trace") from None
    return json_response(TraceFile(file=name, steps=steps, ended=ended))
