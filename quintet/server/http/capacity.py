"""Limits of the work that the server accepts, counted in what costs it time or memory; the excess is refused."""

import contextlib
import operator
from collections import deque
from collections.abc import Iterator
from time import monotonic
from typing import NamedTuple

from quintet.server.http.errors import ApiError
from quintet.server.http.fair_share import FairShares

_MAX_WAIT = 60  # seconds, the longest Retry-After
_RETURN_FACTOR = 2  # a refused client is expected back within this many times its Retry-After
_MAX_ENDS = 64  # ends of requests, from which the wait is estimated


class RequestCost(NamedTuple):
    """Cost of a request in each limited quantity, or the limits themselves."""

    completions: int = 0
    tokens: int = 0  # of prompts, once for each completion's prompt
    logprobs: int = 0  # held until an answer is whole: positions x (likeliest + 1), or 16 numbers of an embedding
    characters: int = 0  # to tokenize; of a detokenization, token ids
    body_bytes: int = 0


_NAMES = ("completions", "prompt tokens", "log-probabilities", "characters to tokenize", "bytes of requests")
_SPLIT_REMEDY = "split it"
_REDUCE = "ask for fewer, set max_tokens, or stream the answer; of texts that become numbers, 16 of these count as one"
_REMEDIES = (_SPLIT_REMEDY, _SPLIT_REMEDY, _REDUCE, _SPLIT_REMEDY, _SPLIT_REMEDY)


class CapacityLimiter:
    """Counts what is inside. One for each process of the API; its share of the limits is the caller's matter."""

    def __init__(self, limits: RequestCost) -> None:
        self.limits, self.held = limits, RequestCost()
        self._shares = FairShares(limits)
        self._end_times: deque[float] = deque(maxlen=_MAX_ENDS)

    def acquire(self, size: RequestCost, owner: str = "") -> None:
        """Raises ApiError 429 if there is no room now, 400 if there never would be. An owner has a share of it."""
        for name, remedy, asked, limit, held in zip(_NAMES, _REMEDIES, size, self.limits, self.held, strict=True):
            if asked > limit:
                raise ApiError(400, f"the request has {asked} {name}, and the server takes {limit} at most; {remedy}")
            if asked and held + asked > limit:
                raise self._busy(owner, f"the server has {held} {name} to work on and takes {limit}")
        if owner:
            if not self._shares.allows(owner, size):
                raise self._busy(owner, "another API key waits for room, and this one has its share")
            self._shares.acquire(owner, size)
        self.held = RequestCost(*map(operator.add, self.held, size))

    def release(self, size: RequestCost, owner: str = "") -> None:
        if owner:
            self._shares.release(owner, size)
        self.held = RequestCost(*map(operator.sub, self.held, size))
        if size.completions:
            self._end_times.append(monotonic())

    @contextlib.contextmanager
    def holding(self, size: RequestCost) -> Iterator[None]:
        """Holds the place while the block runs."""
        self.acquire(size)
        try:
            yield
        finally:
            self.release(size)

    def _busy(self, owner: str, why: str) -> ApiError:
        wait = self._wait()
        if owner:
            self._shares.note_refused(owner, _RETURN_FACTOR * wait)
        return ApiError(
            429, f"{why}; try again in {wait} s", code="server_overloaded", headers={"Retry-After": str(wait)}
        )

    def _wait(self) -> int:
        """Seconds until a place should be free: the mean time between the latest ends, doubled."""
        if len(self._end_times) < 2:
            return 1
        mean = (monotonic() - self._end_times[0]) / len(self._end_times)
        return max(1, min(_MAX_WAIT, round(2 * mean)))
