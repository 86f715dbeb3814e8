"""The streaming HTTP client, against a server that misbehaves on request."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from quintet.clients import http_client as http_stream
from quintet.clients import http_connection
from quintet.clients.http_client import EventStreamParser, HttpClient, HttpResponse, ServerAddress
from quintet.clients.http_connection import ConnectFailed, ConnectionLost, HttpProtocolError, HttpTimeouts, Sink
from tests.clients.conftest import Fake

T = TypeVar("T")


def ask(fake: Fake, model: str, idle: float = 60.0, times: int = 1, **fields: Any) -> tuple[HttpResponse, bytes]:
    """Sends the same request one after the other; the last answer, and all that was streamed."""
    pieces: list[bytes] = []

    async def work() -> HttpResponse:
        client = HttpClient(
            ServerAddress("127.0.0.1", fake.port), {"x-test": "1"}, HttpTimeouts(first_byte=idle, idle=idle)
        )
        try:
            answer = HttpResponse()
            for _ in range(times):
                body = json.dumps({"model": model, "stream": True, **fields}).encode()
                answer = await client.request("POST", "/v1/completions", body, lambda piece, now: pieces.append(piece))
            return answer
        finally:
            client.close()

    return http_stream.run(work()), b"".join(pieces)


def events(data: bytes) -> list[bytes]:
    found: list[bytes] = []
    cut = EventStreamParser(found.append)
    cut.feed(data)
    cut.finish()
    return found


def test_chunks_are_joined_and_the_connection_is_used_again(fake: Fake) -> None:
    answer, data = ask(fake, "echo", times=3)
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    texts = [json.loads(each)["choices"] for each in events(data) if each != b"[DONE]"]
    assert [choices[0]["text"] for choices in texts if choices] == [" 0", " 1", " 2", " 3"] * 3
    assert {asked.connection for asked in fake.asked} == {1}
    assert fake.asked[0].headers["x-test"] == "1"


def test_an_error_is_kept_whole_and_never_reaches_the_sink(fake: Fake) -> None:
    answer, data = ask(fake, "fault")
    assert (answer.status, data) == (500, b"")
    assert json.loads(answer.body)["error"]["message"] == "it broke"


@pytest.mark.parametrize(
    ("model", "error"), [("breaks-off", ConnectionLost), ("hangs-up", ConnectionLost), ("bad-chunk", HttpProtocolError)]
)
def test_what_is_not_whole_is_an_error(fake: Fake, model: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        ask(fake, model)


def test_silence_has_an_end(fake: Fake) -> None:
    with pytest.raises(TimeoutError, match="nothing came"):
        ask(fake, "silent", idle=0.05)


def test_an_answer_may_end_with_its_connection(fake: Fake) -> None:
    answer, data = ask(fake, "until-close", times=2)
    assert answer.status == 200
    assert [each == b"[DONE]" for each in events(data)] == [False, True] * 2
    assert {asked.connection for asked in fake.asked} == {1, 2}


def test_a_connection_that_the_server_closed_is_replaced(fake: Fake) -> None:
    async def work() -> int:
        client = HttpClient(ServerAddress("127.0.0.1", fake.port))
        await asyncio.gather(*(client.request("GET", "/v1/models") for _ in range(3)))
        for connection in client._free:
            connection.closed = False  # as where the server's FIN is still on its way
            connection._transport.abort()
        return (await client.request("GET", "/v1/models")).status

    assert http_stream.run(work()) == 200


def test_a_sink_that_fails_ends_the_request_alone(fake: Fake) -> None:
    def sink(piece: bytes, now: float) -> None:
        raise ValueError("no more")

    async def work() -> int:
        client = HttpClient(ServerAddress("127.0.0.1", fake.port))
        with pytest.raises(ValueError, match="no more"):
            await client.request("POST", "/v1/completions", b'{"model": "echo", "stream": true}', sink)
        return (await client.request("GET", "/v1/models")).status

    assert http_stream.run(work()) == 200


def test_leaving_early_shows_at_the_server(fake: Fake) -> None:
    async def work() -> None:
        heard = asyncio.Event()
        client = HttpClient(ServerAddress("127.0.0.1", fake.port))
        request = client.request("POST", "/v1/completions", b'{"model": "held"}', lambda piece, now: heard.set())
        task = asyncio.create_task(request)
        await asyncio.wait_for(heard.wait(), 60)
        task.cancel()
        await asyncio.wait([task])

    http_stream.run(work())
    assert fake.gone.wait(60)


@pytest.mark.parametrize("target", [b"/a b", b"/a\r\nhost: x", b"/a\x00", b"/a HTTP/1.1\r\n\r\nPOST /b"])
def test_a_path_that_would_end_the_request_line_is_refused(target: bytes) -> None:
    client = HttpClient(ServerAddress("127.0.0.1", 1), {}, HttpTimeouts())
    with pytest.raises(ValueError, match="no path of a request: b'/a"):
        client.message(b"GET", target, [])


def test_a_unix_socket_will_do(fake: Fake) -> None:
    async def work() -> HttpResponse:
        return await HttpClient(ServerAddress("localhost", 80, uds=fake.uds)).request("GET", "/v1/models")

    assert json.loads(http_stream.run(work()).body)["data"][0]["id"] == "echo"
    assert fake.asked[0].headers["host"] == "localhost"


# ------------------------------------------------------------------------------------------- answers byte by byte


def answer_of(*pieces: bytes, sink: Sink | None = None) -> HttpResponse:
    """What the client makes of bytes that a server sends to its first request."""
    return served(lambda client: client.request("GET", "/", sink=sink), *pieces)


def served(work: Callable[[HttpClient], Coroutine[Any, Any, T]], *pieces: bytes) -> T:
    """What the work gives, with a client whose server sends these bytes, whatever it is asked."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        writer.close()

    async def run() -> T:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            return await work(HttpClient(ServerAddress("127.0.0.1", server.sockets[0].getsockname()[1])))

    return asyncio.run(run())


