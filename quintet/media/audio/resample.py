"""Resampling by a polyphase filter: a low-pass of Kaiser-windowed sinc, of which each output needs one phase alone.

With BETA and ZERO_CROSSINGS frequencies up to 0.9 of the lower rate's half are kept within 0.01 dB, and what would be
folded back from 1.1 of it on is 90 dB lower. scipy.signal.resample_poly has 5.0 and 10.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

from quintet.media.audio import SAMPLE_RATE
from quintet.media.lazy_numpy import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Samples: TypeAlias = NDArray[np.float32]  # [N], from -1 to 1
else:
    Samples = Any

MIN_RATE, MAX_RATE = 2000, 192_000  # samples a second
BETA = 9.0  # of the Kaiser window
BLOCK = 2**16  # samples that are resampled at a time: more leave the processor's cache, fewer cost calls
ZERO_CROSSINGS = 32  # of the sinc, on each side of its middle, counted at the lower rate


class Resampler:
    """Resamples a stream of pieces; their ends leave no trace in the result."""

    def __init__(
        self, rate: int, target: int = SAMPLE_RATE, beta: float = BETA, zero_crossings: int = ZERO_CROSSINGS
    ) -> None:
        """From `rate` to `target` samples a second. ValueError if one is not within MIN_RATE and MAX_RATE."""
        for each in (rate, target):
            if not MIN_RATE <= each <= MAX_RATE:
                raise ValueError(
                    f"{each} samples a second, and {MIN_RATE} to {MAX_RATE} are resampled; convert the audio before"
                )
        divisor = math.gcd(rate, target)
        self._up, self._down = target // divisor, rate // divisor
        half = zero_crossings * max(self._up, self._down)
        self._reach = half // self._up + 1  # inputs on each side of the nearest
        self._phases = _phases(self._up, half, self._reach, _low_pass(self._up, self._down, half, beta))
        # Outputs that are this far apart have inputs that are at least a filter apart: their rows are a plain matrix.
        self._stride = self._up * math.ceil((2 * self._reach + 1) / self._down)
        self._held = np.zeros(self._reach, np.float32)  # inputs from `_first` on
        self._first, self._came, self._made = -self._reach, 0, 0

    def feed(self, samples: Samples) -> Samples:
        """Returns the outputs that further inputs do not change."""
        if self._up == self._down:
            return samples
        self._came += len(samples)
        self._held = np.concatenate([self._held, samples])
        known = self._came - 1 - self._reach  # the last input that has all of its neighbours
        return self._outputs(max(self._made, ((known + 1) * self._up - 1) // self._down + 1 if known >= 0 else 0))

    def finish(self) -> Samples:
        """Returns the other outputs; together they are ceil(inputs * target / rate)."""
        if self._up == self._down:
            return np.zeros(0, np.float32)
        self._held = np.concatenate([self._held, np.zeros(self._reach + 1, np.float32)])
        return self._outputs(-(-self._came * self._up // self._down))

    def _outputs(self, end: int) -> Samples:
        """Returns outputs from the last on to number `end`, and drops the inputs that no other needs."""
        found = np.empty(end - self._made, np.float32)
        width, step = 2 * self._reach + 1, self._stride * self._down // self._up
        for lane in range(min(self._stride, len(found))):
            middle, phase = divmod((self._made + lane) * self._down, self._up)
            count, at = -(-(len(found) - lane) // self._stride), middle - self._reach - self._first
            rows = np.lib.stride_tricks.as_strided(
                self._held[at:], (count, width), (step * self._held.itemsize, self._held.itemsize), writeable=False
            )
            found[lane :: self._stride] = rows @ self._phases[phase]
        self._made = end
        begins = end * self._down // self._up - self._reach
        self._held, self._first = self._held[begins - self._first :], begins
        return found


def resample(samples: Samples, rate: int, target: int = SAMPLE_RATE, **filter_options: Any) -> Samples:
    """Returns ceil(N * target / rate) samples for N; the options are Resampler's."""
    resampler = Resampler(rate, target, **filter_options)
    whole = np.asarray(samples, np.float32)
    pieces = [resampler.feed(whole[at : at + BLOCK]) for at in range(0, len(whole), BLOCK)]
    return np.concatenate([*pieces, resampler.finish()])


def _low_pass(up: int, down: int, half: int, beta: float) -> NDArray[np.float64]:
    """Returns the filter at `up` times the input's rate, [2 * half + 1]; its sum is `up`."""
    places = np.arange(-half, half + 1)
    taps = np.sinc(places / max(up, down)) * np.kaiser(2 * half + 1, beta)
    return taps * (up / taps.sum())


def _phases(up: int, half: int, reach: int, taps: NDArray[np.float64]) -> Samples:
    """Returns [up, 2 * reach + 1]: for each place of an output between two inputs, the factors of the inputs around."""
    places = half + np.arange(up)[:, None] + up * np.arange(reach, -reach - 1, -1)
    inside = (places >= 0) & (places < len(taps))
    return np.where(inside, taps[np.clip(places, 0, len(taps) - 1)], 0.0).astype(np.float32)
