"""What somebody was given before: beginnings of prompts, as chains of numbers, the latest ones alone."""

from collections import OrderedDict
from collections.abc import Sequence


class Beginnings:
    """A number of a chain stands for a piece of a prompt and all that is before it. A wrong guess costs time alone."""

    def __init__(self, most: int) -> None:
        """`most`: numbers that are kept; those that were not met for the longest are forgotten first."""
        self._most = most
        self._known: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def shared(self, chain: Sequence[int]) -> int:
        """How many of the chain, from its start, are known."""
        known, count = self._known, 0
        while count < len(chain) and chain[count] in known:
            count += 1
        return count

    def remember(self, chain: Sequence[int]) -> None:
        known = self._known
        for each in reversed(chain):  # ends are forgotten first, as in the engine
            known[each] = None
            known.move_to_end(each)
        while len(known) > self._most:
            known.popitem(last=False)

    def clear(self) -> None:
        self._known.clear()
