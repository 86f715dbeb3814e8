"""POST /v1/messages and /v1/messages/count_tokens, with responses and errors in Anthropic's format."""

from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet.chat.lazy_template import template_variables
from quintet.chat.messages import ChatOptions
from quintet.chat.output_parser import OutputParser
from quintet.chat.prepare import ChatInput, FieldNames, PreparedChat, prepare, render
from quintet.chat.reasoning_effort import SWITCHES, ReasoningSettings, read_thinking
from quintet.outputs import RequestOutput
from quintet.sampling_params import RequestOutputKind, SamplingParams
from quintet.server.backend import EngineDead
from quintet.server.http.anthropic.conversation import read_messages
from quintet.server.http.anthropic.message_builder import AnthropicReply, stream_error
from quintet.server.http.anthropic.protocol import MessageAnswer, MessageError, TokenCount
from quintet.server.http.anthropic.request import CountTokens, CreateMessage, MessageBody, check_body
from quintet.server.http.anthropic.tools import for_template, parallel, read_tools
from quintet.server.http.app_state import AppState
from quintet.server.http.engine_call import EngineCall, PromptRequest
from quintet.server.http.errors import ApiError, as_api_error
from quintet.server.http.inputs.body import read_body
from quintet.server.http.inputs.chat_input import chat_model, check_tools, template_tools
from quintet.server.http.inputs.prompts import need_tokenizer, run_in_thread
from quintet.server.http.inputs.response_format import read_format
from quintet.server.http.inputs.sampling_params import checked_params
from quintet.server.http.middleware.access import error_response
from quintet.server.http.middleware.base import wants_anthropic
from quintet.server.http.openapi import documents_route
from quintet.server.http.respond import app_state_of, json_response, stream_response, whole_response
from quintet.server.http.usage import usage_of

_SAME = ("max_tokens", "temperature", "top_p", "top_k", "seed")  # fields with the same name in SamplingParams

_BUDGET = {"thinking_token_budget": "thinking.budget_tokens"}


class AnthropicRoute(APIRoute):
    """Adds the request id in the `request-id` header, which Anthropic's clients read."""

    def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def answer(http: HttpRequest) -> Response:
            try:
                response = await handler(http)
            except (ApiError, ValueError, EngineDead) as error:
                response = error_response(http.scope, as_api_error(error))
            if wants_anthropic(http.scope):
                response.headers["request-id"] = usage_of(http).request_id
            return response

        return answer


router = APIRouter(route_class=AnthropicRoute)


@router.post("/v1/messages")
@documents_route(body=CreateMessage, answer=MessageAnswer, stream=dict, errors=MessageError)
async def create_message(http: HttpRequest) -> Response:
    """Answers a conversation."""
    service = app_state_of(http)
    body = await read_body(http, CreateMessage)
    check_body(body)
    await service.choose_model(http, body.model)
    service.check_ready()
    prepared = await prepare_message(service, body)
    asks = [PromptRequest.of(prepared, body.priority)]
    tally = usage_of(http)
    tally.count_prompts(asks)
    reply = AnthropicReply(
        f"msg_{tally.request_id}",
        body,
        body.model or service.model_names[0],
        OutputParser(prepared.output_format, whole=not body.stream),
        service.cooperative,
    )
    if body.stream:

        async def events(call: EngineCall) -> AsyncIterator[bytes]:
            async for _, output in call:
                tally.count_output(0, output)
                if chunk := reply.add_output(output):
                    yield chunk
            yield reply.end()

        return await stream_response(service, http, asks, events, stream_error)

    async def whole(outputs: Sequence[RequestOutput]) -> MessageAnswer:
        tally.count_output(0, outputs[0])
        return await reply.message(outputs[0])

    return await whole_response(service, http, asks, whole)


@router.post("/v1/messages/count_tokens")
@documents_route(body=CountTokens, answer=TokenCount, errors=MessageError)
async def count_tokens(http: HttpRequest) -> Response:
    """Counts the tokens of a conversation's prompt, of any length."""
    service = app_state_of(http)
    body = await read_body(http, CountTokens)
    check_body(body)
    await service.choose_model(http, body.model)
    prompt = await render(await _chat(service, body), chat_model(service))
    return json_response(TokenCount(len(prompt.token_ids)))


async def prepare_message(service: AppState, body: CreateMessage) -> PreparedChat:
    """Returns the conversation of a checked request, ready for the engine."""
    chat = await _chat(service, body, _params(service, body), body.cache_salt)
    check_tools(service, chat.tool_choice)
    return await prepare(chat, chat_model(service))


async def _chat(
    service: AppState, body: MessageBody, params: SamplingParams | None = None, cache_salt: str | None = None
) -> ChatInput:
    """Returns the chat; without params, for its prompt alone."""
    tool_choice, thinking = read_tools(body), _thinking(service, body)
    output, form = body.output_config or {}, "output_config.format"
    wanted = output.get("format")
    if body.output_config is None:
        wanted, form = body.output_format, "output_format"
    if params is not None:
        params.structured_outputs = read_format(wanted, form)
    conversation = await run_in_thread(service, body.size, lambda: read_messages(body), "messages")
    tools = template_tools(service, for_template(body), tool_choice)
    return ChatInput(
        messages=conversation.messages,
        params=params,
        options=ChatOptions(tools=tools, continue_final_message=conversation.has_prefill),
        tool_choice=tool_choice,
        parallel_tool_calls=parallel(body),
        thinking=thinking._replace(effort=output.get("effort") or thinking.effort),
        cache_salt=cache_salt,
        size=body.size,
        names=FieldNames(format=form, remedy="shorten it"),
    )


def _thinking(service: AppState, body: MessageBody) -> ReasoningSettings:
    """Returns the settings of reasoning; of disabled thinking, as --anthropic-disabled-thinking-effort has it."""
    thinking, mode = read_thinking(body.thinking, "thinking"), service.settings.anthropic_disabled_thinking_effort
    if thinking.enabled is not False or mode == "none":
        return thinking
    known = template_variables(str(service.chat_template or need_tokenizer(service).templates))
    if mode == "auto" and not known.isdisjoint(SWITCHES):
        return thinking
    return thinking._replace(enabled=None, effort="low")


def _params(service: AppState, body: CreateMessage) -> SamplingParams:
    fields: dict[str, Any] = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    fields["stop"] = body.stop_sequences
    if not isinstance(
        service.reasoning_markers, str
    ):  # clients must send budget_tokens, even if the server cannot enforce it
        fields["thinking_token_budget"] = read_thinking(body.thinking, "thinking").budget
    fields["output_kind"] = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    return checked_params(service, fields, {"stop": "stop_sequences", **_BUDGET})
