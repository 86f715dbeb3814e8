"""Prompt prefixes that an engine was given before, as chains of numbers; only the latest ones."""

from collections import OrderedDict
from collections.abc import Sequence


class PrefixIndex:
    """Known prefixes. A number of a chain stands for a piece of a prompt and all before it. A wrong guess only costs
    time."""

    def __init__(self, most: int) -> None:
        """`most`: numbers that are kept; those that were not used for the longest are dropped first."""
        self._most = most
        self._known: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def shared_length(self, chain: Sequence[int]) -> int:
        """Returns how many numbers of the chain, from its start, are known."""
        known, count = self._known, 0
        while count < len(chain) and chain[count] in known:
            count += 1
        return count

    def add(self, chain: Sequence[int]) -> None:
        known = self._known
        for each in reversed(chain):  # ends of chains are dropped first, as in the engine
            known[each] = None
            known.move_to_end(each)
        while len(known) > self._most:
            known.popitem(last=False)

    def clear(self) -> None:
        self._known.clear()
