"""Pages between engines over connections that cut, flip, delay and lie: what is said is what one engine would say."""

import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from quintet.distributed.connection import NONCE, TAG
from quintet.engine.executor.engine_plan import EnginePlan
from quintet.engine.kv_cache.manager import KVCacheManager
from quintet.engine.kv_transfer.connector import NullConnector
from quintet.engine.kv_transfer.manager import KVTransferManager
from quintet.engine.kv_transfer.p2p.consumer import LeaseAddress, PageClient, PageOrigin, Route
from quintet.engine.kv_transfer.p2p.producer import PageServer
from quintet.engine.kv_transfer.p2p.protocol import (
    PROTOCOL,
    REQUEST,
    ConsumerHello,
    Page,
    PageFormat,
    PeerChannel,
    ProtocolError,
)
from quintet.engine.kv_transfer.p2p.protocol import PageRequest as Asking
from quintet.engine.kv_transfer.p2p.send_buffer import NOT_IN_BUFFER, SendBuffer
from quintet.engine.kv_transfer.p2p.transfers import P2PTransfer
from quintet.engine.kv_transfer.page_copier import PageCopier
from quintet.engine.kv_transfer_params import MAX_NAME, LeasePeer, transfer_params_of
from quintet.engine.observability.stats import KVConnectorStats
from quintet.sampling_params import ParameterError, SamplingParams
from tests.engine.kv_transfer.test_manager import WORDS, Odd, beginnings
from tests.engine.test_overlap import ENGINES, Ask, Said, Served, plain, traffic

FACTS = PageFormat("a checkpoint", "float32", 4, ((1, 2, 3),))
KEY = b"a key that all engines share"
LENDS = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None}}


class Net:
    """Connects a taker with a giver in the same process, by way of somebody in the middle."""

    def __init__(self, giver: PageServer, tamper: Callable[[bytes], bytes | None] = lambda piece: piece) -> None:
        self.giver, self.tamper, self.connections = giver, tamper, 0

    def connect(self, address: LeaseAddress) -> PeerChannel:
        (ours, near), (far, theirs) = socket.socketpair(), socket.socketpair()
        self.connections += 1
        for target, args in (
            (self.giver.serve, (theirs, "a test")), (_pass_on, (near, far, lambda piece: piece)),
            (_pass_on, (far, near, self.tamper)),
        ):  # fmt: skip
            threading.Thread(target=target, args=args, daemon=True).start()
        return PeerChannel(ours, 0.5, 4 * WORDS)


def _pass_on(near: socket.socket, far: socket.socket, tamper: Callable[[bytes], bytes | None]) -> None:
    with contextlib.suppress(OSError):
        while (piece := near.recv(97)) and (piece := tamper(piece)) is not None:
            far.sendall(piece)
    for each in (near, far):
        _hang_up(each)


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def tampering(kind: str, seed: int) -> Callable[[bytes], bytes | None]:
    """What happens to the giver's bytes, now and then."""
    rng = random.Random(seed)

    def tamper(piece: bytes) -> bytes | None:
        if rng.random() > 0.1:
            return piece
        if kind == "cut":
            return None
        if kind == "flipped":
            at = rng.randrange(len(piece))
            return piece[:at] + bytes([piece[at] ^ (1 << rng.randrange(8))]) + piece[at + 1 :]
        if kind == "doubled":
            return piece + piece
        if kind == "lost":
            return b""
        time.sleep(0.005)
        return piece

    return (lambda piece: piece) if kind == "whole" else tamper


