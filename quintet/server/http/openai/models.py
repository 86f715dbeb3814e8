"""GET /v1/models: what is served, under which names."""

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet.server.http.admin.protocol import ModelCard, ModelList
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
    """Every name of the model that is served; in Anthropic's shape with the header `anthropic-version`."""
    service = app_state_of(http)
    if wants_anthropic(http.scope):
        return json_response(model_page(service, http.query_params))
    return json_response(ModelList(data=[_card(service, name) for name in service.model_names]))


@router.get("/v1/models/{model:path}")
@documents_route(answer=ModelCard)
async def retrieve_model(http: HttpRequest, model: str) -> Response:
    """One of them."""
    service = app_state_of(http)
    if model.endswith("/") and model not in (*service.model_names, service.backend.model_info.model):
        model = model[:-1]
    service.check_model(model)
    if wants_anthropic(http.scope):
        return json_response(model_info(service, model))
    return json_response(_card(service, model))


def _card(service: AppState, name: str) -> ModelCard:
    served = service.backend.model_info
    return ModelCard(id=name, created=served.created, root=served.model, max_model_len=served.max_model_len)
