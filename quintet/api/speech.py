"""Transcription by an AsyncLLM that runs a Whisper or Moonshine model, in this process."""

from contextlib import aclosing
from typing import TYPE_CHECKING

from quintet.chat.prompts import Prompt
from quintet.chat.speech import SpeechRequests, speech_model
from quintet.media.audio.encoder_input import SpeechInput
from quintet.outputs import RequestOutput
from quintet.sampling_params import SamplingParams
from quintet.transcription.transcriber import WINDOWS_AT_ONCE, Transcriber, TranscriptionOptions

if TYPE_CHECKING:
    from quintet.api.async_llm import AsyncLLM


class AsyncSpeechEngine(SpeechRequests):
    """SpeechEngine over an AsyncLLM."""

    def __init__(self, llm: "AsyncLLM", encoder: SpeechInput) -> None:
        super().__init__(encoder, WINDOWS_AT_ONCE)
        self._llm = llm

    async def output(self, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        """As SpeechRequests.output. RuntimeError if the request fails."""
        async with aclosing(self._llm._follow(prompt, params, None, 0)) as outputs:
            [output] = [each async for each in outputs]
        if (error := output.outputs[0].error) is not None:
            raise RuntimeError(f"the engine failed on a window of the audio: {error}")
        return output


def make_transcriber(llm: "AsyncLLM", options: TranscriptionOptions | None = None) -> Transcriber:
    """Returns a transcriber: `await make_transcriber(llm).transcript(samples)`, samples at 16 kHz.

    ValueError if the model does not transcribe, or does not have the options.
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
