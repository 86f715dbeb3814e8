"""A real server whose engine sleeps: every API process knows, and what it served before it serves again."""

from collections.abc import Iterator

import httpx
import pytest

from tests.helpers.servers.serving import NULL, Server, until


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


@pytest.mark.slow
def test_a_process_that_joins_a_sleeping_engine_knows_it(server: Server) -> None:
    httpx.post(server.url + "/sleep", timeout=60)
    first = server.find("api_process")
    first.kill()
    assert until(lambda: any(each != first for each in server.those("api_process")))
    assert until(server.all_there)
    assert ready(server) == {503}
    assert httpx.post(server.url + "/wake_up", timeout=60).status_code == 200
    assert until(lambda: ready(server) == {200})
    assert server.complete().status_code == 200
