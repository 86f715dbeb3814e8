"""GET /api/tags, /api/ps, /api/version and POST /api/show, /api/pull: which models there are.

All of them read served_models(), the one place that knows the models.
"""

import hashlib
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet.engine.processes.model_info import ModelInfo
from quintet.media.kinds import IMAGE
from quintet.server.http.app_state import AppState
from quintet.server.http.errors import ApiError
from quintet.server.http.inputs.body import read_body
from quintet.server.http.inputs.infill import find_infill_tokens
from quintet.server.http.ollama.protocol import (
    Details,
    ModelEntries,
    ModelEntry,
    NameBody,
    OllamaError,
    Shown,
    Status,
    Version,
)
from quintet.server.http.openapi import documents_route
from quintet.server.http.respond import app_state_of, json_response
from quintet.server.http.sse import encode

API_VERSION = "0.12.11"  # of Ollama: the first with logprobs; clients compare it with the least that they need
_LATEST = ":latest"
FOREVER = "9999-12-31T23:59:59Z"  # the model stays loaded
_NDJSON = "application/x-ndjson"
_REFUSED = "is not served here: models are chosen when the server starts (quintet serve MODEL), not over HTTP"

router = APIRouter()
root = APIRouter(include_in_schema=False)  # of a server without the page


@dataclass(frozen=True)
class ServedModel:
    """A model that requests may name."""

    name: str  # of requests
    info: ModelInfo
    capabilities: list[str]  # Ollama's words
    is_loaded: bool
    template: str = ""

    @property
    def listed_name(self) -> str:
        return listed_name(self.name)

    def entry(self) -> ModelEntry:
        """Returns the fields that /api/tags and /api/ps share. The digest is an identity, not a hash of the file."""
        facts = (self.info.model, self.info.vocab_size, self.info.weight_bytes)
        digest = hashlib.sha256(repr(facts).encode()).hexdigest()
        name = self.listed_name
        return ModelEntry(name=name, model=name, size=self.info.weight_bytes, digest=digest, details=self.details())

    def details(self) -> Details:
        form = "gguf" if ".gguf" in self.info.model.lower() else "safetensors"
        return Details(format=form, family=self.info.family, families=[self.info.family])

    @property
    def modified_at(self) -> str:
        """Time of the server's start, in RFC 3339."""
        return datetime.fromtimestamp(self.info.created, timezone.utc).isoformat().replace("+00:00", "Z")


def listed_name(name: str) -> str:
    """Returns the name with a tag: Ollama's clients expect one."""
    return name if ":" in name.rpartition("/")[2] else name + _LATEST


def served_models(service: AppState) -> list[ServedModel]:
    """Returns all models that requests may name; the one model under each of its names, and its adapters."""
    info, template = service.backend.model_info, _template(service)
    loaded, words = service.unavailable_reason() is None, _capabilities(service)
    return [ServedModel(name, info, words, loaded, template) for name in service.models.names]


async def find_model(service: AppState, name: str) -> ServedModel:
    """Returns the model of a name, with or without `:latest`. Raises ApiError 404 for a model that is not served."""
    name = known_name(service, name)
    await service.models.find(name)
    return next(model for model in served_models(service) if model.name == name)


def known_name(service: AppState, name: str) -> str:
    """Returns the name without `:latest`, unless a model is served with it."""
    return name if name in service.models.names else name.removesuffix(_LATEST)


def _template(service: AppState) -> str:
    tokenizer = service.backend.tokenizer
    return service.chat_template or ("" if tokenizer is None else tokenizer.templates)


def _capabilities(service: AppState) -> list[str]:
    """Source: Ollama's types/model/capability.go."""
    pooling, tokenizer = service.backend.model_info.pooling, service.backend.tokenizer
    if pooling is not None:
        return ["embedding"] if "embed" in pooling.tasks else []
    words = {
        "tools": service.parsers.tool is not None,
        "insert": tokenizer is not None and find_infill_tokens(tokenizer) is not None,
        "vision": IMAGE in service.backend.model_info.media.kinds,
        "thinking": service.parsers.reasoning is not None,
    }
    return ["completion", *(word for word, has in words.items() if has)]


