"""Finds stop strings in a text that arrives in pieces, one step per character (Aho and Corasick, 1975)."""

import functools
import re
from collections import deque


class StopStrings:
    """The automaton of some stop strings. A state stands for the longest end of the text that begins a stop string."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self.depth = [0]  # of each state: how many characters may yet turn out to belong to a stop string
        self.found: list[str | None] = [None]  # the longest stop string that ends in this state
        for stop in stops:
            self._insert(stop)
        self._fail = self._link()
        self._starts = re.compile("[" + re.escape("".join({stop[0] for stop in stops})) + "]")

    def _insert(self, stop: str) -> None:
        state = 0
        for depth, character in enumerate(stop, 1):
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self.depth.append(depth)
                self.found.append(None)
            state = self._next[state][character]
        self.found[state] = stop

    def _link(self) -> list[int]:
        """Returns for each state the state of its longest proper end that also begins a stop string."""
        fail = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            self.found[state] = self.found[state] or self.found[fail[state]]
            for character, after in self._next[state].items():
                queue.append(after)
                fail[after] = self._step(fail, fail[state], character)
        return fail

    def _step(self, fail: list[int], state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = fail[state]
        return self._next[state].get(character, 0)

    def scan(self, state: int, text: str, start: int = 0) -> tuple[int, int]:
        """Reads text from `start` up to the end of the first stop string. Returns (state, where it stopped reading).

        A stop string ended there if found[state] is set; it does not start over, so a caller may go on.
        """
        found, fail, size = self.found, self._fail, len(text)
        while start < size:
            if state == 0:
                match = self._starts.search(text, start)
                if match is None:
                    return 0, size
                start = match.start()
            state = self._step(fail, state, text[start])
            start += 1
            if found[state] is not None:
                break
        return state, start


@functools.lru_cache(maxsize=256)
def compile_stops(stops: tuple[str, ...]) -> StopStrings:
    """Many requests share their stop strings. SamplingParams bounds their number and length."""
    return StopStrings(stops)
