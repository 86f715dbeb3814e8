"""Requests and answers of /v1/audio. Source: OpenAI's API reference, "Audio"; vLLM's speech_to_text/protocol.py."""

from collections.abc import Mapping
from typing import ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field

from quintet.server.http.inputs.body import Body, UnsupportedField

_FORMATS = Literal["json", "text", "srt", "verbose_json", "vtt"]
_NO = ("false", "False", "0")  # values of forms are text
_NO_SPEAKERS = UnsupportedField("speakers are not distinguished; leave it out", ([],))
UNSUPPORTED_FIELDS = {
    "include": UnsupportedField("log-probabilities of tokens are not returned; verbose_json has avg_logprob", ([],)),
    "chunking_strategy": UnsupportedField(
        "audio is always cut at silences; leave it out, or set it to auto", ("auto",)
    ),
    "known_speaker_names": _NO_SPEAKERS,
    "known_speaker_references": _NO_SPEAKERS,
    "use_beam_search": UnsupportedField("outputs are drawn; leave it out", (False, *_NO)),
    "n": UnsupportedField("there is one transcript; leave it out", (1, "1")),
    "length_penalty": UnsupportedField("it belongs to beam search; leave it out", (1, 1.0, "1", "1.0")),
    "include_stop_str_in_output": UnsupportedField("a transcript has no stop strings; leave it out", (False, *_NO)),
    "vllm_xargs": UnsupportedField("logits processors do not run for transcripts; leave it out", ({},)),
    "hotwords": UnsupportedField("write the words into prompt", ("",)),
}


class SpeechBody(Body):
    """Fields that transcriptions and translations share."""

    unsupported_fields: ClassVar[Mapping[str, UnsupportedField]] = UNSUPPORTED_FIELDS

    model: str | None = Field(None, description="the model's name; none is the one that is served")
    language: str | None = Field(
        None, max_length=64, description="that is spoken: an ISO 639-1 code such as en, or its English name; if not "
        "given it is detected in the first speech",
    )  # fmt: skip
    prompt: str | None = Field(
        None, max_length=2**14, description="text as if it came before the audio, in its language: names, spelling, "
        "style; the last 223 tokens count",
    )  # fmt: skip
    response_format: _FORMATS | None = Field(None, description="json if not given")
    temperature: float | None = Field(
        None, ge=0, le=2, description="0 and none: greedy, and drawn at 0.2 to 1.0 where that fails; else only this one"
    )
    stream: bool | None = Field(
        None, description="answer in server-sent events: the text of each piece of audio when it is there"
    )
    stream_include_usage: bool | None = Field(None, description="accepted, not used: the last event has the usage")
    stream_continuous_usage_stats: bool | None = Field(None, description="accepted, not used")
    to_language: str | None = Field(None, max_length=64, description="of the text: of a translation English alone")
    condition_on_previous_text: bool | None = Field(
        None, description="each piece of audio sees the text before it; pieces are then transcribed one after another"
    )
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1, description="of what is drawn at temperatures above 0")
    top_p: float | None = Field(None, gt=0, le=1, description="as in completions; for temperatures above 0")
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1, description="as in completions")
    min_p: float | None = Field(None, ge=0, le=1, description="as in completions")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="as in completions")
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="as in completions")
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, description="as in completions")
    max_completion_tokens: int | None = Field(
        None, ge=1, le=2**31 - 1, description="most tokens of each piece of audio, of which Whisper gives 224"
    )
    priority: int | None = Field(
        None, ge=-(2**31), le=2**31 - 1, description="lower runs first, where the engine schedules by priority"
    )
    request_id: str | None = Field(None, description="the request's name in headers and the log")
    user: str | None = Field(None, description="accepted, not used")
    file_url: str | None = Field(
        None, description="of JSON bodies: the audio as a data: URL in base64; forms have the part `file` instead"
    )


class TranscriptionRequest(SpeechBody):
    """Body of /v1/audio/transcriptions."""

    timestamp_granularities: list[Literal["word", "segment"]] | None = Field(
        None, max_length=2, description="of verbose_json: segment, which it has in any case, and word"
    )


class TranslationRequest(SpeechBody):
    """Body of /v1/audio/translations."""


class DurationUsage(msgspec.Struct, tag="duration"):
    """Length of the audio, in seconds, rounded up."""

    seconds: int


class TranscriptSegment(msgspec.Struct):
    """Segment of verbose_json: a piece of text with its place in the audio, in seconds."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class TranscriptWord(msgspec.Struct):
    """Word of verbose_json with its punctuation, and its place in the audio, in seconds."""

    word: str
    start: float
    end: float


class TranscriptionAnswer(msgspec.Struct, kw_only=True):
    """Answer as json; the fields from `task` on are those of verbose_json."""

    text: str
    usage: DurationUsage
    task: str | UnsetType = UNSET
    language: str | UnsetType = UNSET
    duration: float | UnsetType = UNSET
    segments: list[TranscriptSegment] | UnsetType = UNSET
    words: list[TranscriptWord] | UnsetType = UNSET


class TranscriptEvent(msgspec.Struct, kw_only=True):
    """Event of a stream: transcript.text.delta with `delta`, then transcript.text.done with the whole `text`."""

    type: Literal["transcript.text.delta", "transcript.text.done"]
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    usage: DurationUsage | UnsetType = UNSET
