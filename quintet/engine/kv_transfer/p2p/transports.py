"""Transports of pages between two engines' memory, by connector: frames, mapped memory, or a transfer library."""

import functools
import ipaddress
import socket
from dataclasses import dataclass

import psutil

from quintet.config import KVTransferConfig
from quintet.config.kv_transfer import MOONCAKE, NIXL, SHARED_MEMORY
from quintet.engine.kv_transfer.p2p.mooncake import MooncakeEngine
from quintet.engine.kv_transfer.p2p.nixl import NixlEngine
from quintet.engine.kv_transfer.p2p.rdma import ExposedRegion, ReceiveBufferPool, RemoteReads, TransferEngine
from quintet.engine.kv_transfer.p2p.remote_memory import MappedRegion, OpenRegion, ShareMemory, send_memory
from quintet.engine.kv_transfer.p2p.send_buffer import SendBuffer
from quintet.engine.kv_transfer.p2p.sockets import NO_KEY


@dataclass
class Transport:
    """Transport of one engine, or of one of its ranks where they are processes."""

    name: str  # the other side must have the same; empty: in frames
    transfer_engine: TransferEngine | None = None

    def __post_init__(self) -> None:
        # into which it moves pages
        self.buffer_pool = None if self.transfer_engine is None else ReceiveBufferPool(self.transfer_engine)

    def share_memory(self, loans: SendBuffer) -> ShareMemory | None:
        """Returns the producer's half."""
        if self.transfer_engine is not None:
            return ExposedRegion(self.transfer_engine, loans.rows)
        return (lambda channel: send_memory(channel, loans.descriptor)) if self.name else None

    def open_region(self, patience: float) -> OpenRegion | None:
        """Returns the consumer's half."""
        if self.transfer_engine is not None and self.buffer_pool is not None:
            return functools.partial(
                RemoteReads, mover=self.transfer_engine, stagings=self.buffer_pool, patience=patience
            )
        return MappedRegion if self.name else None

    def close(self) -> None:
        if self.buffer_pool is not None:
            self.buffer_pool.close()


def transport_of(settings: KVTransferConfig, keyed: bool) -> Transport:
    """Makes the transport of a connector; ValueError where a library is missing, or cannot start."""
    if (
        settings.kv_connector in (NIXL, MOONCAKE)
        and not keyed
        and not ipaddress.ip_address(resolved(settings.kv_ip)).is_loopback
    ):
        raise ValueError(NO_KEY.format(where=f"kv_transfer_config: kv_ip={settings.kv_ip!r}"))
    if settings.kv_connector == SHARED_MEMORY:
        return Transport("shared memory")
    if settings.kv_connector == NIXL:
        return Transport("NIXL", NixlEngine(device_of(settings.kv_ip)))
    if settings.kv_connector == MOONCAKE:
        return Transport("Mooncake", _mooncake(settings))
    return Transport("")


def _mooncake(settings: KVTransferConfig) -> MooncakeEngine:
    """Makes the Mooncake mover. Its own address can be set, but not the one it listens on: so the user must ask for
    0.0.0.0."""
    host = settings.extras.host
    if not ipaddress.ip_address(resolved(settings.kv_ip)).is_unspecified or host is None:
        raise ValueError(
            f"kv_transfer_config.kv_connector {MOONCAKE}: Mooncake listens at all addresses and checks no key; on a "
            "private network give kv_ip 0.0.0.0 and, in kv_connector_extra_config, host; otherwise use TCPConnector"
        )
    return MooncakeEngine(host, settings.extras.mooncake_protocol)


def device_of(host: str) -> str:
    """Returns the network device that has this address; empty: all. ValueError where none has it."""
    address = resolved(host)
    if ipaddress.ip_address(address).is_unspecified:
        return ""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return name
    raise ValueError(f"kv_transfer_config.kv_ip={host!r}: no network device of this machine has it; give one's address")


def resolved(host: str) -> str:
    """Returns the address that kv_ip means; ValueError: none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise ValueError(f"kv_transfer_config.kv_ip={host!r} is no address ({error.strerror}); give another") from None
    return str(found).partition("%")[0]
