"""Rendezvous of ranks: rank 0 listens at the address that all know, and sends each the addresses of the others.

Afterwards each two of them have a connection for tensors, and rank 0 one more to each for its messages.
"""

import contextlib
import logging
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import msgspec

from quintet.distributed.connection import (
    MAX_META,
    AuthenticationFailed,
    Connection,
    authenticate_client,
    authenticate_server,
    configure_socket,
    wait_ready,
)
from quintet.distributed.handshakes import BoundedLog, Handshakes
from quintet.distributed.keys import ranks_key
from quintet.interface.types import RankInfo

logger = logging.getLogger(__name__)

TCP = "tcp://"
PROTOCOL = b"quintet ranks 2"  # its number is raised with any change of the messages
GREETING = 10.0  # seconds for the whole of a challenge: a stranger holds nothing for longer
# seconds for all to come, as torch's launchers give them: a node may still be downloading the model
START_SECONDS = 600.0
FIRST_LOG, NEXT_LOG = 10.0, 30.0  # seconds until the log names the missing ranks, and until it does so again
MAX_HANDSHAKES = 32  # connections that are authenticated at a time; half of them for one address
RETRY = 0.2  # seconds between two attempts to reach a rank that does not listen yet
HELLO, WELCOME, REFUSED = 1, 2, 3  # kinds of frames
MISSING_HELP = (
    "start all nodes, with the same settings, and see that they reach that address (join_timeout_seconds: how long)"
)
KEY_HELP = "set QUINTET_RANKS_KEY, or QUINTET_RANKS_KEY_FILE, to the same on all machines"


