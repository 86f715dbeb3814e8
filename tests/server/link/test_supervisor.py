"""The supervisor's decisions, with processes that are only pretended."""

import asyncio
import logging
import signal
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from quintet.config import EngineConfig
from quintet.server.link import supervisor as supervisors
from quintet.server.link.child import ENDING
from quintet.server.link.supervisor import Supervisor
from quintet.server.settings import ServerConfig
from tests.helpers.null_engine import until


class Pretended:
    """In a Child's place; the system has nothing to spare for the second of them."""

    made = 0

    def __init__(self, *_: Any) -> None:
        type(self).made += 1
        if self.made == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")

    def follow(self, _: Any) -> None:
        """It never ends."""

    def let_go(self) -> None:
        """Nothing is there."""

    def close(self) -> None:
        """Nothing is there."""


@pytest.fixture
def signals() -> Iterator[None]:
    """A supervisor changes what the process's signals mean."""
    handlers, blocked = {each: signal.getsignal(each) for each in ENDING}, signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


async def test_an_api_process_that_cannot_be_started_is_tried_again(
    signals: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    child = type("Child", (Pretended,), {})
    monkeypatch.setattr(supervisors, "Child", child)
    monkeypatch.setattr(supervisors, "_SOONEST", 0.0)
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
