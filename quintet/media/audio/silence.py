"""Cuts long audio at silences, and finds speech by its energy. Every place is a number of samples, so that it is exact.

A window ends at the quietest 100 ms of its last seconds. Speech is where frames are louder than the noise around, which
is estimated from the quietest frames; short gaps are bridged, short noises left out, and edges kept with a margin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from quintet.media.audio import SAMPLE_RATE
from quintet.media.audio.resample import Samples
from quintet.media.lazy_numpy import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

FRAME = SAMPLE_RATE // 100  # samples of which one energy is taken: 10 ms
QUIET_FRAMES = 10  # of which the quietest run is looked for: 100 ms
_SILENCE = 1e-12  # power of what counts as zero: below one step of 16 bits


class Span(NamedTuple):
    """A piece of audio, in samples from its start; `end` is the first behind it."""

    start: int
    end: int

    @property
    def start_seconds(self) -> float:
        return self.start / SAMPLE_RATE

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / SAMPLE_RATE


@dataclass(frozen=True)
class SpeechThresholds:
    """Limits that tell speech from noise, in dB and seconds."""

    above_noise: float = 9.0  # dB over the noise
    least: float = -60.0  # dB, full scale being 0: nothing below is speech
    noise_share: float = 0.1  # of the frames, which are taken for noise alone
    most_noise: float = -35.0  # dB: audio that has speech throughout has no quieter frames
    shortest: float = 0.1  # seconds of speech; less is a click
    gap: float = 0.5  # seconds of silence that end it
    margin: float = 0.2  # seconds kept on each side


DEFAULTS = SpeechThresholds()
SpeechFinder = Callable[[Samples], list[Span]]


def cut_at_silences(samples: Samples, max_seconds: float = 30.0, look_back: float = 5.0) -> list[Span]:
    """Returns windows that cover the audio without gaps, each of at most `max_seconds`; a cut is in the middle of the
    quietest 100 ms of the last `look_back` seconds before that limit. ValueError for limits that leave no window."""
    longest = int(max_seconds * SAMPLE_RATE)
    back = int(look_back * SAMPLE_RATE)
    if not FRAME * QUIET_FRAMES <= back < longest:
        raise ValueError(
            f"windows of {max_seconds:g} s that are cut in their last {look_back:g} s: look back for 0.1 s or more, in "
            "longer windows"
        )
    found, start = [], 0
    while len(samples) - start > longest:
        end = start + longest - back + _quietest(samples[start + longest - back : start + longest])
        found.append(Span(start, end))
        start = end
    return [*found, Span(start, len(samples))] if len(samples) else []


def _quietest(samples: Samples) -> int:
    """Returns the middle of the quietest 100 ms; of several that are equally quiet the last."""
    sums = np.convolve(_power(samples), np.ones(QUIET_FRAMES), "valid")
    at = len(sums) - 1 - int(np.argmin(sums[::-1]))
    return (at + QUIET_FRAMES // 2) * FRAME


def _power(samples: Samples) -> NDArray[np.float64]:
    """Returns the mean power of each full frame."""
    frames = samples[: len(samples) // FRAME * FRAME].reshape(-1, FRAME)
    power: NDArray[np.float64] = np.einsum("ij,ij->i", frames, frames, dtype=np.float64) / FRAME
    return power


def find_speech(samples: Samples, limits: SpeechThresholds = DEFAULTS) -> list[Span]:
    """Returns the spans that may hold speech, by energy alone; none for silence. Music and noise above the threshold
    count as speech."""
    power = _power(np.pad(samples, (0, -len(samples) % FRAME)))
    if not len(power):
        return []
    decibels = 10 * np.log10(np.maximum(power, _SILENCE))
    noise = min(float(np.quantile(decibels, limits.noise_share)), limits.most_noise)
    loud = decibels > max(noise + limits.above_noise, limits.least)
    return joined_spans(loud, FRAME, len(samples), limits)


def joined_spans(marks: NDArray[np.bool_], step: int, length: int, limits: SpeechThresholds) -> list[Span]:
    """Returns spans in `length` samples of the marked steps, of `step` samples each: gaps are bridged, what is too
    short left out, and margins added."""
    per_second = SAMPLE_RATE / step
    runs = _bridged(_runs(marks), round(limits.gap * per_second))
    kept = [run for run in runs if marks[run.start : run.end].sum() >= limits.shortest * per_second]
    margin = round(limits.margin * per_second)
    wide = _bridged([Span(max(run.start - margin, 0), run.end + margin) for run in kept], 0)
    return [Span(each.start * step, min(each.end * step, length)) for each in wide]


def _runs(marks: NDArray[np.bool_]) -> list[Span]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], marks, [False]])))
    return [Span(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def _bridged(runs: list[Span], gap: int) -> list[Span]:
    """Joins runs with at most `gap` frames between them."""
    found: list[Span] = []
    for run in runs:
        if found and run.start - found[-1].end <= gap:
            found[-1] = Span(found[-1].start, max(found[-1].end, run.end))
        else:
            found.append(run)
    return found


def speech_windows(
    samples: Samples, max_seconds: float = 30.0, finder: SpeechFinder = find_speech, look_back: float = 5.0
) -> list[Span]:
    """Returns windows of at most `max_seconds` that hold all speech and leave out long silences: neighbours are joined
    while they fit, longer spans cut at their quietest places. Silence gives none."""
    longest, found = int(max_seconds * SAMPLE_RATE), list[Span]()
    for span in finder(samples):
        if found and span.end - found[-1].start <= longest:
            found[-1] = Span(found[-1].start, span.end)
            continue
        pieces = cut_at_silences(samples[span.start : span.end], max_seconds, look_back)
        found += [Span(span.start + each.start, span.start + each.end) for each in pieces]
    return found
