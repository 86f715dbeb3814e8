"""POST /api/embed and /api/embeddings: embeddings of texts."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet.pooling_params import PoolingParams
from quintet.server.http.app_state import AppState
from quintet.server.http.inputs.body import parse_body
from quintet.server.http.ollama.answer import read_request
from quintet.server.http.ollama.protocol import (
    EmbedBody,
    Embedded,
    EmbeddingsBody,
    OllamaError,
    OneEmbedding,
)
from quintet.server.http.openapi import documents_route
from quintet.server.http.pooling.encoding_format import NumberFormat, Numbers
from quintet.server.http.pooling.inputs import as_list, read_inputs, resolve_params
from quintet.server.http.pooling.protocol_requests import EmbeddingRequest
from quintet.server.http.pooling.routes import encode_all
from quintet.server.http.pooling.run import PoolingWork, respond
from quintet.server.http.respond import json_response
from quintet.server.http.usage import RequestUsage

router = APIRouter()

_WHOLE_CONTEXT = -1  # of truncate_prompt_tokens: as much as the model takes


@router.post("/api/embed")
@documents_route(body=EmbedBody, answer=Embedded, errors=OllamaError)
async def embed(http: HttpRequest) -> Response:
    """Returns embeddings of length 1; of no text, none."""
    watch, service, body = await read_request(http, EmbedBody)
    keep = None if body.truncate is False else _WHOLE_CONTEXT
    params = PoolingParams(dimensions=body.dimensions, normalize=True, truncate_prompt_tokens=keep)
    params = resolve_params(service, params, "embed", "/api/embed")
    if body.input in (None, "", []):
        return json_response(Embedded(
            model=body.model, embeddings=[], total_duration=watch.total, load_duration=watch.load, prompt_eval_count=0
        ))  # fmt: skip

    async def answer(found: list[Numbers], tally: RequestUsage) -> Embedded:
        written: list[Any] = await encode_all(service, found, NumberFormat())
        return Embedded(
            model=body.model, embeddings=written, total_duration=watch.total, load_duration=watch.load,
            prompt_eval_count=tally.prompt_tokens,
        )  # fmt: skip

    return await respond(service, http, await _work(service, as_list(body.input), params), answer)


@router.post("/api/embeddings")
@documents_route(body=EmbeddingsBody, answer=OneEmbedding, errors=OllamaError)
async def embed_prompt(http: HttpRequest) -> Response:
    """Returns the embedding of one text, normalized as the model's files say."""
    watch, service, body = await read_request(http, EmbeddingsBody)
    params = resolve_params(service, PoolingParams(truncate_prompt_tokens=_WHOLE_CONTEXT), "embed", "/api/embeddings")
    if not body.prompt:
        return json_response(OneEmbedding([]))

    async def answer(found: list[Numbers], tally: RequestUsage) -> OneEmbedding:
        [written] = await encode_all(service, found, NumberFormat())
        return OneEmbedding(written)

    return await respond(service, http, await _work(service, [body.prompt], params), answer)


async def _work(service: AppState, texts: list[Any], params: PoolingParams) -> PoolingWork:
    return PoolingWork(await read_inputs(service, parse_body({"input": texts}, EmbeddingRequest), params), params)
