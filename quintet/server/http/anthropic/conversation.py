"""Checks Anthropic's messages and converts them to chat template messages."""

from collections.abc import Callable
from typing import Any, NamedTuple

from quintet.chat.history import arguments_of
from quintet.chat.validation import kind_of, list_of, object_of, one_of, refuse_fields, text_of
from quintet.media.items import IMAGE
from quintet.media.parts import MediaPart
from quintet.sampling_params import ParameterError
from quintet.server.http.anthropic.request import MessageBody, check_cache_control

Block = dict[str, Any]

IMAGE_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp", "image/tiff", "image/avif")

_ROLES = ("user", "assistant", "system")
_BLOCKS_OF_ROLE = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
_CONTENT = "text, or a list of blocks that is not empty"
_NO_FILES = "files are not read here; give their text, or pictures as blocks of type image"
_REASONS = {
    "document": _NO_FILES,
    "container_upload": _NO_FILES,
    "search_result": "give what was found as text",
}


class AnthropicConversation(NamedTuple):
    """Messages for a chat template."""

    messages: list[dict[str, Any]]
    has_prefill: bool  # the model continues the last message


def read_messages(body: MessageBody) -> AnthropicConversation:
    """Reads messages; merges consecutive ones of the same role, as Anthropic does. Raises ParameterError."""
    given = list_of(body.messages, "messages", "a list of messages that is not empty")
    messages: list[dict[str, Any]] = []
    if body.system is not None:
        for block in _read_content(body.system, "system"):
            add_block(messages, "system", block)
    for place, message in enumerate(given):
        where = f"messages[{place}]"
        object_of(message, where, ("role", "content"))
        role = one_of(message.get("role"), f"{where}.role", _ROLES)
        blocks = _read_content(message.get("content"), f"{where}.content")
        if not blocks and (role != "assistant" or place < len(given) - 1):
            raise ParameterError(f"{where}.content", "must not be empty; only a last message of the assistant may be")
        for block in blocks:
            if block["type"] not in _BLOCKS_OF_ROLE[role]:
                raise ParameterError(f"{where}.content", f"of the {role} has no blocks of type {block['type']}")
            add_block(messages, role, block)
    prefilled = bool(messages) and messages[-1]["role"] == "assistant"
    if prefilled and ("tool_calls" in messages[-1] or not messages[-1]["content"]):
        raise ParameterError(
            f"messages[{len(given) - 1}].content", "ends with a call, or a thought; give what came of it"
        )
    if prefilled and (text := messages[-1]["content"][-1]["text"]) != text.rstrip():
        raise ParameterError(
            f"messages[{len(given) - 1}].content", "is continued, so it must not end with white space; strip it"
        )
    return AnthropicConversation(messages, prefilled)


