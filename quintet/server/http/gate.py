"""How much the server takes on: completions and prompt tokens that run or wait. What comes on top is sent away."""

from collections import deque
from time import monotonic
from typing import NamedTuple

from quintet.server.http.errors import ApiError
from quintet.server.http.shares import Shares

_LONGEST_WAIT = 60  # seconds that a client is told to wait, at most
_RETURN = 2  # times that wait: within it, a client that was told to wait is back
_REMEMBERED = 64  # ends of requests, from which the wait is estimated


class Size(NamedTuple):
    """Of an API call."""

    completions: int
    tokens: int  # of its prompts, once for each completion's prompt


class Gate:
    """Counts what is inside. One for each process of the API; its share of the limits is the caller's matter."""

    def __init__(self, max_completions: int, max_tokens: int) -> None:
        self.limits = Size(max_completions, max_tokens)
        self.completions = self.tokens = 0
        self._shares = Shares(self.limits)
        self._ends: deque[float] = deque(maxlen=_REMEMBERED)

    def enter(self, size: Size, owner: str = "") -> None:
        """Raises ApiError 429 if there is no room now, 400 if there never would be. An owner has a share of it."""
        for name, asked, limit, held in (
            ("completions", size.completions, self.limits.completions, self.completions),
            ("prompt tokens", size.tokens, self.limits.tokens, self.tokens),
        ):
            if asked > limit:
                raise ApiError(400, f"the request has {asked} {name}, and the server takes {limit} at most; split it")
            if held + asked > limit:
                raise self._busy(owner, f"the server has {held} {name} to work on and takes {limit}")
        if owner:
            if not self._shares.allows(owner, size):
                raise self._busy(owner, "another API key waits for room, and this one has its share")
            self._shares.enter(owner, size)
        self.completions += size.completions
        self.tokens += size.tokens

    def leave(self, size: Size, owner: str = "") -> None:
        if owner:
            self._shares.leave(owner, size)
        self.completions -= size.completions
        self.tokens -= size.tokens
        self._ends.append(monotonic())

    def _busy(self, owner: str, why: str) -> ApiError:
        wait = self._wait()
        if owner:
            self._shares.wait(owner, _RETURN * wait)
        return ApiError(
            429, f"{why}; try again in {wait} s", code="server_overloaded", headers={"Retry-After": str(wait)}
        )

    def _wait(self) -> int:
        """Seconds until a place should be free: the mean time between the latest ends, doubled."""
        if len(self._ends) < 2:
            return 1
        mean = (monotonic() - self._ends[0]) / len(self._ends)
        return max(1, min(_LONGEST_WAIT, round(2 * mean)))
