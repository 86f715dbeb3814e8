"""Pages of the KV cache that go to other engines and come from them: who with whom, and by what way."""

import ipaddress
import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from quintet.common.value_parsers import count, finite_number, integer, json_object, one_of, optional, text
from quintet.config.schema.fields import Nested, option

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
PEER_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,252}[A-Za-z0-9])?")
MAX_PEERS = 1024


@dataclass(frozen=True)
class AllowedPeer:
    """One entry."""

    host: str  # empty: it is a network
    port: int | None = None  # None: any
    network: Network | None = None  # an address is a network of one


def parse_peers(value: Any) -> tuple[str, ...]:
    """kv_connector_extra_config.peers; ValueError says which entry is none."""
    if not isinstance(value, list | tuple) or not 0 < len(value) <= MAX_PEERS:
        raise ValueError(f'must be a list of hosts, such as ["10.0.0.5:14579", "10.0.1.0/24"], not {value!r}')
    for each in value:
        parse_peer(each)
    return tuple(value)


def parse_peer(entry: Any) -> AllowedPeer:
    """ValueError: it is neither a host, nor one with a port, nor a network."""
    if isinstance(entry, str):
        if (network := _network(entry)) is not None:
            return AllowedPeer("", None, network)
        host, colon, port = entry.rpartition(":")
        if not colon:
            host, port = entry, ""
        network = _network(host[1:-1] if host[:1] + host[-1:] == "[]" else host)
        number = int(port) if port.isascii() and port.isdigit() else 0
        fits = not colon or 0 < number < 2**16
        if fits and (PEER_HOST.fullmatch(host) or (network is not None and "/" not in host)):
            return AllowedPeer("" if network is not None else host.lower(), number or None, network)
    raise ValueError(f"has {entry!r}, which is no host, host:port or network (10.0.1.0/24)")


def _network(text: str) -> Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


TCP = "TCPConnector"
SHARED_MEMORY = "SharedMemoryConnector"
NIXL = "NixlConnector"
MOONCAKE = "MooncakeConnector"
CONNECTORS = TCP, SHARED_MEMORY, NIXL, MOONCAKE
_HOST_DEVICES = "host cpu".split()  # ours and vLLM's word for its memory
_NO_DEVICE = "pages wait for those who fetch them in host memory; leave it out, or give cpu"
_FOLDER_REASON = "a folder of pages is kv_offloading_folder, with kv_offloading_size; it is one engine's at a time"
VLLM_CONNECTORS = {
    "P2pNcclConnector": f"pages go from host memory to host memory here; use {TCP}",
    "LMCacheMPConnector": "its server and engines unpickle what they send each other; use LMCacheConnectorV1, whose "
    "tiers and remotes do not",
    "MooncakeStoreConnector": f"Mooncake's store is not spoken here; use kv_offloading_size, or {TCP}",
    "SharedStorageConnector": _FOLDER_REASON,
    "ExampleConnector": _FOLDER_REASON,
    "DecodeBenchConnector": "it fills the cache with numbers that no model computed; leave it out",
}
_PRODUCES, _CONSUMES, _BOTH = "kv_producer", "kv_consumer", "kv_both"


def _connector(value: Any) -> str:
    if isinstance(value, str) and value in VLLM_CONNECTORS:
        raise ValueError(f"{value} cannot be used: {VLLM_CONNECTORS[value]}")
    return str(one_of(*CONNECTORS)(value))


def _device(value: Any) -> str:
    if value not in _HOST_DEVICES:
        raise ValueError(f"must be cpu, not {value!r}: {_NO_DEVICE}")
    return _HOST_DEVICES[0]


def _port(value: Any) -> int:
    port = integer(value)
    if not 0 <= port < 2**16:
        raise ValueError(f"must be a port, 0 (any that is free) to 65535, not {value!r}")
    return port