def _read_content(content: Any, where: str) -> list[Block]:
    """Returns the blocks; an empty text has none."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return [_read_block(block, f"{where}[{place}]") for place, block in enumerate(list_of(content, where, _CONTENT))]


def _read_block(block: Any, where: str) -> Block:
    if not isinstance(block, dict):
        raise ParameterError(where, f"must be an object with a type, not {kind_of(block)}")
    kind = text_of(block.get("type"), f"{where}.type")
    if kind in _REASONS:
        raise ParameterError(where, f"is of type {kind[:80]}, which is not served: {_REASONS[kind]}")
    one_of(kind, f"{where}.type", tuple(_READ))
    check_cache_control(block.get("cache_control"), f"{where}.cache_control")
    return _READ[kind](block, where)


def _read_text(block: Block, where: str) -> Block:
    refuse_fields(block, ("type", "text", "cache_control", "citations"), where)
    if block.get("citations"):
        raise ParameterError(f"{where}.citations", "is not served: there are no documents to cite; leave it out")
    text = text_of(block.get("text"), f"{where}.text")
    if not text:
        raise ParameterError(f"{where}.text", "must not be empty; leave the block out")
    return {"type": "text", "text": text}


def _read_thinking(block: Block, where: str) -> Block:
    refuse_fields(block, ("type", "thinking", "signature", "cache_control"), where)
    return {"type": "thinking", "thinking": text_of(block.get("thinking"), f"{where}.thinking")}


def _read_redacted(block: Block, where: str) -> Block:
    """Reads reasoning that another server has encrypted: it counts as none."""
    refuse_fields(block, ("type", "data", "cache_control"), where)
    text_of(block.get("data"), f"{where}.data")
    return {"type": "redacted_thinking"}


def _read_use(block: Block, where: str) -> Block:
    refuse_fields(block, ("type", "id", "name", "input", "cache_control", "caller"), where)
    given = block.get("input")  # proxies send text that was cut off
    if not isinstance(given, dict | list | str | None):
        raise ParameterError(f"{where}.input", f"must be an object, not {kind_of(given)}")
    name, call = text_of(block.get("name"), f"{where}.name"), text_of(block.get("id"), f"{where}.id")
    return {"type": "tool_use", "id": call, "name": name, "input": arguments_of(given)}


def _read_result(block: Block, where: str) -> Block:
    refuse_fields(block, ("type", "tool_use_id", "content", "is_error", "cache_control"), where)
    content = block.get("content")
    parts = [] if content in (None, "", []) else _read_content(content, f"{where}.content")
    if any(part["type"] not in ("text", "image") for part in parts):
        raise ParameterError(f"{where}.content", "may have blocks of text and images alone")
    shown: Any = "\n".join(part["text"] for part in parts if part["type"] == "text")
    if any(part["type"] == "image" for part in parts):
        shown = [part["media"] if part["type"] == "image" else part for part in parts]
    return {"type": "tool_result", "id": text_of(block.get("tool_use_id"), f"{where}.tool_use_id"), "content": shown}


def _read_image(block: Block, where: str) -> Block:
    """Reads an image: base64 with its media type, or a URL."""
    refuse_fields(block, ("type", "source", "cache_control"), where)
    source = object_of(block.get("source"), f"{where}.source", ("type", "media_type", "data", "url", "file_id"))
    kind = text_of(source.get("type"), f"{where}.source.type")
    if kind == "file":
        raise ParameterError(f"{where}.source", "is of type file, and none are kept here; give base64, or url")
    if one_of(kind, f"{where}.source.type", ("base64", "url")) == "url":
        url = text_of(source.get("url"), f"{where}.source.url")
    else:
        media_type = one_of(source.get("media_type"), f"{where}.source.media_type", IMAGE_TYPES)
        url = f"data:{media_type};base64,{text_of(source.get('data'), f'{where}.source.data')}"
    if not url:
        raise ParameterError(f"{where}.source.url", "must not be empty")
    return {"type": "image", "media": MediaPart(IMAGE, where, url)}


_READ: dict[str, Callable[[Block, str], Block]] = {
    "text": _read_text,
    "image": _read_image,
    "thinking": _read_thinking,
    "redacted_thinking": _read_redacted,
    "tool_use": _read_use,
    "tool_result": _read_result,
}


def add_block(messages: list[dict[str, Any]], role: str, block: Block) -> None:
    """Appends to the last message if it has that role, else adds a new one. A tool result is always a new message."""
    kind = block["type"]
    if kind == "tool_result":
        messages.append({"role": "tool", "tool_call_id": block["id"], "content": block["content"]})
        return
    if not messages or messages[-1]["role"] != role:
        messages.append({"role": role, "content": []})
    last = messages[-1]
    if kind == "redacted_thinking":
        return
    if kind == "image":
        last["content"].append(block["media"])
    elif kind == "text":
        last["content"].append({"type": "text", "text": block["text"]})
    elif kind == "thinking":
        earlier = last.get("reasoning_content")
        last["reasoning_content"] = f"{earlier}\n\n{block['thinking']}" if earlier else block["thinking"]
    else:
        call = {"id": block["id"], "type": "function", "function": {"name": block["name"], "arguments": block["input"]}}
        last.setdefault("tool_calls", []).append(call)
