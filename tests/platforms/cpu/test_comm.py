"""Ranks over shared memory: what they compute together, what they tell each other, and what of one that is lost."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from quintet.interface.platform import DeviceLost
from quintet.interface.types import RankInfo
from quintet.platforms.cpu import shared_memory as comms
from quintet.platforms.cpu.shared_memory import SharedFiles, SharedMemory, connect_ranks
from quintet.platforms.host import nameless_file

_cpu = pytest.importorskip("quintet._cpu")
T = TypeVar("T")


def on_each(size: int, work: Callable[[Any], T], seconds: float = 30.0) -> list[T | BaseException]:
    """The work of every rank, threads that share a file -> what each gave, or raised."""
    rooms, found = SharedFiles(), dict[int, Any]()

    def run(rank: int) -> None:
        try:
            found[rank] = work(connect_ranks(RankInfo(rank, size, "inproc://here"), rooms, seconds))
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert len(found) == size, f"ranks {sorted(set(range(size)) - set(found))} hang"
    return [found[rank] for rank in range(size)]


def given(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def in_order(tensors: list[Tensor]) -> Tensor:
    total = tensors[0].float()
    for each in tensors[1:]:
        total = total + each.float()
    return total.to(tensors[0].dtype)


SHAPES = [(1,), (3, 7), (16, 1024), (3, 70_001)]  # the last takes several pieces, of odd lengths


@pytest.mark.parametrize("isa", ["baseline", "avx2", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_sums_are_those_in_rank_order_to_the_bit(size: int, dtype: torch.dtype, isa: str | None) -> None:
    try:
        _cpu.choose_isa(isa or _cpu.isa())
    except ValueError:
        pytest.skip(f"no {isa} here")
    try:
        for shape in SHAPES:
            want = in_order([given(rank, shape, dtype) for rank in range(size)])
            for got in on_each(size, lambda comm, s=shape: comm.all_reduce(given(comm.rank, s, dtype))):
                assert isinstance(got, Tensor), got
                assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), shape
    finally:
        _cpu.choose_isa(_cpu.isa())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool], ids=str)
def test_what_is_gathered_is_joined_in_rank_order(dtype: torch.dtype) -> None:
    for shape in [(4, 6), (2, 3, 70_000)]:
        parts = [given(rank, shape, torch.float32).mul(9).to(dtype) for rank in range(3)]
        for dim in (0, 1, -1):
            for got in on_each(3, lambda comm, d=dim, p=parts: comm.all_gather(p[comm.rank], d)):
                assert isinstance(got, Tensor) and torch.equal(got, torch.cat(parts, dim)), (shape, dim)


def test_a_root_gives_all_what_it_has() -> None:
    for shape in SHAPES:
        for got in on_each(3, lambda comm, s=shape: comm.broadcast(given(comm.rank, s, torch.float32), 1)):
            assert isinstance(got, Tensor) and torch.equal(got, given(1, shape, torch.float32))


def test_pieces_are_scattered_and_exchanged() -> None:
    parts = [given(rank, (4, 6), torch.float32) for rank in range(2)]
    for rank, got in enumerate(on_each(2, lambda comm: comm.reduce_scatter(parts[comm.rank], 1))):
        assert torch.equal(got, in_order(parts).chunk(2, 1)[rank])  # type: ignore[arg-type]
    for rank, got in enumerate(on_each(2, lambda comm: comm.all_to_all(parts[comm.rank], 0))):
        assert torch.equal(got, torch.cat([each.chunk(2, 0)[rank] for each in parts], 0))  # type: ignore[arg-type]
    for error in on_each(2, lambda comm: comm.all_to_all(parts[comm.rank][:3], 0)):
        assert isinstance(error, ValueError)


def test_thousands_in_a_row_are_each_their_own() -> None:
    def work(comm: Any) -> bool:
        x = torch.arange(64).float()
        return all(torch.equal(comm.all_reduce(x + turn), 3 * (x + turn)) for turn in range(3000))

    assert on_each(3, work) == [True] * 3


def test_a_recorded_collective_is_run_again_with_what_is_there_then() -> None:
    def work(comm: Any) -> list[Tensor]:
        graph, x, found = _cpu.Graph(), torch.full((40,), float(comm.rank)), []
        graph.begin()
        try:
            total = comm.all_reduce(x)
            everyone = comm.all_gather(total, 0)
        finally:
            graph.end()
        assert len(graph) == 2
        for turn in range(5):
            x.fill_(turn + comm.rank)
            graph.run()
            found.append(everyone.clone())
        return found

    for got in on_each(2, work):
        assert isinstance(got, list)
        for turn, each in enumerate(got):
            assert torch.equal(each, torch.full((80,), 2.0 * turn + 1))


def test_letters_are_heard_in_order_however_long_they_are() -> None:
    letters = [b"", b"a", os.urandom(300_000), b"end"]

    def work(comm: Any) -> list[bytes]:
        if comm.rank:
            return [comm.channel.receive() for _ in letters]
        for each in letters:
            comm.channel.broadcast(each)
        return letters

    assert on_each(3, work) == [letters] * 3


def test_a_rank_that_leaves_a_step_takes_the_others_out_of_it() -> None:
    def work(comm: Any) -> tuple[list[bytes], Tensor]:
        x = torch.ones(4)
        comm.all_reduce(x)
        try:
            if comm.rank == 1:
                raise MemoryError("no room")
            comm.all_reduce(x)
            comm.all_reduce(x)
            why = ""
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        return comm.channel.exchange(why.encode()), comm.all_reduce(x)

    for got in on_each(3, work):
        assert isinstance(got, tuple), got
        notes, total = got
        assert notes == [b"StepLeft: rank 1 has left the step", b"MemoryError: no room", notes[0]]
        assert torch.equal(total, torch.full((4,), 3.0))


def test_who_does_not_come_is_named() -> None:
    def work(comm: Any) -> None:
        with comms.rank_lost_as_device_lost():
            for _ in range(2):  # all have come, all have loaded
                comm.channel.exchange(b"")
            if comm.rank != 1:
                comm.all_reduce(torch.ones(4))

    first, missing, third = on_each(3, work, seconds=0.3)
    assert missing is None
    for error in (first, third):
        assert isinstance(error, DeviceLost) and "rank 1 of 3 did not come within 0 s" in str(error)


def test_a_stop_ends_every_wait_with_its_reason() -> None:
    def work(comm: Any) -> None:
        if comm.rank == 0:
            time.sleep(0.3)  # the others sleep by then
            comm.channel.abort("somebody pulled the plug")
            comm.channel.abort("too late")
            assert comm.channel.aborted == "somebody pulled the plug"
        elif comm.rank == 1:
            comm.channel.receive()
        else:
            comm.channel.exchange(b"")

    _, hearing, exchanging = on_each(3, work)
    for error in (hearing, exchanging):
        assert isinstance(error, DeviceLost) and str(error) == "somebody pulled the plug"


def test_wrong_places_are_refused() -> None:
    rooms = SharedFiles()
    assert isinstance(connect_ranks(RankInfo(0, 2, "inproc://x"), rooms, 1.0), SharedMemory)
    for place, says in [
        (RankInfo(0, 3, "inproc://x"), "where 2 ranks meet"),
        (RankInfo(2, 2, "inproc://y"), "ranks count from 0"),
        (RankInfo(0, 2, "tcp://here:1"), "is neither"),
    ]:
        with pytest.raises(ValueError, match=says):
            connect_ranks(place, rooms, 1.0)
    with pytest.raises(RuntimeError, match="has met no other"):
        connect_ranks(RankInfo(1, 2), rooms, 1.0).all_reduce(torch.ones(1))


def test_places_for_what_stages_hand_on_lie_apart() -> None:
    """Notes of a page, and goods of SHELF_BYTES, of the steps that run at once."""
    with nameless_file() as file:
        team = _cpu.Team(file.fileno(), 0, 2, 1.0, 1)
        assert team.stages == 2
        sizes = {0: 4096, 1: _cpu.SHELF_BYTES}
        places = {(team.place(shelf, step), size) for shelf, size in sizes.items() for step in range(6)}
    assert len(places) == 6 + 3, "notes of six steps, goods of three"
    ordered = sorted(places)
    assert all(start + size <= after for (start, size), (after, _) in zip(ordered, ordered[1:], strict=False))


RANK = """
import sys
import numpy as np
from quintet import _cpu
team = _cpu.Team(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), 1.0, int(sys.argv[3]))
team.exchange(b"come"), team.exchange(b"loaded")
x = np.arange(2048, dtype=np.float32) * (team.rank + 1)
out = np.empty_like(x)
for turn in range(int(sys.argv[4])):
    team.all_reduce(0, out.ctypes.data, x.ctypes.data, x.size)
