"""Whole audio through the transcriber: windows, languages, fallback, silence, order, and ends."""

import asyncio
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quintet.media.audio.resample import Samples
from quintet.media.audio.silence import find_speech
from quintet.transcription.formats import to_text
from quintet.transcription.model import WhisperModel
from quintet.transcription.segments import Thresholds
from quintet.transcription.transcriber import Progress, Transcriber, Transcript, TranscriptionOptions
from tests.transcription.simulated import ENGLISH, TOKENS, Asked, SimulatedEngine, at, model, says, silence, voice

EOT = TOKENS.eot
WORDS = (at(0), 1, 2, at(3), EOT)


def transcriber(engine: SimulatedEngine, names: WhisperModel | None = None, **options: Any) -> Transcriber:
    return Transcriber(engine, names or model(), TranscriptionOptions(finder=find_speech, **options))


async def heard(engine: SimulatedEngine, names: WhisperModel | None = None, **options: Any) -> Transcript:
    return await transcriber(engine, names, **options).transcript(engine.audio)


def long_audio(spans: int) -> Samples:
    """Twenty seconds of speech and four of silence, again and again."""
    return np.concatenate([each for _ in range(spans) for each in (voice(20), silence(4))])


@pytest.mark.parametrize("audio", [silence(0), silence(0.5), silence(65)], ids=["none", "short", "long"])
async def test_silence_asks_nothing_and_gives_no_text(audio: Samples) -> None:
    engine = SimulatedEngine(audio, says(*WORDS))
    found = await heard(engine)
    assert (engine.asked, found.segments, found.language) == ([], [], None)
    assert (await heard(engine, language="German")).language == "de"


async def test_segments_have_their_exact_place_in_the_audio() -> None:
    audio = np.concatenate([silence(7), voice(6), silence(3)])
    engine = SimulatedEngine(audio, says(at(0.2), 1, 2, at(2.5), at(3), 3, at(6.2), EOT))
    found = await heard(engine)
    [asked] = engine.decoded
    assert 6.5 < asked.start < 7 and found.seconds == 16
    assert [(each.id, each.text) for each in found.segments] == [(0, " w1 w2"), (1, " w3")]
    times = [time - asked.start for each in found.segments for time in (each.start, each.end)]
    assert times == pytest.approx([0.2, 2.5, 3, 6.2], abs=1e-5)
    assert found.segments[0].avg_logprob == pytest.approx(-0.2) and found.segments[0].no_speech_prob < 0.01
    assert found.segments[0].temperature == 0 and found.language == "en"


async def test_the_language_is_detected_once_and_used_for_all_windows() -> None:
    engine = SimulatedEngine(long_audio(3), says(*WORDS), languages={"en": -4.0, "de": -0.2, "fr": -3.0})
    found = await heard(engine)
    assert found.language == "de"
    assert {tuple(each.prompt) for each in engine.decoded} == {(TOKENS.sot, 111, TOKENS.transcribe)}
    probes = [each for each in engine.asked if each.is_probe]
    assert len(probes) == 3, "the first window's probe serves for language and silence"
    assert probes[0].prompt == [TOKENS.sot] and probes[0].params.logprob_token_ids == [110, 111, 112, 105]


@pytest.mark.parametrize(
    ("names", "options", "prompt", "probes"),
    [
        (TOKENS, {"language": "French"}, [101, 112, 103], 1),
        (TOKENS, {"language": "de", "task": "translate"}, [101, 111, 102], 1),
        (TOKENS, {"language": "de", "thresholds": Thresholds(no_speech=None)}, [101, 111, 103], 0),
        (ENGLISH, {}, [101], 1),
        (ENGLISH, {"language": "en", "thresholds": Thresholds(no_speech=None)}, [101], 0),
    ],
    ids=["given", "translated", "no-silence", "english", "english-alone"],
)
async def test_prompts_have_language_and_task(names: Any, options: Any, prompt: list[int], probes: int) -> None:
    engine = SimulatedEngine(voice(5), says(*WORDS))
    await heard(engine, model(names), **options)
    assert [each.prompt for each in engine.decoded] == [prompt]
    assert len([each for each in engine.asked if each.is_probe]) == probes


