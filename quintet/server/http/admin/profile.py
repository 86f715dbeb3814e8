"""POST /start_profile and /stop_profile, where the engine's profiler_config allows traces."""

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet.server.backend import EngineRefusal
from quintet.server.http.admin.protocol import Sign, TraceFile
from quintet.server.http.errors import ApiError
from quintet.server.http.openapi import documents_route
from quintet.server.http.respond import app_state_of, json_response

router = APIRouter()


@router.post("/start_profile")
@documents_route(answer=Sign, conflict=True)
async def start_profile(http: HttpRequest) -> Response:
    """Begins a trace of the engine's steps and kernels; it takes no body. 409 while one runs."""
    try:
        await app_state_of(http).backend.trace_control.start()
    except EngineRefusal as error:
        raise ApiError(409, str(error), code="cannot_trace") from None
    return json_response(Sign("tracing"))


@router.post("/stop_profile")
@documents_route(answer=TraceFile, conflict=True)
async def stop_profile(http: HttpRequest) -> Response:
    """Ends the trace, and names its file in the operator's folder. 409 if there is none."""
    try:
        name, steps, ended = await app_state_of(http).backend.trace_control.stop()
    except EngineRefusal as error:
        raise ApiError(409, str(error), code="cannot_trace") from None
    return json_response(TraceFile(file=name, steps=steps, ended=ended))
