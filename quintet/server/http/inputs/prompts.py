"""Converts a request's prompts to token ids: checks their length, tokenizes long ones in a worker thread."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from quintet.chat.messages import render_chats
from quintet.chat.prompts import Prompt, parse_prompt
from quintet.chat.template import template_variables
from quintet.common.unknown_fields import sift
from quintet.sampling_params import ParameterError, SamplingParams
from quintet.server.http.app_state import AppState
from quintet.server.http.capacity import RequestCost
from quintet.server.http.errors import ApiError
from quintet.server.http.inputs.infill import infilled
from quintet.server.http.inputs.prompt_embeds import read_embeds
from quintet.server.http.inputs.sampling_params import refuse
from quintet.server.http.openai.chat_protocol import TemplateFields
from quintet.server.http.openai.completions_protocol import CompletionRequest
from quintet.tokenizers.tokenizer import Tokenizer

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_PART_KEYS = ("type", "text", "refusal", "annotations", "logprobs", "cache_control", "prompt_cache_breakpoint")
INLINE = 2000  # characters, token ids or bytes of JSON; below that a thread costs more than the work

Result = TypeVar("Result")


async def completion_prompts(service: AppState, body: CompletionRequest, params: SamplingParams) -> list[Prompt]:
    """Reads all prompts; embeddings come first, as in vLLM. Raises ApiError 400 with the name of the bad prompt."""
    embeds = [] if body.prompt_embeds is None else _listed(body.prompt_embeds)
    if not embeds and body.prompt is None:
        raise refuse("prompt", "is missing: give text, token ids, or prompt_embeds")
    given = _listed(body.prompt) if body.prompt or not embeds else []
    most = service.settings.max_prompts
    if len(given) + len(embeds) > most:
        count = len(given) + len(embeds)
        raise refuse("prompt", f"holds {count} prompts, and the server takes {most}; send several requests")
    if embeds and body.echo:
        raise refuse("echo", "shows the prompt's text, and embeddings have none; leave it out")
    if body.suffix:
        given = infilled(need_tokenizer(service), body, given, params)
    reader = _Reader(service, params, body.cache_salt, body.add_special_tokens is not False)

    def read() -> list[Prompt]:
        named = len(given) > 1
        return [reader.read(each, f"prompt {place}" if named else "the prompt") for place, each in enumerate(given)]

    size = sum(len(each) for each in given if isinstance(each, (str, list)))
    prompts = await beside(service, size, read, "prompt")
    if embeds:
        prompts = [*await _embedded(service, body, embeds, params), *prompts]
    params.truncate_prompt_tokens = None  # already applied
    return prompts


async def _embedded(
    service: AppState, body: CompletionRequest, embeds: list[Any], params: SamplingParams
) -> list[Prompt]:
    """Decodes embeddings in a worker thread; applies truncation and length limit as for token ids."""
    served, salt = service.backend.served, body.cache_salt

    def read() -> list[Prompt]:
        named = [(each, f"prompt_embeds {at}") for at, each in enumerate(embeds)]
        return [read_embeds(each, served, name, salt) for each, name in named]

    prompts = await beside(service, INLINE, read, "prompt_embeds")
    return [_cut(each, params, served.max_model_len) for each in prompts]


def _cut(prompt: Prompt, params: SamplingParams, limit: int) -> Prompt:
    ids = _fit(prompt.token_ids, params, limit, "prompt_embeds", "the prompt")
    row, kept = len(prompt.embeds) // len(prompt.token_ids), params.kept(len(prompt.token_ids), limit)  # bytes
    return Prompt(ids, None, prompt.cache_salt, prompt.embeds[row * kept.start : row * kept.stop])


async def chat_prompt(
    service: AppState,
    body: TemplateFields,
    messages: Any,
    size: int,
    params: SamplingParams | None = None,
    **settings: Any,
) -> Prompt:
    """Renders a conversation to a prompt. `size`: bytes of its JSON, an upper bound of its characters.
    `settings`: cache_salt, add_special_tokens."""
    tokenizer, options = need_tokenizer(service), template_options(service, body)
    salt, special = settings.get("cache_salt"), bool(settings.get("add_special_tokens"))
    limit = service.backend.served.max_model_len
    if not isinstance(messages, list) or not messages or not isinstance(messages[0], Mapping):
        raise refuse("messages", 'must be a list such as [{"role": "user", "content": "Hello"}]')

    def render() -> Prompt:
        if params is not None and params.truncate_prompt_tokens is None:
            _check_text(tokenizer, _text_size(messages), limit, False, "messages")
        for place, message in enumerate(messages):
            _sift_parts(message, f"messages[{place}]")
        prompt = render_chats(tokenizer, messages, read_files=False, **options)[0]
        ids = tokenizer.encode(prompt.text or "", add_special_tokens=True) if special else prompt.token_ids
        if params is None:
            return Prompt(ids, prompt.text, salt)
        ids = _fit(ids, params, limit, "messages", "the conversation")
        return parse_prompt(_keyed(ids, prompt.text, salt), tokenizer, service.backend.served.vocab_size)

    own = body.chat_template is not None or body.tools
    prompt = await beside(service, max(size, INLINE) if own else size, render, "messages")
    if params is not None:
        params.truncate_prompt_tokens = None
    return prompt


def _sift_parts(message: Any, where: str) -> None:
    """Removes unknown fields of text parts of a message's content; other parts are refused where they are read."""
    content = message.get("content") if isinstance(message, dict) else None
    for place, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, dict) and part.get("type") in _TEXT_PARTS:
            sift(part, _PART_KEYS, f"{where}.content[{place}]")


