"""POST /api/chat and /api/generate: a conversation gets its next message, a prompt its response."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet.chat.messages import ChatOptions
from quintet.chat.output_parser import OutputFormat
from quintet.chat.prepare import ChatInput, FieldNames, compiled_grammar, prepare
from quintet.chat.tool_choice import read_tools
from quintet.sampling_params import ParameterError, RequestOutputKind, SamplingParams
from quintet.server.http.app_state import AppState
from quintet.server.http.engine_call import PromptRequest
from quintet.server.http.inputs.body import parse_body
from quintet.server.http.inputs.chat_input import chat_model, check_tools, template_tools
from quintet.server.http.inputs.llama_sampling import llama_fields
from quintet.server.http.inputs.prompts import completion_prompts, need_tokenizer, run_in_thread
from quintet.server.http.inputs.sampling_params import checked_params, invalid_field
from quintet.server.http.ollama import messages as inputs
from quintet.server.http.ollama.answer import MessagePart, OllamaAnswer, Stopwatch, answer_line, read_request
from quintet.server.http.ollama.protocol import (
    ChatBody,
    ChatLine,
    GenerateBody,
    GenerateLine,
    OllamaError,
    Options,
    OutputBody,
)
from quintet.server.http.openai.completions_protocol import CompletionRequest
from quintet.server.http.openapi import documents_route
from quintet.server.http.respond import app_state_of, json_response

router = APIRouter()

_NAMES = {"max_tokens": "options.num_predict", "repetition_penalty": "options.repeat_penalty"}
_SAME_NAMES = ("temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty", "stop")
_REMEDY = "shorten it, or start the server with a larger --max-model-len"


@router.post("/api/chat")
@documents_route(body=ChatBody, answer=ChatLine, lines=ChatLine, errors=OllamaError)
async def chat(http: HttpRequest) -> Response:
    """Answers a conversation; without messages, says that the model is loaded."""
    watch, service, body = await read_request(http, ChatBody)
    if not body.messages:
        return _loaded(body, is_chat=True)
    params = _params(service, body)
    messages = await run_in_thread(
        service, body.size, lambda: inputs.template_messages(body.messages, service.parsers.tool), "messages"
    )
    return await _answer_chat(http, body, messages, params, watch)


@router.post("/api/generate")
@documents_route(body=GenerateBody, answer=GenerateLine, lines=GenerateLine, errors=OllamaError)
async def generate(http: HttpRequest) -> Response:
    """Answers a prompt, continues it (raw), or fills in before a suffix; without either, says that the model is
    loaded."""
    watch, service, body = await read_request(http, GenerateBody)
    if not body.prompt and not body.suffix:
        return _loaded(body, is_chat=False)
    params = _params(service, body)
    has_template = bool(service.chat_template or need_tokenizer(service).templates)
    if has_template and not body.raw and not body.suffix:
        roles = (("system", body.system), ("user", body.prompt))
        messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in roles if text]
        inputs.add_images(messages[-1], body.images, "images")
        return await _answer_chat(http, body, messages, params, watch)
    if body.images:
        raise invalid_field("images", "are written by the chat template, which raw, suffix and models without one skip")
    if body.system:
        raise invalid_field(
            "system", "is written by the chat template, and raw, suffix and models without a template use none; "
            "put the text into the prompt",
        )  # fmt: skip
    grammar = await compiled_grammar(service.backend.grammar_checks, params.structured_outputs, "format")
    completion = CompletionRequest(prompt=body.prompt or "", suffix=body.suffix or None)
    [prompt] = await completion_prompts(service, completion, params)
    answer = OllamaAnswer(http, service, PromptRequest(prompt, params, 0, grammar), OutputFormat(), watch)
    return await answer.respond(body.model, body.stream is not False, is_chat=False)


async def _answer_chat(
    http: HttpRequest, body: OutputBody, messages: list[dict[str, Any]], params: SamplingParams, watch: Stopwatch
) -> Response:
    service, is_chat = app_state_of(http), isinstance(body, ChatBody)
    tools = inputs.template_tools(body.tools) if isinstance(body, ChatBody) else []
    choice = read_tools(tools, None)
    check_tools(service, choice)
    chat = ChatInput(
        messages=messages,
        params=params,
        options=ChatOptions(
            tools=template_tools(service, tools, choice), continue_final_message=inputs.is_prefill(messages)
        ),
        tool_choice=choice,
        thinking=inputs.read_think(body.think),
        size=body.size,
        names=FieldNames("messages" if is_chat else "prompt", "format", remedy=_REMEDY),
    )
    prepared = await prepare(chat, chat_model(service))
    answer = OllamaAnswer(http, service, PromptRequest.of(prepared, None), prepared.output_format, watch)
    return await answer.respond(body.model, body.stream is not False, is_chat)


def _params(service: AppState, body: OutputBody) -> SamplingParams:
    options = parse_body(body.options or {}, Options)
    fields = llama_fields(options, options.num_predict)
    if fields.get("max_tokens") == 0:
        fields["max_tokens"] = None  # as in Ollama: no limit
    if body.top_logprobs and not body.logprobs:
        raise ParameterError("top_logprobs", "needs logprobs; set it to true")
    fields["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    fields["output_kind"] = RequestOutputKind.FINAL_ONLY if body.stream is False else RequestOutputKind.DELTA
    names = {**_NAMES, **{name: f"options.{name}" for name in _SAME_NAMES}, "logprobs": "top_logprobs"}
    params = checked_params(service, fields, names)
    params.structured_outputs = inputs.read_ollama_format(body.format)
    return params


def _loaded(body: OutputBody, is_chat: bool) -> Response:
    """Answers a request without a prompt, with which clients load a model."""
    line = answer_line(body.model, MessagePart(), is_chat)
    line.done, line.done_reason = True, "load"
    return json_response(line)
