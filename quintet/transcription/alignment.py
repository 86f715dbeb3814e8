"""Times of a transcript's tokens in its audio, by dynamic time warping over attention weights.

A decoder's alignment heads attend to the audio that the next token is of. The path through their weights that goes
forward in both tokens and time gives each token its place. Source: openai-whisper's timing.py; Sakoe and Chiba 1978.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quintet.media.audio.whisper_vocabulary import SECONDS_PER_TIMESTAMP
from quintet.media.lazy_numpy import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BOTH, _TOKEN, _TIME = range(3)  # what the last step of a path advanced


@dataclass(frozen=True)
class AlignmentSpan:
    """Part of a prompt that is a transcript, whose attention to the audio a request asks for. Plain data: it crosses
    processes."""

    first: int  # position of the transcript's first token in the prompt
    rows: int  # of the encoder, of 20 ms each, that hold the audio: the rest is padding


def token_ends(weights: NDArray[np.float32]) -> list[float]:
    """Returns the seconds at which each token ends, and the next begins; weights [T, F] of tokens and rows of 20 ms.

    The row of a token is that of the query which has read it, and looks for the next one.
    """
    return [row * SECONDS_PER_TIMESTAMP for row in first_columns(weights)]


def first_columns(weights: NDArray[np.float32]) -> list[int]:
    """Returns the first column of each row on the heaviest path through weights [T, F], from the first corner to the
    last. Sums are float32; of two equal ways the path prefers the one along the columns."""
    rows, columns = weights.shape
    steps = _steps(weights)
    found = [0] * rows
    row, column = rows - 1, columns - 1
    while row >= 0 and column >= 0:
        found[row] = column
        step = int(steps[row + column, row])
        row -= step != _TIME
        column -= step != _TOKEN
    return found


def _steps(weights: NDArray[np.float32]) -> NDArray[np.int8]:
    """Returns the last step of the best path to each cell, [T + F - 1, T] by antidiagonal and row.

    The cells of an antidiagonal depend on those of the two before it alone, so that each is one operation.
    """
    rows, columns = weights.shape
    count = rows + columns - 1
    costs = np.full((rows, count), np.inf)  # of a cell, moved so that antidiagonals are columns
    for row in range(rows):
        costs[row, row : row + columns] = -weights[row].astype(np.float64)
    costs = np.ascontiguousarray(costs.T)
    steps = np.empty((count, rows), np.int8)
    # costs of paths to the antidiagonals before, behind a border that only the first cell may come from
    last, before = np.full(rows + 1, np.inf, np.float32), np.full(rows + 1, np.inf, np.float32)
    before[0] = 0
    for index in range(count):
        both, token, time = before[:-1], last[:-1], last[1:]
        is_both = (both < token) & (both < time)
        is_token = (token < both) & (token < time)
        best = np.where(is_both, both, np.where(is_token, token, time))
        steps[index] = np.where(is_both, _BOTH, np.where(is_token, _TOKEN, _TIME))
        last, before = np.empty_like(last), last
        last[0], last[1:] = np.inf, costs[index] + best
    return steps
