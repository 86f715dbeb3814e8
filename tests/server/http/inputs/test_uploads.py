"""multipart/form-data: written to private files as it comes, bounded, and deleted whatever happens."""

import asyncio
import contextlib
import gc
import os
import random
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet.server.config import UPLOAD_PATHS, ServerConfig
from quintet.server.http.app import make_app
from quintet.server.http.app_state import AppState
from quintet.server.http.errors import ClientGone
from quintet.server.http.inputs.uploads import FormLimits, read_form
from quintet.server.http.respond import json_response
from tests.server.fakes import FakeBackend
from tests.server.http.serving import HOST, WAIT

[PATH, _] = UPLOAD_PATHS
LIMITS = FormLimits()
BOUNDARY = "xYzZY"
KIND = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


def open_files() -> set[str]:
    """Files of the temporary folder that this process has open."""
    found: set[str] = set()
    for each in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{each}")
            found |= {target} if target.startswith(tempfile.gettempdir()) and "deleted" in target else set()
    return found


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Gives each test a temporary folder of its own: other tests' compilers use the common one meanwhile."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gc.collect()
    before, names = open_files(), set(os.listdir(tempfile.gettempdir()))
    yield
    assert open_files() <= before and not {
        each for each in set(os.listdir(tempfile.gettempdir())) - names if each.startswith("tmp")
    }  # fmt: skip


def app(limits: FormLimits = LIMITS, **settings: Any) -> FastAPI:
    """The server's app with a route that answers with what it was sent."""
    made, routes = make_app(AppState(FakeBackend(), ServerConfig(**settings))), APIRouter()

    @routes.post(PATH)
    async def echo(http: HttpRequest) -> Response:
        async with read_form(http, limits) as form:
            file = form.file()
            content = file.content.read()
            return json_response({
                "values": form.values(), "name": file.name, "type": file.content_type, "size": file.size,
                "equal": len(content) == file.size, "content": content[:100].decode("latin-1"),
            })  # fmt: skip

    made.router.routes.insert(0, routes.routes[0])
    return made


def client(limits: FormLimits = LIMITS, **settings: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app(limits, **settings)), base_url=HOST)


def part(content: bytes, **options: str) -> bytes:
    words = "; ".join(f'{name}="{value}"' for name, value in options.items())
    return b"--%s\r\nContent-Disposition: form-data; %s\r\n\r\n%s\r\n" % (BOUNDARY.encode(), words.encode(), content)


BASE64 = b"Content-Transfer-Encoding: base64"
END = f"--{BOUNDARY}--\r\n".encode()


async def test_fields_and_the_file_arrive_as_httpx_sends_them() -> None:
    content = random.Random(1).randbytes(3 * 2**20) + b"\r\n--almost\r\n"
    fields = {"model": "whisper-1", "prompt": "Grüße,\nand more", "timestamp_granularities[]": ["word", "segment"]}
    async with client() as http:
        answer = await http.post(PATH, data=fields, files={"file": ("a b.wav", content, "audio/wav")})
    assert answer.json() == {
        "values": {"model": "whisper-1", "prompt": "Grüße,\nand more", "timestamp_granularities": ["word", "segment"]},
        "name": "a b.wav", "type": "audio/wav", "size": len(content), "equal": True,
        "content": content[:100].decode("latin-1"),
    }  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 7, 64])
async def test_pieces_of_any_size_are_the_same_form(size: int) -> None:
    raw = part("é".encode(), name="language") + part(b"ab\r\n--xYzZ\r\nc", name="file", filename="x") + END

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(raw), size):
            yield raw[at : at + size]

    async with client() as http:
        answer = (await http.post(PATH, content=pieces(), headers=KIND)).json()
    assert answer["values"] == {"language": "é"} and answer["content"] == "ab\r\n--xYzZ\r\nc" and answer["equal"]


async def test_the_limit_of_a_body_is_the_routes() -> None:
    small = {"max_body_bytes": 1000, "max_upload_bytes": 50_000}
    async with client(**small) as http:
        assert (await http.post(PATH, files={"file": b"x" * 40_000})).json()["size"] == 40_000
        for content in (part(b"x" * 60_000, name="file", filename="a") + END, _pieces(60_000)):
            answer = await http.post(PATH, content=content, headers=KIND)
            assert answer.status_code == 413 and "--max-upload-bytes" in answer.json()["error"]["message"]
        answer = await http.post("/v1/completions", content=b" " * 1001, headers={"content-type": "application/json"})
        assert answer.status_code == 413 and "--max-body-bytes" in answer.json()["error"]["message"]
    assert ServerConfig().body_limit(PATH).bytes == 25 * 2**20  # OpenAI's
    assert ServerConfig().body_limit("/v1/completions").bytes == 4 * 2**20


