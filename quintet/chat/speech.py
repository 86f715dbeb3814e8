"""Whisper models for the transcriber: their vocabulary, and prompts with audio."""

import functools
from collections.abc import Sequence

from quintet.chat.prompts import Prompt, parse_prompt
from quintet.media.audio.resample import Samples
from quintet.tokenizers.tokenizer import Tokenizer
from quintet.transcription.model import FAMILIES, SpeechModel


def speech_model(tokenizer: Tokenizer | None, family: str, vocab_size: int, max_model_len: int) -> SpeechModel | None:
    """Returns the model as one that transcribes, None if its family does not. ValueError without a tokenizer, and for
    one that is not Whisper's."""
    if family not in FAMILIES:
        return None
    if tokenizer is None:
        raise ValueError("a Whisper model transcribes with its tokenizer; start without skip_tokenizer_init")
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    decode = functools.partial(tokenizer.decode, skip_special_tokens=True)
    return SpeechModel.of_tokenizer(tokenizer.added, encode, decode, vocab_size, max_model_len)


def audio_prompt(prompt: Sequence[int], samples: Samples, vocab_size: int) -> Prompt:
    """Returns decoder tokens with the audio that they are about: at most 30 s of samples at 16 kHz."""
    return parse_prompt({"prompt_token_ids": list(prompt), "multi_modal_data": {"audio": samples}}, None, vocab_size)
