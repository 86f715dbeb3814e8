"""Segments of windows, compared with transformers' long-form generation, and their joining."""

import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

from quintet.transcription.segments import (
    Segment,
    Thresholds,
    compression_ratio,
    join_windows,
    mean_logprob,
    parse_window,
)
from quintet.transcription.tokens import WhisperTokens

TOKENS = WhisperTokens(12, 13, 16, 17, 18, 20, 19, {"en": 14})
BEGIN = 21


def at(seconds: float) -> int:
    return BEGIN + round(seconds / 0.02)


def theirs(tokens: list[int], start: float, seconds: float) -> tuple[list[tuple[float, float]], float]:
    segments, offset = WhisperGenerationMixin._retrieve_segment(
        torch.tensor(tokens), [{}], torch.tensor([start], dtype=torch.float64), BEGIN, [round(seconds * 100)],
        0.02, 0.01, 2, 0, 0, False, torch.zeros(1, 0),
    )  # fmt: skip
    return [(float(each["start"]), float(each["end"])) for each in segments], start + offset / 100


@st.composite
def generated(draw: st.DrawFn) -> list[int]:
    """Tokens as the timestamp rules let them come: pairs, not going back."""
    place, found = draw(st.integers(0, 50)), []
    for _ in range(draw(st.integers(1, 4))):
        found += [BEGIN + place, *draw(st.lists(st.integers(0, 11), min_size=1, max_size=3))]
        place += draw(st.integers(1, 300))
        found.append(BEGIN + place)
    return found[: len(found) - draw(st.integers(0, 2))]


@settings(max_examples=80, deadline=None)
@given(generated(), st.sampled_from([0.0, 12.34, 3600.5]), st.sampled_from([30.0, 17.5]))
def test_segments_are_those_of_transformers(tokens: list[int], start: float, seconds: float) -> None:
    window, (wanted, next_start) = parse_window(tokens, TOKENS, start, seconds), theirs(tokens, start, seconds)
    found = [(each.start, each.end) for each in window.segments[: window.complete]]
    assert found == [pytest.approx(each, abs=1e-6) for each in wanted]
    assert window.next_start == pytest.approx(next_start, abs=1e-6)


def test_pairs_separate_and_a_lone_end_closes() -> None:
    tokens = [at(0), 1, 2, at(2.5), at(3), 4, at(4.02), TOKENS.eot, 9]
    window = parse_window(tokens, TOKENS, 100.0, 30.0)
    assert [(each.start, each.end) for each in window.segments] == [(100.0, 102.5), (103.0, 104.02)]
    assert window.complete == 2 and window.next_start == 130.0
    assert window.segments[1].tokens == (at(3), 4, at(4.02)) and window.segments[0].seek == 10_000


def test_text_that_is_cut_at_the_end_is_kept_apart() -> None:
    window = parse_window([at(0), 1, at(2), at(2), 3, 4], TOKENS, 10.0, 5.0)
    assert [(each.start, each.end) for each in window.segments] == [(10.0, 12.0), (12.0, 15.0)]
    assert window.complete == 1 and window.next_start == 12.0


def test_text_without_timestamps_is_one_segment() -> None:
    [segment] = parse_window([1, 2, 3], TOKENS, 1.0, 7.0).segments
    assert (segment.start, segment.end) == (1.0, 8.0)
    assert parse_window([], TOKENS, 0.0, 30.0).segments == []


def test_joined_windows_have_exact_places_within_their_audio() -> None:
    first = [Segment(0.0, 2.0, (1,), " Hi."), Segment(2.0, 31.0, (2,), " There.")]
    second = [Segment(28.9, 29.4, (), " "), Segment(28.9, 31.22, (3,), " End."), Segment(40.0, 50.0, (4,), " Late.")]
    found = join_windows([(0.0, 28.9, first), (28.9, 35.0, second)])
    assert [(each.id, each.start, each.end, each.text) for each in found] == [
        (0, 0.0, 2.0, " Hi."), (1, 2.0, 28.9, " There."), (2, 28.9, 31.22, " End."), (3, 35.0, 35.0, " Late."),
    ]  # fmt: skip


def test_texts_are_judged_as_the_reference_does() -> None:
    assert compression_ratio("ha" * 100) == 200 / len(zlib.compress(b"ha" * 100)) > 2.4
    assert mean_logprob([-1.0, -2.0, -3.0]) == -2.0 and mean_logprob([]) == 0.0
    rules = Thresholds()
    assert rules.needs_fallback(2.5, -0.1, 0.0) and rules.needs_fallback(1.0, -1.1, 0.5)
    assert not rules.needs_fallback(1.0, -0.9, 0.0)
    assert not rules.needs_fallback(2.5, -1.1, 0.7) and rules.is_silent(0.7, -1.1)  # silence is not heard again
    assert not rules.is_silent(0.7, -0.5) and not rules.is_silent(0.5, -5.0)
    free = Thresholds(None, None, None)
    assert not free.needs_fallback(9.0, -9.0, 0.9) and not free.is_silent(0.99, -9.0)
