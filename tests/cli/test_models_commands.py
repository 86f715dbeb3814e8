"""`quintet ps`, `quintet stop`, and flags of `quintet serve` that --models changes."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from quintet.cli.main import main

LOADED: dict[str, Any] = {
    "models": [
        {"name": "chat", "state": "loaded", "memory": 2**29, "in_flight": 2, "waiting": 1, "expires": None,
         "pinned": True},
        {"name": "embed", "state": "sleeping", "memory": 2**30, "in_flight": 0, "waiting": 0, "expires": 42.3,
         "pinned": False},
    ],
    "memory": {"budget": 2**31, "planned": 2**30},
}  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    asked: list[tuple[str, str, bytes]]

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.asked.append((self.command, self.path, body))
        found: tuple[int, Any] = (200, LOADED) if self.path == "/models/loaded" else (200, {"model": "chat"})
        if "/one/" in self.path:
            found = 404, {"error": {"message": f"there is nothing at '{self.path}'", "code": "not_found"}}
        if b"busy" in body:
            found = 409, {"error": {"message": "the model 'busy' has 2 requests; try again later"}}
        data = json.dumps(found[1]).encode()
        self.send_response(found[0])
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = _answer

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, list[tuple[str, str, bytes]]]]:
    _Handler.asked = []
    made = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{made.server_port}", _Handler.asked
    made.shutdown()
    made.server_close()


def test_ps_lists_state_memory_requests_and_time(
    server: tuple[str, list[tuple[str, str, bytes]]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ps", "--url", server[0]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "state", "memory", "requests", "waiting", "until"]
    assert lines[1].split() == ["chat", "(pinned)", "loaded", "0.50", "GiB", "2", "1", "busy"]
    assert lines[2].split() == ["embed", "sleeping", "1.00", "GiB", "0", "0", "42", "s"]
    assert lines[-1] == "memory: 1.00 GiB of 2.00 GiB planned"
    assert main(["ps", "--json", "--url", server[0]]) == 0
    assert json.loads(capsys.readouterr().out) == LOADED


def test_stop_unloads_a_model(
    server: tuple[str, list[tuple[str, str, bytes]]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, asked = server
    assert main(["stop", "gpt-4o", "--url", url]) == 0
    assert asked == [("POST", "/models/unload", b'{"model": "gpt-4o"}')]
    assert capsys.readouterr().err == "chat is unloaded\n"
    assert main(["stop", "busy", "--url", url]) == 1
    assert "has 2 requests; try again later" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["ps"], ["stop", "chat"]])
def test_a_server_of_one_model_has_nothing_to_unload(
    words: list[str], server: tuple[str, list[tuple[str, str, bytes]]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--url", f"{server[0]}/one"]) == 1
    assert "serves one model, which stays loaded; " in capsys.readouterr().err


def test_ps_before_memory_is_planned(
    server: tuple[str, list[tuple[str, str, bytes]]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(LOADED, "memory", {"budget": 0, "planned": 0})
    assert main(["ps", "--url", server[0]]) == 0
    assert "memory: not planned yet" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["--keep-alive", "3"], "--keep-alive has no effect without --models; leave it out"),
        (["bundled", "--models", "x.yaml"], "--models names the models; leave out MODEL and --model"),
        (["--models", "x.yaml", "--served-model-name", "x"], "--served-model-name has no effect with --models"),
        (["--models", "/none.yaml"], "--models /none.yaml: the file cannot be read: .*No such file"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(
    words: list[str], refusal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *words]) == 1
    assert re.search(refusal, capsys.readouterr().err)
