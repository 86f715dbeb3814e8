"""Reads what all chats of this server have in common: the model that prepares them, and what its settings allow."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from quintet.chat.messages import ChatOptions
from quintet.chat.prepare import ChatInput, ChatModel
from quintet.chat.tool_choice import ToolChoice
from quintet.server.http.app_state import AppState
from quintet.server.http.errors import ApiError
from quintet.server.http.inputs.prompts import need_tokenizer, run_in_thread
from quintet.server.http.inputs.sampling_params import invalid_field
from quintet.server.http.openai.chat_protocol import MEDIA_FIELDS, TemplateFields


def chat_model(service: AppState) -> ChatModel:
    """Returns the served model. Raises ApiError 400 if it has no tokenizer."""
    served = service.backend.model_info
    return ChatModel(
        tokenizer=need_tokenizer(service),
        parsers=service.parsers,
        grammars=service.backend.grammar_checks,
        reasoning=service.reasoning_markers,
        chat_template=service.chat_template,
        chat_template_kwargs=service.settings.default_chat_template_kwargs or {},
        reasoning_effort_map=service.settings.reasoning_effort_map or {},
        tool_strict_level=service.settings.tool_strict_level,
        max_model_len=served.max_model_len,
        vocab_size=served.vocab_size,
        worker=functools.partial(run_in_thread, service),
        media=service.media_calls.input,
        media_worker=service.media_calls.run,
    )


def read_chat(service: AppState, body: TemplateFields, messages: Any, **more: Any) -> ChatInput:
    """Returns the chat of a body with messages and fields of a template; `more` are other fields of ChatInput."""
    if body.chat_template is not None and not service.settings.trust_request_chat_template:
        raise ApiError(
            400, "chat_template is not taken from requests here; the server must be started with "
            "--trust-request-chat-template", param="chat_template", code="unsupported_field",
        )  # fmt: skip
    if body.continue_final_message and body.add_generation_prompt:
        raise invalid_field("continue_final_message", "and add_generation_prompt exclude each other; set one of them")
    if not isinstance(messages, list) or not messages or not isinstance(messages[0], Mapping):
        raise invalid_field("messages", 'must be a list such as [{"role": "user", "content": "Hello"}]')
    options = ChatOptions(
        tools=template_tools(service, body.tools, more.get("tool_choice", ToolChoice())),
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
        documents=body.documents,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
    )
    media: dict[str, Any] = {name: getattr(body, name, None) for name in MEDIA_FIELDS}
    return ChatInput(messages=messages, options=options, size=body.size, **media, **more)


def template_tools(
    service: AppState, tools: Sequence[Mapping[str, Any]] | None, choice: ToolChoice
) -> Sequence[Mapping[str, Any]] | None:
    """Returns the tools that the template reads: none if no tool may be called and the operator leaves them out."""
    excluded = choice.tools and choice.mode == "none" and service.settings.exclude_tools_when_tool_choice_none
    return None if excluded else tools or None


def check_tools(service: AppState, choice: ToolChoice) -> None:
    """Raises ApiError 400 if this server cannot parse the tool calls that the request allows."""
    if choice.mode == "auto" and service.parsers.tool is None:
        raise invalid_field(
            "tools", "may be called, but the tool call format of this model is unknown: start the server with "
            '--tool-call-parser NAME, or set tool_choice to "required" or "none"',
        )  # fmt: skip
    if choice.mode == "auto" and not service.settings.enable_auto_tool_choice:
        raise invalid_field("tool_choice", "must be none or required here: --enable-auto-tool-choice is off")
