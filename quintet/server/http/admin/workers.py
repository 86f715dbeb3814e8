"""vLLM's routes for trainers, with --enable-rl-routes: ends of requests, checksums of weights, calls of workers."""

from typing import Any, Literal

import msgspec
from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet.engine.weight_transfer import orders
from quintet.server.backend import EngineRefusal
from quintet.server.http.admin.training import run_order
from quintet.server.http.errors import ApiError
from quintet.server.http.inputs.body import Body, read_body
from quintet.server.http.openapi import documents_route
from quintet.server.http.respond import app_state_of, json_response

router = APIRouter()

CHECKSUMS = "weight_checksums"  # method of workers
RELOAD = "reload_weights"  # method of the engine
MAX_REPORTS = 1024  # of checksums in one request
_PREFIXES = ("cmpl-", "chatcmpl-", "resp_", "msg_")  # what answers put before a request's name

Checksums = dict[str, str]


class AbortRequests(Body):
    """Requests that end."""

    request_ids: list[str] | None = Field(
        None, description="names of requests (request_id, or X-Request-Id), or ids of their answers; all if left out"
    )


class CheckWeights(Body):
    """Checksums that are asked for, or compared."""

    action: Literal["checksum", "compare", "reset"] = Field(description="reset is refused")
    baseline: Checksums | None = Field(None, description="with compare: the checksums of an earlier answer")
    checksums: list[Checksums] | None = Field(None, description="with compare: those of other servers")


class CallWorkers(Body):
    """A call of a method of each worker."""

    method: str = Field(description="of the class that --worker-extension-cls names, or one that every worker has")
    args: list[Any] | None = Field(None, description="plain data")
    kwargs: dict[str, Any] | None = Field(None, description="plain data")
    timeout: float | None = Field(None, description="accepted, not used: what a worker does is not interrupted")


class ServerInfo(msgspec.Struct):
    """Settings of the engines, by vLLM's parts of a configuration."""

    vllm_config: dict[str, dict[str, Any] | None]


class Aborted(msgspec.Struct):
    """Number of completions that were running, and have ended."""

    status: str
    aborted: int


class WeightReport(msgspec.Struct, kw_only=True):
    """Checksums, or the outcome of a comparison."""

    checksums: Checksums | UnsetType = UNSET  # SHA-256 of each weight as it is placed, by engine, rank and layer
    match: bool | UnsetType = UNSET
    mismatches: list[str] | UnsetType = UNSET  # keys that differ, or are absent in a report that covers their rank
    ranks: list[str] | UnsetType = UNSET  # that reports cover


class Results(msgspec.Struct):
    """Result of each rank; what is neither an object nor a list is text."""

    results: list[Any]


@router.get("/server_info")
@documents_route(answer=ServerInfo)
async def server_info(http: HttpRequest) -> Response:
    """Returns the settings that trainers ask for, where vLLM has them: dtype is "torch.bfloat16" and similar text."""
    backend = app_state_of(http).backend
    served = backend.model_info
    model = {"model": served.model, "dtype": f"torch.{served.dtype}", "max_model_len": served.max_model_len}
    lora = {"max_lora_rank": served.max_lora_rank, "max_loras": served.max_loras, "max_cpu_loras": served.max_loras}
    parallel = {"world_size": served.num_ranks, "data_parallel_size": max(len(backend.engines()), 1)}
    return json_response(ServerInfo({
        "model_config": model, "parallel_config": parallel, "lora_config": lora if served.max_loras else None,
    }))  # fmt: skip


@router.post("/abort_requests")
@documents_route(body=AbortRequests, answer=Aborted, conflict=True)
async def abort_requests(http: HttpRequest) -> Response:
    """Ends requests, which are answered with the tokens that they have and finish_reason abort. The engine goes on.

    Requests are known by name to the API process that has them; without names all end, those of other processes too.
    """
    body = await read_body(http, AbortRequests)
    names = set(body.request_ids or ())
    ids = None
    if names:
        calls = app_state_of(http).calls
        ids = [each for call in calls if _named(call.name, names) for each in call.engine_ids()]
    aborted = 0 if ids == [] else await run_order(http, orders.EndRequestsCommand(ids))
    return json_response(Aborted("aborted", aborted))


@router.post("/weight_checker")
@documents_route(body=CheckWeights, answer=WeightReport, conflict=True)
async def weight_checker(http: HttpRequest) -> Response:
    """Returns checksums of the weights that are served, or compares them with earlier ones."""
    body = await read_body(http, CheckWeights)
    if body.action == "reset":
        raise _invalid("action", "reset is not there: weights change by updates alone; send one with other tensors")
    if (body.action == "compare") != (body.baseline is not None):
        raise _invalid("baseline", "belongs to action compare, which needs it; give both, or neither")
    reports = body.checksums or []
    if len(reports) > MAX_REPORTS or (reports and body.action != "compare"):
        raise _invalid(
            "checksums", f"are up to {MAX_REPORTS} reports, with action compare; leave them out, or send fewer"
        )
    by_rank = await run_order(http, orders.CallWorkersCommand(CHECKSUMS, [], {}))
    per_engine = max(app_state_of(http).backend.model_info.num_ranks, 1)
    found = {
        f"dp{number // per_engine}:rank{number % per_engine}:{name}": digest
        for number, of_rank in enumerate(by_rank)
        for name, digest in of_rank.items()
    }
    if body.baseline is None:
        return json_response(WeightReport(checksums=found))
    return json_response(_compared([body.baseline, found, *reports]))


@router.post("/collective_rpc")
@documents_route(body=CallWorkers, answer=Results, conflict=True)
async def collective_rpc(http: HttpRequest) -> Response:
    """Calls a method of each worker by name. reload_weights reads the folder's weights again."""
    body = await read_body(http, CallWorkers)
    if body.method == RELOAD:
        if body.args or body.kwargs:
            raise _invalid("args", "reload_weights takes none here: send /update_weights a folder for other weights")
        return json_response(Results([None] * await _reload(http)))
    order = orders.CallWorkersCommand(body.method, body.args or [], body.kwargs or {})
    return json_response(Results([_plain(each) for each in await run_order(http, order)]))


async def _reload(http: HttpRequest) -> int:
    """Returns the number of ranks that have reloaded."""
    backend = app_state_of(http).backend
    try:
        await backend.weights.reload()
    except EngineRefusal as error:
        raise ApiError(409, str(error), code="weights_refused") from None
    return backend.model_info.num_ranks * max(len(backend.engines()), 1)


def _named(name: str, wanted: set[str]) -> bool:
    return bool(name) and (name in wanted or any(prefix + name in wanted for prefix in _PREFIXES))


def _compared(reports: list[Checksums]) -> WeightReport:
    """Compares reports: every key has one digest, in all reports that cover its rank."""
    ranks = [{key.rpartition(":")[0] for key in report} for report in reports]
    wrong = set[str]()
    for key in set().union(*reports):
        covered = [report for report, has in zip(reports, ranks, strict=True) if key.rpartition(":")[0] in has]
        if len({report.get(key) for report in covered}) > 1:
            wrong.add(key)
    return WeightReport(match=not wrong, mismatches=sorted(wrong), ranks=sorted(set().union(*ranks)))


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, dict | list) else str(value)


def _invalid(field: str, why: str) -> ApiError:
    return ApiError(400, f"{field} {why}", param=field, code="invalid_value")
