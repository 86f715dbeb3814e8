"""A request's prompts as token ids: read, measured against the model's length, tokenized beside the event loop."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from quintet.engine.chat import render_chats
from quintet.engine.prompts import Prompt, parse_prompt
from quintet.engine.strays import sift
from quintet.engine.template import template_variables
from quintet.engine.tokenizer import Tokenizer
from quintet.sampling_params import ParameterError, SamplingParams
from quintet.server.http.embeds import read_embeds
from quintet.server.http.errors import ApiError
from quintet.server.http.gate import Size
from quintet.server.http.infill import infilled
from quintet.server.http.protocol.chat import TemplateFields
from quintet.server.http.protocol.completions import CompletionRequest
from quintet.server.http.sampling import refuse
from quintet.server.http.service import Service

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_PART_KEYS = ("type", "text", "refusal", "annotations", "logprobs", "cache_control", "prompt_cache_breakpoint")
INLINE = 2000  # characters, token ids or bytes of JSON: below, a thread costs more than the work

Result = TypeVar("Result")


async def completion_prompts(service: Service, body: CompletionRequest, params: SamplingParams) -> list[Prompt]:
    """Raises ApiError 400 that names the prompt which cannot be served. Embeddings come first, as vLLM has them."""
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
    params.truncate_prompt_tokens = None  # done
    return prompts


async def _embedded(
    service: Service, body: CompletionRequest, embeds: list[Any], params: SamplingParams
) -> list[Prompt]:
    """Decoded beside the event loop; what does not fit the model is refused as of ids."""
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
    service: Service,
    body: TemplateFields,
    messages: Any,
    size: int,
    params: SamplingParams | None = None,
    **settings: Any,
) -> Prompt:
    """The prompt that a conversation comes to. `size`: bytes of the JSON that it came in, which bound its characters.
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
    """The parts of a message's content that are text; others are refused where they are read."""
    content = message.get("content") if isinstance(message, dict) else None
    for place, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, dict) and part.get("type") in _TEXT_PARTS:
            sift(part, _PART_KEYS, f"{where}.content[{place}]")


def template_text(service: Service) -> str:
    """The chat template, to look for names in: the operator's, or all that the tokenizer has."""
    tokenizer = service.backend.tokenizer
    return service.chat_template or ("" if tokenizer is None else tokenizer.templates)


def told_template(service: Service, given: Mapping[str, Any] | None, template: str) -> dict[str, Any] | None:
    """The variables of a request, and those of the operator that it leaves open and this template reads."""
    known = template_variables(template)
    defaults = service.settings.default_chat_template_kwargs or {}
    return {**{name: each for name, each in defaults.items() if name in known}, **(given or {})} or None


def check_template(service: Service, body: TemplateFields) -> None:
    """Whether the request may bring a template: before anybody runs it. Raises ApiError 400."""
    if body.chat_template is not None and not service.settings.trust_request_chat_template:
        raise ApiError(
            400, "chat_template is not taken from requests here; the server must be started with "
            "--trust-request-chat-template", param="chat_template", code="unsupported_field",
        )  # fmt: skip


def template_options(service: Service, body: TemplateFields) -> dict[str, Any]:
    """Fields of ChatOptions."""
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


async def beside(service: Service, size: int, work: Callable[[], Result], param: str) -> Result:
    """Does work on a text of this size beside the event loop if it is long, and if the gate has room for it.

    A ValueError that names no parameter blames `param`.
    """
    try:
        if size < INLINE:
            return work()
        with service.gate.place(Size(characters=size)):
            return await asyncio.to_thread(work)
    except ParameterError:
        raise
    except ValueError as error:
        raise ApiError(400, str(error), param=param, code="invalid_value") from None


class _Reader:
    """Reads the prompts of one request, in whatever form each came."""

    def __init__(self, service: Service, params: SamplingParams, salt: str | None, special: bool) -> None:
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
    """OpenAI's four forms as one: a list whose first entry is a number is one prompt."""
    if isinstance(prompt, list) and prompt and (isinstance(prompt[0], (str, list))):
        return prompt
    return [prompt]


def _keyed(ids: list[int], text: str | None, salt: str | None) -> dict[str, Any]:
    return {"prompt": text, "prompt_token_ids": ids, "cache_salt": salt}


def _fit(ids: list[int], params: SamplingParams, limit: int, param: str, name: str) -> list[int]:
    """Some of the tokens, if the request asks for that. Raises ApiError 400 if they leave no room for an output."""
    kept = params.kept(len(ids), limit)
    ids = ids if kept == slice(0, len(ids)) else ids[kept]
    if len(ids) >= limit:
        raise _too_long(f"{name} has {len(ids)} tokens", limit, param)
    return ids


def _check_text(tokenizer: Tokenizer, size: int, limit: int, cut: bool, param: str) -> None:
    """Refuses a text that cannot fit before it is tokenized."""
    most = tokenizer.max_chars_per_token
    if not cut and most is not None and size > most * limit:
        raise _too_long(f"{param} has {size} characters, and a token stands for {most} at most", limit, param)


def _too_long(what: str, limit: int, param: str) -> ApiError:
    return ApiError(
        400, f"This model's maximum context length is {limit} tokens with at least one of output, and {what}; shorten "
        "it, or set truncate_prompt_tokens", param=param, code="context_length_exceeded",
    )  # fmt: skip


def need_tokenizer(service: Service) -> Tokenizer:
    if service.backend.tokenizer is None:
        raise ApiError(400, "the engine has no tokenizer; use /v1/completions with token ids", code="no_tokenizer")
    return service.backend.tokenizer


def _text_size(value: Any) -> int:
    """Characters of all text within."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_text_size(each) for each in value.values())
    return sum(_text_size(each) for each in value) if isinstance(value, list) else 0
