"""Log-mel features of Whisper, as transformers' WhisperFeatureExtractor has them: 3,000 frames of 10 ms for 30 s.

Mel scale and filters: Slaney's Auditory Toolbox (1998), as librosa.filters.mel computes them.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

from quintet.media.audio import SAMPLE_RATE
from quintet.media.audio.resample import Samples
from quintet.media.lazy_numpy import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

FEATURES = "input_features"  # a MediaItem's field with them, float32 [bins, 3000]; transformers' name
WINDOW, HOP = 400, 160  # samples: 25 and 10 ms
CHUNK_SECONDS = 30
CHUNK_SAMPLES = CHUNK_SECONDS * SAMPLE_RATE
FRAMES = CHUNK_SAMPLES // HOP
MEL_BINS = (80, 128)  # of Whisper's models; large-v3 has 128
FLOOR = 1e-10  # power
RANGE = 8.0  # powers of ten below the loudest, which are kept
_BREAK_HERTZ, _LINEAR_HERTZ, _LOG_STEP = 1000.0, 200 / 3, math.log(6.4) / 27  # Slaney's: linear, then logarithmic
_BLOCK = 512  # frames that are transformed at a time: 2 MB


def log_mel(samples: Samples, bins: int = MEL_BINS[0]) -> NDArray[np.float32]:
    """Returns features [bins, 3000] of up to 30 s at 16 kHz; the rest is silence. ValueError for longer samples, none,
    or samples that are no numbers."""
    if samples.ndim != 1 or not 0 < len(samples) <= CHUNK_SAMPLES:
        raise ValueError(
            f"features are of 1 to {CHUNK_SAMPLES} samples at 16 kHz in one row, not {list(samples.shape)}; cut it"
        )
    if not np.isfinite(samples).all():
        raise ValueError("the samples hold NaN or infinity; write the file again")
    padded = np.pad(samples.astype(np.float32), (0, CHUNK_SAMPLES - len(samples)))
    padded = np.pad(padded, WINDOW // 2, mode="reflect")
    heard = min(FRAMES, -(-(len(samples) + WINDOW // 2) // HOP))  # frames after these have zeros alone
    frames = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP][:heard]
    filters, window = mel_filters(bins), _hann()
    power = np.full((bins, FRAMES), FLOOR)
    for first in range(0, heard, _BLOCK):
        spectrum = np.fft.rfft(frames[first : first + _BLOCK] * window)
        power[:, first : first + len(spectrum)] = filters @ (spectrum.real**2 + spectrum.imag**2).T
    logs = np.log10(np.maximum(power, FLOOR))
    return ((np.maximum(logs, logs.max() - RANGE) + 4.0) / 4.0).astype(np.float32)


@functools.cache
def mel_filters(bins: int) -> NDArray[np.float64]:
    """Returns triangular filters [bins, 201] over 0 to 8 kHz, each divided by half of its width. ValueError without
    bins."""
    if not 1 <= bins <= WINDOW // 2:
        raise ValueError(f"{bins} mel bins; Whisper has {MEL_BINS[0]} or {MEL_BINS[1]}")
    edges = _hertz(np.linspace(0.0, _mel(SAMPLE_RATE / 2), bins + 2))  # of each: its lower neighbour, itself, its upper
    frequencies = np.linspace(0.0, SAMPLE_RATE / 2, WINDOW // 2 + 1)
    lower, middle, upper = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising, falling = (frequencies - lower) / (middle - lower), (upper - frequencies) / (upper - middle)
    triangles = np.maximum(0.0, np.minimum(rising, falling))
    filters: NDArray[np.float64] = triangles * (2.0 / (upper - lower))
    return filters


def _mel(hertz: float) -> float:
    """Returns the place of a frequency above 1 kHz on the mel scale."""
    return float(_BREAK_HERTZ / _LINEAR_HERTZ + np.log(hertz / _BREAK_HERTZ) / _LOG_STEP)


def _hertz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    start = _BREAK_HERTZ / _LINEAR_HERTZ
    found: NDArray[np.float64] = np.where(
        mel < start, mel * _LINEAR_HERTZ, _BREAK_HERTZ * np.exp(_LOG_STEP * (mel - start))
    )
    return found


@functools.cache
def _hann() -> NDArray[np.float64]:
    """Returns the periodic window."""
    return 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
