"""Addresses that may be fetched from: only those of the public internet.

Sources: IANA's registries of special-purpose addresses for IPv4 and IPv6; RFC 6052 (addresses with an IPv4 address in
them).
"""

import ipaddress
import socket
import threading
from collections.abc import Sequence

MAX_ADDRESSES = 64  # of one host that are looked at
# Networks that Python's is_global has, or has had, as global: relays and translators to IPv4 addresses, and protocols
_SPECIAL = tuple(
    ipaddress.ip_network(each)
    for each in ("192.0.0.0/24", "192.88.99.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.175.48.0/24",
                 "2001::/23", "2002::/16", "2620:4f:8000::/48", "3fff::/20")
)  # fmt: skip
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")  # all that IANA has given away of IPv6


def is_public(address: str) -> bool:
    """True if this is the number of a host on the public internet: not of a private, local or reserved network, and no
    IPv6 form of an IPv4 address."""
    try:
        number = ipaddress.ip_address(address)
    except ValueError:  # an address with a zone is local, too
        return False
    if isinstance(number, ipaddress.IPv6Address) and number not in _GLOBAL_UNICAST:
        return False
    if any(number.version == each.version and number in each for each in _SPECIAL):
        return False
    return number.is_global and not (number.is_multicast or number.is_reserved or number.is_unspecified)


def resolve_host(host: str, port: int, timeout: float) -> Sequence[str]:
    """Returns the addresses of a host, as the system resolves it. OSError if it has none, or none comes in time.

    The system's resolver cannot be interrupted: a thread that still waits for it ends by itself.
    """
    found: list[Sequence[str] | OSError | UnicodeError] = []

    def look_up() -> None:
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            found.append(list(dict.fromkeys(str(info[4][0]) for info in infos)))
        except (OSError, UnicodeError) as error:
            found.append(error)

    thread = threading.Thread(target=look_up, name="quintet-resolve", daemon=True)
    thread.start()
    thread.join(timeout)
    if not found:
        raise TimeoutError("its name was not resolved in time")
    if isinstance(found[0], BaseException):
        raise OSError(str(found[0])) from None
    return found[0]
