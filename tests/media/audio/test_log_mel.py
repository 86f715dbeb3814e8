"""Log-mel features, compared with transformers' WhisperFeatureExtractor."""

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from quintet.media.audio.log_mel import CHUNK_SAMPLES, log_mel, mel_filters
from quintet.media.audio.resample import Samples

DRAW = np.random.default_rng(7)
SPEECHLIKE = (np.sin(np.arange(100_000) ** 1.2 / 900) * np.hanning(100_000)).astype(np.float32)
SOUNDS = {
    "noise": (DRAW.standard_normal(CHUNK_SAMPLES) / 10).astype(np.float32),
    "speechlike": SPEECHLIKE,
    "quiet": SPEECHLIKE * np.float32(1e-4),
    "short": SPEECHLIKE[50_000:50_100],
    "one": np.ones(1, np.float32),
    "silence": np.zeros(16_000, np.float32),
    "full": np.resize(SPEECHLIKE, CHUNK_SAMPLES),
}


def theirs(samples: Samples, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns transformers' features, computed with NumPy and with torch."""
    extractor = WhisperFeatureExtractor(feature_size=bins)
    padded = np.pad(samples, (0, CHUNK_SAMPLES - len(samples)))[None]
    return extractor._np_extract_fbank_features(padded, "cpu")[0], extractor(
        samples, sampling_rate=16_000, return_tensors="np"
    ).input_features[0]


@pytest.mark.parametrize("bins", [80, 128])
def test_filters_are_those_of_the_extractor(bins: int) -> None:
    np.testing.assert_allclose(mel_filters(bins).T, WhisperFeatureExtractor(feature_size=bins).mel_filters, atol=1e-14)


@pytest.mark.parametrize("sound", SOUNDS)
@pytest.mark.parametrize("bins", [80, 128])
def test_features_are_those_of_the_extractor(bins: int, sound: str) -> None:
    found, (exact, single) = log_mel(SOUNDS[sound], bins), theirs(SOUNDS[sound], bins)
    assert found.shape == (bins, 3000) and found.dtype == np.float32
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-6)
    np.testing.assert_allclose(found, single, rtol=0, atol=2e-4)  # its STFT has single precision


def test_samples_that_have_no_features_are_refused() -> None:
    for samples in (np.zeros(0, np.float32), np.zeros(CHUNK_SAMPLES + 1, np.float32), np.zeros((2, 9), np.float32)):
        with pytest.raises(ValueError, match="1 to 480000 samples at 16 kHz"):
            log_mel(samples)
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match="NaN or infinity"):
            log_mel(np.array([0, bad, 0], np.float32))
    with pytest.raises(ValueError, match="mel bins"):
        mel_filters(0)
