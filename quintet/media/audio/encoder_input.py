"""Audio of a request as an encoder of speech takes it: checked, resampled, and perhaps made into log-mel features."""

import hashlib
from dataclasses import dataclass
from typing import Any

from quintet.media.audio import SAMPLE_RATE
from quintet.media.audio.log_mel import CHUNK_SECONDS, FEATURES, log_mel
from quintet.media.audio.resample import MAX_RATE, MIN_RATE, Samples, resample
from quintet.media.audio.waveform import LEAST, SAMPLES, num_rows
from quintet.media.items import AUDIO, MediaItem, WireArray
from quintet.media.lazy_numpy import np

DIGEST_BYTES = 16
FRAMES_PER_ROW, SECONDS_PER_ROW = 2, 0.02  # of an encoder: its second convolution takes every other frame
_FORMS = "give samples at 16 kHz, or (samples, rate): float numbers from -1 to 1 in one row"


@dataclass(frozen=True)
class SpeechInput:
    """Input of a model's encoder of speech. Plain data: it crosses processes."""

    mel_bins: int  # 0: the encoder takes samples (Moonshine)
    rows: int  # that the encoder makes, of 20 ms each; of samples, at most
    start_ids: tuple[int, ...]  # the decoder's prompt where a caller gives none
    aligns: bool = True  # whether requests may ask for the attention of their tokens to the audio

    @property
    def seconds(self) -> float:
        """Length of the longest audio of a request."""
        return self.rows * SECONDS_PER_ROW if self.mel_bins else CHUNK_SECONDS

    def item(self, audio: Any, name: str) -> MediaItem:
        """Returns samples at 16 kHz, or of (samples, rate), as the encoder takes them. ValueError names what is wrong;
        `name` is what it calls the prompt."""
        samples = _samples(audio, self.seconds, name)
        if not self.mel_bins:
            samples = np.pad(samples, (0, max(0, LEAST - len(samples))))
            return _item(samples, SAMPLES, ((0, num_rows(len(samples))),))
        try:
            return _item(log_mel(samples, self.mel_bins)[:, : FRAMES_PER_ROW * self.rows], FEATURES)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


def _item(given: Any, field: str, spans: tuple[tuple[int, int], ...] = ()) -> MediaItem:
    """Returns the item with this array as its field."""
    given = np.ascontiguousarray(given)
    facts = f"{AUDIO} {given.shape}".encode()
    digest = hashlib.blake2b(given.data, digest_size=DIGEST_BYTES, person=b"quintet-audio", key=facts).digest()
    return MediaItem(AUDIO, digest, {field: WireArray.of(given)}, spans)


def _samples(audio: Any, seconds: float, name: str) -> Samples:
    """Returns samples at 16 kHz, so many seconds at most."""
    if isinstance(audio, list) and len(audio) == 1 and not isinstance(audio[0], (int, float)):
        (audio,) = audio  # vLLM takes a list of one
    rate: Any = SAMPLE_RATE
    if isinstance(audio, tuple):
        if len(audio) != 2:
            raise ValueError(f"{name}: 'audio' is a tuple of {len(audio)}; {_FORMS}")
        audio, rate = audio
    if isinstance(rate, bool) or not isinstance(rate, (int, float, np.number)) or float(rate) % 1 != 0:  # NaN, too
        raise ValueError(f"{name}: the rate of 'audio' is {str(rate)[:40]!r}, not a whole number of samples a second")
    rate = int(rate)
    if not MIN_RATE <= rate <= MAX_RATE:
        raise ValueError(f"{name}: the rate of 'audio' is {rate}, not from {MIN_RATE} to {MAX_RATE} samples a second")
    if isinstance(audio, list) and len(audio) > seconds * rate:
        raise _too_long(len(audio) / rate, seconds, name)
    try:
        samples = np.asarray(audio)
    except Exception as error:  # whatever an object's conversion raises
        raise ValueError(f"{name}: 'audio' makes no array ({error}); {_FORMS}") from None
    if samples.ndim != 1 or samples.dtype.kind != "f":
        what = f"of shape {list(samples.shape)} and type {samples.dtype}"
        raise ValueError(f"{name}: 'audio' is {what}; {_FORMS}")
    if not len(samples):
        raise ValueError(f"{name}: 'audio' is empty; {_FORMS}")
    if len(samples) > seconds * rate:
        raise _too_long(len(samples) / rate, seconds, name)
    if not np.isfinite(samples).all():
        raise ValueError(f"{name}: 'audio' holds NaN or infinity; {_FORMS}")
    return resample(samples.astype(np.float32), rate)[: round(seconds * SAMPLE_RATE)]


def _too_long(length: float, seconds: float, name: str) -> ValueError:
    return ValueError(
        f"{name}: 'audio' is {length:.1f} s long, and one request takes {seconds:g} s; cut it, best at silences, and "
        "give each piece a request of its own"
    )
