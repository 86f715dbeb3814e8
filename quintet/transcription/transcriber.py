"""Transcribes audio of any length with an engine that runs Whisper, or a model that gives text alone (Moonshine).

Speech is cut at silences into spans of at most 30 s; silence is not transcribed at all. Each span is a window; one that
Whisper ends early is followed by a window of the rest. Its windows are decoded again at higher temperatures as
openai-whisper's transcribe.py does it, and have the same limits (Thresholds). Spans are transcribed side by side,
unless each is to see the text before it. Where a model has no timestamps, a window is a segment.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from quintet.media.audio import SAMPLE_RATE
from quintet.media.audio.encoder_input import FRAMES_PER_ROW
from quintet.media.audio.log_mel import HOP
from quintet.media.audio.resample import Samples
from quintet.media.audio.silence import Span, SpeechFinder, find_speech, speech_windows
from quintet.media.audio.silero import find_speech_silero, is_installed
from quintet.media.audio.whisper_vocabulary import SECONDS_PER_TIMESTAMP, code_of
from quintet.outputs import CompletionOutput
from quintet.sampling_params import SamplingParams
from quintet.transcription.alignment import AlignmentSpan, token_ends
from quintet.transcription.model import PlainModel, SpeechEngine, SpeechModel, UnsupportedOption, WhisperModel
from quintet.transcription.segments import (
    Segment,
    SegmentJoiner,
    Thresholds,
    compression_ratio,
    mean_logprob,
    parse_window,
)
from quintet.transcription.tokens import TASKS
from quintet.transcription.words import words_of

WINDOWS_AT_ONCE = 16  # of one audio; more fill a step of the engine no better
_SHORTEST_REST = SAMPLE_RATE // 2  # samples behind a window's last timestamp: fewer, with their margin, hold no word
_SHORTEST_ADVANCE = SAMPLE_RATE  # samples that a window advances at least, so that each ends
_LOOK_BACK = 1 / 6  # of a window, in which its quietest place is looked for
_PREVIOUS_UNTIL = 0.5  # temperature above which a text is no previous text, as in openai-whisper
_DEFAULTS = Thresholds()


@dataclass(frozen=True)
class TranscriptionOptions:
    """Options of one transcription. ValueError for a task that Whisper does not have, and without temperatures."""

    task: str = "transcribe"  # or translate, to English
    language: str | None = None  # that is spoken, a code or an English name; None: it is detected
    prompt: str = ""  # text as if it came before the audio: names, spelling, style
    condition_on_previous_text: bool = False  # whether a window sees the text before it; one is decoded at a time then
    word_timestamps: bool = False  # whether segments have their words, with times
    thresholds: Thresholds = _DEFAULTS
    sampling: Mapping[str, Any] = field(default_factory=dict)  # further fields of SamplingParams, such as seed
    windows_at_once: int = WINDOWS_AT_ONCE
    finder: SpeechFinder | None = None  # of speech; None: Silero's model where it is installed, else energy

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"task {self.task[:40]!r} is none of {', '.join(TASKS)}")
        if not self.thresholds.temperatures:
            raise ValueError("thresholds.temperatures is empty; give one at least, such as 0.0")


class Progress(NamedTuple):
    """Next segments of a transcript."""

    segments: list[Segment]  # numbered, in order; may be empty
    until: float  # seconds of the audio up to which it is transcribed
    language: str | None  # code; None while no speech was found


@dataclass(frozen=True)
class Transcript:
    """All segments of an audio."""

    segments: list[Segment]
    language: str | None  # code; None: not given, and there is no speech to detect it from
    seconds: float  # length of the audio


class _Decoded(NamedTuple):
    """Output of one window."""

    prompt: list[int]
    tokens: list[int]
    ended: bool  # by the model: its last token is no text
    temperature: float
    avg_logprob: float
    compression_ratio: float

    @property
    def facts(self) -> dict[str, Any]:
        """Fields of its segments."""
        return {name: getattr(self, name) for name in ("temperature", "avg_logprob", "compression_ratio")}


class _Window(NamedTuple):
    """Segments of a window, with their texts, and its place in seconds."""

    start: float
    end: float
    segments: list[Segment]


def default_finder() -> SpeechFinder:
    """Returns Silero's model where it is installed, else the finder by energy."""
    return find_speech_silero if is_installed() else find_speech