@pytest.mark.parametrize(
    ("names", "options", "reason"),
    [
        (TOKENS, {"language": "xx"}, "none of Whisper's"),
        (TOKENS, {"language": "Welsh"}, "no token for language 'cy'"),
        (ENGLISH, {"language": "de"}, "English alone"),
        (ENGLISH, {"task": "translate"}, "English alone"),
        (TOKENS, {"task": "sing"}, "task 'sing'"),
        (TOKENS, {"thresholds": Thresholds(temperatures=())}, "thresholds.temperatures is empty"),
    ],
)
def test_what_the_model_cannot_do_is_refused_before_anything_is_asked(names: Any, options: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Transcriber(SimulatedEngine(voice(1), says()), model(names), TranscriptionOptions(**options))


def test_words_are_refused_where_none_are_aligned() -> None:
    with pytest.raises(ValueError, match="word_timestamps.*device='cpu'"):
        transcriber(SimulatedEngine(voice(1), says()), replace(model(), aligns=False), word_timestamps=True)


def unlikely_until(temperature: float) -> Any:
    def script(asked: Asked) -> tuple[tuple[int, ...], float]:
        drawn = asked.params.temperature
        return (at(0), 50 if drawn < temperature else 5, at(4), EOT), -2.0 if drawn < temperature else -0.3

    return script


async def test_an_unlikely_text_is_asked_for_again_at_higher_temperatures() -> None:
    engine = SimulatedEngine(voice(5), unlikely_until(0.4))
    found = await heard(engine, sampling={"seed": 3, "top_k": 40})
    assert [each.params.temperature for each in engine.decoded] == [0, 0.2, 0.4]
    assert {(each.params.seed, each.params.top_k) for each in engine.decoded} == {(3, 40)}
    assert len({(each.start, each.seconds) for each in engine.asked}) == 1, "the same samples: encoded once"
    [segment] = found.segments
    assert (segment.text, segment.temperature) == (" w5", 0.4) and segment.avg_logprob == pytest.approx(-0.3)


async def test_a_text_that_repeats_itself_is_asked_for_again() -> None:
    circles = (at(0), *[8, 9] * 60, at(4), EOT)
    engine = SimulatedEngine(voice(5), lambda asked: (circles if asked.params.temperature == 0 else WORDS, -0.1))
    [segment] = (await heard(engine)).segments
    assert segment.text == " w1 w2" and segment.temperature == 0.2 and segment.compression_ratio < 2.4


async def test_the_last_temperature_is_taken_whatever_it_gives() -> None:
    engine = SimulatedEngine(voice(5), unlikely_until(9))
    [segment] = (await heard(engine)).segments
    assert (segment.text, segment.temperature, len(engine.decoded)) == (" w50", 1.0, 6)
    engine = SimulatedEngine(voice(5), unlikely_until(9))
    await heard(engine, thresholds=Thresholds(temperatures=(0.7,)))
    assert [each.params.temperature for each in engine.decoded] == [0.7]


@pytest.mark.parametrize(
    ("no_speech", "logprob", "texts", "decoded"),
    [(0.9, -1.5, 0, 1), (0.9, -0.3, 1, 1), (0.1, -1.5, 1, 6)],
    ids=["silent", "likely", "speech"],
)
async def test_a_window_without_speech_has_no_text(no_speech: float, logprob: float, texts: int, decoded: int) -> None:
    engine = SimulatedEngine(voice(5), says(*WORDS, logprob=logprob), no_speech=math.log(no_speech))
    found = await heard(engine)
    assert (len(found.segments), len(engine.decoded)) == (texts, decoded)


async def test_a_window_that_ends_early_goes_on_behind_its_last_segment() -> None:
    audio = voice(20)

    def script(asked: Asked) -> tuple[tuple[int, ...], float]:
        if asked.start == 0:
            return (at(0), 1, at(8), at(8), 2, at(12.5), at(12.5), 66, EOT), -0.2  # 66 is cut off: it comes again
        return (at(0), 3, at(7), EOT), -0.2

    engine = SimulatedEngine(audio, script)
    found = await heard(engine)
    assert [(each.start, each.seconds) for each in engine.decoded] == [(0, 20), (12.5, 7.5)]
    assert [(each.text, each.start, each.end) for each in found.segments] == [
        (" w1", 0, 8), (" w2", 8, 12.5), (" w3", 12.5, 19.5),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("audio", "tokens", "texts"),
    [
        (np.concatenate([voice(6), silence(0.3)]), (at(0), 1, at(6), at(6), EOT), [" w1"]),
        (voice(6), (at(0), 1, at(5.8), at(5.8), 2, EOT), [" w1", " w2"]),
        (voice(6), (at(0), 1, at(0.5), at(0.5), 2, EOT), [" w1", " w2"]),
        (voice(6), (1, 2, EOT), [" w1 w2"]),
        (voice(6), (EOT,), []),
        (voice(6), (at(0), 1, at(29), EOT), [" w1"]),
    ],
    ids=["silent-rest", "short-rest", "no-advance", "no-times", "nothing", "beyond"],
)
async def test_no_rest_is_asked_for_that_holds_no_word(audio: Samples, tokens: Any, texts: list[str]) -> None:
    engine = SimulatedEngine(audio, says(*tokens))
    found = await heard(engine)
    assert len(engine.decoded) == 1 and [each.text for each in found.segments] == texts
    assert all(0 <= each.start <= each.end <= 6.3 for each in found.segments)


async def test_a_rest_begins_where_the_last_segment_ended() -> None:
    """Two seconds of silence lie within the window, as the speech on both sides is joined."""
    audio = np.concatenate([voice(6), silence(2), voice(6)])
    engine = SimulatedEngine(audio, lambda asked: ((at(0), 1, at(6), *([] if asked.start else [at(6)]), EOT), -0.1))
    found = await heard(engine)
    assert [(each.start, each.seconds) for each in engine.decoded] == [(0, 14), (6, 8)]
    assert [(each.start, each.end) for each in found.segments] == [(0, 6), (6, 12)]


async def test_windows_run_side_by_side_and_come_in_order() -> None:
    audio = long_audio(6)
    engine = SimulatedEngine(audio, lambda asked: ((at(0), round(asked.start / 24), at(20), EOT), -0.1))
    engine.hang = lambda asked: asked.start == 0 and not asked.is_probe
    found: list[Progress] = []

    async def read() -> None:
        async for each in transcriber(engine, windows_at_once=3).progress(audio):
            found.append(each)

    task = asyncio.create_task(read())
    await engine.hangs.wait()
    while len(engine.decoded) < 6:  # all others have run while the first one hangs
        await asyncio.sleep(0)
    assert found == [] and engine.most <= 3
    engine.go_on.set()
    await task
    texts = [segment.text for each in found for segment in each.segments]
    assert texts == [f" w{number}" for number in range(6)]
    assert [each.until for each in found] == sorted(each.until for each in found)
    assert [segment.id for each in found for segment in each.segments] == list(range(6))


async def test_windows_see_the_text_before_them() -> None:
    """A text that was drawn at more than 0.5 is none that others see; nor is the prompt behind it."""

    def script(asked: Asked) -> tuple[tuple[int, ...], float]:
        second, third = 20 < asked.start < 40, asked.start > 44
        unlikely = second and asked.params.temperature < 0.6
        return (at(0), 2 if second else 3 if third else 1, at(5), EOT), -2.0 if unlikely else -0.2

    engine = SimulatedEngine(long_audio(3), script)
    await heard(engine, language="en", prompt=" w7 w8 ", condition_on_previous_text=True)
    seen = {round(each.start): each.prompt for each in engine.decoded}
    task, first = [TOKENS.sot, 110, TOKENS.transcribe], [TOKENS.start_of_prev, 7, 8]
    assert list(seen.values()) == [first + task, [*first, at(0), 1, at(5), *task], task]
    assert engine.most == 1


async def test_the_prompt_is_before_each_window_where_windows_do_not_see_each_other() -> None:
    engine = SimulatedEngine(long_audio(3), says(*WORDS))
    await heard(engine, language="en", prompt="w7")
    assert [each.prompt for each in engine.decoded] == [[104, 7, 101, 110, 103]] * 3


@pytest.mark.parametrize(("positions", "prompt", "most"), [(448, "", 224), (20, "w1 " * 30, 7), (20, "", 10)])
async def test_tokens_that_fit_are_asked_for(positions: int, prompt: str, most: int) -> None:
    engine = SimulatedEngine(voice(3), says(*WORDS))
    await heard(engine, model(max_positions=positions), prompt=prompt, language="en")
    [asked] = engine.decoded
    assert asked.params.max_tokens == most and len(asked.prompt) + most <= positions
    assert asked.params.logprobs == 0 and not asked.params.detokenize


@pytest.mark.parametrize("previous", [False, True])
async def test_cancelling_ends_all_requests(previous: bool) -> None:
    engine = SimulatedEngine(long_audio(5), says(*WORDS), hang=lambda asked: not asked.is_probe)
    work = transcriber(engine, condition_on_previous_text=previous)
    task = asyncio.create_task(work.transcript(engine.audio))
    await engine.hangs.wait()
    while engine.running < (1 if previous else 5):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.running == 0 and engine.cancelled == (1 if previous else 5)
    asked = len(engine.asked)
    engine.go_on.set()
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(engine.asked) == asked


async def test_an_error_of_the_engine_ends_the_transcript() -> None:
    def script(asked: Asked) -> Any:
        if 20 < asked.start < 40:
            raise RuntimeError("the engine is gone")
        return WORDS, -0.1

    engine = SimulatedEngine(long_audio(4), script, hang=lambda asked: asked.start > 40 and not asked.is_probe)
    with pytest.raises(RuntimeError, match="the engine is gone"):
        await heard(engine)
    assert engine.running == 0


async def test_progress_is_in_seconds_of_the_audio() -> None:
    engine, done = SimulatedEngine(long_audio(3), says(*WORDS)), list[float]()
    found = await transcriber(engine).transcript(engine.audio, done.append)
    assert done == sorted(done) and 60 < done[-1] < 72 and to_text(found.segments) == "w1 w2 w1 w2 w1 w2"


async def test_one_transcriber_serves_several_at_once() -> None:
    engine = SimulatedEngine(long_audio(2), says(*WORDS))
    work = transcriber(engine)
    one, two = await asyncio.gather(work.transcript(engine.audio), work.transcript(engine.audio))
    assert one == two and len(one.segments) == 2


async def test_words_have_their_places_in_the_audio() -> None:
    """A token's word begins where the token before it ends; the simulated alignment divides the window evenly."""
    audio = np.concatenate([silence(7), voice(6), silence(3)])
    engine = SimulatedEngine(audio, says(at(0), 1, 2, at(2.5), at(3), 3, at(6), EOT))
    found = await heard(engine, word_timestamps=True)
    [asked], [(tokens, span)] = engine.decoded, engine.aligned
    assert tokens == [*asked.prompt, at(0), 1, 2, at(2.5), at(3), 3, at(6)] and span.first == len(asked.prompt)
    assert span.rows == -(-round(asked.seconds * 16_000) // 160) // 2
    ends = [0.02 * math.ceil(place * span.rows / 7) for place in range(7)]
    assert [[each.text for each in segment.words] for segment in found.segments] == [[" w1", " w2"], [" w3"]]
    times = [(each.start - asked.start, each.end - asked.start) for segment in found.segments for each in segment.words]
    want = [(ends[0], ends[1]), (ends[1], ends[2]), (ends[4], ends[5])]
    assert np.allclose(times, want, atol=0.031)  # a row early where two paths are equal, and hundredths of seconds


async def test_no_words_are_asked_of_silence_or_without_wish() -> None:
    engine = SimulatedEngine(voice(6), says(*WORDS))
    assert not any(each.words for each in (await heard(engine)).segments) and not engine.aligned
    engine = SimulatedEngine(voice(6), says(at(0), EOT))
    assert not (await heard(engine, word_timestamps=True)).segments and not engine.aligned


async def test_a_transcript_that_fills_the_decoder_is_aligned_but_for_its_end() -> None:
    """A request has one token of output: tokens that have no place end with the last that has."""
    engine = SimulatedEngine(voice(6), says(at(0), *range(1, 9)))
    found = await heard(engine, model(max_positions=10), word_timestamps=True)
    [(tokens, span)] = engine.aligned
    assert len(tokens) == 9 and span.first == 3
    words = [each for segment in found.segments for each in segment.words]
    assert len(words) == 8 and {(each.start, each.end) for each in words[5:]} == {(words[4].end, words[4].end)}
    assert words[3].end < words[4].end