class Two:
    """An engine that begins and one that goes on."""

    def __init__(self, kind: str = "whole", seed: int = 0, fails: bool = False, overlap: bool = True, **settings: Any):
        self.loans = SendBuffer(2**20, WORDS, 60.0)
        self.giver = PageServer(self.loans, lambda: FACTS, KEY, 0.5)
        self.net = Net(self.giver, tampering(kind, seed))
        self.first, self.giving, _ = _connected(NullConnector(), fails, overlap, **settings)
        self.giving.send_buffer = self.loans
        self.places = Odd(seed)
        self.places.stores = False  # type: ignore[misc]
        self.second, self.taking, self.manager = _connected(self.places, fails, overlap, **settings)
        self.taker = PageClient(Route(self.net.connect, lambda: FACTS, KEY, WORDS), self.places.changed)
        self.taking.consumer, self.taking.close = self.taker, self.taker.close

    @property
    def counts(self) -> KVConnectorStats:
        return self.second.engine.stats().kv_connector

    def run(self, *asks: Ask) -> dict[str, Said]:
        """Each prompt at the first engine, with one token of output; then at the second, with what the first said."""
        told = {}
        for ask in asks:
            begun = Ask(ask.name, ask.prompt, plain(1, extra_args=LENDS), arrival=ask.arrival)
            told.update(_told(self.first, begun))
        handed = [_with(ask, told.get(ask.name)) for ask in asks]
        return self.second.run(*handed)

    def close(self) -> None:
        self.manager.close()


def _connected(
    places: Any, fails: bool, overlap: bool, **settings: Any
) -> tuple[Served, P2PTransfer, KVTransferManager]:
    made = []

    def make(prepared: EnginePlan, tables: KVCacheManager, _: Any) -> KVTransferManager:
        copies = PageCopier(prepared.ranks)
        transfer = P2PTransfer(tables, copies.read, 2)
        transfer.engine, transfer.host, transfer.port = "one", "here", 1
        made.append((transfer, KVTransferManager(places, copies, tables, b"a model", 60.0, fails, transfer)))
        return made[0][1]

    return Served(overlap, replaced={"make_kv_transfer": make}, **settings), *made[0]


def _told(served: Served, ask: Ask) -> dict[str, Any]:
    served.engine.add(ask.admitted())
    said = {}
    while served.engine.busy:
        for delta in served.engine.step():
            if delta.kv_transfer_params is not None:
                said[delta.request_id] = msgspec.msgpack.decode(msgspec.msgpack.encode(delta.kv_transfer_params))
        served.engine.check_integrity()
    return said


def _with(ask: Ask, told: dict[str, Any] | None) -> Ask:
    params = ask.params.clone()
    params.extra_args = None if told is None else {"kv_transfer_params": told}
    return Ask(**{**vars(ask), "params": params})


@pytest.mark.parametrize(
    ("how", "kind", "overlap"),
    [
        ("plenty of pages", "whole", True),
        ("few pages, chunks", "whole", True),
        ("pages of one token", "whole", False),
        *(("few pages, chunks", kind, True) for kind in ("cut", "flipped", "doubled", "lost", "late")),
    ],
)
def test_random_traffic_says_what_one_engine_says(how: str, kind: str, overlap: bool) -> None:
    two, theirs = Two(kind, len(kind), overlap=overlap, **ENGINES[how]), Served(False, **ENGINES[how])
    for seed in range(2):
        asks = traffic(seed)
        assert two.run(*asks) == theirs.run(*asks), f"traffic {seed}"
    counts = two.taker.counts()
    assert two.giving.num_leases > 0 and two.counts.pages_loaded > 0
    assert (counts["failed"] > 0) == (kind not in ("whole", "late"))
    two.close()


def test_the_second_engine_computes_the_last_page_alone() -> None:
    two, asks = Two(), beginnings(6)
    assert two.run(*asks) == Served(False).run(*asks)
    stats = two.second.engine.stats()
    assert stats.steps.num_prompt_tokens == 6 * 4 and stats.scheduler.external_hits == 6 * 36
    assert stats.kv_connector.pages_failed == 0
    _until(lambda: len(two.loans) == 0)
    assert two.loans.num_free == two.loans.capacity, "what was fetched makes room"
    two.close()


def _until(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.001)