class Transcriber:
    """Transcribes audio with a model. One object may transcribe several at once."""

    def __init__(self, engine: SpeechEngine, model: SpeechModel, options: TranscriptionOptions) -> None:
        """ValueError for a language or a task that the model does not have; UnsupportedOption for other options."""
        _check_options(model, options)
        self._engine, self._model, self._options = engine, model, options
        self._find = options.finder or default_finder()

    async def transcript(self, samples: Samples, progress: Callable[[float], object] | None = None) -> Transcript:
        """Returns the segments of samples [N] at 16 kHz. `progress` gets the seconds that are done.

        Cancelling ends all requests. What the engine raises is raised.
        """
        segments: list[Segment] = []
        language = None if self._options.language is None else code_of(self._options.language)
        async with aclosing(self.progress(samples)) as steps:
            async for step in steps:
                segments += step.segments
                language = step.language
                if progress is not None:
                    progress(step.until)
        return Transcript(segments, language, len(samples) / SAMPLE_RATE)

    async def progress(self, samples: Samples) -> AsyncGenerator[Progress, None]:
        """Yields the transcript piece by piece, in the audio's order; closing it ends all requests."""
        longest = self._model.seconds
        spans = await asyncio.to_thread(speech_windows, samples, longest, self._find, longest * _LOOK_BACK)
        if not spans:
            return
        run = self._run(samples)
        await run.find_language(spans[0])
        joiner = SegmentJoiner()
        async with aclosing(run.windows(spans)) as windows:
            async for window in windows:
                yield Progress(joiner.add(*window), window.end, run.language)

    def _run(self, samples: Samples) -> "_Run":
        engine, model, options = self._engine, self._model, self._options
        if isinstance(model, PlainModel):
            return _PlainRun(engine=engine, model=model, options=options, samples=samples)
        return _WhisperRun(engine=engine, model=model, options=options, samples=samples, find=self._find)


def _check_options(model: SpeechModel, options: TranscriptionOptions) -> None:
    if isinstance(model, WhisperModel):
        if options.word_timestamps and not model.aligns:
            raise UnsupportedOption(
                "word_timestamps", "times of words (word_timestamps) are not there on this device, whose compiled "
                "steps do not show what tokens attend to; leave them out, or run the model with device='cpu'",
            )  # fmt: skip
        model.check_language(options.language, options.task)
        return
    if options.language is not None:
        code_of(options.language)
    wanted = {
        "task": options.task == "translate" and "this model writes what is spoken, and translates nothing",
        "word_timestamps": options.word_timestamps and "this model gives text alone, and no times of words",
        "prompt": options.prompt.strip() and "this model reads no text beside the audio",
        "condition_on_previous_text": options.condition_on_previous_text and "this model reads no text before a window",
    }
    for option, why in wanted.items():
        if why:
            raise UnsupportedOption(option, f"{option}: {why}; use a Whisper model, or leave it out")


