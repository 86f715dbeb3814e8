"""Engines that pages may be requested from, as an operator names them: a host, a host and its port, or a network."""

import ipaddress
import re
from dataclasses import dataclass
from typing import Any

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,252}[A-Za-z0-9])?")
MOST = 1024


@dataclass(frozen=True)
class Allowed:
    """One entry."""

    host: str  # empty: it is a network
    port: int | None = None  # None: any
    network: Network | None = None  # an address is a network of one


def peers(value: Any) -> tuple[str, ...]:
    """kv_connector_extra_config.peers; ValueError says which entry is none."""
    if not isinstance(value, list | tuple) or not 0 < len(value) <= MOST:
        raise ValueError(f'must be a list of hosts, such as ["10.0.0.5:14579", "10.0.1.0/24"], not {value!r}')
    for each in value:
        allowed(each)
    return tuple(value)


def allowed(entry: Any) -> Allowed:
    """ValueError: it is neither a host, nor one with a port, nor a network."""
    if isinstance(entry, str):
        if (network := _network(entry)) is not None:
            return Allowed("", None, network)
        host, colon, port = entry.rpartition(":")
        if not colon:
            host, port = entry, ""
        network = _network(host[1:-1] if host[:1] + host[-1:] == "[]" else host)
        number = int(port) if port.isascii() and port.isdigit() else 0
        fits = not colon or 0 < number < 2**16
        if fits and (HOST.fullmatch(host) or (network is not None and "/" not in host)):
            return Allowed("" if network is not None else host.lower(), number or None, network)
    raise ValueError(f"has {entry!r}, which is no host, host:port or network (10.0.1.0/24)")


def _network(text: str) -> Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None
