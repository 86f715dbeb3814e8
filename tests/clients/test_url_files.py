"""Batches from and to addresses, at a store that answers as it is told to."""

import io
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from quintet.cli import main as cli
from quintet.clients import url_files as transfer
from quintet.clients.errors import ServerError
from tests.clients.conftest import Fake

SECRET = "X-Signature=abcdef"
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "echo", "prompt": "x"}}


@dataclass
class Store:
    """Files by path, and how often each was asked for. Paths that begin with /to/ lead elsewhere."""

    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    refuses: list[int] = field(default_factory=list)  # statuses of the next requests
    leads: dict[str, str] = field(default_factory=dict)
    short: bool = False  # it ends before its end
    port: int = 0

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}?{SECRET}"


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._serve(b"")

        def do_PUT(self) -> None:
            self._serve(self.rfile.read(int(self.headers["content-length"])))

        def _serve(self, body: bytes) -> None:
            path, _, query = self.path.partition("?")
            made.asked.append((self.command, path))
            status, headers, said = 200, {}, made.files.get(path, b"")
            if made.refuses:
                status, said = made.refuses.pop(0), b"come again"
                headers["retry-after"] = "0"
            elif path in made.leads:
                status, headers["location"] = 307, made.leads[path]
            elif query != SECRET:
                status, said = 403, b"not signed"
            elif self.command == "PUT":
                made.files[path], said = body, b""
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(said) + made.short))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, format: str, *args: Any) -> None:
            """It is told by the test."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def held(tmp_path: Path) -> Path:
    """Where answers lie until they are sent."""
    (tmp_path / "held").mkdir()
    return tmp_path / "held"


def batch(fake: Fake, source: str, target: str, folder: Path, *more: str) -> int:
    words = ["run-batch", "-i", source, "-o", target, "--url", fake.url, "--output-tmp-dir", str(folder), *more]
    return cli.main(words)


def test_a_batch_comes_from_an_address_and_goes_to_one(
    fake: Fake, store: Store, held: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.files["/in"] = json.dumps(LINE).encode()
    store.leads = {"/moved": store.url("/in"), "/there": store.url("/out")}
    store.refuses = [503]
    with pytest.raises(ServerError, match="answered 503 to GET: come again"):
        transfer.fetch(store.url("/moved"), io.BytesIO(), 1000)
    assert batch(fake, store.url("/moved"), store.url("/there"), held) == 0
    (answer,) = [json.loads(line) for line in store.files["/out"].splitlines()]
    assert answer["custom_id"] == "a" and answer["response"]["status_code"] == 200
    said = capsys.readouterr().err
    assert f"the answers were sent to http://127.0.0.1:{store.port}/there" in said and SECRET not in said
    assert list(held.iterdir()) == []


def test_only_one_of_the_two_may_be_an_address(fake: Fake, store: Store, tmp_path: Path, held: Path) -> None:
    store.files["/in"] = json.dumps(LINE).encode()
    out = tmp_path / "out.jsonl"
    assert batch(fake, store.url("/in"), str(out), held, "--quiet") == 0
    assert json.loads(out.read_text())["custom_id"] == "a"
    (tmp_path / "in.jsonl").write_bytes(store.files["/in"])
    assert batch(fake, str(tmp_path / "in.jsonl"), store.url("/out"), held, "--quiet") == 0
    assert json.loads(store.files["/out"])["custom_id"] == "a" and list(held.iterdir()) == []


def test_answers_that_cannot_be_sent_stay_and_are_told(
    fake: Fake, store: Store, held: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.files["/in"] = json.dumps(LINE).encode()
    assert batch(fake, store.url("/in"), store.url("/out").replace("abc", "xyz"), held) == 1
    said = capsys.readouterr().err
    (kept,) = held.glob("*/*")
    assert "answered 403 to PUT: not signed; a presigned address holds for a while, and for one" in said
    assert f"the answers are in {kept}" in said and json.loads(kept.read_text())["custom_id"] == "a"
    assert store.asked.count(("PUT", "/out")) == 1, "what will not pass is not tried again"


@pytest.mark.parametrize(("statuses", "tries"), [([500, 429], 3), ([503] * transfer.MAX_TRIES, transfer.MAX_TRIES)])
def test_sending_is_tried_a_few_times(store: Store, tmp_path: Path, statuses: list[int], tries: int) -> None:
    (tmp_path / "file").write_bytes(b"answers")
    store.refuses, pauses = list(statuses), list[float]()
    if tries > len(statuses):
        transfer.send(store.url("/out"), tmp_path / "file", pauses.append)
        assert store.files["/out"] == b"answers"
    else:
        with pytest.raises(ServerError, match="answered 503 to PUT"):
            transfer.send(store.url("/out"), tmp_path / "file", pauses.append)
    assert len(store.asked) == tries and pauses == [0.0] * (tries - 1), "as Retry-After says"


def test_nobody_there_is_tried_again_too(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"answers")
    pauses: list[float] = []
    with pytest.raises(ServerError, match=r"cannot reach http://127.0.0.1:1/out: Connection refused"):
        transfer.send("http://127.0.0.1:1/out?secret", tmp_path / "file", pauses.append)
    assert pauses == [1, 2, 4, 8]


def test_what_is_fetched_is_bounded_and_whole(store: Store) -> None:
    store.files["/in"] = b"x" * 5000
    sink = io.BytesIO()
    assert transfer.fetch(store.url("/in"), sink, 5000) == 5000 == len(sink.getvalue())
    with pytest.raises(ServerError, match="has more than 4999 bytes; --max-input-bytes allows more"):
        transfer.fetch(store.url("/in"), io.BytesIO(), 4999)
    store.short = True
    with pytest.raises(ServerError, match="broke the connection off"):
        transfer.fetch(store.url("/in"), io.BytesIO(), 5000)


def test_redirects_are_bounded_and_stay_with_http(store: Store) -> None:
    store.leads = {"/round": store.url("/round"), "/file": "file:///etc/passwd", "/ftp": "ftp://127.0.0.1/x"}
    with pytest.raises(ServerError, match="where 5 redirects lead, and it leads on"):
        transfer.fetch(store.url("/round"), io.BytesIO(), 1000)
    assert len(store.asked) == transfer.MAX_REDIRECTS + 1
    for path, scheme in (("/file", "file"), ("/ftp", "ftp")):
        with pytest.raises(ServerError, match=f"redirects to an invalid address: {scheme}:// is not served"):
            transfer.fetch(store.url(path), io.BytesIO(), 1000)


@pytest.mark.parametrize(
    ("source", "target", "why"),
    [
        ("file:///etc/passwd", "out", "file:// is not served; give a file, or an address with http"),
        ("in", "s3://bucket/key", "s3:// is not served"),
        ("http://me:secret@127.0.0.1/x", "out", "holds a user"),
        ("http://127.0.0.1:99999/x", "out", "port"),
        ("http://ö/x", "out", "plain ASCII"),
        ("http://127.0.0.1/x", "http://127.0.0.1/x", "is the input's address too"),
    ],
)
def test_what_is_no_such_address_is_refused_before_anything(
    fake: Fake, held: Path, capsys: pytest.CaptureFixture[str], source: str, target: str, why: str
) -> None:
    assert batch(fake, source, target, held) == 1
    said = capsys.readouterr().err
    assert why in said and "secret" not in said and not fake.asked and list(held.iterdir()) == []
