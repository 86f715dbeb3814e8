"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: adapters (LoRA) at run time, with vLLM's texts."""

from typing import ClassVar

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from quintet.engine.processes.messages import ADAPTER_TAKEN, ADAPTER_UNKNOWN, LoadLoRA
from quintet.server.backend import EngineRefusal
from quintet.server.http.app_state import AppState
from quintet.server.http.errors import ApiError
from quintet.server.http.inputs.body import Body, UnsupportedField, read_body
from quintet.server.http.openapi import documents_route
from quintet.server.http.respond import app_state_of
from quintet.server.lora_modules import check_adapter_name

router = APIRouter()


class LoadAdapter(Body):
    """An adapter that is to be served."""

    lora_name: str | None = Field(None, description="its name in requests, as their model")
    lora_path: str | None = Field(None, description="folder on the server's machine, or hub id")
    load_inplace: bool | None = Field(None, description="the name is there: its next requests get these files")

    unsupported_fields: ClassVar[dict[str, UnsupportedField]] = {
        "is_3d_lora_weight": UnsupportedField("the files say it", (False,)),
    }


class UnloadAdapter(Body):
    """An adapter that is to be served no more."""

    lora_name: str | None = Field(None, description="its name")
    lora_int_id: int | None = Field(None, description="accepted: the name alone counts")


@router.post("/v1/load_lora_adapter")
@documents_route(body=LoadAdapter, answer=str)
async def load_adapter(http: HttpRequest) -> Response:
    """Reads and checks an adapter; then all API processes serve it. Running requests keep the files that they have."""
    service = _enabled(http)
    body = await read_body(http, LoadAdapter)
    service.check_ready()
    if not body.lora_name or not body.lora_path:
        raise ApiError(400, "Both 'lora_name' and 'lora_path' must be provided.", code="invalid_value")
    try:
        check_adapter_name(body.lora_name)
    except ValueError as error:
        raise ApiError(400, f"lora_name {error}", param="lora_name", code="invalid_value") from None
    if service.models.is_base(body.lora_name):
        raise ApiError(
            400, f"The lora adapter name '{body.lora_name}' is the model's own; give the adapter another name.",
            param="lora_name", code="invalid_value",
        )  # fmt: skip
    try:
        await service.backend.lora.load(LoadLoRA(body.lora_name, body.lora_path, None, bool(body.load_inplace)))
    except EngineRefusal as error:
        raise _refusal(error, "lora_path") from None
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter")
@documents_route(body=UnloadAdapter, answer=str)
async def unload_adapter(http: HttpRequest) -> Response:
    """Serves an adapter no more; running requests that have it go on."""
    service = _enabled(http)
    body = await read_body(http, UnloadAdapter)
    service.check_ready()
    if not body.lora_name:
        raise ApiError(400, "'lora_name' needs to be provided to unload a LoRA adapter.", code="invalid_value")
    try:
        await service.backend.lora.unload(body.lora_name)
    except EngineRefusal as error:
        raise _refusal(error, "lora_name") from None
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _enabled(http: HttpRequest) -> AppState:
    """Raises ApiError 404 where the operator has not allowed it."""
    service = app_state_of(http)
    if not service.settings.allow_runtime_lora:
        raise ApiError(
            404, "adapters are not loaded over HTTP here: who may do so chooses which files the server reads; start it "
            "with --enable-lora --allow-runtime-lora (or QUINTET_ALLOW_RUNTIME_LORA_UPDATING=1), or name adapters with "
            "--lora-modules", code="not_enabled",
        )  # fmt: skip
    return service


def _refusal(error: EngineRefusal, field: str) -> ApiError:
    """`field`: that names what is not there."""
    if error.kind == ADAPTER_UNKNOWN:
        return ApiError(404, str(error), param=field, code="adapter_not_found")
    if error.kind == ADAPTER_TAKEN:
        return ApiError(400, str(error), param="lora_name", code="adapter_exists")
    return ApiError(400, str(error), code="invalid_adapter")