def template_text(service: AppState) -> str:
    """Returns the template text to search for variables: the operator's, or all templates of the tokenizer."""
    tokenizer = service.backend.tokenizer
    return service.chat_template or ("" if tokenizer is None else tokenizer.templates)


def told_template(service: AppState, given: Mapping[str, Any] | None, template: str) -> dict[str, Any] | None:
    """Returns the request's template variables, plus the operator's defaults that this template reads."""
    known = template_variables(template)
    defaults = service.settings.default_chat_template_kwargs or {}
    return {**{name: each for name, each in defaults.items() if name in known}, **(given or {})} or None


def check_template(service: AppState, body: TemplateFields) -> None:
    """Raises ApiError 400 if the request has a chat template and may not; call before the template is run."""
    if body.chat_template is not None and not service.settings.trust_request_chat_template:
        raise ApiError(
            400, "chat_template is not taken from requests here; the server must be started with "
            "--trust-request-chat-template", param="chat_template", code="unsupported_field",
        )  # fmt: skip


def template_options(service: AppState, body: TemplateFields) -> dict[str, Any]:
    """Returns fields of ChatOptions."""
    check_template(service, body)
    if body.continue_final_message and body.add_generation_prompt:
        raise ApiError(
            400, "continue_final_message and add_generation_prompt exclude each other; set one of them",
            param="continue_final_message", code="invalid_value",
        )  # fmt: skip
    return {
        "tools": body.tools,
        "documents": body.documents,
        "chat_template": body.chat_template or service.chat_template,
        "chat_template_kwargs": told_template(
            service, body.chat_template_kwargs, body.chat_template or template_text(service)
        ),
        "add_generation_prompt": body.add_generation_prompt is not False,
        "continue_final_message": bool(body.continue_final_message),
    }


async def beside(service: AppState, size: int, work: Callable[[], Result], param: str) -> Result:
    """Runs `work` on a text of this size: in a worker thread if it is long, and if the gate has capacity.

    A ValueError without a parameter becomes ApiError 400 for `param`.
    """
    try:
        if size < INLINE:
            return work()
        with service.gate.place(RequestCost(characters=size)):
            return await asyncio.to_thread(work)
    except ParameterError:
        raise
    except ValueError as error:
        raise ApiError(400, str(error), param=param, code="invalid_value") from None


class _Reader:
    """Reads the prompts of one request: text or token ids."""

    def __init__(self, service: AppState, params: SamplingParams, salt: str | None, special: bool) -> None:
        self._served, self._tokenizer = service.backend.served, service.backend.tokenizer
        self._params, self._salt, self._special = params, salt, special

    def read(self, prompt: Any, name: str) -> Prompt:
        limit, vocab_size, text = self._served.max_model_len, self._served.vocab_size, None
        cut = self._params.truncate_prompt_tokens is not None
        if isinstance(prompt, str):
            text = prompt
            if self._tokenizer is None:
                raise ValueError(f"{name} is text, but the engine has no tokenizer; give token ids")
            _check_text(self._tokenizer, len(text), limit, cut, "prompt")
            ids = self._tokenizer.encode(text, add_special_tokens=self._special)
        elif isinstance(prompt, list):
            ids = prompt
        else:
            raise ValueError(f"{name} must be text or a list of token ids, not {type(prompt).__name__}")
        kept = _fit(ids, self._params, limit, "prompt", name)
        text = text if kept is ids else None
        return parse_prompt(_keyed(kept, text, self._salt), self._tokenizer, vocab_size, name)


def _listed(prompt: Any) -> list[Any]:
    """Converts OpenAI's four prompt forms to a list; a list that begins with a number is one prompt."""
    if isinstance(prompt, list) and prompt and (isinstance(prompt[0], (str, list))):
        return prompt
    return [prompt]


def _keyed(ids: list[int], text: str | None, salt: str | None) -> dict[str, Any]:
    return {"prompt": text, "prompt_token_ids": ids, "cache_salt": salt}


def _fit(ids: list[int], params: SamplingParams, limit: int, param: str, name: str) -> list[int]:
    """Truncates the tokens if the request asks for it. Raises ApiError 400 if no room is left for output."""
    kept = params.kept(len(ids), limit)
    ids = ids if kept == slice(0, len(ids)) else ids[kept]
    if len(ids) >= limit:
        raise _too_long(f"{name} has {len(ids)} tokens", limit, param)
    return ids


def _check_text(tokenizer: Tokenizer, size: int, limit: int, cut: bool, param: str) -> None:
    """Refuses a text that is too long to fit, before it is tokenized."""
    most = tokenizer.max_chars_per_token
    if not cut and most is not None and size > most * limit:
        raise _too_long(f"{param} has {size} characters, and a token stands for {most} at most", limit, param)


def _too_long(what: str, limit: int, param: str) -> ApiError:
    return ApiError(
        400, f"This model's maximum context length is {limit} tokens with at least one of output, and {what}; shorten "
        "it, or set truncate_prompt_tokens", param=param, code="context_length_exceeded",
    )  # fmt: skip


def need_tokenizer(service: AppState) -> Tokenizer:
    if service.backend.tokenizer is None:
        raise ApiError(400, "the engine has no tokenizer; use /v1/completions with token ids", code="no_tokenizer")
    return service.backend.tokenizer


def _text_size(value: Any) -> int:
    """Counts characters of all strings in a nested value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_text_size(each) for each in value.values())
    return sum(_text_size(each) for each in value) if isinstance(value, list) else 0
