"""A connection that ends for its client's fault has an answer first (attack A14)."""

import re
import socket

import pytest

from tests.router.fakes import Fake, chunk, routed
from tests.server.fakes import FakeBackend
from tests.server.http.serving import read_all, serving

GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
JSON = b"Host: localhost\r\nContent-Type: application/json\r\n"
POST = b"POST /tokenize HTTP/1.1\r\n" + JSON + b"Transfer-Encoding: chunked\r\n\r\n"
BODY = b'{"prompt": "Hi"}'
WRONG_CHUNKS = {
    "negative": b"-5\r\nhello\r\n0\r\n\r\n",
    "overflow": b"FFFFFFFFFFFFFFFF1\r\nhello",
    "bad_end": b"%x\r\n" % len(BODY) + BODY + b"XX0\r\n\r\n",
    "0x": b"0x%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n",
    "no_size": b"\r\n\r\n",
    "letters": b"zz\r\nhello\r\n",
    "second_chunk": chunk(BODY) + b"q\r\n",
}


def statuses(raw: bytes) -> list[int]:
    return [int(each) for each in re.findall(rb"HTTP/1\.1 (\d{3})", raw)]


def answers(port: int, raw: bytes) -> list[int]:
    with socket.create_connection(("127.0.0.1", port), 20) as wire:
        wire.sendall(raw)
        return statuses(read_all(wire))


def test_too_many_pipelined_requests_get_their_answers_and_a_last_one() -> None:
    with serving() as live:
        got = answers(live.port, GET * 40)
        assert got[:-1] == [200] * (len(got) - 1) and len(got) >= 2 and got[-1] == 503
        assert answers(live.port, GET * 10 + GET.replace(b"Host", b"Connection: close\r\nHost")) == [200] * 11


def test_they_do_so_behind_a_stream() -> None:
    """The first is being answered while the others come."""
    with serving(FakeBackend()) as live:
        body = b'{"prompt": "x", "max_tokens": 5, "stream": true}'
        head = b"POST /v1/completions HTTP/1.1\r\n" + JSON
        first = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
        got = answers(live.port, first + GET * 40)
        assert got == [200] * 17 + [503]


@pytest.mark.parametrize("name", WRONG_CHUNKS)
@pytest.mark.parametrize("before", [0, 3], ids=["alone", "pipelined"])
def test_wrong_chunks_are_refused_with_a_reason(name: str, before: int) -> None:
    with serving() as live:
        got = answers(live.port, GET * before + POST + WRONG_CHUNKS[name])
        assert got == [200] * before + [400]
        assert answers(live.port, GET.replace(b"Host", b"Connection: close\r\nHost")) == [200]


def test_a_wrong_head_behind_other_requests_is_refused_after_their_answers() -> None:
    with serving() as live:
        assert answers(live.port, GET * 3 + b"nonsense\r\n\r\n") == [200, 200, 200, 400]


async def test_so_it_is_at_a_router() -> None:
    import asyncio

    async with routed(Fake()) as router:
        for raw, last in ((GET * 40, 503), (POST.replace(b"/tokenize", b"/v1/completions") + b"zz\r\n", 400)):
            reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
            writer.write(raw)
            got = statuses(await reader.read(-1))
            assert got[-1] == last and set(got[:-1]) <= {200}
            writer.close()