@root.get("/")
async def running() -> Response:
    """Answers 200: Ollama's clients ask it first."""
    return Response("quintet is running", media_type="text/plain")


@router.get("/api/version")
@documents_route(answer=Version, errors=OllamaError)
async def version() -> Response:
    """Returns the version of Ollama's API that these routes follow; GET /version has that of quintet."""
    return json_response(Version(API_VERSION))


@router.get("/api/tags")
@documents_route(answer=ModelEntries, errors=OllamaError)
async def list_models(http: HttpRequest) -> Response:
    """Lists the models."""
    entries = []
    for model in served_models(app_state_of(http)):
        entry = model.entry()
        entry.modified_at, entry.capabilities = model.modified_at, model.capabilities
        entries.append(entry)
    return json_response(ModelEntries(entries))


@router.get("/api/ps")
@documents_route(answer=ModelEntries, errors=OllamaError)
async def list_loaded(http: HttpRequest) -> Response:
    """Lists the models that are loaded."""
    entries = []
    for model in served_models(app_state_of(http)):
        if model.is_loaded:
            entry = model.entry()
            entry.expires_at, entry.context_length = FOREVER, model.info.max_model_len
            entries.append(entry)
    return json_response(ModelEntries(entries))


@router.post("/api/show")
@documents_route(body=NameBody, answer=Shown, errors=OllamaError)
async def show(http: HttpRequest) -> Response:
    """Shows a model's context length, capabilities, default parameters and chat template (Jinja)."""
    body = await read_body(http, NameBody, any_type=True)
    model = await find_model(app_state_of(http), _name_of(body))
    info = model.info
    facts: dict[str, Any] = {
        "general.architecture": info.family,
        "general.basename": model.name,
        f"{info.family}.context_length": info.max_model_len,
        f"{info.family}.vocab_size": info.vocab_size,
    }
    if info.pooling is not None:
        facts[f"{info.family}.embedding_length"] = info.pooling.width
    return json_response(
        Shown(
            modelfile=f"# the model is chosen when the server starts: quintet serve {model.name}\n",
            parameters="\n".join(f"{name:<30} {value}" for name, value in sorted(info.defaults.items())),
            template=model.template,
            details=model.details(),
            model_info=facts,
            capabilities=model.capabilities,
            modified_at=model.modified_at,
        )
    )


@router.post("/api/pull")
@documents_route(body=NameBody, answer=Status, lines=Status, errors=OllamaError)
async def pull(http: HttpRequest) -> Response:
    """Succeeds for a model that is there; downloads nothing."""
    body, service = await read_body(http, NameBody, any_type=True), app_state_of(http)
    try:
        await find_model(service, _name_of(body))
    except ApiError as error:
        message = f"{error.message}, and downloads no other; start it with `quintet serve MODEL`"
        raise ApiError(error.status, message, param="model", code=error.code) from None
    if body.stream is False:
        return json_response(Status("success"))
    lines = [Status("pulling manifest"), Status("success")]
    return Response(b"".join(encode(line) + b"\n" for line in lines), media_type=_NDJSON)


def _name_of(body: NameBody) -> str:
    name = body.model or body.name
    if not name:
        raise ApiError(400, "model is missing; give the name of a model", param="model", code="missing_field")
    return name


@router.get("/api/blobs/{digest}")
@documents_route(errors=OllamaError)
async def find_blob(digest: str) -> Response:
    """Answers 404: no files are kept for Modelfiles."""
    raise ApiError(404, f"there is no blob {digest[:200]!r}: blobs are not kept here", code="not_found")


@router.post("/api/blobs/{digest}")
@documents_route(errors=OllamaError)
async def refuse_blob(http: HttpRequest, digest: str) -> Response:
    """Answers 403, as refuse()."""
    return await refuse(http)


@router.post("/api/create")
@router.post("/api/copy")
@router.post("/api/push")
@router.delete("/api/delete")
@documents_route(errors=OllamaError)
async def refuse(http: HttpRequest) -> Response:
    """Answers 403: the server's models do not change over HTTP."""
    raise ApiError(403, f"{http.url.path[:200]} {_REFUSED}", code="unsupported")
