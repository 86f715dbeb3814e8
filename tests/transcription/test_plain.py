"""Transcription by a model that gives text alone: a window is a segment, and no rule of Whisper is applied."""

from typing import Any

import numpy as np
import pytest

from quintet.transcription.model import PlainModel, UnsupportedOption
from quintet.transcription.transcriber import Transcriber, TranscriptionOptions
from tests.transcription.simulated import SimulatedEngine, says, silence, voice

TEXTS = {1: "Hello", 2: " there.", 3: "\u3053\u3093", 4: "\uc548"}  # of Japanese and Korean letters
MODEL = PlainModel((50,), lambda ids: "".join(TEXTS.get(each, "") for each in ids), 194)
AUDIO = np.concatenate([voice(3), silence(20), voice(20)])


async def transcript(engine: SimulatedEngine, **options: Any) -> Any:
    return await Transcriber(engine, MODEL, TranscriptionOptions(**options)).transcript(AUDIO)


async def test_a_window_is_a_segment() -> None:
    engine = SimulatedEngine(AUDIO, says(1, 2, 99, logprob=-2.0))
    found = await transcript(engine)
    assert found.language is None and len(found.segments) == 3
    for asked, segment in zip(engine.asked, found.segments, strict=True):
        assert asked.prompt == [50] and asked.params.temperature == 0
        assert asked.params.max_tokens == min(193, int(-(-asked.seconds * 13 // 1)) + 2)
        assert (segment.start, segment.end) == pytest.approx((asked.start, asked.start + asked.seconds))
        assert (segment.text, segment.tokens, segment.avg_logprob) == (" Hello there.", (1, 2), -2.0)
        assert segment.end - segment.start <= MODEL.seconds


async def test_unlikely_text_is_not_decoded_again() -> None:
    engine = SimulatedEngine(AUDIO, says(*[1] * 50, 99, logprob=-9.0), no_speech=0.0)
    assert len((await transcript(engine)).segments) == len(engine.asked) == 3


async def test_the_callers_temperature_and_sampling() -> None:
    engine = SimulatedEngine(AUDIO, says(1, 99))
    await transcript(engine, sampling={"seed": 3, "max_tokens": 5})
    assert all((each.params.seed, each.params.max_tokens) == (3, 5) for each in engine.asked)


async def test_a_language_is_a_name_alone() -> None:
    found = await transcript(SimulatedEngine(AUDIO, says(1, 99)), language="Japanese")
    assert found.language == "ja"


@pytest.mark.parametrize(("token", "text"), [(1, " Hello"), (3, TEXTS[3]), (4, " " + TEXTS[4]), (9, " ")])
def test_texts_are_joined_as_their_script_is_written(token: int, text: str) -> None:
    assert MODEL.text([token]) == text


@pytest.mark.parametrize(("positions", "seconds"), [(194, 193 / 13), (512, 30), (8, 6)])
def test_a_windows_text_fits(positions: int, seconds: float) -> None:
    model = PlainModel((50,), str, positions)
    assert model.seconds == pytest.approx(seconds)
    assert positions == 8 or model.max_tokens(model.seconds) >= 13 * model.seconds


@pytest.mark.parametrize(
    "options",
    [{"task": "translate"}, {"word_timestamps": True}, {"prompt": "names"}, {"condition_on_previous_text": True}],
    ids=str,
)
def test_options_that_it_does_not_have(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedOption, match="Whisper") as error:
        Transcriber(SimulatedEngine(AUDIO, says(1)), MODEL, TranscriptionOptions(**options))
    assert error.value.option in options
