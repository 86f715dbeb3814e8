"""Anthropic's messages, checked, as the messages that a chat template takes."""

from typing import Any, NamedTuple

from quintet.engine.prompts import Prompt
from quintet.sampling_params import ParameterError, SamplingParams
from quintet.server.http.anthropic.request import MessageBody, check_cache_control
from quintet.server.http.errors import ApiError
from quintet.server.http.prompts import beside, chat_prompt
from quintet.server.http.protocol.chat import TemplateFields
from quintet.server.http.responses.checks import kind_of, list_of, object_of, one_of, refuse_fields, text_of
from quintet.server.http.service import Service

Parts = list[dict[str, str]]

_ROLES = ("user", "assistant", "system")
_TEXT_KEYS = ("type", "text", "cache_control", "citations")
_CONTENT = "text, or a list of blocks that is not empty"
_NO_MEDIA = "models here read text alone"
_REASONS = {
    "image": _NO_MEDIA,
    "document": _NO_MEDIA,
    "container_upload": _NO_MEDIA,
    "search_result": "give what was found as text",
    "thinking": "thinking is not told from the answer; leave the block out",
    "redacted_thinking": "thinking is not told from the answer; leave the block out",
}
_OF_TOOLS = ("tool_use", "tool_result")


class Conversation(NamedTuple):
    """Messages for a chat template."""

    messages: list[dict[str, Any]]
    prefilled: bool  # the model goes on with the last one


async def render(
    service: Service, body: MessageBody, params: SamplingParams | None = None, cache_salt: str | None = None
) -> Prompt:
    """The prompt; without params, of any length."""
    messages, prefilled = await beside(service, body.size, lambda: read_messages(body), "messages")
    fields = TemplateFields.model_validate({"continue_final_message": prefilled})
    try:
        return await chat_prompt(service, fields, messages, body.size, params, cache_salt=cache_salt)
    except ApiError as error:
        if error.code == "context_length_exceeded":
            error.message = error.message.rpartition(";")[0] + "; shorten it"
        raise


def read_messages(body: MessageBody) -> Conversation:
    """Messages of one role in a row are one, as Anthropic has it. Raises ParameterError."""
    given = list_of(body.messages, "messages", "a list of messages that is not empty")
    messages: list[dict[str, Any]] = []
    if body.system is not None and (parts := _read_content(body.system, "system")):
        messages.append({"role": "system", "content": parts})
    for place, message in enumerate(given):
        where = f"messages[{place}]"
        object_of(message, where, ("role", "content"))
        role = one_of(message.get("role"), f"{where}.role", _ROLES)
        parts = _read_content(message.get("content"), f"{where}.content")
        if not parts and (role != "assistant" or place < len(given) - 1):
            raise ParameterError(f"{where}.content", "must not be empty; only a last message of the assistant may be")
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += parts
        elif parts:
            messages.append({"role": role, "content": parts})
    prefilled = bool(messages) and messages[-1]["role"] == "assistant"
    if prefilled and (text := messages[-1]["content"][-1]["text"]) != text.rstrip():
        raise ParameterError(
            f"messages[{len(given) - 1}].content", "is continued, so it must not end with white space; strip it"
        )
    return Conversation(messages, prefilled)


def _read_content(content: Any, where: str) -> Parts:
    """Its texts; none for an empty one."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return [_read_block(block, f"{where}[{place}]") for place, block in enumerate(list_of(content, where, _CONTENT))]


def _read_block(block: Any, where: str) -> dict[str, str]:
    if not isinstance(block, dict):
        raise ParameterError(where, f"must be an object with type and text, not {kind_of(block)}")
    kind = text_of(block.get("type"), f"{where}.type")
    why = "no tools are called by this server" if kind.endswith(_OF_TOOLS) else _REASONS.get(kind)
    if why is not None:
        raise ParameterError(where, f"is of type {kind[:80]}, which is not served: {why}")
    one_of(kind, f"{where}.type", ("text",))
    refuse_fields(block, _TEXT_KEYS, where)
    check_cache_control(block.get("cache_control"), f"{where}.cache_control")
    if block.get("citations"):
        raise ParameterError(f"{where}.citations", "is not served: there are no documents to cite; leave it out")
    text = text_of(block.get("text"), f"{where}.text")
    if not text:
        raise ParameterError(f"{where}.text", "must not be empty; leave the block out")
    return {"type": "text", "text": text}
