"""Resampling by our polyphase filter, compared with scipy's, and with what the signal is."""

import math

import numpy as np
import pytest
import scipy.signal

from quintet.media.audio.resample import MAX_RATE, MIN_RATE, Resampler, Samples, resample

RATES = (8000, 11_025, 22_050, 24_000, 44_100, 48_000, 96_000)


def noise(count: int) -> Samples:
    return np.random.default_rng(count).standard_normal(count).astype(np.float32)


@pytest.mark.parametrize("rate", RATES)
def test_with_the_filter_of_scipy_it_is_resample_poly(rate: int) -> None:
    samples, divisor = noise(rate // 2 + 17), math.gcd(rate, 16_000)
    theirs = scipy.signal.resample_poly(samples.astype(np.float64), 16_000 // divisor, rate // divisor)
    np.testing.assert_allclose(resample(samples, rate, beta=5.0, zero_crossings=10), theirs, atol=2e-6)


@pytest.mark.parametrize("rate", RATES)
def test_a_sweep_stays_the_sweep_that_it_is(rate: int) -> None:
    top = 0.9 * min(rate, 16_000) / 2
    sweep = scipy.signal.chirp(np.arange(2 * rate) / rate, 20, 2, top)
    found = resample(sweep.astype(np.float32), rate)
    wanted = scipy.signal.chirp(np.arange(len(found)) / 16_000, 20, 2, top)
    inner = slice(800, -800)  # before and after the sweep there is silence
    assert np.abs(found - wanted)[inner].max() < 1e-4


def test_a_sweep_is_as_close_to_the_truth_as_soxr_makes_it() -> None:
    soxr = pytest.importorskip("soxr", reason="pip install soxr compares with it")
    sweep = scipy.signal.chirp(np.arange(96_000) / 48_000, 20, 2, 7000).astype(np.float32)
    inner = slice(800, -800)
    theirs = soxr.resample(sweep, 48_000, 16_000, quality="VHQ")
    assert np.abs(resample(sweep, 48_000) - theirs)[inner].max() < 1e-4


@pytest.mark.parametrize("hertz", [8800, 9500, 15_000, 21_000])
def test_what_is_above_half_of_the_rate_is_not_folded_back(hertz: int) -> None:
    tone = np.sin(2 * np.pi * hertz * np.arange(48_000) / 48_000).astype(np.float32)
    assert np.abs(resample(tone, 48_000)[800:-800]).max() < 10 ** (-90 / 20)


@pytest.mark.parametrize("rate", [8000, 44_100, 48_000])
def test_pieces_of_any_length_give_what_the_whole_gives(rate: int) -> None:
    samples, draw = noise(rate // 2 + 3), np.random.default_rng(1)
    resampler, found, at = Resampler(rate), [], 0
    while at < len(samples):
        size = int(draw.choice([0, 1, 100, 3000]))
        found.append(resampler.feed(samples[at : at + size]))
        at += size
    together = np.concatenate([*found, resampler.finish()])
    np.testing.assert_allclose(together, resample(samples, rate), atol=2e-6)


@pytest.mark.parametrize("count", [0, 1, 2, 441, 442])
@pytest.mark.parametrize("rate", [2000, 44_100, 48_000, 16_000])
def test_lengths_are_the_ratio_rounded_up(rate: int, count: int) -> None:
    assert len(resample(noise(count), rate)) == -(-count * 16_000 // rate)


def test_a_rate_that_no_audio_has_is_refused() -> None:
    for rate in (0, -1, MIN_RATE - 1, MAX_RATE + 1):
        with pytest.raises(ValueError, match="samples a second"):
            Resampler(rate)
