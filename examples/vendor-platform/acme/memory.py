"""A device's memory, counted: what is taken is tagged, and given back when the last tensor on it dies."""

import threading
from collections import Counter

from quintet.contract import Memory

GIB = 2**30


class Block:
    """A stretch of memory. Whoever keeps it keeps the memory."""

    __slots__ = ("_pool", "size", "tag")

    def __init__(self, pool: "Pool", size: int, tag: str) -> None:
        self._pool, self.size, self.tag = pool, size, tag

    def __del__(self) -> None:
        self._pool.give(self.size, self.tag)


class Pool:
    """So many bytes, and who has how many of them."""

    def __init__(self, total: int, name: str) -> None:
        self.used: Counter[str] = Counter()  # by tag
        self._total, self._name, self._peak = total, name, 0
        self._lock = threading.RLock()  # a block may die wherever Python collects garbage, in here too

    def take(self, size: int, tag: str, what: str = "") -> Block:
        """MemoryError with the numbers if it does not fit. `what` wants it, in words."""
        with self._lock:
            free = self._total - self.used.total()
            if size > free:
                raise MemoryError(
                    f"{what or tag} needs {size / GIB:.2f} GiB, {free / GIB:.2f} GiB of {self._total / GIB:.2f} GiB "
                    f"are free on {self._name} ({self._shares()}); lower kv_cache_memory_bytes or max_model_len"
                )
            self.used[tag] += size
            self._peak = max(self._peak, self.used.total())
        return Block(self, size, tag)

    def give(self, size: int, tag: str) -> None:
        with self._lock:
            self.used[tag] -= size

    def facts(self) -> Memory:
        with self._lock:
            return Memory(self._total - self.used.total(), self._total, self._peak)

    def _shares(self) -> str:
        kept = [f"{tag} {size / GIB:.2f} GiB" for tag, size in self.used.items() if size]
        return ", ".join(kept) or "nothing is taken"
