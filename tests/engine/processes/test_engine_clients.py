"""Engines as their client sees them: which of them hangs, and what waits for one that does not read."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from quintet.engine.processes import messages as wire
from quintet.engine.processes.engine_clients import EngineClients


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    made = zmq.Context[zmq.Socket[bytes]]()
    yield made
    made.destroy(0)


def test_an_engine_that_has_ended_hides_none_that_hangs(
    context: "zmq.Context[zmq.Socket[bytes]]", tmp_path: Path
) -> None:
    clients = EngineClients(context, tmp_path, 3, step_timeout=20)
    clients.turn(100)
    assert clients.hung(10) is None, "none has given a sign of life yet: they import"
    for engine in (0, 1):
        clients.hear(wire.Pulse(None, 0.0, 1.0, engine))
    clients.turn(11)
    assert clients.hung(10) == (0, "engine 0 of 3 has given no sign of life for 11 s")
    assert clients.hung(10, {0}) == (1, "engine 1 of 3 has given no sign of life for 11 s")
    clients.hear(wire.Pulse(None, 21.0, 2.0, 2))
    assert clients.hung(10, {0, 1}) == (2, "engine 2 of 3 has been in one step for 21 s")


def test_signs_of_life_do_not_pile_up_for_a_client_that_does_not_read(
    context: "zmq.Context[zmq.Socket[bytes]]", tmp_path: Path
) -> None:
    outbox = wire.push(context, wire.worker_address(tmp_path, 0), most=2)
    with pytest.raises(zmq.Again):
        for _ in range(3):
            outbox.send(b"alive", zmq.NOBLOCK)


def test_a_failure_is_left_for_the_parent_and_callers_read_no_foreign_text(tmp_path: Path) -> None:
    assert wire.Failure.left(tmp_path, 1) is None
    wire.Failure.of(FileNotFoundError("no such model")).leave(tmp_path, 1)
    assert wire.Failure.left(tmp_path, 1) == wire.Failure("OSError", "no such model")
    wire.Failure("KeyError", "'secret'", known=False).leave(tmp_path, 0)
    failure = wire.Failure.left(tmp_path, 0)
    assert failure is not None and failure.for_callers() == "KeyError"
    assert wire.Failure("DeviceLost", "rank 1\nhas ended").for_callers() == "rank 1 has ended"
