"""How much one caller may take: bytes, seconds, places; and what is given back when callers leave."""

import asyncio
import contextlib
import json
import logging
import socket
import struct

import httpx
import pytest
from starlette.requests import Request
from starlette.types import Message

from quintet.chat.prompts import Prompt
from quintet.common.unauthenticated import SPARE_CONNECTIONS, UnauthenticatedConnections
from quintet.sampling_params import RequestOutputKind, SamplingParams
from quintet.server.config import ServerConfig
from quintet.server.http.app_state import AppState
from quintet.server.http.capacity import RequestCost
from quintet.server.http.engine_call import MAX_UNREAD, PromptRequest
from quintet.server.http.errors import ClientGone
from quintet.server.http.middleware.slow_clients import ClientTimeouts
from quintet.server.uvicorn_server import run_loop
from tests.server.fakes import FakeBackend
from tests.server.http.serving import WAIT, Live, chat, client, events, read_all, serving

BODY = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}


def backend(hang: int | None = None, **settings: object) -> FakeBackend:
    fake = FakeBackend(hang=hang, **settings)  # type: ignore[arg-type]
    fake.reply = [853] * 400
    return fake


def status(raw: bytes) -> int:
    assert raw.startswith(b"HTTP/1.1 "), raw[:100]
    return int(raw.split()[1])


def error(raw: bytes) -> dict[str, str]:
    found: dict[str, str] = json.loads(raw.partition(b"\r\n\r\n")[2])["error"]
    return found


def until(wire: socket.socket, end: bytes) -> bytes:
    got = b""
    while end not in got:
        part = wire.recv(65536)
        assert part, got[-200:]
        got += part
    return got


async def test_a_body_is_measured_before_and_while_it_comes() -> None:
    async def pieces() -> object:
        for _ in range(100):
            yield b" " * 100

    async with client(max_body_bytes=1000) as http:
        for content in (b" " * 1001, pieces()):
            response = await http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
            assert response.status_code == 413 and "--max-body-bytes" in response.json()["error"]["message"]
        raw = json.dumps({"prompt": "x"}).encode().ljust(1000)
        headers = {"content-type": "application/json"}
        assert (await http.post("/v1/completions", content=raw, headers=headers)).status_code == 200


def test_a_body_that_is_too_large_is_read_to_its_end_and_answered() -> None:
    """A server that hung up at once would take the answer away from a client that still sends."""
    with serving(max_body_bytes=10_000) as live, httpx.Client(timeout=WAIT) as http:
        for _ in range(2):
            response = http.post(f"{live.url}/tokenize", content=b" " * 2**23, headers={"x-y": "z"})
            assert response.status_code == 413 and response.json()["error"]["code"] == "request_too_large"
        assert http.get(f"{live.url}/health").status_code == 200


def test_a_body_that_never_ends_is_cut_off() -> None:
    with serving(patience=ClientTimeouts(body=0.5), max_body_bytes=10_000) as live, live.connect() as wire:
        wire.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        with pytest.raises(ConnectionError):
            while True:
                wire.sendall(b"4000\r\n" + b"x" * 0x4000 + b"\r\n")
        assert httpx.get(f"{live.url}/health", timeout=WAIT).status_code == 200


def test_a_caller_who_does_not_read_is_not_waited_for() -> None:
    with serving(backend(), patience=ClientTimeouts(reader=0.3)) as live:
        body = {**BODY, "logprobs": 20, "n": 2, "stream": True}  # a megabyte, of which an eighth is held for a reader
        with live.begin("/v1/completions", body) as wire:
            live.run(_submitted(live.backend))
            live.run(asyncio.wait_for(_quiet(live), WAIT))
            settled(live)
            assert b"[DONE]" not in read_all(wire)


def stalled(**settings: object) -> tuple[FakeBackend, dict[str, object]]:
    """What says more than a connection holds, and a request for it; a token with its log-probabilities takes 5 KB."""
    fake = FakeBackend(max_model_len=4096, **settings)  # type: ignore[arg-type]
    fake.reply = [853] * 3000
    return fake, {"prompt": "x", "max_tokens": 3000, "ignore_eos": True, "logprobs": 20, "stream": True}


def test_a_stream_that_nobody_reads_ends_before_it_fills_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    fake, body = stalled()
    with serving(fake) as live, live.begin("/v1/completions", body) as wire:
        live.wait_for_abort()
        live.run(_quiet(live))
        settled(live)
        assert b"[DONE]" not in read_all(wire)
        assert httpx.get(f"{live.url}/health", timeout=WAIT).status_code == 200
    [line] = [each.getMessage() for each in caplog.records if "does not read" in each.getMessage()]
    unread = int(line.split(": ")[1].split()[0])
    assert MAX_UNREAD < unread < MAX_UNREAD + 10_000
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


