"""Conversations to prompts: messages are checked, then written out by the model's chat template."""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quintet.chat.history import arguments_of, first_that_renders, split_thoughts
from quintet.chat.lazy_template import render_template, template_variables
from quintet.chat.media.parts import MEDIA_TYPES, MediaCollector, is_media
from quintet.chat.prompts import Prompt
from quintet.common.suggestions import refuse_unknown, unknown_name_error
from quintet.common.unknown_fields import drop_unknown, report_unknown
from quintet.sampling_params import ParameterError
from quintet.tokenizers.tokenizer import Tokenizer, refuse_surrogates

ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # and those that the template itself names
KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "function_call", "refusal", "reasoning_content")
# What clients copy from an answer into the next request, and what repeats or marks the content: left out.
COPIED = (
    "annotations",
    "cache_control",
    "id",
    "parsed",
    "provider_specific_fields",
    "reasoning_details",
    "thinking_blocks",
)
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_PART_KEYS = ("type", "text", "refusal", "annotations", "logprobs", "cache_control", "prompt_cache_breakpoint")
REASONING = ("reasoning_content", "thinking", "reasoning")  # one thing under three names; templates read either
MAX_MESSAGES = 10_000
MAX_PATH = 4096  # characters; a longer chat_template is certainly text
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # marks where the last message ends; transformers' own, so that spaces come alike
_PROBE = "quintet probe"

Message = dict[str, Any]


@dataclass(frozen=True)
class ChatOptions:
    """Options of a chat template besides the messages."""

    tools: Sequence[Mapping[str, Any]] | None = None  # JSON schemas, as OpenAI's API takes them
    chat_template: str | Path | None = None  # Jinja text or a file's path, instead of the tokenizer's own
    chat_template_kwargs: Mapping[str, Any] | None = None  # variables that the template reads
    documents: Sequence[Mapping[str, Any]] | None = None  # for a template that reads them
    add_generation_prompt: bool = True  # end with the beginning of the next message
    continue_final_message: bool = False  # the model goes on with the last message; nothing is begun then


def conversations(messages: Any) -> Sequence[Any]:
    """Returns a list of conversations; `messages` is one conversation (a list of messages), or a list of them."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(
            'messages must be a list such as [{"role": "user", "content": "Hello"}], or a list of such lists, '
            f"not {type(messages).__name__} {str(messages)[:40]!r}"
        )
    return [messages] if isinstance(messages[0], Mapping) else messages


def load_chat_template(given: str | Path) -> str:
    """Jinja text as it is; the content of a file that is named."""
    if isinstance(given, str) and ("\n" in given or "{" in given or len(given) > MAX_PATH):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, TypeError, ValueError) as error:
        raise ValueError(f"chat_template {str(given)!r} is neither Jinja text nor a readable file: {error}") from None


# of models that embed a text or an image, and have no template
TEXTS_ALONE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def render_chat(
    tokenizer: Tokenizer, messages: Sequence[Any], options: ChatOptions, media: MediaCollector | None = None
) -> Prompt:
    """The prompt that asks for the next message; its ids are what transformers' apply_chat_template gives.

    options.chat_template is Jinja text here. `media` gets the images, video and audio of the messages; None: they are
    refused.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ValueError(f"a conversation is a list of messages, not {type(messages).__name__}")
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise ValueError(f"a conversation has 1 to {MAX_MESSAGES} messages, not {len(messages)}")
    tools = _tools(options.tools)
    media = MediaCollector() if media is None else media
    plain = media.info.without_text and options.chat_template is None and tokenizer.chat_template is None
    template = TEXTS_ALONE if plain else _template(tokenizer, options.chat_template, tools is not None)
    checked = [_check(message, place, template, media) for place, message in enumerate(messages)]
    if options.continue_final_message:
        checked[-1] = _mark(checked[-1])
    variables: dict[str, Any] = {
        **tokenizer.special_tokens,
        "documents": _documents(options.documents, template),
        **_extra(template, options.chat_template_kwargs),
        "tools": tools,
        "add_generation_prompt": options.add_generation_prompt and not options.continue_final_message,
    }

    def render(messages: Sequence[Message]) -> str:
        return render_template(template, {**variables, "messages": messages})

    text = first_that_renders(render, checked)
    if options.continue_final_message:
        text = _until_mark(text)
    refuse_surrogates(text, "the rendered chat")
    return Prompt(tokenizer.encode(text, add_special_tokens=plain), text)


