"""What a router passes on and back, and what it leaves out."""

import asyncio
import gzip
import json

import httpx
import pytest
from openai import AsyncOpenAI, NotFoundError

from tests.router.fakes import DONE, EVENTS, Call, Fake, routed, until

TALK = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def completion(text: str) -> dict[str, object]:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}


async def talk(call: Call) -> None:
    await (call.stream([*EVENTS, DONE]) if call.json.get("stream") else call.say(completion("whole")))


async def test_openais_client_talks_through_it() -> None:
    async with (
        routed(Fake(behave=talk)) as router,
        AsyncOpenAI(base_url=f"{router.url}/v1", api_key="k", max_retries=0) as client,
    ):
        whole = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}])
        assert whole.choices[0].message.content == "whole"
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "Hi"}], stream=True
        )
        assert "".join([each.choices[0].delta.content or "" async for each in stream]) == "0123"
        assert [each.id async for each in client.models.list()] == ["m"]
        with pytest.raises(NotFoundError, match="'other' is not served here; there is m"):
            await client.chat.completions.create(model="other", messages=[{"role": "user", "content": "Hi"}])


async def test_a_request_comes_as_it_was_sent_but_for_what_concerns_the_connection() -> None:
    fake = Fake()
    body = b'{ "model":"m",  "messages":[], "unknown": 1e3 }'
    async with routed(fake) as router:
        answer = await router.post(
            "/v1/chat/completions?a=b%20c", content=body,
            headers={"x-mine": "1", "te": "trailers", "connection": "x-drop, keep-alive", "x-drop": "1",
                     "keep-alive": "timeout=5", "authorization": "Bearer theirs", "x-request-id": "name-1",
                     "content-type": "application/json", "origin": router.url},
        )  # fmt: skip
        assert answer.json() == {"by": "a"} and answer.headers["x-request-id"] == "name-1"
        (call,) = fake.calls
        assert (call.body, call.path) == (body, "/v1/chat/completions?a=b%20c")
        found = dict(call.headers)
        assert len(found) == len(call.headers), "no header comes twice"
        assert not {"te", "connection", "keep-alive", "x-drop", "origin", "transfer-encoding"} & set(found)
        assert found["host"] == f"127.0.0.1:{fake.port}" and found["content-length"] == str(len(body))
        assert (found["x-mine"], found["authorization"], found["x-request-id"]) == ("1", "Bearer theirs", "name-1")


async def test_what_concerns_the_servers_connection_does_not_come_back() -> None:
    async def behave(call: Call) -> None:
        await call.raw(
            b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: x-theirs\r\nkeep-alive: timeout=9\r\nx-theirs: 1\r\n"
            b"x-kept: 1\r\nserver: other\r\nx-request-id: other\r\n\r\n{}"
        )

    async with routed(Fake(behave=behave)) as router:
        answer = await router.post()
        assert answer.headers["x-kept"] == "1" and answer.headers["x-request-id"] != "other"
        assert not {"keep-alive", "x-theirs", "server"} & set(answer.headers)


async def test_servers_are_shown_their_own_key() -> None:
    fake = Fake()
    door = {"api_key": ["door", "second"]}
    async with routed(fake, door=door, backend_api_key="behind") as router:
        assert (await router.client.post("/v1/completions", headers={"authorization": "Bearer no"})).status_code == 401
        answer = await router.post(headers={"x-api-key": "second", "authorization": ""})
        assert answer.status_code == 200
        (call,) = fake.calls
        assert call.header("authorization") == "Bearer behind" and call.header("x-api-key") is None


async def test_a_packed_body_is_unpacked_once() -> None:
    fake = Fake()
    async with routed(fake, door={"max_body_bytes": 4096, "max_upload_bytes": 4096}) as router:
        packed = gzip.compress(json.dumps(TALK).encode())
        answer = await router.post(json=None, content=packed, headers={"content-encoding": "gzip"})
        assert answer.status_code == 200
        assert fake.calls[0].json == TALK and fake.calls[0].header("content-encoding") is None
        bomb = gzip.compress(b" " * 2**20)
        assert (await router.post(json=None, content=bomb, headers={"content-encoding": "gzip"})).status_code == 413