def test_a_reader_that_falls_behind_within_bounds_gets_everything() -> None:
    fake, body = stalled(hang=250)
    with serving(fake) as live, live.begin("/v1/completions", {**body, "max_tokens": 260}) as wire:
        live.run(_hanging(fake))
        [call] = live.service.calls
        assert call._unread > 50_000
        live.go_on()
        got = until(wire, b"[DONE]")
        assert got.count(b"data: ") == 261
        live.run(_quiet(live))
        assert not fake.aborted and call._unread == 0


async def test_what_waits_for_a_caller_who_has_gone_is_let_go() -> None:
    fake, gone = backend(), asyncio.Event()

    async def receive() -> Message:
        await gone.wait()
        return {"type": "http.disconnect"}

    asked = PromptRequest(Prompt([853]), SamplingParams(max_tokens=50, output_kind=RequestOutputKind.DELTA))
    got = []
    async with AppState(fake, ServerConfig()).call(Request({"type": "http", "headers": []}, receive), [asked]) as call:
        await call.peek()
        while fake.running:
            await asyncio.sleep(0)
        gone.set()
        while call._record.why is None:
            await asyncio.sleep(0)
        with pytest.raises(ClientGone):
            async for output in call:
                got.append(output)
    assert len(got) == 1  # the one that was looked at


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 5000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 5000,
        b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\n\r\n",
        b"GET /" + b"a" * 5000,
        b"GET /health HTTP/1.1\r\n" + b"".join(b"X%d: y\r\n" % i for i in range(1000)) + b"\r\n",
        b"POST /tokenize HTTP/1.1\r\nContent-Length: 5\r\nX: " + b"a" * 5000 + b"\r\n\r\nhello",
    ],
)
def test_a_large_head_is_refused(head: bytes) -> None:
    with serving(max_header_bytes=4096) as live:
        raw = live.exchange(head)
        assert status(raw) == 431 and error(raw)["code"] == "headers_too_large"


def test_a_head_that_comes_byte_by_byte_is_counted() -> None:
    with serving(max_header_bytes=1024) as live, live.connect() as wire:
        wire.sendall(b"GET /health HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(2000):
                wire.sendall(b"X: y\r\n")
        raw = read_all(wire)
        assert raw == b"" or status(raw) == 431


def test_many_requests_on_one_connection_are_each_measured_alone() -> None:
    with serving(max_header_bytes=1024) as live, live.connect() as wire:
        for _ in range(30):
            wire.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 600 + b"\r\n\r\n")
            assert status(until(wire, b'"alive"}')) == 200


@pytest.mark.parametrize("sent", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b"\r\n"])
def test_a_slow_head_is_not_waited_for(sent: bytes) -> None:
    with serving(patience=ClientTimeouts(head=0.2)) as live:
        raw = live.exchange(sent)
        assert status(raw) == 408


def test_a_slow_head_after_a_request_is_not_waited_for() -> None:
    with serving() as live, live.connect() as wire:
        wire.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(wire, b'"alive"}')
        live.lose_patience(ClientTimeouts(head=0.2))
        wire.sendall(b"\r\n")  # wakes the connection, begins no request
        assert status(read_all(wire)) == 408


