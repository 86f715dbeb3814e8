"""Reads llama.cpp's prompts and sampling fields."""

from typing import Any, TypeVar

import msgspec
from starlette.requests import Request as HttpRequest

from quintet.chat.validation import kind_of
from quintet.sampling_params import ParameterError, RequestOutputKind, SamplingParams, StructuredOutputsParams
from quintet.server.http.app_state import AppState
from quintet.server.http.inputs.body import read_body
from quintet.server.http.inputs.infill import (
    add_infill_ends,
    added_tokens,
    need_infill_tokens,
    refuse_marks,
)
from quintet.server.http.inputs.llama_sampling import llama_fields
from quintet.server.http.inputs.prompts import need_tokenizer
from quintet.server.http.inputs.response_format import structured_output_of
from quintet.server.http.inputs.sampling_params import checked_params
from quintet.server.http.llamacpp.protocol import CompletionBody, EmbeddingBody, ExtraFile, InfillBody
from quintet.server.http.respond import app_state_of
from quintet.server.http.served_models import set_adapter
from quintet.tokenizers.tokenizer import Tokenizer

# Tokens before the name of a project, and before the name of each file: Qwen2.5-Coder, StarCoder 2.
_REPOSITORY_TOKENS = (("<|repo_name|>", "<|file_sep|>"), ("<repo_name>", "<file_sep>"))
_PROJECT, _FILE = "myproject", "filename"  # names that llama.cpp writes
_NEVER = -100  # bias of a token that must not be drawn
_MAX_BIASES, _MAX_BIASED_TEXT = 1024, 256  # entries; characters, which are tokenized in the event loop

_NAMES = {"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty", "logprobs": "n_probs", "n": "n_cmpl"}

AnyBody = TypeVar("AnyBody", CompletionBody, InfillBody, EmbeddingBody)


async def read_request(http: HttpRequest, kind: type[AnyBody]) -> tuple[AppState, AnyBody]:
    """Reads a body, and checks that its model is served and ready. Raises ApiError 400, 404 or 503."""
    service, body = app_state_of(http), await read_body(http, kind, any_type=True)
    await service.choose_model(http, body.model)
    if isinstance(body, CompletionBody) and body.lora:
        _choose_adapter(http, service, body)
    service.check_ready()
    return service, body


def _choose_adapter(http: HttpRequest, service: AppState, body: CompletionBody) -> None:
    """Has the request answered with the adapter of `lora` that has the scale 1. Raises ParameterError for others."""
    adapters, chosen = {each.number: each for each in service.models.adapters}, set[int]()
    for each in body.lora or ():
        if each.id not in adapters:
            raise ParameterError("lora", f"has the id {each.id}, and GET /lora-adapters lists none with it")
        if each.scale not in (0, 1):
            raise ParameterError(
                "lora", f"has the scale {each.scale:g}; an adapter has its own (lora_alpha): give 0 or 1"
            )
        if each.scale:
            chosen.add(each.id)
    if len(chosen) > 1:
        raise ParameterError("lora", f"has {len(chosen)} adapters of scale 1, and a request is answered with one")
    if chosen and not service.models.is_base(body.model):
        raise ParameterError("lora", f"has an adapter, and model {str(body.model)[:80]!r} is one; give one of them")
    if chosen:
        set_adapter(http, adapters[chosen.pop()].reference)


def read_params(service: AppState, body: CompletionBody) -> SamplingParams:
    """Returns the params of a body, its structured output included."""
    most = body.max_tokens if body.n_predict is None else body.n_predict
    fields = llama_fields(body, 1 if most == 0 else most)
    fields["output_kind"] = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    if body.n_probs:
        fields["logprobs"] = body.n_probs
    if body.n_cmpl is not None:
        fields["n"] = body.n_cmpl
    if body.ignore_eos is not None:
        fields["ignore_eos"] = body.ignore_eos
    if body.logit_bias:
        fields["logit_bias"] = _biases(service, body.logit_bias)
    params = checked_params(service, fields, _NAMES)
    params.structured_outputs = _structured_output(body)
    return params


def _structured_output(body: CompletionBody) -> StructuredOutputsParams | None:
    wanted = {"grammar": body.grammar or None, "json": body.json_schema}
    given = {name: value for name, value in wanted.items() if value is not None}
    if not given:
        return None
    if len(given) > 1:
        raise ParameterError("grammar", "and json_schema exclude each other; give one of them")
    return structured_output_of(None, "grammar", given)[0]


