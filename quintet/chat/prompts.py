"""The forms in which a caller may give prompts, brought to one: token ids, with the text where there was one."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from numbers import Integral
from typing import Any, TypedDict

from quintet.chat.encoder_prompts import is_encoder_prompt, split_prompt, split_texts
from quintet.chat.prompt_embeds import embeds_bytes
from quintet.common.suggestions import refuse_unknown
from quintet.config.schema.unsupported import PROMPT_KEYS
from quintet.lora.request import LoRAReference
from quintet.media.audio.encoder_input import SpeechInput
from quintet.media.encoder_text import TEXT, TextInput
from quintet.media.input import MediaInput
from quintet.media.items import MediaItem
from quintet.media.prompt_data import KEYS as MEDIA_KEYS
from quintet.media.prompt_data import process_prompt
from quintet.sampling_params import ParameterError, SamplingParams
from quintet.tokenizers.tokenizer import Tokenizer, refuse_surrogates
from quintet.transcription.alignment import AlignmentSpan

# how a model takes media: as parts of its prompts, for its encoder alone, or not, for this reason
TakenMedia = MediaInput | SpeechInput | TextInput | str
_KEYS = ("prompt", "prompt_token_ids", "prompt_embeds", "cache_salt", "token_type_ids")
_TOGETHER = 1024  # texts that are encoded at once
SEGMENTS = 2**15  # far more than any model tells apart
NO_MEDIA = "this model takes text alone"
_FORMS = "a prompt is text, a list of token ids, or a dict with 'prompt', 'prompt_token_ids' or 'prompt_embeds'"


class _Salted(TypedDict, total=False):
    cache_salt: str  # requests share cached pages only with the same salt


class TextPrompt(_Salted):
    """A prompt as text, in a dict."""

    prompt: str


class TokensPrompt(_Salted):
    """A prompt as token ids, in a dict."""

    prompt_token_ids: list[int]


PromptType = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]
"""What a caller may give as one prompt: text, token ids, or a dict with either or {"prompt_embeds": tensor}."""


@dataclass(frozen=True)
class Prompt:
    """One prompt, ready for the engine."""

    token_ids: list[int]  # never empty, each in 0 .. vocab_size - 1; of a prompt of embeddings, 0s that hold places
    text: str | None = None  # None if it was given as token ids
    cache_salt: str | None = None  # requests share cached pages only with the same salt
    embeds: bytes = b""  # what stands in the place of the ids: float32, a row for each
    types: bytes = b""  # int32, the segment of each id; none: all are of segment 0
    lora: LoRAReference | None = None  # the adapter that it is answered with
    encoder: MediaItem | None = None  # what the model's encoder takes
    alignment: AlignmentSpan | None = None  # attention to it that is asked for, instead of text
    media: tuple[MediaItem, ...] = ()  # pictures and the like, in the order of their tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, and of the text that the model's encoder takes."""
        text = self.encoder if self.encoder is not None and self.encoder.kind == TEXT else None
        return len(self.token_ids) + (0 if text is None else text.count)

    @property
    def salt(self) -> bytes:
        """Bytes that keep the cached pages of tenants, adapters and encoded media apart."""
        salt = (self.cache_salt or "").encode()
        if self.encoder is not None:
            salt = blake2b(salt, key=self.encoder.digest, digest_size=32, person=b"quintet-media").digest()
        return salt if self.lora is None else self.lora.salted(salt)


class ContextLengthError(ParameterError):
    """A prompt that leaves no token of the context for output."""

    def __init__(self, limit: "PromptLimit", what: str) -> None:
        super().__init__(limit.parameter, what, "context_length_exceeded")
        self.args = (
            f"This model's maximum context length is {limit.tokens} tokens with at least one of output, and {what}; "
            f"{limit.remedy}",
        )