async def test_models_are_those_of_all_servers_and_a_request_goes_to_who_has_its() -> None:
    one, two = Fake("one", ("m", "x")), Fake("two", ("m", "y"))
    async with routed(one, two) as router:
        there = (await router.client.get("/v1/models")).json()["data"]
        assert sorted(each["id"] for each in there) == ["m", "x", "y"]
        for model, by in (("x", "one"), ("y", "two")) * 3:
            assert (await router.post(json={**TALK, "model": model})).json() == {"by": by}
        assert (await router.client.get("/v1/models/y")).json()["id"] == "y"
        assert (await router.client.get("/v1/models/z")).json()["error"]["code"] == "model_not_found"
        refused = await router.post(json={**TALK, "model": "z"})
        assert refused.status_code == 404 and "there is m, x, y" in refused.json()["error"]["message"]
        await two.stop()
        await until(lambda: not router.backend(two).up)
        gone = await router.post(json={**TALK, "model": "y"})
        assert gone.status_code == 503 and gone.headers["retry-after"] == "1", "it is known, and its server is away"


async def test_what_is_not_passed_on_is_said_with_the_reason() -> None:
    fake = Fake()
    async with routed(fake) as router:
        for method, path, status, word in (
            ("POST", "/v1/audio/transcriptions", 404, "several parts"), ("POST", "/v1/files", 404, "ask that server"),
            ("POST", "/sleep", 404, "concerns one server"), ("GET", "/v1/chat/completions", 405, "POST does"),
            ("GET", "/v1/batches/b1", 404, "ask that server"), ("POST", "/v1/x/../../sleep", 404, "nothing at"),
        ):  # fmt: skip
            wire = httpx.URL(router.url).copy_with(raw_path=path.encode())
            answer = await router.client.request(method, wire)
            assert answer.status_code == status and word in answer.json()["error"]["message"], (path, answer.text)
        assert fake.calls == []
        assert (await router.post("/v1/new/thing", json={})).json() == {"by": "a"}, "what is not known goes by policy"


async def test_a_client_that_leaves_ends_its_request() -> None:
    seen = asyncio.Event()

    async def behave(call: Call) -> None:
        await call.raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        try:
            while True:
                await call.raw(b"3\r\n\n\n\n\r\n")
                await asyncio.sleep(0.001)
        finally:
            seen.set()

    fake = Fake(behave=behave)
    async with routed(fake) as router:
        async with router.client.stream("POST", "/v1/completions", json={**TALK, "stream": True}) as answer:
            async for _ in answer.aiter_bytes():
                break
        await until(seen.is_set)
        await until(lambda: router.server.core.queue.in_flight == 0 and router.backend(fake).in_flight == 0)
        assert router.server.core.totals.cancelled == 1


async def test_a_client_that_leaves_before_an_answer_ends_its_request() -> None:
    came, ended = asyncio.Event(), asyncio.Event()

    async def behave(call: Call) -> None:
        came.set()
        try:
            while True:
                await call.raw(b"HTTP/1.1 100 Continue\r\n\r\n")
                await asyncio.sleep(0.001)
        finally:
            ended.set()

    fake = Fake(behave=behave)
    async with routed(fake) as router:
        asking = asyncio.create_task(router.post())
        await until(came.is_set)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: router.backend(fake).in_flight == 0)
        await until(ended.is_set)
        assert len(fake.calls) == 1, "it was sent to nobody a second time"


async def test_metrics_and_signs() -> None:
    fake = Fake()
    async with routed(fake) as router:
        await router.post()
        assert (await router.client.get("/health")).json() == {"status": "alive"}
        assert (await router.client.get("/ready")).json() == {"status": "ready"}
        text = (await router.client.get("/metrics")).text
        assert f'quintet:router_requests_total{{backend="{fake.url}",pool="all",status="200"}} 1.0' in text
        assert "quintet:router_overhead_seconds_count 1.0" in text
        await fake.stop()
        await until(lambda: not router.backend(fake).up)
        assert (await router.client.get("/ready")).status_code == 503
        assert (await router.client.get("/health")).status_code == 200