def test_pages_survive_that_a_step_of_the_first_engine_fails_and_ctrl_c() -> None:
    for error in (RuntimeError("on fire"), KeyboardInterrupt()):
        two, asks = Two(), beginnings(3)
        two.first.work.fails = [("wait", 0, error)]
        begun = [Ask(ask.name, ask.prompt, plain(1, extra_args=LENDS)) for ask in asks]
        two.first.run(*begun)
        assert two.run(*asks) == Served(False).run(*asks)
        two.close()


@pytest.mark.parametrize("fails", [False, True])
def test_a_stale_answer_costs_a_computation_or_the_request(fails: bool) -> None:
    two, ask = Two(fails=fails), beginnings(1)[0]
    wanted = Served(False).run(ask)
    told = _told(two.first, Ask("0", ask.prompt, plain(1, extra_args=LENDS)))["0"]
    two.loans.clear()
    got = two.second.run(_with(ask, told))
    assert (got["0"].reason == "error") == fails
    assert got == wanted or f"here:1: {NOT_IN_BUFFER}" in (got["0"].error or "")
    other = Ask("other", ask.prompt[::-1], plain(4))  # another prompt than the one that was computed
    told = _told(two.first, Ask("0", ask.prompt, plain(1, extra_args=LENDS)))["0"]
    got = two.second.run(_with(other, told))
    assert got == Served(False).run(other) if not fails else got["other"].reason == "error"
    two.close()


@pytest.mark.parametrize(
    ("facts", "key", "why"),
    [
        (FACTS, b"another key of sixteen", "it knows another key; give all engines the same"),
        (msgspec.structs.replace(FACTS, checkpoint="x"), KEY, "one runs another model, or other weights of it"),
        (msgspec.structs.replace(FACTS, dtype="int8"), KEY, "pages in float32 are given, and in int8 wanted"),
        (msgspec.structs.replace(FACTS, page_size=8), KEY, "pages of 4 tokens are given, and of 8 wanted"),
        (
            msgspec.structs.replace(FACTS, shapes=((9, 9),)),
            KEY,
            r"another shape are given \(1 of 1x2x3\) than wanted \(1 of 9x9\)",
        ),
    ],
)
def test_a_peer_of_another_model_or_key_gets_nothing_and_is_told_why(facts: PageFormat, key: bytes, why: str) -> None:
    giver = PageServer(SendBuffer(2**20, WORDS, 60.0), lambda: FACTS, KEY, 0.5)
    channel = Net(giver).connect(LeasePeer("here", 1, "loan"))
    with pytest.raises(ProtocolError, match=why):
        channel.connect_producer(key, facts)
    _until(lambda: giver.counts().get("refused") == 1)


def test_one_that_gives_pages_without_the_key_is_believed_nothing() -> None:
    giver = PageServer(SendBuffer(2**20, WORDS, 60.0), lambda: FACTS, b"", 0.5)
    with pytest.raises(ProtocolError, match="it knows another key"):
        Net(giver).connect(LeasePeer("here", 1, "loan")).connect_producer(KEY, FACTS)
    ours, theirs = socket.socketpair()
    theirs.sendall(PROTOCOL + b"n" * NONCE + b"w" * TAG)
    with pytest.raises(ProtocolError, match="it knows another key; give all engines the same"):
        PeerChannel(ours, 0.5, 0).connect_producer(KEY, FACTS)
    ours, theirs = socket.socketpair()
    theirs.sendall(b"quintet pages 3" + b"n" * NONCE)
    with pytest.raises(ProtocolError, match="it does not speak 'quintet pages 4'; run the same quintet on both"):
        PeerChannel(ours, 0.5, 0).connect_producer(KEY, FACTS)


