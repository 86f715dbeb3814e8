"""POST /v1/audio/transcriptions and /v1/audio/translations: audio files to text, subtitles or JSON."""

import math
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet.media.audio.decode import Audio, AudioError
from quintet.server.http.app_state import AppState
from quintet.server.http.audio.inputs import options_of, read_request
from quintet.server.http.audio.protocol import (
    DurationUsage,
    SpeechBody,
    TranscriptEvent,
    TranscriptionAnswer,
    TranscriptionRequest,
    TranslationRequest,
)
from quintet.server.http.audio.speech import CallEngine, need_speech, open_call, windows_at_once
from quintet.server.http.engine_call import EngineCall
from quintet.server.http.errors import ApiError
from quintet.server.http.openapi import documents_route
from quintet.server.http.respond import WholeResponse, app_state_of
from quintet.server.http.sse import DONE, EventStream, encode, event
from quintet.server.http.usage import set_request_name
from quintet.transcription.formats import to_srt, to_text, to_verbose_json, to_vtt
from quintet.transcription.model import UnsupportedOption
from quintet.transcription.segments import Segment
from quintet.transcription.transcriber import Progress, Transcriber, Transcript, TranscriptionOptions

router = APIRouter()
PLAIN = "text/plain; charset=utf-8"
UNKNOWN = "unknown"  # language of audio without speech, where none was given
_FIELDS = {  # of a request, by the names of options
    "word_timestamps": "timestamp_granularities", "prompt": "prompt",
    "condition_on_previous_text": "condition_on_previous_text",
}  # fmt: skip


@router.post("/v1/audio/transcriptions")
@documents_route(
    body=TranscriptionRequest, file="file", answer=TranscriptionAnswer, stream=TranscriptEvent, text="text/plain"
)
async def create_transcription(http: HttpRequest) -> Response:
    """Returns the text of an audio file in the language that is spoken."""
    return await _answer(http, TranscriptionRequest, "transcribe")


@router.post("/v1/audio/translations")
@documents_route(
    body=TranslationRequest, file="file", answer=TranscriptionAnswer, stream=TranscriptEvent, text="text/plain"
)
async def create_translation(http: HttpRequest) -> Response:
    """Returns the text of an audio file, translated to English."""
    return await _answer(http, TranslationRequest, "translate")


async def _answer(http: HttpRequest, kind: type[SpeechBody], task: str) -> Response:
    service = app_state_of(http)
    service.check_ready()
    model = need_speech(service)
    async with read_request(http, kind) as (body, file):
        set_request_name(http, body.request_id)
        await service.choose_model(http, body.model)
        options = replace(options_of(body, task), windows_at_once=windows_at_once(service))
        call = open_call(service, http)
        try:
            transcriber = Transcriber(CallEngine(service, http, call, body.priority or 0), model, options)
        except UnsupportedOption as error:
            raise ApiError(400, str(error), param=_FIELDS.get(error.option), code="unsupported") from None
        except ValueError as error:  # of other options the language alone depends on the model
            raise ApiError(400, f"language: {error}", param="language", code="invalid_value") from None
        await call.__aenter__()
        try:
            audio = await _decoded(service, call, file)
        except BaseException:
            call.close()
            raise
    answer = _Transcription(call, transcriber, audio, options, body.response_format or "json")
    return await (answer.stream() if body.stream else answer.whole())


async def _decoded(service: AppState, call: EngineCall, file: Any) -> Audio:
    try:
        return await call.run_between(service.audio.decode(file))
    except AudioError as error:
        raise ApiError(400, str(error), param="file", code="invalid_audio") from None


@dataclass
class _Transcription:
    """One transcription in its open call."""

    call: EngineCall
    transcriber: Transcriber
    audio: Audio
    options: TranscriptionOptions
    shape: str  # the response_format
    segments: list[Segment] = field(default_factory=list)  # of a stream, so far

    async def whole(self) -> Response:
        """Returns the answer when all of it is there."""
        try:
            transcript = await self.call.run_between(self.transcriber.transcript(self.audio.samples))
            media_type = None if self.shape in ("json", "verbose_json") else PLAIN
            return WholeResponse(self.call, self._content(transcript), media_type)
        except BaseException:
            self.call.close()
            raise

    def _content(self, transcript: Transcript) -> bytes:
        if self.shape in ("srt", "vtt"):
            return (to_srt if self.shape == "srt" else to_vtt)(transcript.segments).encode()
        text = to_text(transcript.segments)
        if self.shape == "text":
            return text.encode() + b"\n"
        if self.shape == "json":
            return encode(TranscriptionAnswer(text=text, usage=self._usage()))
        language = transcript.language or UNKNOWN
        words = self.options.word_timestamps
        facts = to_verbose_json(transcript.segments, self.options.task, language, transcript.seconds, words)
        return encode(msgspec.convert({**facts, "usage": {"type": "duration", "seconds": self._usage().seconds}},
                                      TranscriptionAnswer))  # fmt: skip

    async def stream(self) -> Response:
        """Returns a stream once the first piece is there: what fails before has a status of its own."""
        steps = self.transcriber.progress(self.audio.samples)
        try:
            first = await self.call.run_between(_next(steps))
        except BaseException:
            await steps.aclose()
            self.call.close()
            raise
        return EventStream(self.call, self._events(steps, first))

    async def _events(self, steps: AsyncGenerator[Progress, None], step: Progress | None) -> AsyncIterator[bytes]:
        text = ""
        async with aclosing(steps):
            while step is not None:
                self.segments += step.segments
                whole = to_text(self.segments)
                if len(whole) > len(text):
                    yield event(TranscriptEvent(type="transcript.text.delta", delta=whole[len(text) :]))
                text = whole
                step = await self.call.run_between(_next(steps))
        yield event(TranscriptEvent(type="transcript.text.done", text=text, usage=self._usage()))
        yield DONE

    def _usage(self) -> DurationUsage:
        return DurationUsage(math.ceil(self.audio.seconds))


async def _next(steps: AsyncGenerator[Progress, None]) -> Progress | None:
    return await anext(steps, None)
