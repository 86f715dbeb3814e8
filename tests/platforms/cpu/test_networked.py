"""Ranks over TCP: sums with the bits of shared memory, steps that are left, ranks that are lost, strangers."""

import os
import socket
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import msgspec
import pytest
import torch

from quintet.common.processes import Exit
from quintet.config import EngineConfig
from quintet.distributed import connection as wire
from quintet.distributed import messages as letters
from quintet.distributed import rendezvous
from quintet.engine.parallel import multiproc as processes
from quintet.interface.platform import DeviceLost
from quintet.interface.types import RankInfo
from quintet.platforms.cpu.shared_memory import SharedFiles, connect_ranks, rank_lost_as_device_lost
from quintet.platforms.cpu.tcp_comm import connect_over_network
from tests.platforms.cpu.test_comm import SHAPES, given

_cpu = pytest.importorskip("quintet._cpu")
T = TypeVar("T")
KEY = b"a key of these"


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUINTET_RANKS_KEY", "of these tests alone")


def listener() -> tuple[int, int]:
    """An open descriptor that listens on the loopback interface, and its port."""
    made = rendezvous.listen_on("127.0.0.1", 0)
    port = made.getsockname()[1]
    return made.detach(), port


def places(size: int) -> list[RankInfo]:
    descriptor, port = listener()
    first = RankInfo(0, size, f"tcp://127.0.0.1:{port}?listener={descriptor}")
    return [first, *(RankInfo(rank, size, f"tcp://127.0.0.1:{port}") for rank in range(1, size))]


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """What each gave, or raised."""
    found = dict[int, Any]()

    def run(number: int) -> None:
        try:
            found[number] = calls[number]()
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert len(found) == len(calls), f"{sorted(set(range(len(calls))) - set(found))} hang"
    return [found[number] for number in range(len(calls))]


