"""The served model as one that transcribes, and the requests of one transcription as parts of one API call."""

from typing import TYPE_CHECKING

from starlette.requests import HTTPConnection
from starlette.requests import Request as HttpRequest

from quintet.chat.prompts import Prompt
from quintet.chat.speech import SpeechRequests
from quintet.outputs import RequestOutput
from quintet.sampling_params import SamplingParams
from quintet.server.http.app_state import AppState
from quintet.server.http.engine_call import EngineCall, PromptRequest
from quintet.server.http.errors import ApiError
from quintet.server.http.usage import usage_of
from quintet.transcription.model import SpeechModel
from quintet.transcription.transcriber import WINDOWS_AT_ONCE

if TYPE_CHECKING:
    pass


def need_speech(service: AppState) -> SpeechModel:
    """Returns the model. ApiError 400 if it does not transcribe."""
    model = service.models.speech
    if model is None:
        raise ApiError(
            400, "this server's model transcribes no audio; start a server with a model of speech, such as `quintet "
            "serve openai/whisper-base`", code="unsupported",
        )  # fmt: skip
    return model


def open_call(service: AppState, http: HttpRequest) -> EngineCall:
    """Returns a call that takes the place of a transcription's windows, to be entered."""
    return service.call(http, placeholders(windows_at_once(service)), waits=True)


def placeholders(count: int) -> list[PromptRequest]:
    """Returns what takes the place of so many windows, in a call that waits."""
    return [PromptRequest(Prompt([0]), SamplingParams(max_tokens=1))] * count


def windows_at_once(service: AppState) -> int:
    return min(WINDOWS_AT_ONCE, service.capacity.limits.completions)


class CallEngine(SpeechRequests):
    """SpeechEngine over one API call: all of its requests end with the call."""

    def __init__(self, service: AppState, http: HTTPConnection, call: EngineCall, priority: int = 0) -> None:
        encoder = service.backend.model_info.encoder
        assert encoder is not None
        super().__init__(encoder, windows_at_once(service))
        self._call, self._priority = call, priority
        self._usage = usage_of(http)
        self._number = 0

    async def output(self, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        """As SpeechRequests.output. Raises what ends the call, and ApiError if the request fails."""
        ask = PromptRequest(prompt, params, self._priority)
        number, self._number = self._number, self._number + 1
        self._usage.count_prompts([ask])
        output = await self._call.answer(ask)
        self._usage.count_output(number, output)
        return output
