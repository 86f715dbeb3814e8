"""vLLM's routes for trainers, with --enable-rl-routes: pauses, and weights that change while the server runs."""

import asyncio
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from fastapi import APIRouter, Query
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet.engine.weight_transfer import orders
from quintet.server.backend import EngineRefusal
from quintet.server.http.admin.protocol import Sign
from quintet.server.http.errors import ApiError
from quintet.server.http.inputs.body import Body, read_body, read_bytes
from quintet.server.http.openapi import documents_route
from quintet.server.http.respond import app_state_of, json_response

router = APIRouter()

POLL_SECONDS = 0.02  # between two looks at whether requests have finished
B = TypeVar("B", bound=Body)
Mode = Annotated[
    Literal["abort", "wait", "keep"],
    Query(description="of running requests. abort: they end; wait: they finish first; keep: they go on at /resume"),
]
ClearCache = Annotated[bool, Query(description="forget cached prefixes, unless mode is keep")]
IncludeDP = Annotated[bool, Query(description="count the ranks of all engines, not of one")]


class InitTransfer(Body):
    """The way by which tensors will come."""

    init_info: dict[str, Any] = Field(description="TCP: address; a process group: master_address, master_port, "
                                      "rank_offset, world_size and backend")  # fmt: skip


class UpdateWeights(Body):
    """Tensors that come now."""

    update_info: dict[str, Any] = Field(description="process group: names, dtype_names and shapes; TCP: {}; shared "
                                        "memory: segment and tensors; files: folder")  # fmt: skip


class FinishUpdate(Body):
    """End of an update."""

    weight_version: str | None = Field(None, description="name of the weights in answers and metrics")
    partial: bool | None = Field(None, description="tensors that did not come stay as they are")
    keep_kv: bool | None = Field(None, description="running requests keep what other weights computed for them")


class NewVersion(Body):
    """A name for the weights that are served."""

    new_version: str


class Message(msgspec.Struct):
    """An order that was carried out."""

    message: str


class WeightInfo(msgspec.Struct):
    """Name of the weights that are served; "" while engines have different ones."""

    weight_version: str


class WorldSize(msgspec.Struct):
    """Number of ranks that take weights."""

    world_size: int


class IsPaused(msgspec.Struct):
    """True if no step may start."""

    is_paused: bool


class VersionSet(msgspec.Struct):
    """The new name."""

    success: bool
    new_version: str


@router.post("/pause")
@documents_route(answer=Sign, conflict=True)
async def pause(http: HttpRequest, mode: Mode = "abort", clear_cache: ClearCache = True) -> Response:
    """Starts no more steps until /resume; requests that come wait."""
    while not await run_order(http, orders.PauseCommand(mode, clear_cache)):
        await asyncio.sleep(POLL_SECONDS)
    return json_response(Sign("paused"))


@router.post("/resume")
@documents_route(answer=Sign, conflict=True)
async def resume(http: HttpRequest) -> Response:
    """Ends a pause."""
    await run_order(http, orders.ResumeCommand())
    return json_response(Sign("resumed"))


@router.get("/is_paused")
@documents_route(answer=IsPaused)
async def is_paused(http: HttpRequest) -> Response:
    """Returns whether the engine is paused, or an update of its weights is open or has failed."""
    stats = app_state_of(http).backend.stats()
    return json_response(IsPaused(stats is not None and bool(stats.weights.paused)))


@router.get("/get_world_size")
@documents_route(answer=WorldSize)
async def get_world_size(http: HttpRequest, include_dp: IncludeDP = True) -> Response:
    """Returns the number of ranks that a trainer's process group has beside its own."""
    backend = app_state_of(http).backend
    engines = len(backend.engines()) if include_dp else 1
    return json_response(WorldSize(backend.model_info.num_ranks * max(engines, 1)))


@router.post("/init_weight_transfer_engine")
@documents_route(body=InitTransfer, answer=Message, conflict=True)
async def init_weight_transfer_engine(http: HttpRequest) -> Response:
    """Opens the way by which tensors come. Returns once the trainer has answered."""
    body = await read_body(http, InitTransfer)
    await run_order(http, orders.InitTransferCommand(body.init_info))
    return json_response(Message("Weight transfer initialized"))


@router.post("/shutdown_weight_transfer_engine")
@documents_route(answer=Message, conflict=True)
async def shutdown_weight_transfer_engine(http: HttpRequest) -> Response:
    """Closes the way by which tensors come; without one it does nothing."""
    await run_order(http, orders.CloseTransferCommand())
    return json_response(Message("Weight transfer shut down"))


@router.post("/start_weight_update")
@documents_route(answer=Message, conflict=True)
async def start_weight_update(http: HttpRequest) -> Response:
    """Begins an update: no step runs until it is finished."""
    await run_order(http, orders.StartUpdateCommand())
    return json_response(Message("Weight update started"))


@router.post("/start_draft_weight_update")
@documents_route(answer=Message, conflict=True)
async def start_draft_weight_update(http: HttpRequest) -> Response:
    """Begins an update of the draft model's weights, by the names of its own checkpoint."""
    await run_order(http, orders.StartUpdateCommand(draft=True))
    return json_response(Message("Draft weight update started"))


@router.post("/update_weights")
@documents_route(body=UpdateWeights, answer=Message, conflict=True)
async def update_weights(http: HttpRequest) -> Response:
    """Takes tensors by their names in the checkpoint's files. May be called again until the update is finished."""
    body = await read_body(http, UpdateWeights)
    await run_order(http, orders.ReceiveWeightsCommand(body.update_info))
    return json_response(Message("Weights updated"))


@router.post("/finish_weight_update")
@documents_route(body=FinishUpdate, answer=Message, conflict=True)
async def finish_weight_update(http: HttpRequest) -> Response:
    """Ends an update, on all engines or on none. The body may be left out."""
    body = await _optional_body(http, FinishUpdate)
    version = _version(body.weight_version)
    await run_order(http, orders.CheckUpdateCommand(bool(body.partial)))
    await run_order(http, orders.FinishUpdateCommand(version, bool(body.keep_kv)))
    return json_response(Message("Weight update finished"))


@router.post("/update_weight_version")
@documents_route(body=NewVersion, answer=VersionSet, conflict=True)
async def update_weight_version(http: HttpRequest) -> Response:
    """Names the weights that are served."""
    body = await read_body(http, NewVersion)
    await run_order(http, orders.SetVersionCommand(_version(body.new_version) or ""))
    return json_response(VersionSet(True, body.new_version))


@router.get("/weight_info")
@documents_route(answer=WeightInfo)
async def weight_info(http: HttpRequest) -> Response:
    """Returns the name of the weights that are served."""
    stats = app_state_of(http).backend.stats()
    return json_response(WeightInfo("" if stats is None else stats.weights.weight_version))


async def run_order(http: HttpRequest, order: orders.WeightOrder) -> Any:
    """Has all engines carry out an order. ApiError 409 says why one did not."""
    try:
        return await app_state_of(http).backend.weights.run(order)
    except EngineRefusal as error:
        raise ApiError(409, str(error), code="weights_refused") from None


async def _optional_body(http: HttpRequest, model: type[B]) -> B:
    return await read_body(http, model, any_type=True) if await read_bytes(http) else model()


def _version(version: str | None) -> str | None:
    try:
        return orders.check_version(version)
    except ValueError as error:
        raise ApiError(400, str(error), param="weight_version", code="invalid_value") from None
