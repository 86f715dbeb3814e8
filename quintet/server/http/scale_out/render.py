"""POST /v1/.../render: a request as token ids and sampling parameters, for /inference/v1/generate; nothing runs."""

import dataclasses
from typing import Any

import msgspec
from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet.chat.prepare import prepare
from quintet.engine.kv_transfer_params import NAME as HANDOFF
from quintet.sampling_params import SamplingParams
from quintet.server.http.anthropic.protocol import MessageError
from quintet.server.http.anthropic.request import CreateMessage
from quintet.server.http.anthropic.request import check_body as check_message
from quintet.server.http.anthropic.routes import prepare_message
from quintet.server.http.app_state import AppState
from quintet.server.http.engine_call import PromptRequest
from quintet.server.http.inputs.body import Body, read_body
from quintet.server.http.inputs.chat_input import chat_model
from quintet.server.http.inputs.sampling_params import invalid_field
from quintet.server.http.middleware.auth import owner_of
from quintet.server.http.openai.chat import chat_input
from quintet.server.http.openai.chat_protocol import ChatRequest
from quintet.server.http.openai.completions import completion_params, completion_requests
from quintet.server.http.openai.completions_protocol import CompletionRequest
from quintet.server.http.openapi import documents_route
from quintet.server.http.respond import app_state_of, json_response
from quintet.server.http.responses.conversation import make_plan
from quintet.server.http.responses.request import CreateResponse
from quintet.server.http.responses.request import check_body as check_response
from quintet.server.http.responses.routes import store_of
from quintet.server.http.scale_out.protocol import RenderedRequest
from quintet.server.http.usage import set_request_name, usage_of

router = APIRouter()

_PLAIN = SamplingParams()
_BY_ROUTE = ("output_kind", "detokenize", "max_tokens", "extra_args", "truncate_prompt_tokens")


@router.post("/v1/chat/completions/render")
@documents_route(body=ChatRequest, answer=RenderedRequest)
async def render_chat(http: HttpRequest) -> Response:
    """Returns a conversation as token ids, by the model's chat template."""
    service = app_state_of(http)
    body = await read_body(http, ChatRequest)
    await _begin(service, http, body)
    prepared = await prepare(chat_input(service, body), chat_model(service))
    return json_response(_rendered(service, http, body, PromptRequest.of(prepared, body.priority), "chatcmpl-"))


@router.post("/v1/completions/render")
@documents_route(body=CompletionRequest, answer=list[RenderedRequest])
async def render_completion(http: HttpRequest) -> Response:
    """Returns each prompt as token ids."""
    service = app_state_of(http)
    body = await read_body(http, CompletionRequest)
    await _begin(service, http, body)
    asks = await completion_requests(service, body, completion_params(service, body))
    rendered = [_rendered(service, http, body, ask, "cmpl-") for ask in asks]
    if len(rendered) > 1:
        for place, each in enumerate(rendered):
            each.request_id += f"-{place}"
    return json_response(rendered)


@router.post("/v1/messages/render")
@documents_route(body=CreateMessage, answer=RenderedRequest, errors=MessageError)
async def render_message(http: HttpRequest) -> Response:
    """Returns a conversation of Anthropic's API as token ids."""
    service = app_state_of(http)
    body = await read_body(http, CreateMessage)
    check_message(body)
    await _begin(service, http, body)
    prepared = await prepare_message(service, body)
    return json_response(_rendered(service, http, body, PromptRequest.of(prepared, body.priority), "msg_"))


@router.post("/v1/responses/render")
@documents_route(body=CreateResponse, answer=RenderedRequest)
async def render_response(http: HttpRequest) -> Response:
    """Returns the conversation of a response as token ids. Nothing is stored."""
    service = app_state_of(http)
    body = await read_body(http, CreateResponse)
    check_response(body)
    if body.previous_response_id is not None:
        raise invalid_field("previous_response_id", "is not rendered; give the whole conversation in input")
    await _begin(service, http, body)
    plan = await make_plan(service, store_of(http), body, owner_of(http))
    if plan.runs_calls_first:
        raise invalid_field("input", "approves calls of tools, which are not run here; send it to /v1/responses")
    return json_response(_rendered(service, http, body, plan.request, "resp_"))


async def _begin(service: AppState, http: HttpRequest, body: Any) -> None:
    if getattr(body, "use_beam_search", None):
        raise invalid_field("use_beam_search", "is not rendered: a search goes on from its own tokens; leave it out")
    set_request_name(http, getattr(body, "request_id", None))
    await service.choose_model(http, body.model)
    service.check_ready()


def _rendered(service: AppState, http: HttpRequest, body: Any, ask: PromptRequest, prefix: str) -> RenderedRequest:
    prompt, params = ask.prompt, ask.params
    if prompt.media or prompt.encoder is not None or prompt.embeds:
        raise invalid_field(
            "messages" if prompt.media else "prompt",
            "has media or embeddings, and /inference/v1/generate takes token ids alone; send it to the route itself",
        )
    options: Body | None = getattr(body, "stream_options", None)
    extra = dict(params.extra_args or {})
    pages = extra.pop(HANDOFF, None)
    most = service.backend.model_info.max_model_len - len(prompt.token_ids)
    fields = {**_changed(params), "max_tokens": min(params.max_tokens or most, most)}
    if extra:
        fields["extra_args"] = extra
    return RenderedRequest(
        request_id=prefix + usage_of(http).request_id,
        token_ids=prompt.token_ids,
        sampling_params=fields,
        model=body.model or service.model_names[0],
        stream=bool(body.stream),
        stream_options=UNSET if options is None else options.model_dump(exclude_none=True),
        return_token_ids=True if getattr(body, "return_token_ids", None) else UNSET,
        cache_salt=prompt.cache_salt or UNSET,
        priority=ask.priority,
        kv_transfer_params=pages or UNSET,
    )


def _changed(params: SamplingParams) -> dict[str, Any]:
    """Returns the parameters that are not the defaults of SamplingParams, as JSON has them."""
    found = {}
    for name in (each.name for each in dataclasses.fields(params) if each.name not in _BY_ROUTE):
        value = getattr(params, name)
        if value == getattr(_PLAIN, name):
            continue
        if dataclasses.is_dataclass(value):
            value = {key: inner for key, inner in msgspec.to_builtins(value).items() if inner not in (None, False)}
        found[name] = value
    return found