def _check(message: Any, place: int, template: str, media: MediaCollector) -> Message:
    """A message as templates want it."""
    if not isinstance(message, Mapping):
        raise ValueError(f"message {place} must be a dict with 'role' and 'content', not {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not (role in ROLES or (role.isidentifier() and _names(template, role))):
        wrong = (
            unknown_name_error("role", role, ROLES) if isinstance(role, str) else f"the role {role!r}; it must be text"
        )
        raise ValueError(f"message {place} has {wrong}")
    message = _without_copied(message, place, template)
    content, thought = split_thoughts(message.get("content"))
    if content is None and role in ("tool", "function"):
        content = ""
    if content is None and role != "assistant":
        raise ValueError(f"message {place} ({role}) has no content; give text")
    # Templates take a missing key for None better than None itself.
    checked: Message = {
        key: _plain(f"message {place}: {key}", value)
        for key, value in message.items()
        if value is not None and key != "content" and not (key == "tool_calls" and value == [])
    }
    if content is not None:
        checked["content"] = _content(content, place, template, _MediaParts(media, role, template))
    if "tool_calls" in checked:
        checked["tool_calls"] = _tool_calls(checked["tool_calls"], place)
    reasoning = next((checked[key] for key in REASONING if key in checked), thought or None)
    return checked if reasoning is None else {"thinking": reasoning, **checked, "reasoning_content": reasoning}


def _without_copied(message: Mapping[Any, Any], place: int, template: str) -> Message:
    """The keys that count. Others that hold nothing, or are of an answer, go; the rest is refused, or gathered."""
    known = dict.fromkeys((*KEYS, *REASONING))
    kept = {key: value for key, value in message.items() if key in known or (isinstance(key, str) and key in template)}
    wrong = [key for key, value in message.items() if not (key in kept or key in COPIED or value in (None, "", [], {}))]
    if not report_unknown(f"messages[{place}]", [str(key) for key in wrong], known):
        refuse_unknown(f"key of message {place}", map(str, wrong), known)
    return kept


def _names(template: str, word: str) -> bool:
    return f"'{word}'" in template or f'"{word}"' in template


def _content(content: Any, place: int, template: str, media: "_MediaParts") -> Any:
    """One text: parts are joined by line breaks, but for a template that writes parts itself."""
    if isinstance(content, str):
        refuse_surrogates(content, f"the content of message {place}")
        return [{"type": "text", "text": content}] if _content_format(template) == "parts" else content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise ValueError(f"message {place}: content must be text or a list of parts, not {type(content).__name__}")
    parts = [
        media.read(part, f"messages[{place}].content[{number}]") if is_media(part) else _part(part, place, number)
        for number, part in enumerate(content)
    ]
    listed = any(part["type"] != "text" for part in parts)
    if listed or _content_format(template) == "parts" or (len(parts) > 1 and _content_format(template) == "both"):
        return parts
    return "\n".join(part["text"] for part in parts)


class _MediaParts:
    """Images, video and audio of one message, as its chat template writes them."""

    def __init__(self, media: MediaCollector, role: str, template: str) -> None:
        self._media, self._role, self._template = media, role, template

    def read(self, part: Any, where: str) -> Message:
        """Returns the part for the template: of the kind alone, or the model's placeholder as text."""
        kind = self._media.add(part, self._role, where)
        if _writes_media(self._template, kind):
            return {"type": kind}
        return {"type": "text", "text": self._media.placeholder(kind, where)}


def _part(part: Any, place: int, number: int) -> Message:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind == "str" or not isinstance(part, Mapping):
        part = {"type": "text", "text": part} if isinstance(part, str) else {}
    elif kind not in _TEXT_PARTS:
        part = {}
    elif isinstance(part, dict):
        drop_unknown(part, _PART_KEYS, f"messages[{place}].content[{number}]")
    if not part:
        known = f"text, {', '.join(MEDIA_TYPES)}"
        raise ValueError(f"message {place}: content parts of type {str(kind)[:80]!r} are not supported; known: {known}")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise ValueError(f"message {place}: a part of type {kind!r} must hold text, not {type(text).__name__}")
    refuse_surrogates(text, f"the content of message {place}")
    return {"type": "text", "text": text}


@functools.lru_cache(maxsize=64)
def _writes_media(template: str, kind: str) -> bool:
    """True if the template writes something for a part of this kind. Tried, not guessed."""
    text = {"type": "text", "text": _PROBE}
    alone, beside = _probe(template, [text]), _probe(template, [{"type": kind}, text])
    return _PROBE in alone and _PROBE in beside and alone != beside and f"'type': '{kind}'" not in beside


@functools.lru_cache(maxsize=64)
def _content_format(template: str) -> str:
    """Returns what the template takes as content: "text"; "parts", as multimodal models' often do; or "both" alike.
    Tried, not guessed."""
    parts = [{"type": "text", "text": _PROBE}]
    text, listed = _probe(template, _PROBE), _probe(template, parts)
    if _PROBE in text:
        return "both" if listed == text else "text"
    return "parts" if _PROBE in listed else "text"


def _probe(template: str, content: Any) -> str:
    """Renders a message with this content; "" where the template refuses it."""
    messages = [{"role": "user", "content": content}]
    try:
        return render_template(template, {"messages": messages, "tools": None, "add_generation_prompt": False})
    except ValueError:
        return ""


def _tool_calls(calls: Any, place: int) -> Any:
    """Templates want a call's arguments as an object; OpenAI's API has them as JSON text, which may be broken."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"message {place}: tool_calls must be a list of dicts")
    for call in calls:
        function = call.get("function", call)
        if isinstance(function, dict):
            function["arguments"] = arguments_of(function.get("arguments"))
    return calls


def _tools(tools: Any) -> list[Any] | None:
    if not tools:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError('tools must be a list of dicts such as {"type": "function", "function": {"name": ...}}')
    plain: list[Any] = _plain("tools", list(tools))
    return plain


def _documents(given: Any, template: str) -> Any:
    """Refused where the template reads none: the answer would not be made of them."""
    if not given:
        return None
    if "documents" not in template_variables(template):
        raise ParameterError("documents", "are not read by this chat template; put them into the messages")
    return _plain("documents", list(given))


def _extra(template: str, given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Variables for the template, refused where it reads none of that name, or gathered."""
    if not given:
        return {}
    known = template_variables(template) - {"messages", "tools", "add_generation_prompt"}
    if report_unknown("chat_template_kwargs", [str(name) for name in given if name not in known], known):
        given = {name: value for name, value in given.items() if name in known}
    refuse_unknown("variable of the chat template, in chat_template_kwargs:", map(str, given), known)
    plain: Mapping[str, Any] = _plain("chat_template_kwargs", dict(given))
    return plain


def _plain(what: str, value: Any) -> Any:
    """Plain data alone reaches a template: a copy by way of JSON, so no object's methods can be called."""
    try:
        return json.loads(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{what} must be plain data (text, numbers, lists, dicts): {error}") from None


def _template(tokenizer: Tokenizer, given: str | Path | None, with_tools: bool) -> str:
    if given is not None:
        return str(given)
    own = tokenizer.chat_template
    if isinstance(own, dict):
        own = own.get("tool_use" if with_tools and "tool_use" in own else "default")
    if own is None:
        raise ValueError(
            "the model's tokenizer has no chat template, so it was likely not trained to chat; "
            "give chat_template, or use generate() with plain text"
        )
    return own


def _mark(message: Message) -> Message:
    """Ends the message's text with the tag."""
    content = message.get("content")
    if isinstance(content, list):
        if content[-1]["type"] != "text":
            raise ValueError("continue_final_message needs a last message that ends with text to go on from")
        last = {**content[-1], "text": content[-1]["text"] + _TAG}
        return {**message, "content": [*content[:-1], last]}
    if not content:
        raise ValueError("continue_final_message needs a last message with text to go on from")
    return {**message, "content": content + _TAG}


def _until_mark(text: str) -> str:
    """Cuts the tag and what the template writes after it. A template that trims the text trims the result as well."""
    at = text.rfind(_TAG.strip())
    if at < 0:
        raise ValueError(
            "continue_final_message: the chat template leaves out the last message or changes its text; "
            "end with an assistant message, or use another template"
        )
    return text[:at] if text.startswith(_TAG, at) else text[:at].rstrip()