def spoken() -> Iterator[bytes]:
    """What strangers say."""
    yield b"GET / HTTP/1.1\r\n\r\n" * 20
    opening, head = PROTOCOL + b"n" * NONCE, struct.Struct(">IB")
    yield opening + b"p" * TAG
    yield opening + bytes(TAG)
    yield opening[:-20]
    yield b"quintet pages 7" + b"n" * NONCE + b"p" * TAG
    for message in (ConsumerHello(FACTS), Asking("loan", [b"k"])):
        content = msgspec.msgpack.encode(message)
        yield opening + b"p" * TAG + head.pack(len(content), 0) + content + b"t" * TAG
        yield head.pack(len(content), 0) + content
    yield opening + b"p" * TAG + head.pack(2**31, 0)
    rng = random.Random(1)
    for _ in range(60):
        yield (opening if rng.random() < 0.5 else b"") + rng.randbytes(rng.randrange(300))


def _heard(connection: socket.socket) -> bytes:
    heard = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(4096):
            heard += piece
    return heard


def test_strangers_get_no_page_whatever_they_say() -> None:
    loans = SendBuffer(2**16, WORDS, 60.0)
    assert loans.reserve("loan", [b"k"])
    loans.fill("loan", [b"k"], np.full((1, WORDS), 0x5EC4E7, np.int32))
    secret = np.full(1, 0x5EC4E7, np.int32).tobytes()
    for words in spoken():
        giver = PageServer(loans, lambda: FACTS, KEY, 0.05)
        ours, theirs = socket.socketpair()
        thread = threading.Thread(target=giver.serve, args=(theirs, "a stranger"))
        ours.sendall(words)  # before it listens, for it does not wait long
        thread.start()
        thread.join()
        heard = _heard(ours)
        assert secret not in heard and len(heard) < 400 and giver.counts() == {"refused": 1}, words
        ours.close()


def test_a_recorded_conversation_is_worth_nothing() -> None:
    """Proofs and tags are of one connection, and frames of their place in it."""
    giver = PageServer(SendBuffer(2**16, WORDS, 60.0), lambda: FACTS, KEY, 0.5)
    ours, near = socket.socketpair()
    far, theirs = socket.socketpair()
    sent = bytearray()

    def record(piece: bytes) -> bytes:
        sent.extend(piece)
        return piece

    for target, args in ((giver.serve, (theirs, "a")), (_pass_on, (near, far, record)),
                         (_pass_on, (far, near, lambda piece: piece))):  # fmt: skip
        threading.Thread(target=target, args=args, daemon=True).start()
    channel = PeerChannel(ours, 0.5, 4 * WORDS)
    channel.connect_producer(KEY, FACTS)
    channel.send(Asking("loan", [b"k"]))
    _until(lambda: giver.counts().get("lacked") == 1)
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=giver.serve, args=(theirs, "a"))
    thread.start()
    ours.sendall(bytes(sent))
    thread.join()
    assert giver.counts() == {"pages": 0, "lacked": 1, "refused": 1}


def test_a_page_of_another_length_is_no_page() -> None:
    ours, theirs = socket.socketpair()

    def lie() -> None:
        channel = PeerChannel(theirs, 0.5, 0)
        channel.accept_consumer(KEY, FACTS)
        channel.receive(REQUEST)
        channel.send(Page(0, b"1234"))

    threading.Thread(target=lie, daemon=True).start()
    taker = PageClient(Route(lambda _: PeerChannel(ours, 0.5, 4 * WORDS), lambda: FACTS, KEY, WORDS), threading.Event())
    load = taker.load([PageOrigin(LeasePeer("here", 1, "loan"))], [b"k"], True)
    _until(lambda: load.num_failed == 1)
    assert load.take(9).failed == {0: f"here:1: a page of 4 bytes, where {4 * WORDS} make one"} and load.done
    taker.close()


