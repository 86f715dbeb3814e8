"""Converts a request's prompts to token ids: checks their length, tokenizes long ones in a worker thread."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from quintet.chat.prepare import MAX_INLINE_CHARACTERS
from quintet.chat.prompts import NO_MEDIA, Prompt, PromptLimit, parse_prompt
from quintet.sampling_params import ParameterError, SamplingParams
from quintet.server.http.app_state import AppState
from quintet.server.http.capacity import RequestCost
from quintet.server.http.errors import ApiError
from quintet.server.http.inputs.infill import infill_texts
from quintet.server.http.inputs.prompt_embeds import read_embeds
from quintet.server.http.inputs.sampling_params import invalid_field
from quintet.server.http.openai.completions_protocol import CompletionRequest
from quintet.tokenizers.tokenizer import Tokenizer

Result = TypeVar("Result")


async def completion_prompts(service: AppState, body: CompletionRequest, params: SamplingParams) -> list[Prompt]:
    """Reads all prompts; embeddings come first, as in vLLM. Raises ApiError 400 with the name of the bad prompt."""
    embeds = [] if body.prompt_embeds is None else _as_list(body.prompt_embeds)
    if not embeds and body.prompt is None:
        raise invalid_field("prompt", "is missing: give text, token ids, or prompt_embeds")
    given = _as_list(body.prompt) if body.prompt or not embeds else []
    most = service.settings.max_prompts
    if len(given) + len(embeds) > most:
        count = len(given) + len(embeds)
        raise invalid_field("prompt", f"holds {count} prompts, and the server takes {most}; send several requests")
    if embeds and body.echo:
        raise invalid_field("echo", "shows the prompt's text, and embeddings have none; leave it out")
    if body.suffix:
        given = infill_texts(need_tokenizer(service), body, given, params)
    reader = PromptReader(service, params, body.cache_salt, body.add_special_tokens is not False)

    def read() -> list[Prompt]:
        named = len(given) > 1
        return [reader.read(each, f"prompt {place}" if named else "the prompt") for place, each in enumerate(given)]

    size = sum(len(each) for each in given if isinstance(each, (str, list)))
    prompts = await run_in_thread(service, size, read, "prompt")
    if embeds:
        prompts = [*await _embeds_prompts(service, body, embeds, params), *prompts]
    params.truncate_prompt_tokens = None  # already applied
    return prompts


async def _embeds_prompts(
    service: AppState, body: CompletionRequest, embeds: list[Any], params: SamplingParams
) -> list[Prompt]:
    """Decodes embeddings in a worker thread; applies truncation and length limit as for token ids."""
    served, salt = service.backend.model_info, body.cache_salt

    def read() -> list[Prompt]:
        named = [(each, f"prompt_embeds {at}") for at, each in enumerate(embeds)]
        return [read_embeds(each, served, name, salt) for each, name in named]

    prompts = await run_in_thread(service, MAX_INLINE_CHARACTERS, read, "prompt_embeds")
    return [_truncate(each, params, served.max_model_len) for each in prompts]


def _truncate(prompt: Prompt, params: SamplingParams, limit: int) -> Prompt:
    ids = PromptLimit(limit, "prompt_embeds").fit(prompt.token_ids, params, "the prompt")
    row, kept = len(prompt.embeds) // len(prompt.token_ids), params.kept(len(prompt.token_ids), limit)  # bytes
    return Prompt(ids, None, prompt.cache_salt, prompt.embeds[row * kept.start : row * kept.stop])


async def run_in_thread(service: AppState, size: int, work: Callable[[], Result], param: str) -> Result:
    """Runs `work` on a text of this size: in a worker thread if it is long, and if the gate has capacity.

    A ValueError without a parameter becomes ApiError 400 for `param`.
    """
    try:
        if size < MAX_INLINE_CHARACTERS:
            return work()
        with service.capacity.holding(RequestCost(characters=size)):
            return await asyncio.to_thread(work)
    except ParameterError:
        raise
    except ValueError as error:
        raise ApiError(400, str(error), param=param, code="invalid_value") from None


class PromptReader:
    """Reads the prompts of one request: text or token ids."""

    def __init__(self, service: AppState, params: SamplingParams, salt: str | None, special: bool) -> None:
        self._served, self._tokenizer = service.backend.model_info, service.backend.tokenizer
        self._params, self._salt, self._special = params, salt, special

    def read(self, prompt: Any, name: str) -> Prompt:
        source, text = self._served.source, None
        limit = PromptLimit(self._served.max_model_len if source is None else source.rows + 1)
        if isinstance(prompt, str):
            text = prompt
            if self._tokenizer is None:
                raise ValueError(f"{name} is text, but the engine has no tokenizer; give token ids")
            if self._params.truncate_prompt_tokens is None:
                limit.check_text(len(text), self._tokenizer)
            ids = self._tokenizer.encode(text, add_special_tokens=self._special)
        elif isinstance(prompt, list):
            ids = prompt
        else:
            raise ValueError(f"{name} must be text or a list of token ids, not {type(prompt).__name__}")
        kept = limit.fit(ids, self._params, name)
        keyed = {"prompt": text if kept is ids else None, "prompt_token_ids": kept, "cache_salt": self._salt}
        return parse_prompt(keyed, self._tokenizer, self._served.vocab_size, name, media=source or NO_MEDIA)


def _as_list(prompt: Any) -> list[Any]:
    """Converts OpenAI's four prompt forms to a list; a list that begins with a number is one prompt."""
    if isinstance(prompt, list) and prompt and (isinstance(prompt[0], (str, list))):
        return prompt
    return [prompt]


def need_tokenizer(service: AppState) -> Tokenizer:
    if service.backend.tokenizer is None:
        raise ApiError(400, "the engine has no tokenizer; use /v1/completions with token ids", code="no_tokenizer")
    return service.backend.tokenizer
