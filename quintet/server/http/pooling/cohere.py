"""POST /v2/embed: embeddings in Cohere's shape. Source: Cohere's API reference, version 2, "Embed"."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet.pooling_params import PoolingParams
from quintet.server.http.app_state import AppState
from quintet.server.http.inputs.body import read_body
from quintet.server.http.inputs.sampling_params import invalid_field
from quintet.server.http.openapi import documents_route
from quintet.server.http.pooling.encoding_format import COHERE_TYPES, Numbers, cohere_json
from quintet.server.http.pooling.inputs import TextReader, bounds_of, one_of, prompt_named, resolve_params
from quintet.server.http.pooling.protocol_requests import CohereEmbedRequest
from quintet.server.http.pooling.protocol_responses import CohereEmbeddings
from quintet.server.http.pooling.run import PoolingWork, meta, respond
from quintet.server.http.respond import app_state_of
from quintet.server.http.usage import RequestUsage, usage_of

router = APIRouter()

_TRUNCATIONS = ("NONE", "START", "END")
# Cohere's input_type -> names that models use for the same prompt
_NAMES = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}


@router.post("/v2/embed")
@documents_route(body=CohereEmbedRequest, answer=CohereEmbeddings)
async def embed(http: HttpRequest) -> Response:
    """Returns an embedding of each text, in one or more types."""
    service = app_state_of(http)
    body = await read_body(http, CohereEmbedRequest)
    await service.choose_model(http, body.model)
    service.check_ready()
    given = PoolingParams(dimensions=body.output_dimension, truncate_prompt_tokens=_max_tokens(body))
    params = resolve_params(service, given, "embed", "/v2/embed")
    kinds = _kinds(body, params.dimensions or bounds_of(service).width)
    texts, param = _texts(body)
    reader = TextReader(
        service,
        params,
        truncate_left=body.truncate == "START",
        prefix=_prompt_prefix(service, body.input_type),
        param=param,
    )
    most = body.max_tokens if body.truncate == "NONE" else None
    prompts = await reader.read(texts)
    for at, each in enumerate(prompts):
        if most is not None and len(each.token_ids) > most:
            name = reader.name(at, len(prompts))
            raise invalid_field(
                param,
                f"is too long: {name} has {len(each.token_ids)} tokens, and max_tokens is {most}; set "
                "truncate to END or START",
            )

    async def answer(found: list[Numbers], tally: RequestUsage) -> Any:
        embeddings = {}
        for kind in kinds:
            embeddings[kind] = await service.cooperative.run_all([_json_writer(each, kind) for each in found])
        id = f"embd-{usage_of(http).request_id}"
        return CohereEmbeddings(id=id, embeddings=embeddings, texts=texts, meta=meta(tally, "2"))

    return await respond(service, http, PoolingWork(prompts, params, body.priority or 0), answer)


def _json_writer(x: Numbers, kind: str) -> Any:
    return lambda: cohere_json(x, kind)


def _max_tokens(body: CohereEmbedRequest) -> int | None:
    if body.truncate is not None and body.truncate not in _TRUNCATIONS:
        raise invalid_field("truncate", f"must be one of {', '.join(_TRUNCATIONS)}, not {body.truncate[:40]!r}")
    return None if body.truncate == "NONE" else body.max_tokens or -1


def _kinds(body: CohereEmbedRequest, width: int) -> list[str]:
    kinds = list(dict.fromkeys(body.embedding_types or ["float"]))
    for each in kinds:
        if each not in COHERE_TYPES:
            raise invalid_field("embedding_types", f"has {each[:40]!r}; they are {', '.join(COHERE_TYPES)}")
        if each.endswith("binary") and width % 8:
            raise invalid_field("embedding_types", f"{each} packs 8 numbers into a byte, and an embedding has {width}")
    return kinds


def _texts(body: CohereEmbedRequest) -> tuple[list[str], str]:
    """Returns the texts, and the name of their field."""
    one_of(body, "texts", "inputs")
    if body.texts is not None:
        return body.texts, "texts"
    if not isinstance(body.inputs, list):
        raise invalid_field("inputs", 'must be a list of objects such as {"content": [{"type": "text", "text": ...}]}')
    return [_content(each, f"inputs[{at}]") for at, each in enumerate(body.inputs)], "inputs"


def _content(given: Any, name: str) -> str:
    parts = given.get("content") if isinstance(given, dict) else None
    if isinstance(parts, list) and parts and all(isinstance(each, dict) for each in parts):
        texts = [each.get("text") for each in parts if each.get("type") == "text"]
        if len(texts) == len(parts) and all(isinstance(each, str) for each in texts):
            return "".join(texts)
    raise invalid_field("inputs", f"{name} must have content of parts that are text; models here take text alone")


def _prompt_prefix(service: AppState, kind: str | None) -> str:
    """Returns the model's prompt prefix for this input_type; empty if the model has none."""
    bounds = bounds_of(service)
    if kind is None:
        return prompt_named(service, bounds.default_prompt) if bounds.default_prompt else ""
    names = _NAMES.get(kind, (kind,))
    found = next((each for each in names if each in bounds.prompts), None)
    if found is None and kind not in _NAMES:
        known = ", ".join(dict.fromkeys([*_NAMES, *bounds.prompts]))
        raise invalid_field("input_type", f"{kind[:40]!r} is not known; this model takes {known}")
    return "" if found is None else prompt_named(service, found)
