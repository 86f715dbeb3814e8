"""Notices when an output goes in circles: its end is one pattern of tokens, again and again."""

import numpy as np

from quintet.sampling_params import RepetitionDetectionParams


class RepetitionDetector:
    """Repetition detection of one output. add() costs the same for every token, however long the output is.

    For each size p it counts the last tokens in a row that are equal to the one p places before them: when there are
    p * (count - 1) of them, the output ends with `count` copies of its last p tokens.
    """

    def __init__(self, params: RepetitionDetectionParams) -> None:
        """params.max_pattern_size is over 0."""
        self._most = params.max_pattern_size
        sizes = np.arange(self._most, max(params.min_pattern_size, 1) - 1, -1)  # as the places lie, oldest first
        self._needed = sizes * (params.min_count - 1)
        self._counts = np.zeros(len(sizes), np.int64)
        self._tokens = np.full(4 * self._most, -1)  # -1: before the output's start
        self._end = self._most  # of the tokens in there

    def add(self, token_id: int) -> bool:
        """Adds the next token; True if the output now ends in a repeated pattern."""
        if self._end == len(self._tokens):
            self._tokens[: self._most] = self._tokens[-self._most :]
            self._end = self._most
        start = self._end - self._most
        self._counts += 1
        self._counts *= self._tokens[start : start + len(self._counts)] == token_id
        self._tokens[self._end] = token_id
        self._end += 1
        return bool((self._counts >= self._needed).any())
