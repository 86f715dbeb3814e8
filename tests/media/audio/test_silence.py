"""Cuts at silences and speech by energy: every sample has its place, silence has none."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quintet.media.audio import SAMPLE_RATE, silero
from quintet.media.audio.resample import Samples
from quintet.media.audio.silence import Span, cut_at_silences, find_speech, speech_windows


def voice(seconds: float, loudness: float = 0.1) -> Samples:
    """Syllables of 200 ms with dips between, as a voice has them."""
    t = np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    return (loudness * (0.55 - 0.45 * np.cos(2 * np.pi * 5 * t)) * np.sin(2 * np.pi * 170 * t)).astype(np.float32)


def silence(seconds: float, loudness: float = 0.0) -> Samples:
    draw = np.random.default_rng(4)
    return (loudness * draw.standard_normal(round(seconds * SAMPLE_RATE))).astype(np.float32)


def seconds(spans: list[Span]) -> list[tuple[float, float]]:
    return [(span.start / SAMPLE_RATE, span.end / SAMPLE_RATE) for span in spans]


def test_a_cut_is_in_the_middle_of_the_pause_near_the_end() -> None:
    audio = np.concatenate([voice(10), silence(0.4), voice(17), silence(0.3), voice(26), silence(0.2), voice(9)])
    found = seconds(cut_at_silences(audio))
    assert found[0][0] == 0 and found[-1][1] == len(audio) / SAMPLE_RATE
    assert 27.45 < found[0][1] < 27.7 and 53.7 < found[1][1] < 53.9


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 40 * SAMPLE_RATE), st.sampled_from([3.0, 7.5, 30.0]), st.integers(0, 9))
def test_windows_cover_every_sample_once(length: int, longest: float, seed: int) -> None:
    audio = np.random.default_rng(seed).standard_normal(length).astype(np.float32)
    found = cut_at_silences(audio, longest, look_back=1.0)
    ends = [0, *(span.end for span in found)]
    assert [span.start for span in found] == ends[:-1] and ends[-1] == length
    assert all(0 < span.end - span.start <= longest * SAMPLE_RATE for span in found)
    assert all(span.seconds >= longest - 1.0 for span in found[:-1])


def test_limits_without_a_window_are_refused() -> None:
    for longest, back in ((1.0, 1.0), (30.0, 0.05), (0.0, 0.0)):
        with pytest.raises(ValueError, match="longer windows"):
            cut_at_silences(voice(1), longest, back)


@pytest.mark.parametrize("loudness", [0.0, 1e-5, 3e-4])
def test_silence_has_no_speech(loudness: float) -> None:
    for length in (0, 0.005, 0.5, 40):
        assert find_speech(silence(length, loudness)) == [] == speech_windows(silence(length, loudness))


@pytest.mark.parametrize("noise", [0.0, 1e-4, 2e-3])
def test_speech_is_found_where_it_is(noise: float) -> None:
    audio = np.concatenate([silence(3), voice(2), silence(2), voice(1.5), silence(4)]) + silence(12.5, noise)
    [first, second] = seconds(find_speech(audio))
    assert first == pytest.approx((2.8, 5.2), abs=0.06) and second == pytest.approx((6.8, 8.7), abs=0.06)


def test_quiet_speech_and_speech_throughout_are_found() -> None:
    assert len(find_speech(np.concatenate([silence(2, 1e-5), voice(2, 0.004), silence(2, 1e-5)]))) == 1
    [whole] = seconds(find_speech(voice(20)))
    assert whole == pytest.approx((0, 20), abs=0.05)


def test_silero_finds_voices_where_energy_finds_noise_too() -> None:
    if not silero.is_installed():
        pytest.skip("pip install --no-deps faster-whisper, and onnxruntime, bring its model")
    from faster_whisper.vad import SileroVADModel  # the same model, asked by its own package

    assert silero.find_speech_silero(silence(2)) == [] == silero.find_speech_silero(silence(0))
    noise = np.concatenate([silence(2), silence(3, 0.1), silence(2)])
    assert len(find_speech(noise)) == 1 and silero.find_speech_silero(noise) == []
    audio = np.concatenate([voice(1.7), silence(1)])
    padded = np.pad(audio, (0, -len(audio) % silero.STEP))
    theirs = SileroVADModel(str(silero._model_file()))(padded).reshape(-1)
    np.testing.assert_allclose(silero.speech_probabilities(audio), theirs, atol=1e-5)


def test_silero_that_is_missing_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silero, "_model_file", lambda: None)
    silero._session.cache_clear()
    with pytest.raises(ValueError, match="pip install faster-whisper onnxruntime"):
        silero.find_speech_silero(voice(1))
    assert not silero.is_installed()


def test_a_click_is_no_speech_and_pauses_between_words_end_none() -> None:
    click = silence(4)
    click[30_000:30_400] = 0.5
    assert find_speech(click) == []
    assert len(find_speech(np.concatenate([silence(1), voice(1), silence(0.4), voice(1), silence(1)]))) == 1


def test_windows_of_speech_leave_out_long_silences_and_keep_exact_places() -> None:
    audio = np.concatenate([silence(20), voice(2), silence(3), voice(3), silence(50), voice(45), silence(20)])
    found = seconds(speech_windows(audio))
    assert found[0] == pytest.approx((19.8, 28.2), abs=0.06)  # two, joined
    assert found[1][0] == pytest.approx(77.8, abs=0.06) and found[-1][1] == pytest.approx(123.2, abs=0.06)
    assert found[1][1] == found[2][0] and all(end - start <= 30 for start, end in found)
