"""Eviction order of pages: least recently used, or ARC (Megiddo and Modha, FAST 2003)."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable

IsPinned = Callable[[bytes], bool]


class EvictionPolicy(ABC):
    """Keys that are stored, at most `capacity` of them, and the order of their eviction."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, key: object) -> bool: ...

    @abstractmethod
    def touch(self, key: bytes) -> None:
        """Marks a key that is stored as used."""

    @abstractmethod
    def remove(self, key: bytes) -> None:
        """Removes a key for another reason than lack of room; it may be absent."""

    @abstractmethod
    def evict(self, spared: IsPinned, new: bytes = b"") -> bytes | None:
        """Removes and returns the key to evict, to make room for `new`; None if all are spared, or there are none."""

    @abstractmethod
    def insert(self, key: bytes) -> None:
        """Adds a key that is not stored yet; there must be room."""

    def add(self, key: bytes, spared: IsPinned) -> tuple[bool, list[bytes]]:
        """Adds a key, and evicts others for it -> whether it was added, and the evicted keys."""
        gone: list[bytes] = []
        while len(self) >= self.capacity:
            victim = self.evict(spared, key)
            if victim is None:
                return False, gone
            gone.append(victim)
        self.insert(key)
        return True, gone


class LRUPolicy(EvictionPolicy):
    """Evicts the least recently used key."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._keys: OrderedDict[bytes, None] = OrderedDict()  # the last used at the end

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def touch(self, key: bytes) -> None:
        self._keys.move_to_end(key)

    def remove(self, key: bytes) -> None:
        self._keys.pop(key, None)

    def evict(self, spared: IsPinned, new: bytes = b"") -> bytes | None:
        return _evict_first(self._keys, spared)

    def insert(self, key: bytes) -> None:
        self._keys[key] = None


class ARCPolicy(EvictionPolicy):
    """Keeps keys that were used once and keys that were used again in two lists. Their shares follow the misses: an
    evicted key that comes again shows which list was too short. So one long prompt does not evict what all requests
    use."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._once: OrderedDict[bytes, None] = OrderedDict()  # T1
        self._again: OrderedDict[bytes, None] = OrderedDict()  # T2
        self._gone_once: OrderedDict[bytes, None] = OrderedDict()  # B1
        self._gone_again: OrderedDict[bytes, None] = OrderedDict()  # B2
        self._share = 0.0  # p: keys that _once should have

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __contains__(self, key: object) -> bool:
        return key in self._once or key in self._again

    def touch(self, key: bytes) -> None:
        self._once.pop(key, None)
        self._again.pop(key, None)
        self._again[key] = None

    def remove(self, key: bytes) -> None:
        self._once.pop(key, None)
        self._again.pop(key, None)

    def evict(self, spared: IsPinned, new: bytes = b"") -> bytes | None:
        long = len(self._once) > self._share or (new in self._gone_again and len(self._once) == self._share)
        lists = [(self._once, self._gone_once), (self._again, self._gone_again)]
        for held, gone in lists if self._once and long else reversed(lists):
            victim = _evict_first(held, spared)
            if victim is not None:
                gone[victim] = None
                return victim
        return None

    def add(self, key: bytes, spared: IsPinned) -> tuple[bool, list[bytes]]:
        """Adapts the shares first: the eviction depends on them."""
        once, again = len(self._gone_once), len(self._gone_again)
        if key in self._gone_once:
            self._share = min(float(self.capacity), self._share + max(1.0, again / once))
        elif key in self._gone_again:
            self._share = max(0.0, self._share - max(1.0, once / again))
        return super().add(key, spared)

    def insert(self, key: bytes) -> None:
        known = key in self._gone_once or key in self._gone_again
        self._gone_once.pop(key, None)
        self._gone_again.pop(key, None)
        (self._again if known else self._once)[key] = None
        while self._gone_once and len(self._once) + len(self._gone_once) > self.capacity:
            self._gone_once.popitem(last=False)
        while self._gone_again and len(self) + len(self._gone_once) + len(self._gone_again) > 2 * self.capacity:
            self._gone_again.popitem(last=False)


POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LRUPolicy, "arc": ARCPolicy}


def _evict_first(keys: OrderedDict[bytes, None], spared: IsPinned) -> bytes | None:
    """Removes and returns the first key that is not spared; None if there is none."""
    found = next((key for key in keys if not spared(key)), None)
    if found is not None:
        del keys[found]
    return found