@dataclass(kw_only=True)
class _Run:
    """Transcription of one audio."""

    engine: SpeechEngine
    model: SpeechModel
    options: TranscriptionOptions
    samples: Samples
    language: str | None = None  # code; of models of English alone "en"

    async def find_language(self, span: Span) -> None:
        """Sets the language, if it was given."""
        self.language = None if self.options.language is None else code_of(self.options.language)

    def windows(self, spans: Sequence[Span]) -> AsyncGenerator[_Window, None]:
        """Returns the windows of all spans, in order."""
        return self._side_by_side(spans, ())

    async def _side_by_side(self, spans: Sequence[Span], prompt: Sequence[int]) -> AsyncGenerator[_Window, None]:
        places = asyncio.Semaphore(self.options.windows_at_once)

        async def transcribe(span: Span) -> list[_Window]:
            async with places:
                return [window async for window in self._windows_of(span, prompt)]

        tasks = [asyncio.create_task(transcribe(span)) for span in spans]
        try:
            for task in tasks:
                for window in await task:
                    yield window
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _windows_of(self, span: Span, previous: Sequence[int]) -> AsyncGenerator[_Window, None]:
        raise NotImplementedError

    async def _decode_once(self, place: Span, prompt: Sequence[int], temperature: float, most: int) -> _Decoded:
        """Returns the output of one request, of so many tokens at most."""
        fields = {"max_tokens": most, **self.options.sampling, "temperature": temperature}
        params = SamplingParams(**{**fields, "logprobs": 0, "detokenize": False})
        output = await self._generate(place, prompt, params)
        assert output.logprobs is not None
        tokens = list(output.token_ids)
        drawn = [at[token].logprob for at, token in zip(output.logprobs, tokens, strict=True)]
        text = self.model.text(tokens).strip()
        ended = output.finish_reason == "stop"
        return _Decoded(list(prompt), tokens, ended, temperature, mean_logprob(drawn), compression_ratio(text))

    async def _generate(self, place: Span, prompt: Sequence[int], params: SamplingParams) -> CompletionOutput:
        return await self.engine.generate(self.samples[place.start : place.end], prompt, params)


@dataclass(kw_only=True)
class _PlainRun(_Run):
    """Transcription by a model that gives text alone: a window is a segment, decoded once."""

    model: PlainModel

    async def _windows_of(self, span: Span, previous: Sequence[int]) -> AsyncGenerator[_Window, None]:
        model, temperature = self.model, self.options.thresholds.temperatures[0]
        decoded = await self._decode_once(span, model.prompt, temperature, model.max_tokens(span.seconds))
        start, end = span.start_seconds, span.end / SAMPLE_RATE
        tokens = decoded.tokens[: -1 if decoded.ended else None]
        segment = Segment(start, end, tuple(tokens), model.text(tokens), seek=round(start * 100))
        yield _Window(start, end, [replace(segment, **decoded.facts)])