def _biases(service: AppState, given: Any) -> dict[Any, Any]:
    """Reads pairs of token id or text and bias; of a text, all of its tokens get the bias."""
    pairs = list(given.items()) if isinstance(given, dict) else given
    if not isinstance(pairs, list) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise ParameterError("logit_bias", "must be pairs such as [[15043, 1.0]], or an object")
    if len(pairs) > _MAX_BIASES:
        raise ParameterError("logit_bias", f"has {len(pairs)} entries; at most {_MAX_BIASES}")
    found: dict[Any, Any] = {}
    for token, bias in pairs:
        if not isinstance(token, str) and not _is_token(token):
            raise ParameterError("logit_bias", f"must have token ids or texts, not {kind_of(token)}")
        if isinstance(token, str) and len(token) > _MAX_BIASED_TEXT:
            raise ParameterError("logit_bias", f"has a text of {len(token)} characters; at most {_MAX_BIASED_TEXT}")
        value = _NEVER if bias is False else bias
        if isinstance(token, str) and not token.isdigit():
            ids = need_tokenizer(service).encode(token, add_special_tokens=False)
            found.update(dict.fromkeys(ids, value))
        else:
            found[token] = value
    return found


def text_size(given: Any) -> int:
    """Returns the characters of the texts of a prompt."""
    if isinstance(given, dict):
        return text_size(given.get("prompt_string"))
    return sum(map(text_size, given)) if isinstance(given, list) else len(given) if isinstance(given, str) else 0


def read_prompts(service: AppState, given: Any) -> tuple[list[str | list[int]], bool]:
    """Returns the prompts, and whether they were a list. Raises ParameterError. Lists with texts are tokenized."""
    if isinstance(given, list) and (not given or any(_is_token(part) for part in given)):
        return [_mixed(service, given)], False
    if isinstance(given, list):
        return [_prompt(service, each) for each in given], True
    return [_prompt(service, given)], False


def _prompt(service: AppState, given: Any) -> str | list[int]:
    if isinstance(given, dict):
        if given.get("multimodal_data"):
            raise ParameterError("prompt.multimodal_data", "is not served: models here take text alone; leave it out")
        given = given.get("prompt_string")
    if isinstance(given, list):
        return _mixed(service, given)
    if not isinstance(given, str):
        raise ParameterError("prompt", f"must be text, token ids, or a list of these, not {kind_of(given)}")
    return given


def _mixed(service: AppState, parts: list[Any]) -> list[int]:
    """Returns the ids of texts and ids in one list; special tokens come before the first part, if it is text."""
    if all(_is_token(part) for part in parts):
        return parts
    tokenizer, ids = need_tokenizer(service), list[int]()
    for place, part in enumerate(parts):
        if isinstance(part, str):
            ids += tokenizer.encode(part, add_special_tokens=place == 0)
        elif _is_token(part):
            ids.append(part)
        else:
            raise ParameterError(f"prompt[{place}]", f"must be text or a token id, not {kind_of(part)}")
    return ids


def _is_token(part: Any) -> bool:
    return isinstance(part, int) and not isinstance(part, bool)


def infill_prompt(service: AppState, body: InfillBody, params: SamplingParams) -> str:
    """Returns the text with FIM tokens, and adds the tokens that end an infill to the params. Other files come before
    it, after repository tokens where the tokenizer has some. Source: llama.cpp's format_infill()."""
    tokenizer = need_tokenizer(service)
    marks = need_infill_tokens(tokenizer, "input_suffix")
    extras = _extras(body)
    prefix, suffix, start = body.input_prefix or "", body.input_suffix or "", body.prompt or ""
    texts = {"input_prefix": [prefix], "input_suffix": [suffix], "prompt": [start]}
    texts["input_extra"] = [text for extra in extras for text in (extra.filename, extra.text)]
    refuse_marks(marks, texts)
    add_infill_ends(tokenizer, params)
    before = _extra_text(tokenizer, extras)
    return f"{before}{marks.begin}{prefix}{marks.middle}{suffix}{marks.end}{start}"


def _extras(body: InfillBody) -> list[ExtraFile]:
    try:
        return msgspec.convert(body.input_extra or [], list[ExtraFile])
    except msgspec.ValidationError as error:
        raise ParameterError("input_extra", f"must be objects with filename and text: {error}") from None


def _extra_text(tokenizer: Tokenizer, extras: list[ExtraFile]) -> str:
    if not extras:
        return ""
    known = added_tokens(tokenizer)
    pair = next((pair for pair in _REPOSITORY_TOKENS if set(pair) <= known.keys()), None)
    if pair is None:
        return "".join(extra.text for extra in extras)
    repository, file = pair
    files = "".join(f"{file}{extra.filename}\n{extra.text}" for extra in extras)
    return f"{repository}{_PROJECT}\n{files}{file}{_FILE}\n"
