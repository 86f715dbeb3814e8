"""BM25 (Robertson and Zaragoza 2009), in Lucene's form: what words alone find."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

K1, B = 1.2, 0.75
_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


class BM25:
    """score(q, d) = sum over q's words of idf * f * (K1 + 1) / (f + K1 * (1 - B + B * length / mean length))"""

    def __init__(self, documents: Sequence[str]) -> None:
        self.counts = [Counter(words(each)) for each in documents]
        self.lengths = [sum(each.values()) for each in self.counts]
        self.mean = sum(self.lengths) / len(documents)
        held = Counter(word for each in self.counts for word in each)
        self.idf = {word: math.log(1 + (len(documents) - count + 0.5) / (count + 0.5)) for word, count in held.items()}

    def scores(self, query: str) -> list[float]:
        asked = words(query)
        return [
            sum(self._score(word, counts[word], length) for word in asked)
            for counts, length in zip(self.counts, self.lengths, strict=True)
        ]

    def _score(self, word: str, count: int, length: int) -> float:
        return self.idf.get(word, 0.0) * count * (K1 + 1) / (count + K1 * (1 - B + B * length / self.mean))
