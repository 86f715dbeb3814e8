"""Middlewares of the operator's own: what they see, in which order, and what is said of one that cannot be."""

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quintet.server.config import ServerConfig
from quintet.server.http.app import make_app
from quintet.server.http.app_state import AppState
from tests.helpers.servers.serving import NULL, PATIENCE, Server, until
from tests.server.fakes import FakeBackend
from tests.server.http.serving import client

MINE = """
import os

class Signed:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        async def signed(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-signed", str(os.getpid()).encode())]
            await send(message)
        await self.app(scope, receive, signed)

async def closed(request, call_next):
    from starlette.responses import PlainTextResponse
    if request.headers.get("x-badge") == "none":
        return PlainTextResponse("closed", 418)
    answer = await call_next(request)
    answer.headers["x-open"] = "yes"
    return answer

async def broken(request, call_next):
    raise RuntimeError("a secret of the operator's")

READ = []

class Reader:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        from starlette.requests import Request
        body = await Request(scope, receive).body()
        READ.append(len(body))
        given = [{"type": "http.request", "body": body}]
        async def signed(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-read", str(len(body)).encode())]
            await send(message)
        async def again():
            return given.pop() if given else await receive()
        await self.app(scope, again, signed)

class Picky:
    def __init__(self, app, needs):
        pass

def plain(request, call_next):
    pass
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """In a folder that is on the path, here and in processes that are started."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "mine.py").write_text(MINE)
    (tmp_path / "path" / "half.py").write_text("def (:\n")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "beside.py").write_text("raise SystemExit('run from the working directory')")
    monkeypatch.syspath_prepend(tmp_path / "path")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return "mine"


async def test_requests_pass_through_a_class_and_through_a_function() -> None:
    async with client(middleware=("mine.Signed", "mine:closed")) as http:
        answer = await http.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 200 and answer.headers["x-open"] == "yes" and answer.headers["x-signed"]
        refused = await http.get("/health", headers={"x-badge": "none"})
        assert refused.status_code == 418 and "x-signed" not in refused.headers, "the last is met first"
        streamed = await http.post("/v1/completions", json={"prompt": "x", "stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")


async def test_it_sees_what_may_be_asked_alone() -> None:
    async with client(middleware=("mine.Reader",), api_key=("sesame",), max_body_bytes=1000) as http:
        assert (await http.post("/tokenize", json={"prompt": "x"})).status_code == 401
        headers = {"authorization": "Bearer sesame"}
        fits = await http.post("/tokenize", json={"prompt": "x"}, headers=headers)
        assert fits.status_code == 200 and fits.headers["x-read"] == "14"

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(50):
                yield b" " * 100

        assert (await http.post("/tokenize", content=pieces(), headers=headers)).status_code == 413
    assert sys.modules["mine"].READ == [14], "of the others it got nothing whole"


async def test_a_middleware_that_fails_is_a_500_which_tells_nothing() -> None:
    async with client(middleware=("mine.broken",)) as http:
        answer = await http.get("/health")
    assert answer.status_code == 500 and "secret" not in answer.text


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere.Thing", r"'nowhere.Thing' cannot be imported: ModuleNotFoundError: .*onto PYTHONPATH; the working"),
        ("beside.Thing", "cannot be imported: ModuleNotFoundError"),
        ("half.Thing", "cannot be imported: SyntaxError: .*mend that module"),
        ("mine.Other", "mine has no 'Other'; name what is there"),
        ("mine.plain", r"is function, and must be a class that takes the app, .* or an async function"),
        ("mine.Picky", "'mine.Picky' cannot be made: TypeError: .*needs"),
        ("mine", "names no module; write package.module.Name"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as raised:
        make_app(AppState(FakeBackend(), ServerConfig(middleware=(name,))))
    assert "\n" not in str(raised.value)


def _serve(folder: Path, *flags: str) -> Any:
    command = [sys.executable, "-m", "quintet.cli.main", "serve", *NULL, "--port", "0", *flags]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, env=os.environ)


def test_a_server_does_not_start_with_one_nor_look_in_the_working_directory(tmp_path: Path) -> None:
    done = _serve(tmp_path / "here", "--middleware", "beside.Thing")
    assert done.returncode == 1 and "run from the working directory" not in done.stderr
    first, last = done.stderr.strip().splitlines()
    assert first.endswith("loading bundled")
    assert last.startswith("quintet serve: error: --middleware: middleware 'beside.Thing' cannot be imported")


@pytest.mark.slow
def test_every_process_of_a_server_has_them() -> None:
    with Server(*NULL, "--middleware", "mine.Signed", "--middleware", "mine.closed", "--api-workers", "2") as server:
        assert until(lambda: len(server.api_processes()) == 2) and until(server.all_there)
        seen = set()
        for each in server.api_processes():
            with server.only(each) as http:
                seen.add(int(http.get("/health").headers["x-signed"]))
        assert seen == {each.pid for each in server.api_processes()}
        assert httpx.get(server.url + "/health", headers={"x-badge": "none"}).status_code == 418
        assert server.stop() == 0
