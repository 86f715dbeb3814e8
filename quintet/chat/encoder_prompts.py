"""Prompts of encoder-decoder models: media or text for the encoder, and the decoder's tokens, in vLLM's forms."""

from collections.abc import Mapping
from typing import Any

from quintet.media.audio.encoder_input import SpeechInput
from quintet.media.items import AUDIO, MediaItem

MEDIA = "multi_modal_data"
_PARTS = ("encoder_prompt", "decoder_prompt")
_TEXTS = ("prompt", "prompt_token_ids")
_FORM = "{'prompt_token_ids': [...], 'multi_modal_data': {'audio': samples}}"


def is_encoder_prompt(prompt: Mapping[Any, Any]) -> bool:
    """Returns whether a prompt names what an encoder takes."""
    return any(key in prompt for key in (MEDIA, *_PARTS))


def split_prompt(prompt: Mapping[Any, Any], encoder: SpeechInput, name: str) -> tuple[dict[Any, Any], MediaItem]:
    """Returns the decoder's prompt in a dict, and what its encoder takes. ValueError where they are in no known form.
    `name` is what a message calls the prompt."""
    flat = _flattened(prompt, name) if any(key in prompt for key in _PARTS) else dict(prompt)
    media = flat.pop(MEDIA, None)
    if flat.get("prompt") is None and flat.get("prompt_token_ids") is None:
        flat["prompt_token_ids"] = list(encoder.start_ids)
    if not isinstance(media, Mapping) or list(media) != [AUDIO]:
        raise ValueError(f"{name}: {MEDIA!r} must be a dict with 'audio' alone; give {_FORM}")
    return flat, encoder.item(media[AUDIO], name)


def split_texts(prompt: Any, name: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Returns the encoder's prompt, with a cache_salt, and the decoder's (None: the caller gives none), in dicts with
    'prompt' or 'prompt_token_ids'. A prompt that names neither part is the encoder's. ValueError where they are in no
    known form."""
    if not isinstance(prompt, Mapping) or not any(key in prompt for key in _PARTS):
        return _as_text(prompt, name, ("cache_salt",)), None
    if unknown := [str(key) for key in prompt if key not in (*_PARTS, "cache_salt")]:
        raise ValueError(
            f"{name}: beside 'encoder_prompt' and 'decoder_prompt' there may be 'cache_salt', not "
            f"{', '.join(unknown)[:80]}"
        )
    encoder, decoder = (prompt.get(key) for key in _PARTS)
    if encoder is None:
        raise ValueError(f"{name}: 'encoder_prompt' is missing; give text, or token ids")
    salt = {key: prompt[key] for key in ("cache_salt",) if key in prompt}
    source = {**_as_text(encoder, f"{name}: 'encoder_prompt'"), **salt}
    return source, None if decoder is None else _as_text(decoder, f"{name}: 'decoder_prompt'")


def _as_text(prompt: Any, name: str, beside: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns text, token ids, or a dict with one of them as a dict; `beside`: what it may have, too."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, (list, tuple)):
        return {"prompt_token_ids": prompt}
    if not isinstance(prompt, Mapping):
        raise ValueError(f"{name} is of type {type(prompt).__name__}; give text, token ids, or a dict with one of them")
    given = {str(key): value for key, value in prompt.items() if value is not None}
    if given.get(MEDIA) == {}:  # vLLM's examples have it
        del given[MEDIA]
    if stray := [key for key in given if key not in (*_TEXTS, *beside)]:
        raise ValueError(f"{name}: this model's encoder takes text, and no {', '.join(stray)[:80]}; leave it out")
    return given


def _flattened(prompt: Mapping[Any, Any], name: str) -> dict[Any, Any]:
    """{"encoder_prompt": ..., "decoder_prompt": ...} -> the decoder's prompt with the encoder's media."""
    unknown = [str(key) for key in prompt if key not in (*_PARTS, "cache_salt")]
    encoder, decoder = (prompt.get(key) for key in _PARTS)
    if unknown or not isinstance(encoder, Mapping):
        raise ValueError(
            f"{name}: beside 'encoder_prompt', a dict with {MEDIA!r}, there is 'decoder_prompt' alone"
            + (f", not {', '.join(unknown)[:80]}" if unknown else "")
        )
    if encoder.get("prompt") or encoder.get("prompt_token_ids"):
        raise ValueError(f"{name}: the text of 'encoder_prompt' must be empty: this encoder takes media alone")
    if stray := [str(key) for key in encoder if key not in ("prompt", "prompt_token_ids", MEDIA)]:
        raise ValueError(f"{name}: 'encoder_prompt' has {', '.join(stray)[:80]}; it may have {MEDIA!r} alone")
    if isinstance(decoder, str):
        decoder = {"prompt": decoder}
    elif isinstance(decoder, (list, tuple)):
        decoder = {"prompt_token_ids": decoder}
    elif decoder is None:
        decoder = {}
    if not isinstance(decoder, Mapping) or is_encoder_prompt(decoder):
        raise ValueError(f"{name}: 'decoder_prompt' must be text, token ids, or a dict with one of them")
    salt = {key: value for key, value in prompt.items() if key == "cache_salt"}
    return {**decoder, **salt, MEDIA: encoder.get(MEDIA)}
