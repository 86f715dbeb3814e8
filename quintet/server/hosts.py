"""Names of machines: which are this one's own, and which others a server answers to (the Host header)."""

import re
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

ANY = "*"
_NAME = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*\.?")


def is_loopback(host: str) -> bool:
    """True if only this machine reaches the address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def allowed_host(value: Any) -> str:
    """A name, an address, *.example.com (any name below it) or *; what is compared is in lower case."""
    if not isinstance(value, str):
        raise ValueError(f"must be the name of a host, not {value!r}")
    name = value.strip().lower()
    if name == ANY or _address(name.strip("[]")) is not None or _NAME.fullmatch(name):
        return _address(name.strip("[]")) or name
    raise ValueError(f"must be a name or an address, without scheme, port or path, *.example.com or *, not {value!r}")


def _address(name: str) -> str | None:
    """The one way to write it; None: it is no address."""
    try:
        return str(ip_address(name))
    except ValueError:
        return None


class AllowedHosts:
    """Host names that a server answers to. Guards against DNS rebinding: a foreign name that points to this server, so
    that a page of that name could read its answers."""

    def __init__(self, local: bool, allowed: Sequence[str]) -> None:
        """`local`: only this machine reaches the server. `allowed`: values that allowed_host() returned."""
        self._local, self._allowed = local, frozenset(allowed)
        self._below = tuple(each[1:] for each in allowed if each.startswith("*."))
        self._all = ANY in allowed or not (local or allowed)

    def allows(self, host: str) -> bool:
        """`host`: a Host header, with or without a port.

        This machine's own names always count: a health check inside of a container asks for them. Where others reach
        the server, so does each address: rebinding needs a name.
        """
        if self._all:
            return True
        name = _name(host)
        address = _address(name)
        if name.endswith(".localhost") or is_loopback(name) or (address is not None and not self._local):
            return True
        return (address or name) in self._allowed or name.endswith(self._below)


def _name(host: str) -> str:
    """In lower case; "" for what is no host."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:  # half an IPv6 address
        return ""
