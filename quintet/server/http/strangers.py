"""Connections on which no request was let in yet: an address has a share of them, and the oldest makes room."""

from ipaddress import IPv6Address, ip_address
from typing import Generic, TypeVar

SPARE = 16  # connections above the limit, so that a probe of /health finds a place when callers have all of them
_LEAST = 16  # an address's share; browsers open some ahead

T = TypeVar("T")


class Strangers(Generic[T]):
    """Remembers them in the order in which they came."""

    def __init__(self, max_connections: int) -> None:
        self._share = max(_LEAST, max_connections // 4)
        self._places: dict[T, str] = {}
        self._by_place: dict[str, dict[T, None]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, who: T) -> bool:
        return who in self._places

    def add(self, who: T, host: str) -> T | None:
        """Returns the oldest of the same place if that has more than its share now."""
        place = self._places[who] = _place(host)
        there = self._by_place.setdefault(place, {})
        there[who] = None
        return next(iter(there)) if len(there) > self._share else None

    def remove(self, who: T) -> None:
        """Passes over those that are none."""
        place = self._places.pop(who, None)
        if place is not None:
            there = self._by_place[place]
            del there[who]
            if not there:
                del self._by_place[place]

    @property
    def oldest(self) -> T:
        """Of all; there is one."""
        return next(iter(self._places))


def _place(host: str) -> str:
    """An IPv4 address, or the network of an IPv6 address: who has one has all 2**64 of it."""
    try:
        address = ip_address(host)
    except ValueError:
        return host  # a Unix socket has none
    if isinstance(address, IPv6Address) and address.ipv4_mapped is None:
        return address.packed[:8].hex()
    return str(getattr(address, "ipv4_mapped", None) or address)