def on_each(size: int, work: Callable[[Any], T], seconds: float = 30.0) -> list[T | BaseException]:
    def run(rank_info: RankInfo) -> T:
        return work(connect_over_network(rank_info, rendezvous.RendezvousTerms(seconds)))

    return at_once([lambda place=place: run(place) for place in places(size)])  # type: ignore[misc]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_what_is_computed_over_the_network_has_the_bits_of_shared_memory(size: int) -> None:
    def work(comm: Any) -> list[torch.Tensor]:
        found = []
        for shape in SHAPES:
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                found.append(comm.all_reduce(given(comm.rank, shape, dtype)))
                found += [comm.all_gather(given(comm.rank, shape, dtype), dim) for dim in (0, -1)]
            found.append(comm.broadcast(given(comm.rank, shape, torch.float32), 1))
        return found

    rooms = SharedFiles()
    want = at_once(
        [lambda r=r: work(connect_ranks(RankInfo(r, size, "inproc://here"), rooms, 30)) for r in range(size)]
    )  # type: ignore[misc]
    for rank, got in enumerate(on_each(size, work)):
        assert isinstance(got, list), got
        for one, other in zip(got, want[rank], strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_a_recorded_collective_is_run_again_with_what_is_there_then() -> None:
    def work(comm: Any) -> list[torch.Tensor]:
        graph, x, found = _cpu.Graph(), torch.full((40,), float(comm.rank)), []
        graph.begin()
        try:
            total = comm.all_reduce(x)  # held: the graph writes to it
            everyone = comm.all_gather(total, 0)
        finally:
            graph.end()
        for turn in range(5):
            x.fill_(turn + comm.rank)
            graph.run()
            found.append(everyone.clone())
        return found

    for got in on_each(2, work):
        assert isinstance(got, list), got
        for turn, each in enumerate(got):
            assert torch.equal(each, torch.full((80,), 2.0 * turn + 1))


def test_letters_and_notes_come_whole_and_in_order() -> None:
    told = [b"", b"a", os.urandom(3_000_000), b"end"]

    def work(comm: Any) -> tuple[list[bytes], list[bytes]]:
        for each in told if comm.rank == 0 else []:
            comm.channel.broadcast(each)
        heard = told if comm.rank == 0 else [comm.channel.receive() for _ in told]
        return heard, comm.channel.exchange(bytes([comm.rank]) * 1000)

    assert on_each(3, work) == [(told, [bytes([rank]) * 1000 for rank in range(3)])] * 3


def test_a_rank_that_leaves_a_step_takes_the_others_out_of_it() -> None:
    """Also with much of a sum still under way, and again and again."""

    def work(comm: Any) -> list[tuple[list[bytes], bool]]:
        found = []
        for turn in range(20):
            x = torch.ones(1 if turn % 2 else 1_000_000)
            try:
                comm.all_reduce(x)
                if comm.rank == turn % 3:
                    raise MemoryError("no room")
                comm.all_reduce(x)
                comm.all_reduce(x)
                why = ""
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
            notes = comm.channel.exchange(why.encode())
            found.append((notes, bool((comm.all_reduce(x) == 3).all())))
        return found

    for got in on_each(3, work):
        assert isinstance(got, list), got
        for turn, (notes, good) in enumerate(got):
            left = f"StepLeft: rank {turn % 3} has left the step".encode()
            assert notes == [b"MemoryError: no room" if rank == turn % 3 else left for rank in range(3)]
            assert good


def test_who_does_not_come_is_named() -> None:
    gate = threading.Event()

    def work(comm: Any) -> None:
        with rank_lost_as_device_lost():
            for _ in range(2):  # all have come, all have loaded
                comm.channel.exchange(b"")
            if comm.rank != 1:
                try:
                    comm.all_reduce(torch.ones(4))
                finally:
                    gate.set()
            gate.wait(30)

    first, _, third = on_each(3, work, seconds=0.3)
    for error in (first, third):
        assert isinstance(error, DeviceLost) and "rank 1 of 3 did not come within 0 s" in str(error)


def test_a_connection_that_ends_is_a_rank_that_is_lost_on_all() -> None:
    def work(comm: Any) -> None:
        comm.channel.exchange(b"")
        if comm.rank == 2:
            return  # and what it held is closed
        with rank_lost_as_device_lost():
            if comm.rank == 1:
                comm.channel.receive()
            comm.all_reduce(torch.ones(4))

    first, second, _ = on_each(3, work)
    for error in (first, second):
        assert isinstance(error, DeviceLost) and "rank 2 of 3 is lost: " in str(error)


def test_a_stop_ends_every_wait_with_its_reason() -> None:
    def work(comm: Any) -> None:
        if comm.rank == 1:
            comm.channel.abort("somebody pulled the plug")
            comm.channel.abort("too late")
        try:
            with rank_lost_as_device_lost():
                comm.channel.receive() if comm.rank == 0 else comm.channel.exchange(b"")
        finally:
            assert comm.channel.aborted == "somebody pulled the plug"

    for error in on_each(3, work):
        assert isinstance(error, DeviceLost) and str(error) == "somebody pulled the plug"


def meeting(
    rank_info: RankInfo, key: bytes = KEY, alike: dict[str, str] | None = None, start: float = 10, nodes: int = 1
) -> Any:
    met = rendezvous.join(rank_info, key, alike or {"torch": "2"}, rendezvous.RendezvousTerms(5, start, nodes))
    for each in met.connections.values():
        each.close()
    for descriptor in met.sockets:
        if descriptor >= 0:
            os.close(descriptor)
    return met


def test_strangers_do_not_come_in_and_keep_nobody_waiting() -> None:
    first, second = places(2)
    port = int(second.endpoint.rpartition(":")[2])
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]  # one that says nothing holds up nobody
    silent[1].sendall(os.urandom(500))
    silent[2].sendall(rendezvous.PROTOCOL + bytes(wire.NONCE + wire.TAG))
    found = at_once([
        lambda: meeting(first),
        lambda: pytest.raises(ValueError, meeting, second, b"another key").value,
        lambda: time.sleep(0.2) or meeting(second),
    ])  # fmt: skip
    assert "knows another key; set QUINTET_RANKS_KEY" in str(found[1])
    assert found[0].session == found[2].session and found[0].sockets[1] >= 0
    for each in silent:
        each.close()


def test_a_rank_that_would_compute_other_bits_is_refused() -> None:
    first, second = places(2)
    wrong = [
        (RankInfo(1, 3, second.endpoint), {"torch": "2"}, "it is rank 1 of 3, where rank 0 is one of 2"),
        (second, {"torch": "3"}, "its torch is 3, and rank 0's 2"),
    ]
    calls: list[Callable[[], Any]] = [lambda: meeting(first)]
    for place, alike, _ in wrong:
        calls.append(lambda p=place, a=alike: pytest.raises(ValueError, meeting, p, alike=a).value)  # type: ignore[misc]
    calls.append(lambda: time.sleep(0.3) or meeting(second))
    found = at_once(calls)
    for error, (_, _, says) in zip(found[1:3], wrong, strict=True):
        assert says in str(error)
    assert found[3].session == found[0].session


