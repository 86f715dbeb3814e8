"""POST /v1/embeddings, /classify and /pooling: embeddings, class probabilities, or any pooling task of the model."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet.pooling_params import PoolingParams
from quintet.server.http.app_state import AppState
from quintet.server.http.inputs.body import read_body
from quintet.server.http.inputs.sampling_params import invalid_field
from quintet.server.http.openapi import documents_route
from quintet.server.http.pooling import io_processor as plugins
from quintet.server.http.pooling.encoding_format import (
    DTYPES,
    ENDIANNESS,
    FORMATS,
    NumberFormat,
    Numbers,
    list_json,
    native_order,
)
from quintet.server.http.pooling.inputs import read_inputs, resolve_params
from quintet.server.http.pooling.protocol_requests import (
    ClassificationRequest,
    EmbeddingRequest,
    EncodedBody,
    InputBody,
    PoolingBody,
    PoolingRequest,
)
from quintet.server.http.pooling.protocol_responses import (
    Classes,
    Classification,
    Embedding,
    Embeddings,
    Pooled,
    PooledList,
)
from quintet.server.http.pooling.run import Binary, PoolingWork, respond, usage
from quintet.server.http.respond import AnswerHead, app_state_of
from quintet.server.http.usage import RequestUsage, set_request_name, usage_of

router = APIRouter()

AnyBody = TypeVar("AnyBody", bound=PoolingBody)

_MAX_METADATA_TEXTS = 200  # most texts for the metadata header, which has a byte range for each


@router.post("/v1/embeddings")
@documents_route(body=EmbeddingRequest, answer=Embeddings)
async def create_embedding(http: HttpRequest) -> Response:
    """Returns an embedding of each text."""
    service, body = await check_request(http, EmbeddingRequest)
    params = resolve_params(service, _embedding_params(body), "embed", "/v1/embeddings")

    def response(written: list[Any], head: dict[str, Any]) -> Embeddings:
        return Embeddings(data=[Embedding(index=at, embedding=each) for at, each in enumerate(written)], **head)

    return await _respond_encoded(service, http, body, params, "embd", response)


@router.post("/pooling")
@documents_route(body=PoolingRequest, answer=PooledList)
async def create_pooling(http: HttpRequest) -> Response:
    """Returns the pooled output of each text, for any task of the model; or an IO processor's output for data."""
    service, body = await check_request(http, PoolingRequest)
    if body.data is not None or body.task == "plugin":
        return await plugins.respond(service, http, body)
    params = resolve_params(service, _pooling_params(body), None, "/pooling")

    def response(written: list[Any], head: dict[str, Any]) -> PooledList:
        return PooledList(data=[Pooled(index=at, data=each) for at, each in enumerate(written)], **head)

    return await _respond_encoded(service, http, body, params, "pool", response)


@router.post("/classify")
@documents_route(body=ClassificationRequest, answer=Classification)
async def classify(http: HttpRequest) -> Response:
    """Returns the class probabilities of each text."""
    service, body = await check_request(http, ClassificationRequest)
    given = PoolingParams(use_activation=body.use_activation, truncate_prompt_tokens=body.truncate_prompt_tokens)
    params = resolve_params(service, given, "classify", "/classify")
    work = await _read_work(service, body, params)
    head = head_of(service, http, "classify", body.model)

    async def answer(found: list[Numbers], tally: RequestUsage) -> Any:
        labels = service.backend.model_info.labels
        data = [_classes(at, each, labels) for at, each in enumerate(found)]
        return Classification(data=data, usage=usage(tally), **head)

    return await respond(service, http, work, answer)


def _classes(index: int, x: Numbers, labels: list[str]) -> Classes:
    likeliest = int(x.argmax())
    label = labels[likeliest] if likeliest < len(labels) else None
    return Classes(index=index, label=label, probs=list_json(x), num_classes=len(x))


async def check_request(http: HttpRequest, kind: type[AnyBody]) -> tuple[AppState, AnyBody]:
    """Reads a body, sets the request id, and checks the model's name and that the server is ready."""
    service = app_state_of(http)
    body = await read_body(http, kind)
    set_request_name(http, body.request_id)
    await service.choose_model(http, body.model)
    service.check_ready()
    return service, body