async def _pieces(count: int) -> AsyncIterator[bytes]:
    yield part(b"", name="file", filename="a")[:-2]
    for _ in range(0, count, 100):
        yield b"x" * 100


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (part(b"x", name="model") + END, "file is missing"),
        (part(b"x", name="file", filename="a"), "it ends before its last boundary"),
        (b"rubbish", "the form is damaged"),
        (END, "file is missing"),
        (part(b"x", filename="a") + END, "no Content-Disposition: form-data with a name"),
        (part(b"x", name="other", filename="a") + END, "the form has a file 'other'"),
        (part(b"x", name="file", filename="a") * 2 + END, "the form has a file 'file'"),
        (part(b"x", name="model") * 2 + part(b"x", name="file", filename="a") + END, "model comes twice"),
        (part(b"\xff", name="model") + END, "model is not UTF-8"),
        (part(b"x", name="m") * 9 + END, "more than 8 parts"),
        (part(b"x" * 101, name="prompt") + END, "fields of more than 100 bytes together"),
        (part(b"x", name="m" * 5000) + END, "the form"),
        (part(b"eA==", name="f").replace(b"\r\n\r\n", b"\r\n" + BASE64 + b"\r\n\r\n") + END, "base64"),
        (part(b"x", name="f").replace(b"\r\n\r\n", b"\r\n" + b"a: b\r\n" * 30 + b"\r\n") + END, "the form"),
    ],
    ids=["no-file", "cut", "rubbish", "nothing", "no-name", "other", "two", "twice", "utf-8", "parts", "bytes",
         "header", "encoding", "headers"],
)  # fmt: skip
async def test_a_wrong_form_is_refused_with_the_reason(raw: bytes, reason: str) -> None:
    async with client(FormLimits(fields=8, field_bytes=100)) as http:
        answer = await http.post(PATH, content=raw, headers=KIND)
    assert answer.status_code == 400 and reason in answer.json()["error"]["message"], answer.text


async def test_another_type_of_body_is_refused() -> None:
    async with client() as http:
        answer = await http.post(PATH, json={})
        assert answer.status_code == 415 and "send multipart/form-data" in answer.json()["error"]["message"]
        answer = await http.post(PATH, content=END, headers={"content-type": "multipart/form-data"})
        assert answer.status_code == 400 and "boundary" in answer.json()["error"]["message"]
        long = {"content-type": f"multipart/form-data; boundary={'x' * 5000}"}
        assert (await http.post(PATH, content=END, headers=long)).status_code == 400


async def test_the_checks_of_all_routes_come_first() -> None:
    async with client(api_key=("secret",)) as http:
        assert (await http.post(PATH, files={"file": b"x"})).status_code == 401


@pytest.mark.parametrize("end", ["gone", "cancelled", "interrupted", "failed"])
async def test_the_file_is_deleted_however_the_request_ends(end: str) -> None:
    """The fixture looks at what is left."""
    before, arrived = open_files(), asyncio.Event()
    body = part(b"x" * 2**19, name="file", filename="a")
    messages = [{"type": "http.request", "body": body, "more_body": True}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        arrived.set()
        if end == "gone":
            return {"type": "http.disconnect"}
        if end == "interrupted":
            raise KeyboardInterrupt
        if end == "failed":
            return {"type": "http.request", "body": END, "more_body": False}
        await asyncio.Event().wait()

    headers = [(name.encode(), value.encode()) for name, value in KIND.items()]
    http = HttpRequest({"type": "http", "method": "POST", "path": PATH, "headers": headers}, receive)

    async def read() -> None:
        async with read_form(http) as form:
            assert open_files() > before and form.file().size == 2**19
            raise ZeroDivisionError

    errors = {"gone": ClientGone, "interrupted": KeyboardInterrupt, "failed": ZeroDivisionError}
    if end in errors:
        with pytest.raises(errors[end]):
            await read()
    else:
        task = asyncio.create_task(read())
        await asyncio.wait_for(arrived.wait(), WAIT)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert open_files() == before


async def test_a_full_disk_is_an_error_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: open("/dev/full", "wb+"))  # no space left on device
    async with client() as http:
        answer = await http.post(PATH, files={"file": b"x" * 10})
    assert answer.status_code == 507 and "No space left on device" in answer.json()["error"]["message"]
