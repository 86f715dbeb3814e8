"""A real server whose engine sleeps: every API process knows, and what it served before it serves again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from quintet.engine.prompts import Prompt
from quintet.server.link import wire
from quintet.server.link.core import Core, Pulse, served
from tests.helpers.null_engine import greedy, null_client
from tests.helpers.serving import NULL, Server, until


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(*NULL, "--enable-sleep-mode", "--api-workers", "2") as made:
        assert until(made.all_there)
        yield made
        assert made.stop() == 0 and made.leftovers() == []


def ready(server: Server) -> set[int]:
    """What each process says."""
    found = set()
    for each in server.api_processes():
        with server.only(each) as client:
            found.add(client.get("/ready").status_code)
    return found


def test_every_process_knows_that_it_sleeps(server: Server) -> None:
    before = server.complete().json()["choices"]
    assert len(server.api_processes()) == 2
    for level in (1, 2):
        assert httpx.post(server.url + f"/sleep?level={level}", timeout=60).json() == {"status": "asleep"}
        assert until(lambda: ready(server) == {503})
        refused = server.complete()
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "asleep"
        deeper = httpx.post(server.url + f"/sleep?level={3 - level}", timeout=60)
        assert deeper.status_code == 400 and f"sleeps at level {level}" in deeper.json()["error"]["message"]
        assert httpx.post(server.url + "/wake_up", timeout=60).json() == {"status": "awake"}
        assert until(lambda: ready(server) == {200})
        assert server.complete().json()["choices"] == before


def test_a_process_that_joins_a_sleeping_engine_knows_it(server: Server) -> None:
    httpx.post(server.url + "/sleep", timeout=60)
    first = server.find("api")
    first.kill()
    assert until(lambda: any(each != first for each in server.those("api")))
    assert until(server.all_there)
    assert ready(server) == {503}
    assert httpx.post(server.url + "/wake_up", timeout=60).status_code == 200
    assert until(lambda: ready(server) == {200})
    assert server.complete().status_code == 200


def test_the_engines_process_tells_everybody_first_and_refuses_in_words(tmp_path: Path) -> None:
    client, context = null_client(), zmq.Context()
    inbox = context.socket(zmq.PULL)
    inbox.bind(wire.worker_address(tmp_path, 0))
    engine = Core(context, tmp_path, client.engine, served(client.prepared), Pulse(context, tmp_path, range(1)))
    engine._pulse.engine = client.engine

    def told() -> Any:
        assert inbox.poll(60_000)
        return wire.decode_to_worker(inbox.recv())

    try:
        engine._obey(wire.Sleep(0, 5, 1))
        assert told().stats["asleep"] == 1 and told() == wire.Answer(5)
        engine._obey(wire.Sleep(0, 6, 2))
        assert told() == wire.Answer(6, "the engine sleeps at level 1; wake it up before it sleeps at level 2")
        (late,) = client.admission.admit("late", Prompt([1, 2]), greedy(), 0)
        engine._obey(wire.Submit(0, [wire.Admitted.of(late)]))
        (delta,) = told().deltas
        assert (delta.request_id, delta.finish_reason, delta.error) == ("late", "error", "the engine is asleep")
        engine._obey(wire.WakeUp(0, 7))
        assert told().stats["asleep"] == 0 and told() == wire.Answer(7)
        engine._obey(wire.Submit(0, [wire.Admitted.of(late)]))
        engine._obey(wire.Sleep(0, 8, 1))
        assert "the engine has 1 requests" in told().refused
    finally:
        context.destroy(0)
