"""Paths through attention weights, and filters: equal to transformers'."""

import numpy as np
import pytest
import torch
from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter

from quintet.engine.encoder.alignment import smoothed
from quintet.transcription.alignment import first_columns, token_ends


@pytest.mark.parametrize("kind", ["normal", "ties", "diagonal"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 9), (9, 1), (2, 2), (7, 40), (40, 7), (23, 60)])
def test_the_path_equals_transformers(rows: int, columns: int, kind: str) -> None:
    drawn = np.random.default_rng(rows * columns)
    weights = drawn.standard_normal((rows, columns)).astype(np.float32)
    if kind == "ties":
        weights = np.round(weights)
    if kind == "diagonal":
        weights[np.arange(rows), np.arange(rows) * columns // rows] += 6
    tokens, times = _dynamic_time_warping(-weights.astype(np.float64))
    want = [int(times[list(tokens).index(row)]) for row in range(rows)]
    assert first_columns(weights) == want
    assert token_ends(weights) == pytest.approx([0.02 * each for each in want])


@pytest.mark.parametrize("shape", [(5, 40), (2, 4), (3, 3), (4, 2)])
@pytest.mark.parametrize("width", [1, 3, 7])
def test_smoothing_equals_transformers(shape: tuple[int, int], width: int) -> None:
    weights = torch.rand(shape, generator=torch.Generator().manual_seed(width)).softmax(-1)
    deviation, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
    want = _median_filter(((weights - mean) / deviation)[None, None], width)[0, 0]
    torch.testing.assert_close(smoothed(weights, width), want, rtol=0, atol=1e-5)


def test_tokens_that_are_all_alike_have_no_deviation() -> None:
    assert smoothed(torch.full((3, 20), 0.05), 7).abs().max() < 1e-6
    assert not smoothed(torch.rand(1, 20), 7).any()