class RankHello(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Hello of a rank, with what must be alike on all. Port 0: it comes for tensors."""

    rank: int
    size: int
    port: int
    shared_settings: dict[str, str]
    session: bytes = b""
    reason: str = ""  # it is called off


CALLED_OFF = -1  # in the place of a rank: a rank will never come, so the wait ends


class RankWelcome(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    session: bytes  # a name that only these ranks know
    addresses: list[tuple[str, int]]  # where each listens


class RendezvousTerms(NamedTuple):
    """Terms of a rendezvous."""

    seconds: float  # that ranks will wait for each other
    start: float = START_SECONDS  # that all have to come
    nodes: int = 1  # machines with as many ranks each; 1: ranks are named without machines


@dataclass
class JoinedRanks:
    """Result of a rendezvous: all have come."""

    session: bytes
    sockets: list[int]  # descriptors by rank, -1 in the own place: for tensors
    connections: dict[int, Connection] = field(default_factory=dict)  # rank 0's to each, or each one's to rank 0


def key_of(endpoint: str) -> bytes:
    """Returns the key of a rendezvous: one that was made for it alone, or the one that is given to all."""
    own = parse_qs(urlsplit(endpoint).query).get("key")
    return own[0].encode() if own else ranks_key()


def parse_endpoint(endpoint: str) -> tuple[str, int, int | None]:
    """Parses tcp://HOST:PORT[?listener=NUMBER&key=KEY] -> host, port, the open descriptor on which rank 0 listens."""
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname, parts.port
        listener = parse_qs(parts.query).get("listener")
        if parts.scheme == "tcp" and host and port is not None:
            return host, port, int(listener[0]) if listener else None
    except ValueError:
        pass
    raise ValueError(f"endpoint {endpoint!r} is not {TCP}HOST:PORT")


def listen_on(host: str, port: int, backlog: int = 128) -> socket.socket:
    """Listens on the interface that has this address, and no other. ValueError says why not."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(backlog)
    except OSError as error:
        raise ValueError(
            f"rank 0 cannot listen on {host}:{port} ({error.strerror or error}); master_addr is an address of the "
            "machine of rank 0 which the others reach, and master_port one that is free there"
        ) from None
    return made


def join(rank_info: RankInfo, key: bytes, alike: dict[str, str], terms: RendezvousTerms) -> JoinedRanks:
    """Blocks until all ranks have come. `alike`: what must be the same on all. ValueError says which ranks did not
    come, or what differs."""
    if rank_info.rank == 0:
        return _RankZero(rank_info, key, alike, terms).accept_all()
    return _join_rank_zero(rank_info, key, alike, terms.seconds, time.monotonic() + terms.start)


class _WaitLog:
    """Logs now and then which ranks are missing."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._next = self._began + FIRST_LOG

    def log_missing(self, what: str, until: float) -> None:
        """Logs `what`, if it is time to. `until`: when the wait ends."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + NEXT_LOG
            logger.warning("%s after %.0f s; waiting for %.0f s more", what, now - self._began, max(0.0, until - now))


class _Acceptor:
    """Accepts connections that know the key; each is authenticated in a thread, so that none delays the others."""

    def __init__(self, listener: socket.socket, key: bytes, seconds: float) -> None:
        self._listener, self._key, self._seconds = listener, key, seconds
        self._accepted: queue.Queue[tuple[Connection, RankHello]] = queue.Queue()
        self._handshakes, self._waiting = Handshakes(MAX_HANDSHAKES), _WaitLog()
        self._refusals = BoundedLog(logger)

    def next(self, until: float, waits: Callable[[], str]) -> tuple[Connection, RankHello]:
        """Returns the next rank that comes; ValueError with `waits()` if none does in time."""
        while True:
            with contextlib.suppress(queue.Empty):
                wire, hello = self._accepted.get_nowait()
                if hello.rank != CALLED_OFF:
                    return wire, hello
                wire.close()
                raise ValueError(hello.reason)
            why = waits()
            if time.monotonic() > until:
                raise ValueError(f"{why} in time; {MISSING_HELP}")
            self._waiting.log_missing(why, until)
            if wait_ready(self._listener.fileno(), select.POLLIN, 0.05):
                with contextlib.suppress(OSError):
                    connection, address = self._listener.accept()
                    self._handshakes.add(connection, str(address[0]))
                    threading.Thread(target=self._ask, args=(connection, str(address[0])), daemon=True).start()

    def _ask(self, connection: socket.socket, who: str) -> None:
        try:
            configure_socket(connection, self._seconds)
            wire = authenticate_client(connection, self._key, PROTOCOL, time.monotonic() + GREETING)
            self._handshakes.remove(connection)
            frame = wire.receive(time.monotonic() + GREETING)
            self._accepted.put((wire, msgspec.msgpack.decode(frame.payload, type=RankHello)))
        except (OSError, msgspec.MsgspecError) as error:
            if isinstance(error, AuthenticationFailed):
                self._refusals.warning("%s wanted to join the ranks: %s; %s", who, error, KEY_HELP)
            self._handshakes.remove(connection)
            connection.close()


class _RankZero:
    """Rank 0's side of a rendezvous."""

    def __init__(self, rank_info: RankInfo, key: bytes, alike: dict[str, str], terms: RendezvousTerms) -> None:
        host, port, descriptor = parse_endpoint(rank_info.endpoint)
        self._listener = listen_on(host, port) if descriptor is None else socket.socket(fileno=descriptor)
        self._place, self._alike, self._at = rank_info, alike, f"{host}:{port}"
        self._door, self._terms = _Acceptor(self._listener, key, terms.seconds), terms
        self._connections: dict[int, Connection] = {}
        self._ports: dict[int, int] = {}
        self._session = os.urandom(16)
        self._sockets = [-1] * rank_info.size

    def accept_all(self) -> JoinedRanks:
        until = time.monotonic() + self._terms.start
        try:
            while len(self._connections) < self._place.size - 1:
                self._take(*self._door.next(until, self._missing))
            places = [("", 0)] + [(self._connections[r].peer, self._ports[r]) for r in range(1, self._place.size)]
            welcome = msgspec.msgpack.encode(RankWelcome(self._session, places))
            for rank, wire in self._connections.items():
                try:
                    wire.send(WELCOME, welcome, until)
                except OSError as error:
                    raise ValueError(f"rank {rank} of {self._place.size} has gone again: {error}") from None
            while any(self._sockets[rank] < 0 for rank in range(1, self._place.size)):
                _accept_tensor_connection(*self._door.next(until, self._missing), self._session, 0, self._sockets)
        except BaseException:
            _close_all(self._connections.values(), self._sockets)
            raise
        finally:
            self._listener.close()
        return JoinedRanks(self._session, self._sockets, self._connections)

    def _take(self, wire: Connection, hello: RankHello) -> None:
        why = self._wrong(hello)
        if why:
            logger.warning("rank %d from %s was refused: %s", hello.rank, wire.peer, why)
            with contextlib.suppress(OSError):
                wire.send(REFUSED, why.encode(), time.monotonic() + GREETING)
            wire.close()
            return
        logger.debug("rank %d of %d has come from %s", hello.rank, hello.size, wire.peer)
        self._connections[hello.rank], self._ports[hello.rank] = wire, hello.port

    def _wrong(self, hello: RankHello) -> str:
        size = self._place.size
        if hello.size != size or not 0 < hello.rank < size:
            return f"it is rank {hello.rank} of {hello.size}, where rank 0 is one of {size}"
        if hello.rank in self._connections:
            return f"there is a rank {hello.rank} of {size} already; each machine has a node_rank of its own"
        return differences(self._alike, hello.shared_settings)

    def _missing(self) -> str:
        """Names the ranks that are missing; one that has come and gone may come again."""
        for rank in [
            rank
            for rank, wire in self._connections.items()
            if len(self._connections) < self._place.size - 1 and wire.is_closed
        ]:
            logger.warning("rank %d of %d has gone again before all had come", rank, self._place.size)
            self._connections.pop(rank).close()
        missing = [rank for rank in range(1, self._place.size) if rank not in self._connections]
        return f"{self._named(missing)} did not come to {self._at}"

    def _named(self, ranks: list[int]) -> str:
        """Returns ranks in words, and on which machine they are."""
        size, each = self._place.size, self._place.size // self._terms.nodes
        if not ranks:
            return f"ranks of {size}, of some machine,"
        text = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {size}"
        nodes = sorted({rank // each for rank in ranks})
        if self._terms.nodes == 1:
            return text
        return f"node{'s' * (len(nodes) > 1)} {', '.join(map(str, nodes))} of {self._terms.nodes} ({text})"


def call_off(endpoint: str, why: str) -> bool:
    """Reports to this user's process that listens at the endpoint: a rank will never come. Returns whether it was
    received."""
    host, port, _ = parse_endpoint(endpoint)
    with contextlib.suppress(OSError, ValueError):
        key, until = key_of(endpoint), time.monotonic() + GREETING
        with socket.create_connection((host, port), timeout=GREETING) as connection:
            hello = msgspec.msgpack.encode(RankHello(CALLED_OFF, 0, 0, {}, reason=why))
            authenticate_server(connection, key, PROTOCOL, until).send(HELLO, hello, until)
            return True
    return False


def differences(ours: dict[str, str], theirs: dict[str, str]) -> str:
    """Returns what is not alike, in words; empty if all is."""
    for name in ours.keys() | theirs.keys():
        if ours.get(name) != theirs.get(name):
            return (
                f"its {name} is {theirs.get(name, 'unknown')}, and rank 0's {ours.get(name, 'unknown')}: they would "
                "compute other bits; make them alike"
            )
    return ""


def _join_rank_zero(
    rank_info: RankInfo, key: bytes, alike: dict[str, str], seconds: float, until: float
) -> JoinedRanks:
    """Runs the rendezvous of any rank but rank 0."""
    host, port, _ = parse_endpoint(rank_info.endpoint)
    first = _connect(host, port, key, seconds, until)
    sockets = [-1] * rank_info.size
    try:
        listener = listen_on(first.local_address, 0)
    except ValueError:
        first.close()
        raise
    try:
        first.send(
            HELLO,
            msgspec.msgpack.encode(RankHello(rank_info.rank, rank_info.size, listener.getsockname()[1], alike)),
            until,
        )
        welcome = _receive_welcome(first, until)
        come = msgspec.msgpack.encode(RankHello(rank_info.rank, rank_info.size, 0, {}, welcome.session))
        for rank in range(rank_info.rank):
            there = (host, port) if rank == 0 else welcome.addresses[rank]
            wire = _connect(*there, key, seconds, until)
            wire.send(HELLO, come, until)
            sockets[rank] = wire.detach()
        door, late = (
            _Acceptor(listener, key, seconds),
            f"others did not come to rank {rank_info.rank} of {rank_info.size}",
        )
        while any(sockets[rank] < 0 for rank in range(rank_info.rank + 1, rank_info.size)):
            _accept_tensor_connection(*door.next(until, lambda: late), welcome.session, rank_info.rank, sockets)
    except BaseException:
        _close_all([first], sockets)
        raise
    finally:
        listener.close()
    return JoinedRanks(welcome.session, sockets, {0: first})


def _connect(host: str, port: int, key: bytes, seconds: float, until: float) -> Connection:
    """Connects to a rank; tries until it listens there."""
    why, waiting = "", _WaitLog()
    while time.monotonic() < until:
        connection: socket.socket | None = None
        try:
            connection = socket.create_connection((host, port), timeout=GREETING)
            configure_socket(connection, seconds)
            return authenticate_server(connection, key, PROTOCOL, time.monotonic() + GREETING)
        except AuthenticationFailed as error:
            if connection is not None:
                connection.close()
            raise ValueError(f"rank 0 at {host}:{port} is not met: {error}; {KEY_HELP}") from None
        except OSError as error:
            if connection is not None:
                connection.close()
            why = f"rank 0 was not reached at {host}:{port} ({error.strerror or error})"
            waiting.log_missing(why, until)
            time.sleep(RETRY)
    raise ValueError(f"{why} in time; start node 0, and see to the network")


def _receive_welcome(first: Connection, until: float) -> RankWelcome:
    try:
        frame = first.receive(until, MAX_META)
    except TimeoutError:
        raise ValueError("the other ranks did not come in time; start all nodes") from None
    except OSError as error:
        raise ValueError(f"rank 0 has ended before all had come: {error}") from None
    if frame.kind == REFUSED:
        raise ValueError(f"rank 0 refuses this rank: {frame.payload.decode(errors='replace')}")
    return msgspec.msgpack.decode(frame.payload, type=RankWelcome)


def _accept_tensor_connection(
    wire: Connection, hello: RankHello, session: bytes, rank: int, sockets: list[int]
) -> None:
    """Takes a connection for tensors; closes one of an earlier rendezvous, or of a rank that came twice."""
    fits = hello.port == 0 and hello.session == session and rank < hello.rank < len(sockets)
    if fits and sockets[hello.rank] < 0:
        sockets[hello.rank] = wire.detach()
    else:
        wire.close()


def _close_all(wires: Any, sockets: list[int]) -> None:
    for wire in wires:
        wire.close()
    for descriptor in sockets:
        if descriptor >= 0:
            os.close(descriptor)
