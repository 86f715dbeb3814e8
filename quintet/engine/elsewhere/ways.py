"""How pages get from one engine's memory into another's, by connector: in frames, mapped, or by a library."""

import functools
import ipaddress
import socket
from dataclasses import dataclass

import psutil

from quintet.config import KVTransferConfig
from quintet.engine.elsewhere.loans import Loans
from quintet.engine.elsewhere.memory import Mapped, Open, Share, lend
from quintet.engine.elsewhere.mooncake_mover import MooncakeMover
from quintet.engine.elsewhere.moved import Lent, Moved, Mover, Stagings
from quintet.engine.elsewhere.nixl_mover import NixlMover
from quintet.engine.elsewhere.sockets import NO_KEY
from quintet.settings.kv_transfer import MOONCAKE, NIXL, SHARED_MEMORY


@dataclass
class Means:
    """Of one engine, or of one of its ranks where they are processes."""

    name: str  # as the other side must have it, too; empty: in frames
    mover: Mover | None = None

    def __post_init__(self) -> None:
        self.stagings = None if self.mover is None else Stagings(self.mover)  # into which it moves pages

    def share(self, loans: Loans) -> Share | None:
        """The giver's half."""
        if self.mover is not None:
            return Lent(self.mover, loans.rows)
        return (lambda channel: lend(channel, loans.descriptor)) if self.name else None

    def open(self, patience: float) -> Open | None:
        """The taker's."""
        if self.mover is not None and self.stagings is not None:
            return functools.partial(Moved, mover=self.mover, stagings=self.stagings, patience=patience)
        return Mapped if self.name else None

    def close(self) -> None:
        if self.stagings is not None:
            self.stagings.end()


def means_of(settings: KVTransferConfig, keyed: bool) -> Means:
    """ValueError where a library is missing, or cannot begin."""
    if (
        settings.kv_connector in (NIXL, MOONCAKE)
        and not keyed
        and not ipaddress.ip_address(resolved(settings.kv_ip)).is_loopback
    ):
        raise ValueError(NO_KEY.format(where=f"kv_transfer_config: kv_ip={settings.kv_ip!r}"))
    if settings.kv_connector == SHARED_MEMORY:
        return Means("shared memory")
    if settings.kv_connector == NIXL:
        return Means("NIXL", NixlMover(device_of(settings.kv_ip)))
    if settings.kv_connector == MOONCAKE:
        return Means("Mooncake", _mooncake(settings))
    return Means("")


def _mooncake(settings: KVTransferConfig) -> MooncakeMover:
    """It can be told where it is, and not where to listen: so that has to be asked for."""
    host = settings.extras.host
    if not ipaddress.ip_address(resolved(settings.kv_ip)).is_unspecified or host is None:
        raise ValueError(
            f"kv_transfer_config.kv_connector {MOONCAKE}: Mooncake listens at all addresses, and asks nobody for a "
            "key; where the network is its own give kv_ip 0.0.0.0 and, in kv_connector_extra_config, host, or else use "
            "TCPConnector"
        )
    return MooncakeMover(host, settings.extras.mooncake_protocol)


def device_of(host: str) -> str:
    """The network device that has this address; empty: all. ValueError where none has it."""
    address = resolved(host)
    if ipaddress.ip_address(address).is_unspecified:
        return ""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return name
    raise ValueError(f"kv_transfer_config.kv_ip={host!r}: no network device of this machine has it; give one's address")


def resolved(host: str) -> str:
    """The address that kv_ip means; ValueError: none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise ValueError(f"kv_transfer_config.kv_ip={host!r} is no address ({error.strerror}); give another") from None
    return str(found).partition("%")[0]
