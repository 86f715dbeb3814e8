"""Samples as Moonshine's encoder takes them (Jeffries et al. 2024): in blocks, behind which are three convolutions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quintet.media.audio.resample import Samples
from quintet.media.lazy_numpy import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

SAMPLES = "input_values"  # a MediaItem's field with them, float32 [N]; transformers' name
CONVOLUTIONS = ((127, 64), (7, 3), (3, 2))  # taps and stride of each
BLOCK = CONVOLUTIONS[0][1]  # samples; the first convolution sees two blocks, but for the last sample
LEAST = 895  # samples that give one row


def num_rows(samples: int) -> int:
    """Returns the number of the encoder's rows: one for 24 ms."""
    for taps, stride in CONVOLUTIONS:
        samples = (samples - taps) // stride + 1
    return samples


def blocks_of(samples: Samples) -> NDArray[np.float32]:
    """Returns samples [N] in blocks [F + 1, 64], F being the steps of the first convolution; zeros fill the last."""
    taps, stride = CONVOLUTIONS[0]
    blocks = np.zeros(((len(samples) - taps) // stride + 2, BLOCK), np.float32)
    used = samples[: blocks.size]
    blocks.reshape(-1)[: len(used)] = used
    return blocks