def test_loans_hold_no_more_than_they_may_and_no_longer() -> None:
    loans = SendBuffer(10 * 4 * WORDS, WORDS, 0.0)
    assert loans.capacity == 10 and loans.reserve("a", [bytes([each]) for each in range(10)])
    assert not loans.reserve("b", [b"1"] * 11)
    assert loans.reserve("c", [b"1"]) and loans.expired == 1 and len(loans) == 1, "nobody came for the first"
    lasting = SendBuffer(2 * 4 * WORDS, WORDS, 60.0)
    assert lasting.reserve("a", [b"1", b"2"]) and not lasting.reserve("b", [b"1"])
    lasting.fill("a", [b"1"], np.ones((1, WORDS), np.int32))
    (row, late), loan = lasting.read("a", [b"1", b"2"], 0.01)
    assert not isinstance(row, str) and late == "it was not copied in time" and loan is not None
    lasting.finish("a")
    assert not lasting.reserve("b", [b"1"]), "somebody reads them still"
    lasting.release_read(loan)
    assert lasting.reserve("b", [b"1", b"2"]) and lasting.read("a", [b"1"], 0.0) == ([NOT_IN_BUFFER], None)
    lasting.finish("b", of=2, reader=1)
    lasting.finish("b", of=2, reader=1)
    assert not lasting.reserve("c", [b"1"]), "the other one has not read them yet"
    lasting.finish("b", of=2, reader=0)
    assert lasting.reserve("c", [b"1", b"2"])


@pytest.mark.parametrize(
    "said",
    [
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "remote_host": "a", "remote_port": 0, "remote_request_id": "x"},
        {"do_remote_prefill": True, "remote_host": "a", "remote_port": True, "remote_request_id": "x"},
        *({"do_remote_prefill": True, "remote_host": "a", "remote_port": 1, "remote_request_id": "x",
           "remote_ports": each} for each in ([], [0], [1, "2"], "1", [1] * 257)),
        {"do_remote_prefill": True, "remote_host": "a" * 300, "remote_port": 1, "remote_request_id": "x"},
        {"do_remote_prefill": True, "remote_host": "a", "remote_port": 1, "remote_request_id": 7},
        {"do_remote_prefill": True, "remote_host": "a", "remote_port": 1, "remote_request_id": "x",
         "remote_num_tokens": -1},
        *({"do_remote_prefill": True, "remote_host": "a", "remote_port": 1, "remote_request_id": "x", **each}
          for each in ({"tp_size": 0}, {"tp_size": True}, {"tp_size": 257}, {"pp_size": "1"},
                       {"tp_size": 3, "remote_ports": [1, 2]}, {"remote_hosts": ["a"]},
                       {"remote_ports": [1, 2], "remote_hosts": ["a", ""]})),
        {"do_remote_prefill": True, "do_remote_decode": True},
        {"do_remote_decode": "yes"},
        [1],
    ],
)  # fmt: skip
def test_what_a_request_says_of_pages_is_checked(said: Any) -> None:
    with pytest.raises(ParameterError, match="^kv_transfer_params "):
        transfer_params_of(SamplingParams(extra_args={"kv_transfer_params": said}))


@pytest.mark.parametrize(("length", "taken"), [(0, False), (1, True), (MAX_NAME, True), (MAX_NAME + 1, False)])
def test_names_have_1_to_256_characters(length: int, taken: bool) -> None:
    fields = {"do_remote_prefill": True, "remote_host": "host", "remote_port": 1, "remote_request_id": "r" * length}
    params = SamplingParams(extra_args={"kv_transfer_params": fields})
    if taken:
        found = transfer_params_of(params)
        assert found is not None and found.peer is not None
        assert (found.peer.host, found.peer.lease) == ("host", "r" * length)
    else:
        with pytest.raises(ParameterError, match="must have remote_request_id"):
            transfer_params_of(params)


def test_what_asks_for_nothing_is_nothing() -> None:
    for said in (None, {}, {"do_remote_decode": False, "do_remote_prefill": None, "remote_host": None}):
        assert transfer_params_of(SamplingParams(extra_args={"kv_transfer_params": said})) is None