print(float(out.sum()), flush=True)
if sys.argv[5:]:
    team.all_reduce(0, out.ctypes.data, x.ctypes.data, x.size)
"""


def process(file: Any, rank: int, size: int, *more: str) -> "subprocess.Popen[str]":
    words = [sys.executable, "-c", RANK, str(file.fileno()), str(rank), str(size), "200", *more]
    return subprocess.Popen(words, pass_fds=(file.fileno(),), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("size", [2, 4])
def test_processes_compute_the_same_and_leave_nothing_behind(size: int) -> None:
    before = sorted(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else []
    with nameless_file() as file:
        ranks = [process(file, rank, size) for rank in range(size)]
        said = [each.communicate(timeout=60) for each in ranks]
    want = float(np.arange(2048, dtype=np.float32).sum()) * sum(range(1, size + 1))
    assert [float(out) for out, _ in said] == [want] * size, said
    assert not os.path.isdir("/dev/shm") or sorted(os.listdir("/dev/shm")) == before


def test_a_process_that_is_killed_is_named_by_those_that_wait() -> None:
    with nameless_file() as file:
        waiting, killed = process(file, 0, 3, "once more"), process(file, 2, 3)
        other = process(file, 1, 3, "once more")
        killed.communicate(timeout=60)  # it ends before the last one, as if it had been killed
        for each in (waiting, other):
            _, said = each.communicate(timeout=60)
            assert each.returncode == 1 and "RankLost: rank 2 of 3 did not come within 1 s" in said
