"""Unauthenticated connections: limits them per address; the oldest is closed for a new one."""

from ipaddress import IPv6Address, ip_address
from typing import Generic, TypeVar

SPARE_CONNECTIONS = 16  # connections above the limit, so that a /health probe can connect when clients use all of them
_MIN_SHARE = 16  # minimum share of an address; browsers open some in advance

T = TypeVar("T")


class UnauthenticatedConnections(Generic[T]):
    """Unauthenticated connections in the order of their arrival."""

    def __init__(self, max_connections: int) -> None:
        self._share = max(_MIN_SHARE, max_connections // 4)
        self._places: dict[T, str] = {}
        self._by_place: dict[str, dict[T, None]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, who: T) -> bool:
        return who in self._places

    def add(self, who: T, host: str) -> T | None:
        """Adds a connection; returns the oldest of the same address if that now exceeds its share."""
        place = self._places[who] = _address_key(host)
        there = self._by_place.setdefault(place, {})
        there[who] = None
        return next(iter(there)) if len(there) > self._share else None

    def remove(self, who: T) -> None:
        """Removes a connection, if present."""
        place = self._places.pop(who, None)
        if place is not None:
            there = self._by_place[place]
            del there[who]
            if not there:
                del self._by_place[place]

    @property
    def oldest(self) -> T:
        """The oldest connection; there must be one."""
        return next(iter(self._places))


def _address_key(host: str) -> str:
    """Returns the IPv4 address, or the /64 network of an IPv6 address: one client has all its 2**64 addresses."""
    try:
        address = ip_address(host)
    except ValueError:
        return host  # a Unix socket has no address
    if isinstance(address, IPv6Address) and address.ipv4_mapped is None:
        return address.packed[:8].hex()
    return str(getattr(address, "ipv4_mapped", None) or address)
