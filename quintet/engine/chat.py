"""Conversations to prompts: messages are checked, then written out by the model's chat template."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quintet.engine.prompts import Prompt
from quintet.engine.template import render_template
from quintet.engine.tokenizer import Tokenizer, refuse_surrogates
from quintet.names import refuse_unknown

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
OPTIONS = ("tools", "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
MAX_MESSAGES = 10_000
MAX_PATH = 4096  # characters; a longer chat_template is certainly text

Message = dict[str, Any]


def render_chats(tokenizer: Tokenizer, messages: Any, **options: Any) -> list[Prompt]:
    """One conversation (a list of messages) or a list of them; the options are render_chat's."""
    refuse_unknown("chat option", options, OPTIONS)
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(
            'messages must be a list such as [{"role": "user", "content": "Hello"}], or a list of such lists, '
            f"not {type(messages).__name__} {str(messages)[:40]!r}"
        )
    if isinstance(messages[0], Mapping):
        return [render_chat(tokenizer, messages, **options)]
    return [render_chat(tokenizer, each, **options) for each in messages]


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Any],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> Prompt:
    """The prompt that asks for the next message; its ids are what transformers' apply_chat_template gives.

    `chat_template` is Jinja text or a file's path, instead of the tokenizer's own. With continue_final_message the
    model goes on with the last message, and add_generation_prompt is not looked at.
    """
    checked = [_check(message, place) for place, message in enumerate(messages)]
    if not checked or len(checked) > MAX_MESSAGES:
        raise ValueError(f"a conversation has 1 to {MAX_MESSAGES} messages, not {len(checked)}")
    variables = {
        **tokenizer.special_tokens,
        "messages": checked,
        "tools": _plain("tools", list(tools)) if tools else None,
        "add_generation_prompt": add_generation_prompt and not continue_final_message,
        **_plain("chat_template_kwargs", dict(chat_template_kwargs or {})),
    }
    text = render_template(_template(tokenizer, chat_template, bool(tools)), variables)
    if continue_final_message:
        text = _until_final(text, checked[-1])
    refuse_surrogates(text, "the rendered chat")
    return Prompt(tokenizer.encode(text, add_special_tokens=False), text)


def _check(message: Any, place: int) -> Message:
    """A message as templates want it: its content one text, parts joined by line breaks."""
    if not isinstance(message, Mapping):
        raise ValueError(f"message {place} must be a dict with 'role' and 'content', not {type(message).__name__}")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"message {place} has role {role!r}; use one of {', '.join(ROLES)}")
    checked: Message = _plain(f"message {place}", dict(message))
    content = message.get("content")
    if content is None and role != "assistant":
        raise ValueError(f"message {place} ({role}) has no content; give text")
    if content is not None:
        checked["content"] = _text(content, place)
    return checked


def _text(content: Any, place: int) -> str:
    if isinstance(content, str):
        refuse_surrogates(content, f"the content of message {place}")
        return content
    if not isinstance(content, Sequence):
        raise ValueError(f"message {place}: content must be text or a list of parts, not {type(content).__name__}")
    return "\n".join(_part(part, place) for part in content)


def _part(part: Any, place: int) -> str:
    if isinstance(part, str):
        return _text(part, place)
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if not isinstance(part, Mapping) or kind not in ("text", "input_text", "output_text", "refusal"):
        raise ValueError(f"message {place}: content parts of type {kind!r} are not supported; models here take text")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise ValueError(f"message {place}: a part of type {kind!r} must hold text, not {type(text).__name__}")
    return _text(text, place)


def _plain(what: str, value: Any) -> Any:
    """Plain data alone reaches a template: a copy by way of JSON, so no object's methods can be called."""
    try:
        return json.loads(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{what} must be plain data (text, numbers, lists, dicts): {error}") from None


def _template(tokenizer: Tokenizer, given: str | None, with_tools: bool) -> str:
    if given is not None:
        path = Path(given) if len(given) < MAX_PATH and "\n" not in given and "{" not in given else None
        if path is None:
            return given
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"chat_template {given!r} is neither Jinja text nor a readable file: {error}") from None
    own = tokenizer.chat_template
    if isinstance(own, dict):
        own = own.get("tool_use" if with_tools and "tool_use" in own else "default")
    if own is None:
        raise ValueError(
            "the model's tokenizer has no chat template, so it was likely not trained to chat; "
            "give chat_template, or use generate() with plain text"
        )
    return own


def _until_final(text: str, final: Message) -> str:
    """Cuts what the template writes after the last message's text."""
    content = str(final.get("content") or "").strip()
    at = text.rfind(content)
    if not content or at < 0:
        raise ValueError("continue_final_message needs a last message with text that the chat template writes as it is")
    return text[: at + len(content)]