@dataclass(frozen=True)
class PromptLimit:
    """Most tokens of prompt and output, and the field and the remedy for errors."""

    tokens: int
    parameter: str = "prompt"
    remedy: str = "shorten it, or set truncate_prompt_tokens"

    def check_text(self, size: int, tokenizer: Tokenizer) -> None:
        """Raises ContextLengthError for a text of `size` characters that cannot fit, before it is tokenized."""
        most = tokenizer.max_chars_per_token
        if most is not None and size > most * self.tokens:
            raise ContextLengthError(
                self, f"{self.parameter} has {size} characters, and a token stands for {most} at most"
            )

    def fit(self, ids: list[int], params: SamplingParams, name: str) -> list[int]:
        """Truncates the tokens if the request asks for it. Raises ContextLengthError if no room is left for output."""
        kept = params.kept(len(ids), self.tokens)
        ids = ids if kept == slice(0, len(ids)) else ids[kept]
        if len(ids) >= self.tokens:
            raise ContextLengthError(self, f"{name} has {len(ids)} tokens")
        return ids

    def fit_whole(self, ids: list[int], params: SamplingParams, name: str) -> None:
        """Checks a prompt with media, which is not truncated. Raises ParameterError if it would be."""
        if params.kept(len(ids), self.tokens) != slice(0, len(ids)):
            raise ParameterError(
                "truncate_prompt_tokens", f"would cut {name} of {len(ids)} tokens, which has media; leave it out, or "
                "send fewer media",
            )  # fmt: skip
        self.fit(ids, params, name)


def parse_prompts(
    prompts: Any, tokenizer: Tokenizer | None, vocab_size: int, width: int = 0, media: TakenMedia = NO_MEDIA
) -> list[Prompt]:
    """One prompt or a list of them. `vocab_size` is the model's; so is `width`, of embeddings that prompts may be, or 0
    where they may not. `media`: makes prompts with media ready, or says why there may be none. Raises ValueError that
    says which prompt and why."""
    if not isinstance(prompts, (list, tuple)) or (prompts and _is_number(prompts[0])):
        return [parse_prompt(prompts, tokenizer, vocab_size, width=width, media=media)]
    parsed: list[Prompt] = []
    for first in range(0, len(prompts), _TOGETHER):
        named = [(each, f"prompt {first + i}") for i, each in enumerate(prompts[first : first + _TOGETHER])]
        if (
            tokenizer is not None
            and not isinstance(media, SpeechInput | TextInput)
            and len(named) > 1
            and all(isinstance(each, str) for each, _ in named)
        ):
            parsed += _texts(named, tokenizer, vocab_size)
        else:
            parsed += [parse_prompt(each, tokenizer, vocab_size, name, width, media) for each, name in named]
    return parsed


def _texts(named: Sequence[tuple[str, str]], tokenizer: Tokenizer, vocab_size: int) -> list[Prompt]:
    """Texts and their names, encoded together."""
    for text, name in named:
        refuse_surrogates(text, name)
    encoded = tokenizer.encode_all([text for text, _ in named])
    return [
        Prompt(_check_tokenizer_ids(ids, vocab_size, name), text)
        for ids, (text, name) in zip(encoded, named, strict=True)
    ]


def parse_prompt(  # of a model: its tokenizer, and what else prompts may be
    prompt: Any, tokenizer: Tokenizer | None, vocab_size: int, name: str = "the prompt", width: int = 0,
    media: TakenMedia = NO_MEDIA,
) -> Prompt:  # fmt: skip
    """One prompt; `name` is what a message calls it."""
    if isinstance(media, TextInput):
        return _for_text_encoder(prompt, tokenizer, vocab_size, name, media)
    if isinstance(media, SpeechInput) and isinstance(prompt, Mapping) and is_encoder_prompt(prompt):
        decoder, item = split_prompt(prompt, media, name)
        if isinstance(text := decoder.get("prompt"), str) and decoder.get("prompt_token_ids") is None:
            decoder["prompt_token_ids"] = _encode(text, tokenizer, vocab_size, name, special=False)
        return replace(_parse_dict(decoder, tokenizer, vocab_size, name, width), encoder=item)
    if isinstance(prompt, str):
        return Prompt(_encode(prompt, tokenizer, vocab_size, name), prompt)
    if isinstance(prompt, (list, tuple)):
        return Prompt(_check_ids(prompt, vocab_size, name))
    if isinstance(prompt, Mapping):
        if any(prompt.get(key) for key in MEDIA_KEYS):
            with_media = _with_media(prompt, vocab_size, name, media)
            if with_media is not None:
                return with_media
        return _parse_dict(prompt, tokenizer, vocab_size, name, width)
    raise ValueError(f"{name} is of type {type(prompt).__name__}; {_FORMS}")