@dataclass(kw_only=True)
class _WhisperRun(_Run):
    """Transcription by Whisper."""

    model: WhisperModel
    find: SpeechFinder
    _first: tuple[Span, dict[int, float]] | None = None  # log-probabilities that the language was found by

    async def find_language(self, span: Span) -> None:
        """Sets the language: the one that was given, or the likeliest of a span."""
        tokens, given = self.model.tokens, self.options.language
        if given is not None:
            self.language = code_of(given)
        elif not tokens.languages:
            self.language = "en"
        else:
            logprobs = await self._first_logprobs(span)
            self._first = span, logprobs
            self.language = max(tokens.languages, key=lambda code: logprobs[tokens.languages[code]])

    def windows(self, spans: Sequence[Span]) -> AsyncGenerator[_Window, None]:
        """Returns the windows of all spans, in order."""
        if self.options.condition_on_previous_text:
            return self._in_turn(spans)
        return self._side_by_side(spans, self._prompt())

    def _prompt(self) -> list[int]:
        text = self.options.prompt.strip()
        return self.model.encode(" " + text) if text else []

    async def _in_turn(self, spans: Sequence[Span]) -> AsyncGenerator[_Window, None]:
        previous = self._prompt()
        for span in spans:
            async with aclosing(self._windows_of(span, previous)) as windows:
                async for window in windows:
                    previous += [token for each in window.segments if each.text.strip() for token in each.tokens]
                    if any(each.temperature > _PREVIOUS_UNTIL for each in window.segments):
                        previous.clear()
                    yield window

    async def _windows_of(self, span: Span, previous: Sequence[int]) -> AsyncGenerator[_Window, None]:
        start = span.start
        while True:
            window, start = await self._window(Span(start, span.end), previous)
            yield window
            rest = self.samples[start : span.end]
            if len(rest) < _SHORTEST_REST or not await asyncio.to_thread(self.find, rest):
                return

    async def _window(self, place: Span, previous: Sequence[int]) -> tuple[_Window, int]:
        """Returns a window, and the sample from which on it was not transcribed completely."""
        no_speech = await self._no_speech(place)
        decoded = await self._decode(place, previous, no_speech)
        start = place.start_seconds
        if self.options.thresholds.is_silent(no_speech, decoded.avg_logprob):
            return _Window(start, place.end / SAMPLE_RATE, []), place.end
        parsed = parse_window(decoded.tokens, self.model.tokens, start, place.seconds)
        segments, end = parsed.segments, min(round(parsed.next_start * SAMPLE_RATE), place.end)
        if end - place.start < _SHORTEST_ADVANCE:
            end = place.end
        elif place.end - end >= _SHORTEST_REST:
            segments = segments[: parsed.complete]
        facts = {**decoded.facts, "no_speech_prob": no_speech}
        segments = [replace(each, text=self.model.text(each.tokens), **facts) for each in segments]
        if self.options.word_timestamps and any(each.text.strip() for each in segments):
            segments = await self._with_words(segments, decoded, place)
        return _Window(start, end / SAMPLE_RATE, segments), end

    async def _with_words(self, segments: Sequence[Segment], decoded: _Decoded, place: Span) -> list[Segment]:
        """Returns the segments of a window, which are its first tokens, with their words."""
        model, count = self.model, sum(len(each.tokens) for each in segments)
        prompt, samples = decoded.prompt, self.samples[place.start : place.end]
        rows = max(1, min(-(-len(samples) // HOP) // FRAMES_PER_ROW, round(model.seconds / SECONDS_PER_TIMESTAMP)))
        all_tokens = decoded.tokens[: -1 if decoded.tokens[-1] == model.tokens.eot else None]
        aligned = all_tokens[: model.max_positions - 1 - len(prompt)]  # the request has one token of output
        weights = await self.engine.align(samples, [*prompt, *aligned], AlignmentSpan(len(prompt), rows))
        ends = await asyncio.to_thread(token_ends, weights)
        bounds = [0.0, *ends, *[ends[-1]] * (count - len(ends))]
        found, first, start, end = [], 0, place.start_seconds, place.end / SAMPLE_RATE
        for each in segments:
            own = bounds[first : first + len(each.tokens) + 1]
            words = words_of(each.tokens, own, self.language, model.tokens.eot, model.decode)
            found.append(replace(each, words=tuple(word.moved(start, start, end) for word in words)))
            first += len(each.tokens)
        return found

    async def _no_speech(self, place: Span) -> float:
        """Returns the probability that there is no speech; 0 where it is not asked for."""
        token = self.model.tokens.no_speech
        if token is None or self.options.thresholds.no_speech is None:
            return 0.0
        known = self._first is not None and self._first[0] == place
        logprobs = self._first[1] if known and self._first is not None else await self._first_logprobs(place)
        return math.exp(logprobs[token])

    async def _first_logprobs(self, place: Span) -> dict[int, float]:
        """Returns the log-probabilities of languages and of silence behind <|startoftranscript|>."""
        tokens = self.model.tokens
        named = [*tokens.languages.values(), *([] if tokens.no_speech is None else [tokens.no_speech])]
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=0, logprob_token_ids=named, detokenize=False)
        output = await self._generate(place, [tokens.sot], params)
        assert output.logprobs is not None
        return {token: each.logprob for token, each in output.logprobs[0].items()}

    async def _decode(self, place: Span, previous: Sequence[int], no_speech: float) -> _Decoded:
        """Returns the first output that neither repeats itself nor is unlikely, or the last."""
        model, thresholds = self.model, self.options.thresholds
        language = self.language if model.tokens.languages else None
        prompt = model.tokens.prompt(language, self.options.task, previous=previous, max_positions=model.max_positions)
        decoded: _Decoded | None = None
        for temperature in thresholds.temperatures:
            most = min(model.max_positions // 2, model.max_positions - len(prompt))
            decoded = await self._decode_once(place, prompt, temperature, most)
            if not thresholds.needs_fallback(decoded.compression_ratio, decoded.avg_logprob, no_speech):
                break
        assert decoded is not None
        return decoded
