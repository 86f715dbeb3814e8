"""Fair shares of the capacity limiter: while one API key waits for room, no other takes more than its share."""

import operator
from collections.abc import Sequence
from time import monotonic


class FairShares:
    """Counts by owner, in the quantities that the gate counts. A share is a limit divided by the owners that hold or
    wait.

    An owner waits from a refusal until it is admitted, or until the time in which it should come again has passed.
    """

    def __init__(self, limits: Sequence[int]) -> None:
        self._limits, self._nothing = limits, (0,) * len(limits)
        self._held: dict[str, tuple[int, ...]] = {}  # of those that hold something
        self._waiting: dict[str, float] = {}  # until when it counts, time.monotonic()

    def allows(self, owner: str, size: Sequence[int]) -> bool:
        """Returns whether the owner may have `size` more. One that holds nothing may, and any owner while no other
        waits."""
        now = monotonic()
        self._waiting = {each: until for each, until in self._waiting.items() if until > now}
        if owner not in self._held or not self._waiting.keys() - {owner}:
            return True
        num = len(self._held.keys() | self._waiting.keys())
        amounts = zip(self._held[owner], size, self._limits, strict=True)
        return all(not asked or (held + asked) * num <= limit for held, asked, limit in amounts)

    def acquire(self, owner: str, size: Sequence[int]) -> None:
        """Counts an owner's request that was admitted."""
        self._waiting.pop(owner, None)
        self._held[owner] = tuple(map(operator.add, self._held.get(owner, self._nothing), size))

    def release(self, owner: str, size: Sequence[int]) -> None:
        left = tuple(map(operator.sub, self._held.pop(owner), size))
        if any(left):
            self._held[owner] = left

    def note_refused(self, owner: str, seconds: float) -> None:
        """Notes that the owner was refused, and is expected again within that time."""
        self._waiting[owner] = monotonic() + seconds
