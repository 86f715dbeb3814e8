"""Hosts that pages may be requested from: a request names a host, and the operator lists those that are allowed."""

import ipaddress
import socket
from collections.abc import Sequence

from quintet.config.kv_transfer import AllowedPeer, parse_peer


class AllowedPeers:
    """Operator's list of allowed peers."""

    def __init__(self, entries: Sequence[str]) -> None:
        self._entries = [parse_peer(each) for each in entries]

    def allows(self, host: str, address: str, port: int) -> bool:
        """Returns whether the list allows a host. address: the host's IP address, to which the connection goes. A host
        that the list has by name may have any address that its name resolves to."""
        return any(each.port in (None, port) and _matches(each, host, address) for each in self._entries)


def _matches(entry: AllowedPeer, host: str, address: str) -> bool:
    plain = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(plain, ipaddress.IPv6Address) and plain.ipv4_mapped is not None:
        plain = plain.ipv4_mapped
    if entry.network is not None:
        return plain in entry.network
    if entry.host == host.lower():
        return True
    try:
        found = socket.getaddrinfo(entry.host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return str(plain) in {str(each[4][0]).partition("%")[0] for each in found}
