"""What a router does not let in: too much, too many, too deep, two requests in one, other sites' pages."""

import asyncio
import socket

import httpx
import pytest

from tests.router.fakes import Call, Fake, routed, until

TALK = {"model": "m", "messages": []}


@pytest.mark.parametrize("head", [
    "content-length: 2\r\ncontent-length: 30", "content-length: 2\r\ntransfer-encoding: chunked",
    "transfer-encoding: chunked\r\ntransfer-encoding: identity", "content-length: +2", "content-length: 2, 2",
    "content-length : 2", "transfer-encoding: xchunked", "content-length: 2\r\n x: folded",
])  # fmt: skip
async def test_two_requests_in_one_are_refused(head: str) -> None:
    fake = Fake()
    async with routed(fake) as router:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(
            f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{head}\r\n\r\n{{}}".encode()
            + b"POST /v1/hidden HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}"
        )
        said = await reader.read()
        writer.close()
        assert not said or (said.startswith(b"HTTP/1.1 400 ") and said.count(b"HTTP/1.1") == 1), "refused, or cut"
        assert fake.calls == []


async def test_bodies_are_bounded_and_have_to_be_json() -> None:
    fake = Fake()
    bounds = {"max_body_bytes": 1000, "max_upload_bytes": 1000, "max_queued_bytes": 1500}
    async with routed(fake, door=bounds) as router:

        async def pieces() -> object:
            for _ in range(20):
                yield b"x" * 100

        assert (await router.post(json=None, content=b"x" * 1001)).status_code == 413
        assert (await router.post(json=None, content=pieces())).status_code == 413
        for body in (b"", b"{", b"[1]", b'{"model": {}}', b"{} {}", b"\xff"):
            answer = await router.post(json=None, content=body)
            assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
        assert fake.calls == []
        hold = asyncio.Event()

        async def wait(call: Call) -> None:
            await hold.wait()
            await call.say({})

        fake.behave = wait
        asked = asyncio.create_task(router.post(json={**TALK, "pad": "x" * 900}))
        await until(lambda: len(fake.calls) == 1)
        full = await router.post(json={**TALK, "pad": "x" * 900})
        assert full.status_code == 429 and full.headers["retry-after"] == "1"
        hold.set()
        assert (await asked).status_code == 200
        assert (await router.post(json={**TALK, "pad": "x" * 900})).status_code == 200, "nothing is held any more"


async def test_requests_are_bounded_and_wait_in_their_order() -> None:
    order: list[str] = []
    hold = asyncio.Event()

    async def wait(call: Call) -> None:
        order.append(call.json["user"])
        await hold.wait()
        await call.say({})

    fake = Fake(behave=wait)
    for limits in ({"max_concurrent_requests": 2}, {"max_backend_requests": 2}):
        order.clear()
        hold.clear()
        async with routed(fake, queue_size=2, **limits) as router:
            asked = []
            for number in range(4):
                asked.append(asyncio.create_task(router.post(json={**TALK, "user": str(number)})))
                await until(lambda: len(order) + router.server.core.queue.waiting == len(asked))  # noqa: B023
            full = await router.post()
            assert full.status_code == 429 and full.json()["error"]["code"] == "server_overloaded"
            assert order == ["0", "1"] and "quintet:router_waiting 2.0" in (await router.server.core.metrics()).decode()
            asked[2].cancel()
            await until(lambda: router.server.core.queue.waiting == 1)
            hold.set()
            assert [each.status_code for each in await asyncio.gather(*asked[:2], asked[3])] == [200] * 3
            assert order == ["0", "1", "3"]
            places = router.server.core.queue
            await until(lambda: (places.in_flight, places.waiting) == (0, 0))  # noqa: B023
        fake.port, fake.calls = 0, []


async def test_who_waits_too_long_is_told() -> None:
    async def wait(call: Call) -> None:
        await asyncio.sleep(60)

    async with routed(Fake(behave=wait), max_backend_requests=1, queue_timeout=0.05) as router:
        first = asyncio.create_task(router.post())
        await until(lambda: router.server.core.queue.in_flight == 1)
        late = await router.post()
        assert late.status_code == 503 and "no place became free" in late.json()["error"]["message"]
        first.cancel()


async def test_a_slow_reader_slows_its_server_down_and_takes_no_memory() -> None:
    sent = 0

    async def flood(call: Call) -> None:
        nonlocal sent
        await call.raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        while sent < 2**28:
            await call.raw(b":" * 2**16)
            sent += 2**16

    fake = Fake(behave=flood)
    async with routed(fake) as router:
        wire = socket.create_connection(("127.0.0.1", router.port))
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)
        wire.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}")
        await until(lambda: sent > 0)
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.2)
        assert sent < 2**25, "what the system's buffers hold, and ours"
        wire.close()
        await until(lambda: router.backend(fake).in_flight == 0)


async def test_other_names_and_other_sites_pages_are_refused() -> None:
    fake = Fake()
    async with routed(fake, door={"allowed_origins": ["https://good.example"]}) as router:
        assert (await router.post(headers={"host": "evil.example"})).status_code == 421
        assert (await router.post(headers={"origin": "https://evil.example"})).status_code == 403
        good = await router.post(headers={"origin": "https://good.example"})
        assert good.headers["access-control-allow-origin"] == "https://good.example"
        asks = {"origin": "https://good.example", "access-control-request-method": "POST"}
        assert (await router.client.options("/v1/completions", headers=asks)).status_code == 200
        assert len(fake.calls) == 1


async def test_servers_nonsense_ends_one_request_alone() -> None:
    answers = iter([
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{\"other\"}",
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * 2**17 + b"\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    ])  # fmt: skip

    async def behave(call: Call) -> None:
        await call.raw(next(answers, b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]"))

    fake = Fake(behave=behave)
    async with routed(fake, health_check_interval=30) as router:
        assert (await router.post()).text == "{}", "what comes behind an answer is no answer to the next"
        for status in (502, 502, 502):
            router.backend(fake).record_success()
            assert (await router.post()).status_code == status
        router.backend(fake).record_success()
        assert (await router.post()).text == "[]"


async def test_a_head_has_no_body() -> None:
    async with routed(Fake()) as router:
        answer = await router.client.head("/health")
        assert answer.status_code == 200 and not answer.content
        assert isinstance(answer, httpx.Response)
