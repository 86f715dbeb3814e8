"""GET /v1/models: what is served, under which names."""

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet.server.http.admin.protocol import Architecture, ModelCard, ModelList
from quintet.server.http.anthropic.models import model_info, model_page
from quintet.server.http.anthropic.routes import AnthropicRoute
from quintet.server.http.app_state import AppState
from quintet.server.http.middleware.base import wants_anthropic
from quintet.server.http.openapi import documents_route
from quintet.server.http.respond import app_state_of, json_response

router = APIRouter(route_class=AnthropicRoute)


@router.get("/v1/models")
@documents_route(answer=ModelList)
async def list_models(http: HttpRequest) -> Response:
    """All names of the model, and its adapters; in Anthropic's shape with the header `anthropic-version`."""
    service = app_state_of(http)
    if wants_anthropic(http.scope):
        return json_response(model_page(service, http.query_params))
    return json_response(ModelList(data=[model_card(service, name) for name in service.models.names]))


@router.get("/v1/models/{model:path}")
@documents_route(answer=ModelCard)
async def retrieve_model(http: HttpRequest, model: str) -> Response:
    """One of them."""
    service = app_state_of(http)
    if model.endswith("/") and model not in (*service.models.names, service.backend.model_info.model):
        model = model[:-1]
    await service.models.find(model)
    if wants_anthropic(http.scope):
        return json_response(model_info(service, model))
    return json_response(model_card(service, model))


def model_card(service: AppState, name: str) -> ModelCard:
    """Returns the facts of a name; an adapter has its base model as parent, as in vLLM."""
    served, adapter = service.backend.model_info, service.backend.lora.served.get(name)
    kinds = served.media.kinds
    takes = Architecture(["text", *kinds], ["text"]) if kinds else msgspec.UNSET
    if adapter is not None and not service.models.is_base(name):
        return ModelCard(
            id=name, created=adapter.created, root=adapter.path, max_model_len=served.max_model_len,
            parent=adapter.base_model_name or service.model_names[0], architecture=takes,
        )  # fmt: skip
    return ModelCard(
        id=name, created=served.created, root=served.model, max_model_len=served.max_model_len, architecture=takes
    )