def _for_text_encoder(
    prompt: Any, tokenizer: Tokenizer | None, vocab_size: int, name: str, encoder: TextInput
) -> Prompt:
    """One prompt of a model whose encoder takes text: the encoder's text is the prompt's, and the decoder's tokens are
    the caller's, without special ones, or those that the model begins with."""
    source, decoder = split_texts(prompt, name)
    whole = f"{name}: 'encoder_prompt'" if decoder is not None else name
    read = _parse_dict(source, tokenizer, encoder.vocab_size, whole, 0)
    given: list[int] | None = None
    if decoder is not None and decoder.get("prompt_token_ids") is not None:
        given = _parse_dict(decoder, tokenizer, vocab_size, f"{name}: 'decoder_prompt'", 0).token_ids
    elif decoder is not None and decoder.get("prompt"):
        given = _encode(decoder["prompt"], tokenizer, vocab_size, f"{name}: 'decoder_prompt'", special=False)
    ids = encoder.decoder_ids(given)
    return Prompt(ids, read.text, read.cache_salt, encoder=encoder.item(read.token_ids, whole))


def _parse_dict(
    prompt: Mapping[Any, Any], tokenizer: Tokenizer | None, vocab_size: int, name: str, width: int
) -> Prompt:
    refuse_unknown("prompt key", map(str, prompt), (*_KEYS, *MEDIA_KEYS), PROMPT_KEYS)
    text, ids, embeds, salt, types = (prompt.get(key) for key in _KEYS)
    if types is not None and ids is None:
        raise ValueError(f"{name}: 'token_type_ids' are of 'prompt_token_ids'; give both, or neither")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{name}: 'prompt' must be text, not {type(text).__name__}")
    _check_salt(salt, name)
    if embeds is not None:
        if ids is not None or text is not None:
            raise ValueError(f"{name}: 'prompt_embeds' are the whole prompt; leave out 'prompt' and 'prompt_token_ids'")
        return embeds_prompt(embeds, width, name, salt)
    if ids is None and text is None:
        raise ValueError(f"{name} has neither 'prompt' nor 'prompt_token_ids' nor 'prompt_embeds'")
    if ids is None:
        return Prompt(_encode(str(text), tokenizer, vocab_size, name), text, salt)
    if not isinstance(ids, (list, tuple)):
        raise ValueError(f"{name}: 'prompt_token_ids' must be a list of ints, not {type(ids).__name__}")
    segments = b"" if types is None else _segments(types, len(ids), name)
    # given both, the ids are run and the text is shown
    return Prompt(_check_ids(ids, vocab_size, name), text, salt, types=segments)


def _check_salt(salt: Any, name: str) -> None:
    if salt is not None and not (isinstance(salt, str) and salt):
        raise ValueError(f"{name}: 'cache_salt' must be text that is not empty, not {salt!r}")
    if salt is not None:
        refuse_surrogates(salt, f"{name}: 'cache_salt'")


