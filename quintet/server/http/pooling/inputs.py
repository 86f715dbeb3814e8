"""Reads the texts of a pooling request in any form, tokenizes them together, truncates and checks each."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quintet.chat.prepare import render
from quintet.chat.prompts import Prompt, parse_prompt
from quintet.engine.pooling.input_processor import PoolingBounds
from quintet.pooling_params import PoolingParams
from quintet.sampling_params import ParameterError
from quintet.server.http.app_state import AppState
from quintet.server.http.errors import ApiError
from quintet.server.http.inputs.chat_input import chat_model, read_chat
from quintet.server.http.inputs.prompts import run_in_thread
from quintet.server.http.inputs.sampling_params import invalid_field
from quintet.server.http.pooling.protocol_requests import InputBody, PoolingBody
from quintet.tokenizers.tokenizer import Tokenizer, refuse_surrogates

SIDES = ("left", "right")


@dataclass(frozen=True)
class TextReader:
    """Reader for the texts of one request. Errors name the text, and are raised before anything runs."""

    service: AppState
    params: PoolingParams  # settled
    salt: str | None = None
    special: bool = True  # let the tokenizer add special tokens
    truncate_left: bool | None = None  # a long text loses its beginning; None: as the tokenizer's files say
    prefix: str = ""  # put before each text
    param: str = "input"  # name of the request's field
    limits: PoolingBounds = field(init=False)

    def __post_init__(self) -> None:
        limits = bounds_of(self.service).with_special_tokens(self.service.backend.tokenizer)
        if self.truncate_left is not None:
            limits = replace(limits, truncates_left=self.truncate_left)
        object.__setattr__(self, "limits", limits)

    async def read(self, given: Sequence[Any]) -> list[Prompt]:
        """Reads texts; each is text or token ids."""
        most = self.service.settings.max_inputs
        if not given:
            raise invalid_field(self.param, "is empty; give at least one text")
        if len(given) > most:
            raise invalid_field(
                self.param, f"holds {len(given)} texts, and the server takes {most}; send several requests"
            )
        size = sum(len(each) for each in given if isinstance(each, (str, list)))
        return await run_in_thread(self.service, size, lambda: self._read(given), self.param)

    def _read(self, given: Sequence[Any]) -> list[Prompt]:
        at = [place for place, each in enumerate(given) if isinstance(each, str)]
        ids = dict(zip(at, self._tokenized([given[place] for place in at], at, len(given)), strict=True))
        found = []
        for place, each in enumerate(given):
            name = self.name(place, len(given))
            found.append(self.make_prompt(ids[place], name, each) if place in ids else self.fit_ids(each, name))
        return found

    def name(self, place: int, count: int) -> str:
        """Returns the name of a text for error messages."""
        return self.param if count == 1 else f"{self.param}[{place}]"

    def _tokenized(self, texts: list[str], at: Sequence[int], count: int) -> list[list[int]]:
        if not texts:
            return []
        tokenizer = self.service.backend.tokenizer
        if tokenizer is None:
            raise ValueError(f"{self.name(at[0], count)} is text, but the engine has no tokenizer; give token ids")
        for place, text in zip(at, texts, strict=True):
            self._check_length(tokenizer, len(text), self.name(place, count))
        return tokenizer.encode_all([self.prefix + each for each in texts], self.special)

    def _check_length(self, tokenizer: Tokenizer, size: int, name: str) -> None:
        """Refuses a text that is too long to fit, before it is tokenized."""
        most = tokenizer.max_chars_per_token
        limit = self.limits.max_model_len
        whole = self.params.truncate_prompt_tokens is None and not self.limits.chunks_long_texts
        if whole and most is not None and size > most * limit:
            raise too_long(f"{name} has {size} characters, and a token stands for {most} at most", limit, self.param)

    def fit_ids(self, ids: Any, name: str) -> Prompt:
        """Checks each of a client's token ids."""
        if not isinstance(ids, list):
            raise ValueError(f"{name} must be text or a list of token ids, not {type(ids).__name__}")
        served = self.service.backend.model_info
        parse_prompt(ids, self.service.backend.tokenizer, served.vocab_size, name)
        return self.make_prompt(ids, name)

    def make_prompt(self, ids: list[int], name: str, text: str | None = None, types: bytes = b"") -> Prompt:
        """Builds the prompt from a text's token ids, truncated as the request asks."""
        return self.fit(Prompt(ids, text, self.salt, types=types), name)

    def fit(self, prompt: Prompt, name: str) -> Prompt:
        """Checks a prompt, and truncates it as the request asks."""
        ids = prompt.token_ids
        size = self.service.backend.model_info.vocab_size
        if not ids:
            raise ValueError(f"{name} is empty: it has no tokens; give at least one")
        if max(ids) >= size:
            raise ValueError(
                f"{name}: the tokenizer gives token {max(ids)}, but the model's vocabulary has {size}: tokenizer and "
                "model do not belong together"
            )
        if self.salt is not None:
            refuse_surrogates(self.salt, "cache_salt")
        keep = self.params.truncate_prompt_tokens
        if self.limits.chunks_long_texts and self.params.task == "embed" and keep is None and not prompt.media:
            self._check_pieces(len(prompt.token_ids), name)
            return prompt
        try:
            admitted = self.limits.admit("", prompt, self.params)
        except ParameterError:
            raise
        except ValueError:
            if len(prompt.token_ids) > self.limits.max_model_len:
                what = f"{name} has {len(prompt.token_ids)} tokens"
                raise too_long(what, self.limits.max_model_len, self.param) from None
            raise
        return replace(prompt, token_ids=list(admitted.prompt_ids), types=admitted.token_types)

    def _check_pieces(self, count: int, name: str) -> None:
        """Checks the length of a text that is embedded in chunks."""
        most = self.limits.max_embed_len
        if most is not None and count > most:
            raise too_long(f"{name} has {count} tokens, which are embedded in pieces", most, self.param)


