"""Transcription by an AsyncLLM that runs a Whisper model, in this process."""

from collections.abc import Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from quintet.chat.prompts import Prompt
from quintet.chat.speech import AudioPrompts, aligning_params, speech_model
from quintet.media.audio.encoder_input import SpeechInput
from quintet.media.audio.resample import Samples
from quintet.outputs import CompletionOutput, RequestOutput
from quintet.sampling_params import RequestOutputKind, SamplingParams
from quintet.transcription.alignment import AlignmentSpan
from quintet.transcription.transcriber import WINDOWS_AT_ONCE, Transcriber, TranscriptionOptions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quintet.api.async_llm import AsyncLLM


class AsyncSpeechEngine:
    """SpeechEngine over an AsyncLLM."""

    def __init__(self, llm: "AsyncLLM", encoder: SpeechInput) -> None:
        self._llm, self._prompts = llm, AudioPrompts(encoder, WINDOWS_AT_ONCE)

    async def generate(self, samples: Samples, prompt: Sequence[int], params: SamplingParams) -> CompletionOutput:
        """As SpeechEngine.generate. RuntimeError if the request fails."""
        return (await self._output(await self._prompts.make(prompt, samples), params)).outputs[0]

    async def align(self, samples: Samples, tokens: Sequence[int], span: AlignmentSpan) -> "NDArray[np.float32]":
        """As SpeechEngine.align. RuntimeError if the request fails."""
        output = await self._output(await self._prompts.make(tokens, samples, span), aligning_params())
        assert output.pooled is not None, "an engine with an encoder of audio aligns"
        return output.pooled

    async def _output(self, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        params.output_kind = RequestOutputKind.FINAL_ONLY
        async with aclosing(self._llm._follow(prompt, params, None, 0)) as outputs:
            [output] = [each async for each in outputs]
        if (error := output.outputs[0].error) is not None:
            raise RuntimeError(f"the engine failed on a window of the audio: {error}")
        return output


def make_transcriber(llm: "AsyncLLM", options: TranscriptionOptions | None = None) -> Transcriber:
    """Returns a transcriber: `await make_transcriber(llm).transcript(samples)`, samples at 16 kHz.

    ValueError if the model does not transcribe, or not the language or task of the options.
    """
    client = llm._client
    limits = client.input_processor.limits
    encoder = limits.encoder if isinstance(limits.encoder, SpeechInput) else None
    model = speech_model(client.tokenizer, encoder, limits.vocab_size, limits.max_model_len)
    if model is None or encoder is None:
        raise ValueError(
            f"{llm.config.model} is of the family {client.family!r}, which transcribes no audio; take a Whisper model, "
            "such as openai/whisper-base"
        )
    return Transcriber(AsyncSpeechEngine(llm, encoder), model, options or TranscriptionOptions())
