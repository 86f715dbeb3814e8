"""Drafts: tokens that are guessed to come next, so that one step may check several. The text so far is looked up.

What is drawn never depends on them: each row of a step is drawn with its own position's random numbers, and a draft is
accepted where the draw before it gave the same token. A wrong guess costs its share of a step.
"""

from collections.abc import Sequence

import numpy as np

from quintet.config import SpeculativeConfig
from quintet.engine.request import Request
from quintet.engine.spec_decode.proposer import Proposer
from quintet.interface.types import IntArray


class TokenHistory:
    """The known tokens of one request as an array that grows with it."""

    def __init__(self) -> None:
        self._ids = np.empty(256, np.int32)
        self._size = 0
        self.last_match: tuple[int, list[int]] = (0, [])  # what was proposed after so many tokens

    def token_ids_of(self, request: Request) -> IntArray:
        """[num_known]; a view that holds until the next call."""
        size = request.num_known
        if size > len(self._ids):
            self._ids = np.concatenate([self._ids[: self._size], np.empty(size, np.int32)])
        self._ids[self._size : size] = request.token_ids[self._size : size]
        self._size = size
        return self._ids[:size]


class NgramProposer(Proposer):
    """Prompt lookup (Saxena 2023; vLLM's "ngram"): what followed the last few tokens when they stood there before."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._most, self._min_ngram = config.prompt_lookup_max, config.prompt_lookup_min
        self.num_drafts = config.num_speculative_tokens  # guessed at once, at most

    def propose(self, room: Sequence[tuple[Request, int]]) -> None:
        for request, most in room:
            request.draft_tokens = self._continuation(request)[:most]

    def may_propose(self, requests: Sequence[Request]) -> bool:
        return any(map(self._continuation, requests))

    def _continuation(self, request: Request) -> list[int]:
        """Returns draft tokens after the known ones; [] if the last tokens have not occurred before."""
        if request.history is None:
            request.history = TokenHistory()
        size, drafts = request.history.last_match
        if size != request.num_known:
            drafts = find_continuation(
                request.history.token_ids_of(request), self._min_ngram, self._most, self.num_drafts
            )
            request.history.last_match = request.num_known, drafts
        return drafts


def find_continuation(ids: IntArray, least: int, most: int, count: int) -> list[int]:
    """Up to `count` tokens that followed the longest end of ids [T] that stood there before, of `least` to `most`
    tokens; where it stood several times, the first counts. The two may overlap, but are not the same."""
    size, found = len(ids), -1
    ends = np.flatnonzero(ids[:-1] == ids[-1])  # where a text like the last n tokens ends
    for n in range(1, min(most, size - 1) + 1):
        if n > 1:
            ends = ends[np.searchsorted(ends, n - 1) :]
            ends = ends[ids[ends - (n - 1)] == ids[size - n]]
        if not len(ends):
            break
        if n >= least:
            found = int(ends[0])
    return ids[found + 1 : found + 1 + count].tolist() if found >= 0 else []
