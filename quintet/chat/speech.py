"""Models of speech for the transcriber: their vocabulary, and requests with audio."""

import asyncio
import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from quintet.chat.prompts import Prompt
from quintet.media.audio.encoder_input import SpeechInput
from quintet.media.audio.resample import Samples
from quintet.media.items import MediaItem
from quintet.outputs import CompletionOutput, RequestOutput
from quintet.sampling_params import RequestOutputKind, SamplingParams
from quintet.tokenizers.tokenizer import Tokenizer
from quintet.transcription.alignment import AlignmentSpan
from quintet.transcription.model import PlainModel, SpeechModel, WhisperModel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def speech_model(
    tokenizer: Tokenizer | None, encoder: SpeechInput | None, vocab_size: int, max_model_len: int
) -> SpeechModel | None:
    """Returns the model as one that transcribes, None if it does not. ValueError without a tokenizer, and for one that
    is not Whisper's where the model is."""
    if encoder is None:
        return None
    if tokenizer is None:
        raise ValueError("a model transcribes with its tokenizer; start without skip_tokenizer_init")
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    decode = functools.partial(tokenizer.decode, skip_special_tokens=True)
    if not encoder.mel_bins:
        return PlainModel(encoder.start_ids, decode, max_model_len, encoder.seconds)
    model = WhisperModel.of_tokenizer(tokenizer.added, encode, decode, vocab_size, max_model_len, encoder.seconds)
    return replace(model, aligns=encoder.aligns)


class SpeechRequests(ABC):
    """SpeechEngine by requests with audio. Features of the latest windows are kept, for requests that ask again."""

    def __init__(self, encoder: SpeechInput, kept: int) -> None:
        """`kept`: windows, each with 1 to 2 MB of features."""
        self._encoder, self._kept = encoder, kept
        self._items: dict[tuple[int, int], MediaItem] = {}  # by address and number of samples

    async def generate(self, samples: Samples, prompt: Sequence[int], params: SamplingParams) -> CompletionOutput:
        """As SpeechEngine.generate. Raises as output()."""
        params.output_kind = RequestOutputKind.FINAL_ONLY
        return (await self.output(await self._prompt(prompt, samples), params)).outputs[0]

    async def align(self, samples: Samples, tokens: Sequence[int], span: AlignmentSpan) -> "NDArray[np.float32]":
        """As SpeechEngine.align. Raises as output()."""
        # one token is sampled that is not looked at
        params = SamplingParams(temperature=0, max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        output = await self.output(await self._prompt(tokens, samples, span), params)
        assert output.pooled is not None, "an engine with an encoder of audio aligns"
        return output.pooled

    @abstractmethod
    async def output(self, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        """Returns the finished output of a request; raises what ends it."""

    async def _prompt(self, prompt: Sequence[int], samples: Samples, span: AlignmentSpan | None = None) -> Prompt:
        """Returns decoder tokens with the samples that they are about, at 16 kHz, of which the caller keeps the array,
        and the alignment that is asked for. ValueError if they are more than the encoder takes."""
        place = samples.__array_interface__["data"][0], len(samples)
        item = self._items.pop(place, None)
        if item is None:
            item = await asyncio.to_thread(self._encoder.item, samples, "a window")
        self._items[place] = item  # the latest is last
        while len(self._items) > self._kept:
            self._items.pop(next(iter(self._items)), None)
        return Prompt(list(prompt), encoder=item, alignment=span)