OK = b"HTTP/1.1 200 OK\r\n"


def test_continue_announces_the_answer() -> None:
    answer = answer_of(b"HTTP/1.1 100 Continue\r\n\r\n", OK + b"content-length: 2\r\nX-A: b\r\n\r\nhi")
    assert (answer.status, answer.body, answer.headers["x-a"]) == (200, b"hi", "b")


def test_an_answer_too_many_changes_nothing() -> None:
    second = b"HTTP/1.1 500 x\r\ncontent-length: 3\r\nx-b: c\r\n\r\nbad"
    answer = answer_of(OK + b"content-length: 2\r\n\r\nhi" + second)
    assert (answer.status, answer.body, answer.headers) == (200, b"hi", {"content-length": "2"})


def test_a_sink_that_fails_at_a_whole_answer_fails_the_request() -> None:
    def sink(piece: bytes, now: float) -> None:
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        answer_of(OK + b"content-length: 2\r\n\r\nhi", sink=sink)


def test_a_slow_reader_makes_the_server_wait_and_gets_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "MAX_BUFFERED", 1000)
    content = bytes(range(256)) * 40_000  # more than the sockets between hold

    async def work(client: HttpClient) -> bytes:
        exchange, found = await client.send(client.message(b"GET", b"/", [])), bytearray()
        assert (await exchange.head()).status == 200
        connection = exchange._connection
        while piece := await exchange.next_chunk():
            found += piece
            await asyncio.sleep(0.001)
            assert sum(map(len, connection.pieces)) < 2**20, "reading stops until what came is taken"
        exchange.close()
        return bytes(found)

    assert served(work, OK + b"content-length: %d\r\n\r\n" % len(content), content) == content