def test_a_slow_body_is_not_waited_for() -> None:
    with serving(patience=ClientTimeouts(body=0.2)) as live:
        raw = live.exchange(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{")
        assert raw == b""


@pytest.mark.parametrize("fails", [None, 3])
def test_a_client_of_http_1_0_gets_a_stream_whole(fails: int | None) -> None:
    """It knows no chunks: RFC 9112, 6.1."""
    body = json.dumps({**BODY, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    with serving(backend(fail_at=fails)) as live:
        raw = live.exchange(head + body)
    answered, _, stream = raw.partition(b"\r\n\r\n")
    assert status(raw) == 200 and b"transfer-encoding" not in answered.lower()
    assert b"content-length: %d" % len(stream) in answered.lower()
    assert stream.endswith(b"data: [DONE]\n\n") and (b"the fake failed" in stream) == (fails is not None)


def test_a_long_answer_is_no_slow_head() -> None:
    """Half a request that is sent meanwhile does not end it."""
    fake = backend(hang=5)
    with serving(fake) as live, live.begin("/v1/completions", {**BODY, "stream": True}) as wire:
        until(wire, b"data: ")
        live.lose_patience(ClientTimeouts(head=0.1))
        wire.sendall(b"GET /hea")
        live.run(asyncio.sleep(0.3))
        live.go_on()
        assert b"[DONE]" in until(wire, b"[DONE]")


@pytest.mark.parametrize(
    "raw",
    [b"nonsense\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01", b"GET / HTTP/9.9\r\n\r\n", b"GET  HTTP/1.1\r\n\r\n",
     b"CONNECT localhost:80 HTTP/1.1\r\n\r\n", b"GET http://[ HTTP/1.1\r\n\r\n",
     b"POST /tokenize HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
     b"POST /tokenize HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"],
)  # fmt: skip
def test_what_is_no_http_is_refused(raw: bytes) -> None:
    with serving() as live:
        answer = live.exchange(raw)
        assert status(answer) == 400 and error(answer)["code"] == "invalid_http"
        assert httpx.get(f"{live.url}/health", timeout=WAIT).status_code == 200


def ask(wire: socket.socket, path: str = "/version", end: bytes = b'"}') -> int:
    """The status of an answer whose body ends so."""
    wire.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nx-api-key: key\r\n\r\n".encode())
    return status(until(wire, end))


def test_callers_have_a_limit_and_health_answers_all_the_same() -> None:
    with serving(max_connections=3, api_key=("key",)) as live, contextlib.ExitStack() as stack:
        callers = [stack.enter_context(live.connect()) for _ in range(3)]
        assert [ask(each) for each in callers] == [200] * 3
        raw = live.exchange(b"GET /version HTTP/1.1\r\nHost: localhost\r\nx-api-key: key\r\n\r\n")
        assert status(raw) == 503 and error(raw)["code"] == "too_many_connections"
        idle = [stack.enter_context(live.connect(f"127.0.0.{2 + each % 4}")) for each in range(40)]
        with live.connect() as probe:
            assert ask(probe, "/health") == 200
        assert read_all(idle[0]) == b"" and ask(idle[-1], "/health") == 200  # the oldest made room
        assert [ask(each) for each in callers] == [200] * 3
        callers[0].close()
        live.run(_fewer_connections(live, 3 + SPARE_CONNECTIONS))
        with live.connect() as another:
            assert ask(another) == 200


def test_idle_connections_make_room_for_newer_ones_of_the_same_address() -> None:
    with serving(max_connections=50) as live, contextlib.ExitStack() as stack:
        with live.connect() as caller:
            assert ask(caller) == 200
            idle = [stack.enter_context(live.connect()) for _ in range(60)]
            with live.connect() as probe:
                assert ask(probe, "/health") == 200 and ask(probe) == 200
            assert read_all(idle[0]) == read_all(idle[44]) == b""  # 16 are its share
            assert ask(idle[-1]) == 200 and ask(caller) == 200


async def _fewer_connections(live: Live, than: int) -> None:
    while len(live.server.server_state.connections) >= than:
        await asyncio.sleep(0.01)


def test_strangers_are_counted_by_address_and_the_oldest_goes() -> None:
    strangers = UnauthenticatedConnections[int](64)
    for number in range(16):
        assert strangers.add(number, "10.0.0.1") is None
        assert strangers.add(100 + number, f"2001:db8::{number:x}") is None
    assert strangers.add(16, "::ffff:10.0.0.1") == 0  # the same, to a server that listens on IPv6
    assert strangers.add(116, "2001:db8::ffff") == 100  # a network of IPv6 is one place
    assert strangers.add(200, "2001:db8:0:1::1") is None
    assert strangers.oldest == 0 and len(strangers) == 35
    for number in (*range(17), 999):
        strangers.remove(number)
    assert strangers.add(0, "10.0.0.1") is None and strangers.oldest == 100


def test_a_body_without_a_key_is_not_taken_in_for_ever() -> None:
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    with serving(api_key=("key",), max_body_bytes=10_000) as live:
        with live.connect() as wire:
            wire.sendall(head % 5000 + b" " * 5000)
            assert status(until(wire, b"}}")) == 401
            assert ask(wire) == 200  # no more than a request may have: the connection goes on
        chunked = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        many = b" " * 2**16
        for begin, part in ((head % 2**40, many), (chunked, b"10000\r\n" + many + b"\r\n")):
            with live.connect() as wire:
                wire.sendall(begin)
                assert status(until(wire, b"}}")) == 401
                sent = 0
                with pytest.raises(ConnectionError):
                    while sent < 2**26:
                        wire.sendall(part)
                        sent += len(part)
                assert sent < 2**23, sent


def settled(live: Live) -> None:
    """Nothing runs, nothing is held."""
    assert not live.backend.running and not live.service.calls
    assert live.service.capacity.held == RequestCost()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_caller_who_hangs_up_frees_the_request(path: str, stream: bool) -> None:
    fake = backend(hang=3)
    with serving(fake) as live:
        body = {**BODY, "stream": stream} if path == "/v1/completions" else chat(stream=stream, n=2)
        wire = live.begin(path, body)
        if stream:
            until(wire, b"data: ")
        else:
            live.run(_submitted(fake))
        wire.close()
        live.wait_for_abort()
        live.run(_quiet(live))
        assert fake.aborted == [fake.submitted[0].request_id]
        settled(live)


def test_a_reset_under_pipelined_requests_ends_the_one_that_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    """uvicorn tells the last of them alone that nobody is there; uvloop raises when the first writes on."""
    fake = backend(hang=3)
    with serving(fake, run=run_loop) as live:
        later = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        wire = live.begin("/v1/completions", {**BODY, "stream": True}, later)
        until(wire, b"data: ")
        live.run(_hanging(fake))
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wire.close()  # by a reset
        live.go_on()
        live.wait_for_abort()
        live.run(_quiet(live))
        settled(live)
    assert [each.getMessage() for each in caplog.records if each.levelno > logging.INFO] == []


async def _submitted(fake: FakeBackend) -> None:
    while not fake.submitted:
        await asyncio.sleep(0.01)


async def _hanging(fake: FakeBackend, count: int = 1) -> None:
    while fake.hanging < count:
        await asyncio.sleep(0.01)


async def _quiet(live: Live) -> None:
    while live.service.calls:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_has_a_deadline(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, loop = backend(hang=3), asyncio.get_running_loop()
    clock, headers = loop.time, {"X-Request-Timeout": "1000"}
    async with client(fake) as http:
        asked = asyncio.create_task(http.post("/v1/completions", json={**BODY, "stream": stream}, headers=headers))
        await _hanging(fake)  # a stream has begun
        monkeypatch.setattr(loop, "time", lambda: clock() + 1000)
        late = await asked
        bad = await http.post("/v1/completions", json=BODY, headers={"X-Request-Timeout": "soon"})
    if stream:
        assert events(late.text)[-1]["error"]["code"] == "timeout"
    else:
        assert late.status_code == 504 and late.json()["error"]["code"] == "timeout"
    assert bad.status_code == 400 and len(fake.aborted) == 1 and not fake.running


async def test_what_is_too_much_is_told_to_come_again() -> None:
    fake = backend(hang=1)
    async with client(fake, max_queued_requests=2) as http:
        first = asyncio.create_task(http.post("/v1/completions", json={**BODY, "n": 2}))
        await _submitted(fake)
        busy = await http.post("/v1/completions", json=BODY)
        never = await http.post("/v1/completions", json={**BODY, "n": 3})
        fake.go_on.set()
        assert (await first).status_code == 200
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200
    assert busy.status_code == 429 and int(busy.headers["retry-after"]) >= 1
    assert busy.json()["error"]["type"] == "rate_limit_error"
    assert never.status_code == 400


async def test_draining_ends_nothing_and_takes_nothing_on() -> None:
    fake = backend(hang=1)
    async with client(fake) as http:
        service = http._transport.app.state.service  # type: ignore[attr-defined]
        first = asyncio.create_task(http.post("/v1/completions", json=BODY))
        await _submitted(fake)
        draining = asyncio.create_task(service.drain())
        await asyncio.sleep(0)
        assert (await http.get("/ready")).status_code == 503 and (await http.get("/health")).status_code == 200
        refused = await http.post("/v1/completions", json=BODY)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        fake.go_on.set()
        assert (await first).status_code == 200
        await draining


@pytest.mark.parametrize("stream", [False, True])
async def test_draining_has_an_end(stream: bool) -> None:
    fake = backend(hang=1)
    async with client(fake, drain_timeout=0.1) as http:
        service = http._transport.app.state.service  # type: ignore[attr-defined]
        first = asyncio.create_task(http.post("/v1/completions", json={**BODY, "stream": stream}))
        await _hanging(fake)  # a stream has begun
        await service.drain()
        response = await first
    error = events(response.text)[-1]["error"] if stream else response.json()["error"]
    assert error["code"] == "shutting_down" and response.status_code == (200 if stream else 503)
    assert not fake.running


async def test_a_dead_engine_ends_every_call() -> None:
    fake = backend(hang=1)
    async with client(fake) as http:
        service = http._transport.app.state.service  # type: ignore[attr-defined]
        calls = [
            asyncio.create_task(http.post("/v1/completions", json={**BODY, "stream": each})) for each in (False, True)
        ]
        await _hanging(fake, 2)  # the stream has begun
        service.fail("the engine was killed")
        whole, streamed = await asyncio.gather(*calls)
        later = await http.post("/v1/completions", json=BODY)
    said = events(streamed.text)[-1]
    assert said["error"]["code"] == "engine_dead" and "the engine was killed" in said["error"]["message"]
    assert [(each.status_code, each.headers["retry-after"], each.json()) for each in (whole, later)] == [
        (503, "5", said), (503, "5", said)
    ]  # fmt: skip