def test_ranks_that_do_not_come_are_named_and_a_meeting_can_be_called_off(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = places(3)[:2]
    found = at_once([lambda: meeting(first, start=0.5), lambda: meeting(second, start=5)])
    assert "rank 2 of 3 did not come to 127.0.0.1:" in str(found[0])
    assert isinstance(found[1], ValueError) and "rank 0 has ended before all had come" in str(found[1])
    monkeypatch.setenv("QUINTET_RANKS_KEY", "a key of these")
    first, second = places(3)[:2]
    error, _ = at_once([lambda: meeting(first), lambda: rendezvous.call_off(second.endpoint, "rank 2 was killed")])
    assert str(error) == "rank 2 was killed"


def test_who_waits_says_for_which_machine_and_where_it_is_awaited(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous, "FIRST_LOG", 0.1)
    monkeypatch.setattr(rendezvous, "NEXT_LOG", 0.3)
    first, second = places(4)[:2]
    host = second.endpoint.removeprefix("tcp://")
    error, _ = at_once([
        lambda: meeting(first, start=1.5, nodes=2), lambda: pytest.raises(ValueError, meeting, second, start=5).value
    ])  # fmt: skip
    missing = f"node 1 of 2 (ranks 2, 3 of 4) did not come to {host}"
    assert str(error).startswith(f"{missing} in time; start all nodes")
    assert caplog.text.count(f"{missing} after ") > 1 and "; waiting for 1 s more" in caplog.text
    with pytest.raises(ValueError, match=rf"rank 0 was not reached at {host} \(.+\) in time; start node 0"):
        meeting(second, start=1)
    assert f"rank 0 was not reached at {host} (" in caplog.text


def test_a_meeting_that_has_not_begun_is_called_off_when_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that dies first is told of again: nobody would wait for it for ten minutes."""
    monkeypatch.setenv("QUINTET_RANKS_KEY", "a key of these")
    descriptor, port = listener()
    os.close(descriptor)
    endpoint, tried = f"tcp://127.0.0.1:{port}", threading.Event()

    def call_off(*what: str) -> bool:
        heard = rendezvous.call_off(*what)
        tried.set()
        return heard

    monkeypatch.setattr(processes, "call_off", call_off)

    def late() -> Any:
        assert tried.wait(30)
        return meeting(RankInfo(0, 2, endpoint))

    error, _ = at_once([late, lambda: processes.report_call_off(endpoint, "rank 1 was killed", lambda: False)])
    assert str(error) == "rank 1 was killed"


@pytest.mark.parametrize(("node_rank", "tells"), [(0, True), (1, False)])
def test_machine_0_alone_calls_a_meeting_off(monkeypatch: pytest.MonkeyPatch, node_rank: int, tells: bool) -> None:
    """Another machine's ranks may be started again while rank 0 waits, and theirs may be rank 1."""
    said = list[tuple[str, str]]()
    monkeypatch.setattr(processes, "Child", lambda *_, **__: SimpleNamespace(follow=lambda _: None))
    monkeypatch.setattr(processes, "report_call_off", lambda endpoint, why, done: said.append((endpoint, why)))
    config = EngineConfig(model="x", nnodes=2, node_rank=node_rank, tensor_parallel_size=2)
    others = processes.RankProcesses(config, 2, range(1, 2), "tcp://127.0.0.1:1")
    others._ended(0, Exit(9))
    assert said == [("tcp://127.0.0.1:1", "rank 1 of 2 has ended: it exited with code 9")] * tells


def test_what_no_rank_sends_ends_the_mesh() -> None:
    one, other = socket.socketpair()
    mesh = _cpu.Mesh([-1, one.detach()], 0, 5.0)
    other.sendall(b"\xff" * 64)
    with pytest.raises(_cpu.RankLost, match="rank 1 of 2 is lost: it sent what is no part of a sum"):
        mesh.exchange(b"")
    with pytest.raises(ValueError, match="a note of more than"):
        _cpu.Mesh([-1, other.detach()], 0, 5.0).exchange(bytes(2000))
    with pytest.raises(ValueError, match="a socket for each other rank"):
        _cpu.Mesh([-1, -1], 0, 5.0)


def test_greetings_are_strict() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode([0, 1, 2]), type=rendezvous.RankHello)
    for endpoint in ("tcp://here", "tcp://:1", "http://here:1", "tcp://here:x"):
        with pytest.raises(ValueError, match="is not tcp://HOST:PORT"):
            rendezvous.parse_endpoint(endpoint)
    with pytest.raises(ValueError, match="rank 0 cannot listen on 192.0.2.1:1"):
        rendezvous.listen_on("192.0.2.1", 1)
    assert letters.MAC_BYTES <= 64  # what the mesh leaves for it