def test_an_answer_that_came_whole_can_be_left_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its connection is used for the next."""
    monkeypatch.setattr(http_connection, "MAX_BUFFERED", 1000)
    content = b"x" * 4000

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(OK + b"content-length: %d\r\n\r\n" % len(content) + content)

    async def work() -> bytes:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            client = HttpClient(ServerAddress("127.0.0.1", server.sockets[0].getsockname()[1]))
            exchange = await client.send(client.message(b"GET", b"/", []))
            await exchange.head()
            exchange.close()
            exchange = await client.send(client.message(b"GET", b"/", []))
            found = await asyncio.wait_for(exchange.body(5000), 30)
            client.close()
            exchange.close()
            client.close()
            return found

    assert asyncio.run(work()) == content


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([b"220 mail.example.org ready\r\n"], HttpProtocolError),
        ([OK, b"x: " + b"y" * 200_000, b"y" * 200_000], HttpProtocolError),
        ([OK + b"content-length: nine\r\n\r\n"], HttpProtocolError),
        ([OK + b"content-length: 5\r\n\r\nhi"], ConnectionLost),
        ([OK + b"transfer-encoding: chunked\r\n\r\n5\r\nhi"], ConnectionLost),
        ([OK], ConnectionLost),
        ([], ConnectionLost),
    ],
)
def test_half_an_answer_is_none(pieces: list[bytes], error: type[Exception]) -> None:
    with pytest.raises(error):
        answer_of(*pieces)


def test_no_server_is_an_error_of_the_system() -> None:
    with pytest.raises(ConnectFailed, match="no connection: ") as refused:
        http_stream.run(HttpClient(ServerAddress("127.0.0.1", 1)).request("GET", "/"))
    assert isinstance(refused.value.__cause__, OSError)
    with pytest.raises(ConnectFailed, match="no connection: No such file") as missing:
        http_stream.run(HttpClient(ServerAddress("x", 80, uds="/nowhere/socket")).request("GET", "/"))
    assert isinstance(missing.value.__cause__, FileNotFoundError)


def test_the_loop_is_the_fastest_that_there_is() -> None:
    async def name() -> str:
        return type(asyncio.get_running_loop()).__module__

    assert http_stream.run(name()) == "uvloop"


@pytest.mark.parametrize("runner", [asyncio.run, http_stream.run])
def test_both_loops_do_the_same(fake: Fake, runner: Callable[[Coroutine[Any, Any, int]], int]) -> None:
    async def work() -> int:
        client, size = HttpClient(ServerAddress("127.0.0.1", fake.port)), 0

        def sink(piece: bytes, now: float) -> None:
            nonlocal size
            size += len(piece)

        await client.request("POST", "/v1/completions", b'{"model": "drips", "stream": true}', sink)
        client.close()
        return size

    assert runner(work()) > 100


# -------------------------------------------------------------------------------------------------------- events


STREAM = b': note\n\nevent: x\ndata: {"a":1}\n\ndata: one\ndata: two\n\ndata:three\r\n\r\nid: 5\n\ndata: [DONE]\n\n'
FOUND = [b'{"a":1}', b"one\ntwo", b"three", b"[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_the_same_however_they_are_cut(size: int) -> None:
    found: list[bytes] = []
    cut = EventStreamParser(found.append)
    for at in range(0, len(STREAM), size):
        cut.feed(STREAM[at : at + size])
    assert found == FOUND


def test_a_last_event_needs_no_blank_line() -> None:
    assert events(b"data: a\n\ndata: [DONE]") == [b"a", b"[DONE]"]
    assert events(b"") == []


def test_a_line_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_stream, "MAX_EVENT", 10)
    with pytest.raises(HttpProtocolError, match="longer than 10"):
        events(b"data: " + b"x" * 20)


async def test_a_cancellation_that_comes_with_the_connection_is_heeded(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, client = asyncio.get_running_loop(), HttpClient(ServerAddress("127.0.0.1", fake.port))
    connect = loop.create_connection

    async def connecting(*args: Any, **settings: Any) -> Any:
        made = await connect(*args, **settings)
        asking.cancel()
        return made

    monkeypatch.setattr(loop, "create_connection", connecting)
    asking = loop.create_task(client.request("GET", "/v1/models"))
    with pytest.raises(asyncio.CancelledError):
        await asking
    client.close()