async def _read_work(service: AppState, body: InputBody, params: PoolingParams) -> PoolingWork:
    return PoolingWork(await read_inputs(service, body, params), params, body.priority or 0)


async def _respond_encoded(
    service: AppState,
    http: HttpRequest,
    body: EncodedBody,
    params: PoolingParams,
    kind: str,
    response: Callable[[list[Any], dict[str, Any]], Any],
) -> Response:
    """Runs the texts; `response` is made of their encoded outputs and of id, created, model and usage. In an encoding
    of bytes, the outputs follow each other instead."""
    form = _number_format(body)
    work = await _read_work(service, body, params)
    _check_metadata_size(form, len(work.prompts))
    head = head_of(service, http, kind, body.model)

    async def answer(found: list[Numbers], tally: RequestUsage) -> Any:
        full = {**head, "usage": usage(tally)}
        if form.encoding.startswith("bytes"):
            return _binary_response(found, form, full)
        return response(await encode_all(service, found, form), full)

    return await respond(service, http, work, answer)


def head_of(service: AppState, http: HttpRequest, kind: str, model: str | None) -> dict[str, Any]:
    """Returns id, created and model of a response."""
    head = AnswerHead.for_answer(service, f"{kind}-{usage_of(http).request_id}", model)
    return {"id": head.id, "created": head.created, "model": head.model}


def _embedding_params(body: EncodedBody) -> PoolingParams:
    return PoolingParams(
        dimensions=body.dimensions,
        normalize=body.normalize,
        use_activation=body.use_activation,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
    )


def _pooling_params(body: PoolingRequest) -> PoolingParams:
    params = _embedding_params(body)
    params.task, params.late_chunking_params = body.task, body.late_chunking_params
    if params.use_activation is None:
        params.use_activation = body.softmax
    return params


def _number_format(body: EncodedBody) -> NumberFormat:
    """Reads the encoding. Raises ApiError 400 for an unknown name."""
    given = {"encoding_format": FORMATS, "embed_dtype": DTYPES, "endianness": ENDIANNESS}
    for name, known in given.items():
        value = getattr(body, name)
        if value is not None and value not in known:
            raise invalid_field(name, f"must be one of {', '.join(known)}, not {value[:40]!r}")
    return NumberFormat(body.encoding_format or "float", body.embed_dtype or "float32", body.endianness or "native")


def _check_metadata_size(form: NumberFormat, count: int) -> None:
    """Limits the texts in the metadata header: clients and proxies limit header sizes."""
    if form.encoding == "bytes" and count > _MAX_METADATA_TEXTS:
        raise invalid_field(
            "encoding_format",
            f"bytes tells in a header where each text's numbers are, of {_MAX_METADATA_TEXTS} texts at most, "
            f"not of {count}; use bytes_only or base64",
        )


async def encode_all(service: AppState, found: list[Numbers], form: NumberFormat) -> list[Any]:
    """Encodes one array at a time and yields to other requests between them: lists of numbers are slow."""

    def write(x: Numbers) -> Any:
        return lambda: form.json(x)

    return await service.cooperative.run_all(map(write, found))


def _binary_response(found: list[Numbers], form: NumberFormat, head: dict[str, Any]) -> Binary:
    """Concatenates all numbers; the header `metadata` has each text's byte range, unless encoding is bytes_only.
    Source: vLLM's pooling API."""
    parts = [form.raw(each) for each in found]
    headers = {}
    if form.encoding == "bytes":
        data, start = [], 0
        order = native_order() if form.endianness == "native" else form.endianness
        for at, (part, each) in enumerate(zip(parts, found, strict=True)):
            data.append({"index": at, "embed_dtype": form.dtype, "endianness": order, "start": start,
                         "end": start + len(part), "shape": list(each.shape)})  # fmt: skip
            start += len(part)
        tokens = head.pop("usage")
        usage = {"prompt_tokens": tokens.prompt_tokens, "total_tokens": tokens.total_tokens}
        headers["metadata"] = json.dumps({**head, "data": data, "usage": usage}, ensure_ascii=True)
    return Binary(b"".join(parts), headers)
