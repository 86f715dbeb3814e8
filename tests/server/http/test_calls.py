"""A call that is over leaves nothing behind."""

import asyncio

import pytest
from starlette.requests import Request
from starlette.types import Message

from quintet.chat.prompts import Prompt
from quintet.sampling_params import SamplingParams
from quintet.server.config import ServerConfig
from quintet.server.http.app_state import AppState
from quintet.server.http.engine_call import PromptRequest
from tests.server.fakes import FakeBackend


async def silent() -> Message:
    """A client that says nothing more, and does not hang up."""
    await asyncio.Event().wait()
    return {"type": "http.disconnect"}


async def test_neither_its_timer_nor_its_watcher_outlives_it() -> None:
    service = AppState(FakeBackend(), ServerConfig())
    http = Request({"type": "http", "method": "POST", "path": "/", "headers": [], "state": {}}, silent)
    async with service.call(http, [PromptRequest(Prompt([5]), SamplingParams(max_tokens=2))]) as call:
        await call.outputs()
        timer, watcher = call._timer, call._watcher
        assert timer is not None and not timer.cancelled()
        assert watcher is not None and not watcher.done()
    assert timer.cancelled() and not service.calls
    with pytest.raises(asyncio.CancelledError):
        await watcher
