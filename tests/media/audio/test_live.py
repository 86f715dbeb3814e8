"""Sound that arrives in pieces: chunks end at pauses, whatever the pieces are, and no speech is lost."""

import numpy as np
import pytest

from quintet.media.audio import SAMPLE_RATE
from quintet.media.audio.live import LiveCutter
from quintet.media.audio.resample import Samples
from tests.media.audio.test_silence import silence, voice


def chunks(audio: Samples, size: int, **options: float) -> list[Samples]:
    cutter, found = LiveCutter(**options), list[Samples]()  # type: ignore[arg-type]
    for first in range(0, len(audio), size):
        found += cutter.feed(audio[first : first + size])
    rest = cutter.flush()
    assert cutter.flush() is None
    return found if rest is None else [*found, rest]


@pytest.mark.parametrize("size", [160, 4000, 16_000, 10**7])
def test_a_chunk_for_each_utterance(size: int) -> None:
    audio = np.concatenate([silence(3), voice(2), silence(2), voice(4), silence(5), voice(1), silence(0.3)])
    found = chunks(audio, size)
    assert [round(len(each) / SAMPLE_RATE) for each in found] == [2, 4, 1]
    assert [float(np.abs(each).max()) > 0.09 for each in found] == [True] * 3


def test_silence_gives_nothing_and_is_not_kept() -> None:
    cutter = LiveCutter()
    for _ in range(200):
        assert cutter.feed(silence(1)) == []
        assert len(cutter._buffer) <= SAMPLE_RATE
    assert cutter.flush() is None


def test_speech_without_a_pause_is_cut_before_the_limit_and_nothing_is_lost() -> None:
    audio = np.concatenate([voice(13), voice(13)])
    found = chunks(audio, 1600, longest=7.0)
    assert len(found) >= 4 and all(len(each) <= 7 * SAMPLE_RATE for each in found)
    assert np.array_equal(np.concatenate(found), audio)


def test_what_is_shorter_than_a_step_comes_with_the_flush() -> None:
    cutter = LiveCutter()
    assert cutter.feed(voice(0.2)) == [] and cutter.flush() is not None
