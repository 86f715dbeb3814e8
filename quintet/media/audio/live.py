"""Cuts sound that arrives piece by piece: a chunk ends with a pause, or where it becomes too long."""

from quintet.media.audio import SAMPLE_RATE
from quintet.media.audio.resample import Samples
from quintet.media.audio.silence import SpeechFinder, cut_at_silences, find_speech
from quintet.media.lazy_numpy import np

PAUSE = 0.5  # seconds without speech that end a chunk; a finder's margins come on top
LONGEST = 30.0  # seconds of a chunk
_STEP = SAMPLE_RATE // 4  # new samples after which the buffer is looked at again
_LEAD = SAMPLE_RATE // 2  # samples of silence that stay in front of what comes next


class LiveCutter:
    """Buffer of sound that has not become a chunk yet: LONGEST seconds and what feed() brings, at most."""

    def __init__(self, finder: SpeechFinder = find_speech, pause: float = PAUSE, longest: float = LONGEST) -> None:
        self._find, self._pause, self._longest = finder, round(pause * SAMPLE_RATE), longest
        self._buffer: Samples = np.zeros(0, np.float32)
        self._waiting: list[Samples] = []

    def feed(self, samples: Samples) -> list[Samples]:
        """Takes samples at 16 kHz; returns the chunks of speech that are complete. Silence gives none."""
        found: list[Samples] = []
        for first in range(0, len(samples), _STEP):  # a large piece is cut as small ones are
            self._waiting.append(samples[first : first + _STEP])
            if sum(map(len, self._waiting)) >= _STEP:
                found += self._look()
        return found

    def flush(self) -> Samples | None:
        """Returns what is left, None if that is silence; the buffer is empty then."""
        self._join()
        rest, self._buffer = self._buffer, np.zeros(0, np.float32)
        spans = self._find(rest) if len(rest) else []
        return rest[spans[0].start : spans[-1].end] if spans else None

    def _join(self) -> None:
        self._buffer, self._waiting = np.concatenate([self._buffer, *self._waiting]), []

    def _look(self) -> list[Samples]:
        self._join()
        sound = self._buffer
        spans = self._find(sound)
        if not spans:
            self._buffer = sound[-_LEAD:].copy()
            return []
        begin, end = spans[0].start, spans[-1].end
        if len(sound) - end >= self._pause:
            self._buffer = sound[end:].copy()
            return [sound[begin:end]]
        longest = int(self._longest * SAMPLE_RATE)
        if len(sound) - begin < longest:
            self._buffer = sound[begin:].copy() if begin > longest else sound
            return []
        cut = begin + cut_at_silences(sound[begin : begin + longest + 1], self._longest)[0].end
        self._buffer = sound[cut:].copy()
        return [sound[begin:cut]]