def _bytes(value: Any) -> int:
    """vLLM gives 1e9."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return int(count()(value))


def _backends(value: Any) -> list[str]:
    if value != ["UCX"]:
        raise ValueError(f'must be ["UCX"], not {value!r}: NIXL moves pages by UCX alone here; leave it out')
    return list(value)


def _seconds(value: Any) -> float:
    found = -1.0 if isinstance(value, bool) else finite_number(value)
    if not 0 < found <= 86_400:
        raise ValueError(f"must be over 0 and at most 86400, in seconds, not {value!r}")
    return found


@dataclass(frozen=True)
class TransferExtras(Nested):
    """kv_connector_extra_config, as our connectors read it."""

    name: ClassVar[str] = "kv_transfer_config.kv_connector_extra_config"

    key_file: str | None = option(
        None, optional(text), "file with the key that all engines share; instead, QUINTET_KV_TRANSFER_KEY",
        group="memory", metavar="FILE",
    )  # fmt: skip
    host: str | None = option(
        None, optional(text), "where others reach this engine, if that is not kv_ip", group="memory", metavar="HOST"
    )
    lease_seconds: float = option(
        120.0, _seconds, "how long pages wait to be fetched", group="memory", metavar="SECONDS"
    )
    timeout_seconds: float = option(
        10.0, _seconds, "how long a peer may be silent that pages are asked of", group="memory", metavar="SECONDS"
    )
    peers: tuple[str, ...] | None = option(
        None,
        optional(parse_peers),
        "of whom pages may be asked: hosts, host:port, networks; any that a request names, if not given",
        group="memory",
    )
    mooncake_protocol: str = option(
        "tcp", one_of("tcp", "rdma"), "of MooncakeConnector", group="memory", choices=("tcp", "rdma")
    )
    backends: list[str] | None = option(
        None, optional(_backends), "of NixlConnector: UCX, which is the one that there is", group="memory"
    )


@dataclass(frozen=True)
class KVTransferConfig(Nested):
    """Pages between engines; vLLM's names. Off where there is no kv_connector."""

    name: ClassVar[str] = "kv_transfer_config"

    kv_connector: str | None = option(
        None,
        optional(_connector),
        "how pages travel: TCPConnector, SharedMemoryConnector on one machine, NixlConnector or "
        "MooncakeConnector; vLLM's OffloadingConnector and MultiConnector are taken",
        group="memory",
        metavar="NAME",
    )
    kv_role: str | None = option(
        None, optional(one_of(_PRODUCES, _CONSUMES, _BOTH)), "whether pages are given (kv_producer), taken "
        "(kv_consumer), or both (kv_both)", group="memory", choices=(_PRODUCES, _CONSUMES, _BOTH),
    )  # fmt: skip
    engine_id: str | None = option(
        None, optional(text), "this engine's name among the others; a random one if not given", group="memory"
    )
    kv_ip: str = option(
        "127.0.0.1", text, "address at which pages are given; beyond loopback only with a key", group="memory",
        metavar="HOST",
    )  # fmt: skip
    kv_port: int = option(14579, _port, "its port; 0: any that is free", group="memory", metavar="PORT")
    kv_buffer_size: int = option(
        1_000_000_000, _bytes, "bytes of host memory for pages that wait to be fetched", group="memory",
        metavar="BYTES",
    )  # fmt: skip
    kv_buffer_device: str = option(_HOST_DEVICES[0], _device, "where they wait: cpu, the host's memory", group="memory")
    kv_rank: int | None = option(None, optional(count(0)), "taken, and not used: peers are named by each request",
                                 group="memory")  # fmt: skip
    kv_parallel_size: int = option(1, count(), "the same", group="memory")
    kv_connector_extra_config: dict[str, Any] | None = option(
        None,
        optional(json_object),
        "key_file, peers, host, lease_seconds, timeout_seconds, backends, mooncake_protocol",
        group="memory",
        metavar="JSON",
    )
    kv_load_failure_policy: str | None = option(
        None, optional(one_of("recompute", "fail")), "where pages do not come: compute them, or end the request; "
        "the engine's own setting of that name if not given", group="memory", choices=("recompute", "fail"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.extras
        if (self.kv_connector is None) != (self.kv_role is None):
            lacks, given = ("kv_role", "kv_connector") if self.kv_role is None else ("kv_connector", "kv_role")
            raise ValueError(f"{self.name}.{lacks} must be given, too, where {given} is")

    @property
    def is_producer(self) -> bool:
        """True if this engine is a KV producer: other engines may read its pages."""
        return self.kv_role in (_PRODUCES, _BOTH)

    @property
    def is_consumer(self) -> bool:
        """True if this engine is a KV consumer: it reads pages of other engines."""
        return self.kv_role in (_CONSUMES, _BOTH)

    @property
    def shared_part(self) -> "KVTransferConfig":
        """The part that is equal on all machines of one engine: each has its own address, and its own files."""
        given = self.kv_connector_extra_config or {}
        extras = {name: value for name, value in given.items() if name not in ("host", "key_file")}
        return replace(self, kv_ip=type(self).kv_ip, kv_connector_extra_config=extras or None)

    @property
    def extras(self) -> TransferExtras:
        """kv_connector_extra_config, read."""
        found = TransferExtras.from_value(self.kv_connector_extra_config or {})
        assert isinstance(found, TransferExtras)
        return found