def bounds_of(service: AppState) -> PoolingBounds:
    """Returns the model's pooling limits. Raises ApiError 400 if the model generates text."""
    bounds = service.backend.model_info.pooling
    if bounds is None:
        raise ApiError(
            400, "this server's model generates text and gives no numbers; start the server with an embedding model "
            "(`quintet serve bundled-embed` needs no download), a classifier or a reranker, or with --runner pooling",
            code="unsupported",
        )  # fmt: skip
    return bounds


def resolve_params(service: AppState, params: PoolingParams, task: str | None, route: str) -> PoolingParams:
    """Returns the params with a task of the model. Raises ApiError 400 with a remedy if the model lacks the task."""
    bounds = bounds_of(service)
    if task is not None and task not in bounds.tasks:
        raise ApiError(
            400, f"{route} needs the task {task!r}, and this server's model has {', '.join(bounds.tasks)}; "
            f"{_other_route(bounds.tasks)}", code="unsupported",
        )  # fmt: skip
    return bounds.resolve_params(params, task)


def _other_route(tasks: Sequence[str]) -> str:
    routes = {"embed": "/v1/embeddings", "classify": "/classify", "score": "/score"}
    there = [route for task, route in routes.items() if task in tasks] or ["/pooling"]
    return f"ask {' or '.join(there)}, or serve another model"


def truncates_left(body: PoolingBody) -> bool | None:
    """True if a text is truncated on the left."""
    if body.truncation_side is not None and body.truncation_side not in SIDES:
        raise invalid_field("truncation_side", f"must be left or right, not {body.truncation_side[:40]!r}")
    return None if body.truncation_side is None else body.truncation_side == "left"


async def read_inputs(service: AppState, body: InputBody, params: PoolingParams) -> list[Prompt]:
    """Reads the body's input or messages."""
    one_of(body, "input", "messages")
    if body.messages is not None:
        return await _conversations(service, body, params)
    default = bounds_of(service).default_prompt
    texts = TextReader(
        service, params, body.cache_salt, body.add_special_tokens is not False, truncates_left(body),
        prompt_named(service, default) if default else "",
    )  # fmt: skip
    return await texts.read(as_list(body.input))


def one_of(body: Any, first: str, second: str) -> None:
    """Raises ApiError 400 unless exactly one of two fields is given."""
    given = [name for name in (first, second) if getattr(body, name) is not None]
    if len(given) == 2:
        raise invalid_field(first, f"and {second} exclude each other; give one of them")
    if not given:
        raise invalid_field(first, f"is missing; give {first} or {second}")


async def _conversations(service: AppState, body: InputBody, params: PoolingParams) -> list[Prompt]:
    """Reads one conversation, or a list of them."""
    model = chat_model(service)
    body.add_generation_prompt = bool(body.add_generation_prompt)
    texts = TextReader(service, params, body.cache_salt, truncate_left=truncates_left(body), param="messages")
    several = isinstance(body.messages, list) and body.messages and isinstance(body.messages[0], list)
    given = body.messages if several else [body.messages]
    most = service.settings.max_inputs
    if len(given) > most:
        raise invalid_field(
            "messages", f"holds {len(given)} conversations, and the server takes {most}; send several requests"
        )
    special = bool(body.add_special_tokens)
    found = [
        await render(read_chat(service, body, each, cache_salt=body.cache_salt, add_special_tokens=special), model)
        for each in given
    ]
    return [texts.fit(each, texts.name(at, len(found))) for at, each in enumerate(found)]


def as_list(given: Any) -> list[Any]:
    """Converts OpenAI's four input forms to a list; a list that begins with a number is one text."""
    if isinstance(given, list) and (not given or isinstance(given[0], (str, list))):
        return given
    return [given]


def prompt_named(service: AppState, name: str) -> str:
    """Returns a prompt prefix of the model's files; empty if there is none of that name."""
    return bounds_of(service).prompts.get(name, "")


def too_long(what: str, limit: int, param: str) -> ApiError:
    return ApiError(
        400, f"This model's maximum context length is {limit} tokens, and {what}; shorten it, or set "
        "truncate_prompt_tokens (-1 cuts what is too much)", param=param, code="context_length_exceeded",
    )  # fmt: skip
