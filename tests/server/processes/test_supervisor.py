"""The supervisor's decisions, with processes that are only pretended."""

import asyncio
import logging
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from quintet.common.processes import Exit
from quintet.config import EngineConfig
from quintet.hub.model_names import tokenizer_file
from quintet.server.config import ServerConfig
from quintet.server.metrics.api_processes import ApiPeers
from quintet.server.processes import supervisor as supervisors
from quintet.server.processes.messages import WorkerHeartbeat
from quintet.server.processes.supervisor import Supervisor
from tests.helpers.platforms.null_engine import until
from tests.helpers.processes import the_same_signals


class Pretended:
    """In a Child's place; the system has nothing to spare for one of them."""

    made, failing = 0, 0
    killed = False

    def __init__(self, *_: Any) -> None:
        type(self).made += 1
        self.pid = self.made
        if self.made == self.failing:
            raise BlockingIOError(11, "Resource temporarily unavailable")

    def kill(self) -> None:
        self.killed = True

    def follow(self, _: Any) -> None:
        """It never ends."""

    def ask_to_end(self, why: str = "") -> None:
        """It goes at once."""

    def let_go(self) -> None:
        """Nothing is there."""

    def close(self, seconds: float = 0.0) -> None:
        """Nothing is there."""


@pytest.fixture
def signals() -> Iterator[None]:
    with the_same_signals():
        yield


async def test_an_api_process_without_a_sign_of_life_is_ended_and_another_started(
    signals: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    child = type("Child", (Pretended,), {})
    monkeypatch.setattr(supervisors, "Child", child)
    monkeypatch.setattr(supervisors, "_MIN_RESTART_SECONDS", 0.0)
    server = Supervisor(EngineConfig(), ServerConfig(api_workers=2, engine_timeout=30), socket.socket())
    server._loop, peers, left = asyncio.get_running_loop(), ApiPeers(zmq.Context(), tmp_path, 0), list[int]()
    service, backend = SimpleNamespace(draining=False), SimpleNamespace(peers=peers, remove_worker=left.append)
    server._api = SimpleNamespace(service=service, backend=backend)  # type: ignore[assignment]
    silent = server._others[1] = child()
    peers.handle(WorkerHeartbeat(silent.pid))
    for quiet, ended in ((30, False), (1, True)):
        peers.tick(quiet)
        server._end_silent()
        assert silent.killed is ended
    server._on_api_exit(1, Exit(-signal.SIGKILL))
    assert caplog.messages == ["API process 1 has ended: it gave no sign of life for 31 s; another is started"]
    await until(lambda: server._others[1] is not silent)
    assert left == [1]
    server._end_silent()
    assert not server._others[1].killed
    server._ending = True
    server._close()


async def test_an_api_process_that_cannot_be_started_is_tried_again(
    signals: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    child = type("Child", (Pretended,), {"failing": 2})
    monkeypatch.setattr(supervisors, "Child", child)
    monkeypatch.setattr(supervisors, "_MIN_RESTART_SECONDS", 0.0)
    server = Supervisor(EngineConfig(), ServerConfig(api_workers=2), socket.socket())
    server._loop = asyncio.get_running_loop()
    server._api = SimpleNamespace(service=SimpleNamespace(draining=False))  # type: ignore[assignment]
    with caplog.at_level(logging.ERROR, "quintet"):
        server._start(1)
    assert "API process 1 cannot be started ([Errno 11] Resource temporarily unavailable)" in caplog.text
    assert server._others == {}
    await until(lambda: server._others)
    assert child.made == 3
    server._ending = True
    server._close()


def test_the_tokenizer_is_loaded_beside_the_engine_from_a_gguf_file_that_has_its_own(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    assert tokenizer_file(EngineConfig(model=str(model))) == model
    for other in ({"tokenizer": "other"}, {"skip_tokenizer_init": True}, {"tokenizer_mode": "mistral"}):
        assert tokenizer_file(EngineConfig(model=str(model), **other)) is None
    assert tokenizer_file(EngineConfig(model=str(tmp_path))) is None, "a checkpoint's folder"
