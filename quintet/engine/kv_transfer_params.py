"""kv_transfer_params: KV pages at other engines in a request, and KV pages of this engine in its response.

The names are vLLM's. One engine computes a prompt (`do_remote_decode`) and responds with the place of its pages; the
same prompt with that response (`do_remote_prefill`) goes on at another engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quintet.engine.kv_transfer.p2p.protocol import MAX_RANKS
from quintet.sampling_params import ParameterError, SamplingParams

NAME = "kv_transfer_params"
MAX_NAME = 256  # characters of a name or an address


@dataclass(frozen=True)
class LeasePeer:
    """Pages of a prompt that wait at another engine."""

    host: str
    port: int
    lease: str  # their name there
    tokens: int | None = None  # of the prompt that they hold; None: unknown
    ports: tuple[int, ...] = ()  # of each process there, where ranks are processes
    stage_size: int = 1  # ranks there that share each layer
    stages: int = 1  # that share the layers
    hosts: tuple[str, ...] = ()  # of each process there, where these are on several machines

    @property
    def processes(self) -> int:
        """Number of processes that each have a part of every page."""
        return max(1, len(self.ports))

    @property
    def host_port(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass
class TransferParams:
    """KV transfer of one request's pages."""

    offers_pages: bool = False  # another engine will go on with its prompt
    peer: LeasePeer | None = None  # has begun with it
    requested: bool = False  # pages were asked for there, and are not asked for again
    peer_hashes: list[bytes] = field(default_factory=list)  # its pages' names among engines
    peer_names: dict[bytes, bytes] = field(default_factory=dict)  # by those of one generation here
    generation: int = -1


def kv_transfer_params_of(params: SamplingParams) -> Any:
    """Returns the caller's kv_transfer_params; None if there are none."""
    return (params.extra_args or {}).get(NAME)


def transfer_params_of(params: SamplingParams) -> TransferParams | None:
    """None: this request's pages are no other engine's business. ParameterError says what is wrong."""
    fields = kv_transfer_params_of(params)
    if not fields:
        return None
    if not isinstance(fields, Mapping):
        raise ParameterError(NAME, "must be an object")
    lends, takes = _bool_field(fields, "do_remote_decode"), _bool_field(fields, "do_remote_prefill")
    if lends and takes:
        raise ParameterError(NAME, "asks for do_remote_decode and do_remote_prefill; one engine does one of them")
    if lends:
        return TransferParams(offers_pages=True)
    if not takes:
        return None
    tokens = fields.get("remote_num_tokens")
    if tokens is not None and (not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0):
        raise ParameterError(NAME, f"has remote_num_tokens {str(tokens)[:80]!r}, which is no number of tokens")
    host, port, loan = (
        _name_field(fields, "remote_host"),
        _port(fields.get("remote_port")),
        _name_field(fields, "remote_request_id"),
    )
    ports, share, stages = _rank_fields(fields)
    return TransferParams(
        peer=LeasePeer(host, port, loan, tokens, ports, share, stages, _host_fields(fields, len(ports)))
    )


def check_transfer_params(params: SamplingParams, role: str | None) -> None:
    """ParameterError where an engine of this kv_role cannot do what is asked."""
    handoff = transfer_params_of(params)
    if handoff is None:
        return
    if role is None:
        raise ParameterError(NAME, "is of engines that give each other pages; start this one with kv_transfer_config")
    asked, lacks = ("do_remote_decode", "kv_consumer") if handoff.offers_pages else ("do_remote_prefill", "kv_producer")
    if role == lacks:
        raise ParameterError(NAME, f"asks for {asked}, and this engine is a {role}; ask another, or make it kv_both")


def response_params(engine: str, peer: LeasePeer) -> dict[str, Any]:
    """Returns kv_transfer_params for a response: with them, another engine finds the pages that wait here."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine,
        "remote_block_ids": None,  # pages are found by names that both sides compute
        "remote_host": peer.host,
        "remote_port": peer.port,
        "remote_request_id": peer.lease,
        "remote_num_tokens": peer.tokens,
        "tp_size": peer.stage_size,
        **({"pp_size": peer.stages} if peer.stages > 1 else {}),
        **({"remote_ports": list(peer.ports)} if peer.ports else {}),
        **({"remote_hosts": list(peer.hosts)} if peer.hosts else {}),
    }


def _bool_field(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value not in (None, True, False):
        raise ParameterError(NAME, f"has {name} {str(value)[:80]!r}, and it is true or false")
    return bool(value)


def _name_field(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not _is_name(value):
        raise ParameterError(
            NAME, f"with do_remote_prefill must have {name}, as the answer of the other engine gave it"
        )
    return str(value)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME and value.isprintable()


def _rank_fields(fields: Mapping[str, Any]) -> tuple[tuple[int, ...], int, int]:
    """Returns ports, ranks of a stage, and stages. Default: each process is a rank of one stage."""
    ports = _port_fields(fields)
    processes = max(1, len(ports))
    share, stages = fields.get("tp_size"), fields.get("pp_size")
    share, stages = processes if share is None else share, 1 if stages is None else stages
    for name, count in (("tp_size", share), ("pp_size", stages)):
        if not isinstance(count, int) or isinstance(count, bool) or not 0 < count <= MAX_RANKS:
            raise ParameterError(NAME, f"has {name} {str(count)[:80]!r}, which is no number from 1 to {MAX_RANKS}")
    if share * stages % processes:
        raise ParameterError(
            NAME, f"has tp_size {share} and pp_size {stages}, which {processes} remote_ports cannot share out; hand on "
            "the answer of the other engine as it is"
        )  # fmt: skip
    return ports, share, stages


def _host_fields(fields: Mapping[str, Any], count: int) -> tuple[str, ...]:
    """Returns the host of each process; () if all are on one machine."""
    hosts = fields.get("remote_hosts")
    if hosts is None:
        return ()
    if not isinstance(hosts, list) or len(hosts) != count or not all(map(_is_name, hosts)):
        raise ParameterError(NAME, "has remote_hosts that are no list of a host for each of remote_ports")
    return tuple(hosts)


def _port_fields(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the port of each process; () if one process has whole pages."""
    ports = fields.get("remote_ports")
    if ports is None:
        return ()
    if not isinstance(ports, list) or not 0 < len(ports) <= MAX_RANKS:
        raise ParameterError(NAME, f"has remote_ports that are no list of 1 to {MAX_RANKS} ports")
    return tuple(_port(each) for each in ports)


def _port(port: Any) -> int:
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 2**16:
        raise ParameterError(
            NAME, "with do_remote_prefill must have remote_port, as the answer of the other engine gave it"
        )
    return port