def _with_media(prompt: Mapping[Any, Any], vocab_size: int, name: str, media: TakenMedia) -> Prompt | None:
    """Returns a prompt of text or token ids with media; None if it has no media after all."""
    if not isinstance(media, MediaInput):
        why = media if isinstance(media, str) else "this model takes audio for its encoder alone"
        raise ValueError(f"{name}: 'multi_modal_data' is not taken here: {why}")
    refuse_unknown("prompt key", map(str, prompt), ("prompt", "prompt_token_ids", "cache_salt", *MEDIA_KEYS), {})
    text, ids, salt = (prompt.get(key) for key in ("prompt", "prompt_token_ids", "cache_salt"))
    _check_salt(salt, name)
    given: str | list[int]
    if isinstance(ids, (list, tuple)):
        given = _check_ids(ids, vocab_size, name)
    elif ids is None and isinstance(text, str):
        given = text
        refuse_surrogates(text, name)
    else:
        raise ValueError(f"{name} must have 'prompt', a text, or 'prompt_token_ids', a list of ints")
    try:
        made = process_prompt(media, given, prompt, salt)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if made is None:
        return None
    return Prompt(_check_tokenizer_ids(made.token_ids, vocab_size, name), text, salt, media=tuple(made.items))


def _segments(types: Any, count: int, name: str) -> bytes:
    """Returns the checked token types as int32 bytes."""
    if not isinstance(types, (list, tuple)) or len(types) != count:
        raise ValueError(f"{name}: 'token_type_ids' must be a list of {count} ints, one for each token")
    for index, each in enumerate(types):
        if not _is_number(each) or not 0 <= each < SEGMENTS:
            raise ValueError(f"{name}: 'token_type_ids' has {_short(each)} at entry {index}, not a segment's number")
    return array("i", types).tobytes()


def embeds_prompt(embeds: Any, width: int, name: str, salt: str | None = None) -> Prompt:
    """The prompt that is these embeddings."""
    check_enabled(width, name)
    given = embeds_bytes(embeds, width, name)
    return Prompt([0] * (len(given) // (4 * width)), None, salt, given)


def check_enabled(width: int, name: str) -> None:
    """ValueError where prompts may not be embeddings."""
    if not width:
        raise ValueError(
            f"{name}: 'prompt_embeds' are not taken here; start with enable_prompt_embeds=True (--enable-prompt-embeds)"
        )


def _encode(text: str, tokenizer: Tokenizer | None, vocab_size: int, name: str, special: bool = True) -> list[int]:
    """Encodes a text; with `special`, special tokens around it are those that the tokenizer adds."""
    if tokenizer is None:
        raise ValueError(f"{name} is text, but the engine has no tokenizer; give token ids")
    refuse_surrogates(text, name)
    return _check_tokenizer_ids(tokenizer.encode(text, special), vocab_size, name)


def _check_tokenizer_ids(ids: list[int], vocab_size: int, name: str) -> list[int]:
    """Returns a tokenizer's ids, if the model's vocabulary has them all."""
    if not ids:
        raise ValueError(f"{name} is empty: it has no tokens; give at least one")
    if max(ids) >= vocab_size:
        raise ValueError(
            f"{name}: the tokenizer gives token {max(ids)}, but the model's vocabulary has {vocab_size}: "
            "tokenizer and model do not belong together"
        )
    return ids


def _check_ids(ids: Sequence[Any], vocab_size: int, name: str) -> list[int]:
    if not ids:
        raise ValueError(f"{name} is empty: it has no tokens; give at least one")
    if {*map(type, ids)} == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return list(ids)
    for index, token_id in enumerate(ids):
        if not _is_number(token_id):
            raise ValueError(f"{name}: entry {index} is {_short(token_id)}, not a token id (an int); {_FORMS}")
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"{name}: token id {token_id} at entry {index} is not in 0 .. {vocab_size - 1}")
    return [int(token_id) for token_id in ids]


def _is_number(value: Any) -> bool:
    """bool is no number here, numpy's integers are."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _short(value: Any) -> str:
    shown = repr(value) if isinstance(value, (str, bytes, int, float, bool, type(None))) else ""
    return f"{shown[:40]} of type {type(value).__name__}".strip()
