"""API processes that ask each other for their counts, over real sockets."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from quintet.common.metric_types import MetricSample, sum_samples
from quintet.engine.processes.messages import encode, worker_address
from quintet.server.metrics.api_processes import ApiPeers
from quintet.server.processes.messages import FromPeer, MetricsResponse, decode_to_worker
from quintet.server.processes.remote_backend import RemoteBackend
from tests.helpers.platforms.null_engine import until


class Process:
    """An API process's inbox, and what hangs on it."""

    def __init__(self, context: "zmq.asyncio.Context", folder: Path, worker: int) -> None:
        self.inbox = context.socket(zmq.PULL)
        self.inbox.bind(worker_address(folder, worker))
        self.peers = ApiPeers(zmq.Context(context), folder, worker)
        self.peers.rows = lambda: [MetricSample("a", ("x",), [10.0**worker, 1.0])]
        self.reader = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        while True:
            message = decode_to_worker(await self.inbox.recv())
            assert isinstance(message, FromPeer)
            self.peers.handle(message)

    def close(self) -> None:
        self.reader.cancel()
        self.inbox.close(0)
        self.peers.close()


@pytest.fixture
async def processes(tmp_path: Path) -> AsyncIterator[list[Process]]:
    context = zmq.asyncio.Context()
    made = [Process(context, tmp_path, worker) for worker in range(3)]
    yield made
    for each in made:
        each.close()
    context.term()


async def test_each_finds_the_sum_of_all(processes: list[Process]) -> None:
    for each in processes:
        rows, silent = await each.peers.gather(3, patience=60)
        assert silent == 0
        assert sum_samples([*each.peers.rows(), *rows]) == [MetricSample("a", ("x",), [111.0, 3.0])]


async def test_questions_at_the_same_time_do_not_mix(processes: list[Process]) -> None:
    asked = [each.peers.gather(3, patience=60) for each in processes for _ in range(20)]
    found = await asyncio.gather(*asked)
    assert {silent for _, silent in found} == {0}
    assert [sum(row.values[0] for row in rows) for rows, _ in found] == [110.0] * 20 + [101.0] * 20 + [11.0] * 20


async def test_one_that_does_not_answer_is_left_out_and_counted(processes: list[Process]) -> None:
    processes[2].reader.cancel()
    for patience in (0.3, 3, 30):  # longer where the machine is so busy that the other one is late
        rows, silent = await processes[0].peers.gather(3, patience)
        if silent == 1:
            break
    assert silent == 1
    assert [row.values for row in rows] == [[10.0, 1.0]]


async def test_one_that_never_reads_does_not_gather_questions(processes: list[Process]) -> None:
    """More are asked than may wait; none blocks, and an answer that comes late is nobody's."""
    peers = processes[0].peers
    for _ in range(3):
        processes[2].reader.cancel()
        found = await asyncio.gather(*(peers.gather(4, patience=0.05) for _ in range(30)))
        assert {silent for _, silent in found} <= {2, 3}
    processes[2].reader = asyncio.get_running_loop().create_task(processes[2]._read())
    rows, silent = await peers.gather(3, patience=60)
    assert (silent, len(rows)) == (0, 2)


async def test_alone_it_asks_nobody(processes: list[Process]) -> None:
    assert await processes[0].peers.gather(1, patience=60) == ([], 0)


async def test_the_first_counts_how_long_another_is_silent(processes: list[Process]) -> None:
    first, second, pid = processes[0].peers, processes[1].peers, os.getpid()
    first.tick(5)
    assert first.silent_seconds(pid) == 0  # before its first sign of life there is no telling
    second.tick(5)
    await until(lambda: first._quiet)
    first.tick(5)
    first.tick(5)
    assert first.silent_seconds(pid) == 10
    second.tick(5)
    await until(lambda: first.silent_seconds(pid) == 0)
    first.tick(5)
    first.remove(pid)
    assert first.silent_seconds(pid) == 0


async def test_one_that_has_answered_is_known_to_live(processes: list[Process]) -> None:
    """Else it could fall silent before its first turn, and nobody would miss it."""
    first, pid = processes[0].peers, os.getpid()
    assert (await first.gather(2, patience=60))[1] == 0
    first.tick(5)
    assert first.silent_seconds(pid) == 5


async def test_a_peer_is_no_sign_of_life_of_the_engine(tmp_path: Path) -> None:
    context = zmq.asyncio.Context()
    remote = RemoteBackend(tmp_path, 0, step_timeout=10)
    remote.start()
    peer = Process(context, tmp_path, 1)
    remote.peers.rows = lambda: [MetricSample("b", (), [1.0])]
    try:
        rows, silent = await peer.peers.gather(2, patience=60)
        assert (rows, silent) == ([MetricSample("b", (), [1.0])], 0)
        assert remote._engines._quiet == [None]
    finally:
        peer.close()
        remote.close()
        context.term()


def test_rows_cross_the_wire_unchanged() -> None:
    rows = [
        MetricSample("quintet:http_requests_total", ("/v1/é", "GET", "200"), [3.0]),
        MetricSample("h", (), [0.0, 2.0, 0.25]),
    ]
    assert decode_to_worker(encode(MetricsResponse(1, 7, rows))) == MetricsResponse(1, 7, rows)
