"""Bodies that come packed: what they hold is what counts, and what is no such body is refused in words."""

import asyncio
import gzip
import json
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from quintet.server.config import ServerConfig
from quintet.server.http.app import make_app
from quintet.server.http.app_state import AppState
from tests.server.fakes import FakeBackend
from tests.server.http.serving import HOST, WAIT, client, serving

BODY = {"prompt": "Once upon a time", "max_tokens": 3}
RAW = json.dumps(BODY).encode()
PATH = "/v1/completions"


def squeeze(raw: bytes) -> bytes:
    return gzip.compress(raw, mtime=0)


def packed(coding: str) -> dict[str, str]:
    return {"content-encoding": coding, "content-type": "application/json"}


def bomb(megabytes: int) -> bytes:
    """A JSON text that is mostly spaces."""
    pack = zlib.compressobj(wbits=31)
    parts = [pack.compress(b" " * 2**20) for _ in range(megabytes)]
    return b"".join([*parts, pack.compress(RAW), pack.flush()])


@pytest.mark.parametrize(
    ("coding", "pack"),
    [("gzip", squeeze), ("x-gzip", squeeze), ("GZip", squeeze), ("deflate", zlib.compress),
     ("identity", bytes), ("identity, gzip", squeeze)],
)  # fmt: skip
async def test_a_packed_body_is_what_it_holds(coding: str, pack: Callable[[bytes], bytes]) -> None:
    async with client() as http:
        plain = await http.post(PATH, json=BODY)
        answer = await http.post(PATH, content=pack(RAW), headers=packed(coding))
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"] == plain.json()["choices"]


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_it_may_come_in_any_pieces(size: int) -> None:
    whole = squeeze(json.dumps({**BODY, "prompt": "word " * 3000, "truncate_prompt_tokens": 9}).encode())

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(whole), size):
            yield whole[start : start + size]

    with serving() as live:
        answer = httpx.post(live.url + PATH, content=squeeze(RAW), headers=packed("gzip"), timeout=WAIT)
        assert answer.status_code == 200, answer.text
        async with httpx.AsyncClient(timeout=WAIT) as http:
            answer = await http.post(live.url + PATH, content=pieces(), headers=packed("gzip"))
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == 9


async def test_a_bomb_is_too_large_and_takes_no_memory() -> None:
    content = bomb(64)
    assert len(content) < 100_000
    service = AppState(FakeBackend(), ServerConfig(max_body_bytes=100_000))
    transport = httpx.ASGITransport(make_app(service))
    async with httpx.AsyncClient(transport=transport, base_url=HOST) as http:
        tracemalloc.start()
        try:
            answer = await http.post(PATH, content=content, headers=packed("gzip"))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    assert peak < 4 * 2**20, f"{peak} bytes"
    assert service.capacity.held.body_bytes == 0


@pytest.mark.parametrize(("most", "status"), [(len(RAW), 200), (len(RAW) - 1, 413)], ids=["at the bound", "over it"])
async def test_pieces_of_a_body_add_up(most: int, status: int) -> None:
    """Where no length is announced, and nothing comes behind the last piece."""
    messages = [{"type": "http.request", "body": RAW[:7], "more_body": True}, {"type": "http.request", "body": RAW[7:]}]
    headers = [(b"content-type", b"application/json"), (b"host", HOST.removeprefix("http://").encode())]
    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "path": PATH, "scheme": "http",
        "raw_path": PATH.encode(), "query_string": b"", "headers": headers, "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }  # fmt: skip
    sent: list[Any] = []

    async def receive() -> Any:
        if messages:
            return messages.pop(0)
        await asyncio.Event().wait()  # until the app is through

    async def send(message: Any) -> None:
        sent.append(message)

    app = make_app(AppState(FakeBackend(), ServerConfig(max_body_bytes=most)))
    await app(scope, receive, send)
    assert sent[0]["status"] == status, sent


async def test_what_unpacks_to_nothing_has_a_bound_too() -> None:
    """Empty blocks of deflate give no byte, however many come."""

    async def blocks() -> AsyncIterator[bytes]:
        yield b"\x78\x9c"
        for _ in range(100):
            yield b"\x00\x00\x00\xff\xff" * 100

    async with client(max_body_bytes=10_000) as http:
        answer = await http.post(PATH, content=blocks(), headers=packed("deflate"))
    assert answer.status_code == 413


async def test_the_gate_counts_what_was_unpacked() -> None:
    content = squeeze(json.dumps({**BODY, "prompt": "x" * 3000}).encode())
    assert len(content) < 200
    async with client(max_queued_bytes=1000, max_body_bytes=1000) as http:
        assert (await http.post(PATH, content=content, headers=packed("gzip"))).status_code == 413
    fake = FakeBackend(max_model_len=4096)
    service = AppState(fake, ServerConfig(max_queued_bytes=5000, max_body_bytes=4000))
    held = []
    fake.submit = lambda *_, **__: held.append(service.capacity.held.body_bytes) or fake.fail()  # type: ignore
    transport = httpx.ASGITransport(make_app(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url=HOST) as http:
        await http.post(PATH, content=content, headers=packed("gzip"))
    assert held and held[0] > 3000
    assert service.capacity.held.body_bytes == 0


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"no gzip at all", "cannot be unpacked"), (squeeze(RAW)[:-4], "ends early"), (b"", "ends early"),
        (squeeze(RAW)[:-8] + b"12345678", "cannot be unpacked"), (squeeze(RAW) + b"x", "goes on after"),
        (squeeze(RAW) * 2, "goes on after"), (zlib.compress(RAW), "cannot be unpacked"),
    ],
    ids=["no gzip", "no end", "nothing", "wrong sum", "one byte more", "two members", "zlib"],
)  # fmt: skip
async def test_what_is_damaged_is_a_wrong_request(content: bytes, why: str) -> None:
    async with client() as http:
        answer = await http.post(PATH, content=content, headers=packed("gzip"))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_encoding")
    assert why in error["message"] and "gzip" in error["message"]


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, gzip", pytest.param("x" * 500, id="long")])
async def test_another_coding_is_refused_with_those_that_are_taken(coding: str) -> None:
    async with client() as http:
        answer = await http.post(PATH, content=RAW, headers=packed(coding))
        assert (await http.get("/v1/models", headers={"content-encoding": coding})).status_code == 200
    assert answer.status_code == 415 and answer.headers["accept-encoding"] == "gzip, deflate"
    assert "gzip or deflate" in answer.json()["error"]["message"] and len(answer.text) < 500


async def test_a_key_is_asked_for_before_anything_is_unpacked() -> None:
    async with client(api_key=("secret",)) as http:
        assert (await http.post(PATH, content=b"x", headers=packed("gzip"))).status_code == 401
        assert (await http.post(PATH, content=b"x", headers=packed("br"))).status_code == 401
