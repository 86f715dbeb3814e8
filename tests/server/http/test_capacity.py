"""What dear requests cost everybody else: rounds of the event loop, and places in the gate."""

import asyncio
import gc
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from quintet.common.param_checks import MAX_ALLOWED_IDS
from quintet.server.config import ServerConfig
from quintet.server.http.app import make_app
from quintet.server.http.app_state import AppState
from quintet.server.http.capacity import CapacityLimiter, RequestCost
from quintet.server.http.cooperative import CooperativeWork
from tests.server.fakes import FakeBackend
from tests.server.http.serving import HOST, chat, client, events

LONGEST = 0.3  # CPU seconds of one callback of the loop: the longest takes 0.03 to 0.18, most of it the fake engine's
FILLING = [853] * 400


def prepared() -> FakeBackend:
    fake = FakeBackend()
    fake.reply = FILLING
    return fake


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Iterator[None]:
    """What pytest and other tests hold is not looked at by the collector: a second on a large heap."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def callbacks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, str]]:
    """CPU seconds of every callback that an event loop of this thread runs, and what it was."""
    seen: list[tuple[float, str]] = []
    run = asyncio.events.Handle._run

    def timed(self: Any) -> None:
        begun = time.thread_time()
        run(self)
        seen.append((time.thread_time() - begun, repr(self)))

    monkeypatch.setattr(asyncio.events.Handle, "_run", timed)
    return seen


# Each is dear in one way, and all are legal but the last ones.
DEAR: dict[str, tuple[str, dict[str, Any]]] = {
    "logprobs": (
        "/v1/completions",
        {"prompt": ["a", "b"], "max_tokens": 400, "ignore_eos": True, "logprobs": 20, "n": 16},
    ),
    "top_logprobs": ("/v1/chat/completions", chat(max_tokens=400, logprobs=True, top_logprobs=20, n=16)),
    "prompt_logprobs": (
        "/v1/completions",
        {"prompt": [[853] * 500] * 8, "max_tokens": 1, "prompt_logprobs": 20, "n": 4},
    ),
    "echo": ("/v1/completions", {"prompt": [[853] * 500] * 8, "max_tokens": 1, "echo": True, "logprobs": 20}),
    "echo, streamed": (
        "/v1/completions",
        {"prompt": [[853] * 500] * 8, "max_tokens": 1, "echo": True, "logprobs": 20, "stream": True},
    ),
    "a response's": (
        "/v1/responses",
        {"input": "a", "include": ["message.output_text.logprobs"], "top_logprobs": 20, "max_output_tokens": 400},
    ),
    "allowed": (
        "/v1/completions",
        {"prompt": ["a"] * 64, "max_tokens": 1, "allowed_token_ids": list(range(2000)) * (MAX_ALLOWED_IDS // 2000)},
    ),
    "bad words": ("/v1/completions", {"prompt": ["a"] * 64, "max_tokens": 1, "bad_words": ["ab" * 512] * 64}),
    "text": ("/tokenize", {"prompt": "a b" * 300_000, "return_token_strs": True}),
    "ids": ("/detokenize", {"tokens": [853] * 500_000}),
    "messages": ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}] * 10_000}),
    "items": ("/v1/responses", {"input": [{"role": "user", "content": "a"}] * 10_000}),
    "parts": ("/v1/chat/completions", {"messages": [{"role": "user", "content": [[]] * 300_000}]}),
    "tools": ("/v1/chat/completions", chat(tools=[1] * 1_000_000)),
    "tokens": ("/detokenize", {"tokens": [""] * 1_000_000}),
    "options": ("/v1/completions", {"prompt": "a", "stream_options": {str(each): 1 for each in range(200_000)}}),
    "fields": ("/v1/completions", {"prompt": "a", **{f"field{each}": 1 for each in range(200_000)}}),
}


async def ask(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> int:
    content = await asyncio.to_thread(lambda: json.dumps(body, separators=(",", ":")).encode())
    return (await http.post(path, content=content, headers={"content-type": "application/json"})).status_code


async def stream(http: httpx.AsyncClient) -> str:
    body = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True}
    return "".join(each["choices"][0]["text"] for each in events((await http.post("/v1/completions", json=body)).text))


@pytest.mark.parametrize("name", DEAR)
async def test_a_dear_request_takes_the_loop_for_a_moment_at_a_time(
    name: str, callbacks: list[tuple[float, str]]
) -> None:
    async with client(prepared()) as http:
        alone = await stream(http)
        dear = asyncio.create_task(ask(http, *DEAR[name]))
        others = [asyncio.create_task(stream(http)) for _ in range(4)]
        assert await dear in (200, 400)
        assert [await each for each in others] == [alone] * 4
    longest, what = max(callbacks)
    assert longest < LONGEST, what


async def test_a_short_question_is_answered_while_a_long_answer_is_written() -> None:
    """Within some rounds of the loop, in each of which the long answer takes a stretch."""
    backend = prepared()
    async with client(backend) as http:
        path, body = DEAR["logprobs"]
        dear = asyncio.create_task(ask(http, path, body))
        while not backend.submitted or backend.running:
            await asyncio.sleep(0)
        rounds = 0

        async def count() -> None:
            nonlocal rounds
            while True:
                await asyncio.sleep(0)
                rounds += 1

        counting = asyncio.create_task(count())
        for _ in range(3):
            rounds = 0
            assert (await http.get("/health")).status_code == 200
            assert rounds < 50 and not dear.done()
        assert await dear == 200 and rounds > 50
        counting.cancel()


async def test_many_who_have_long_work_take_turns() -> None:
    turns, order = CooperativeWork(), []

    def work(name: str, count: int) -> Iterator[Callable[[], str]]:
        def stretch() -> str:
            order.append(name)
            return name

        return (stretch for _ in range(count))

    rounds = []

    async def count() -> None:
        while True:
            rounds.append(len(order))
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    long, short = asyncio.create_task(turns.run_all(work("a", 20))), asyncio.create_task(turns.run_all(work("b", 2)))
    assert await short == ["b"] * 2
    assert order.count("a") < 5, "the short one waited for the long one"
    assert await long == ["a"] * 20
    assert all(after - before <= 1 for before, after in zip(rounds, rounds[1:], strict=False)), rounds
    counting.cancel()


def test_a_gate_counts_every_kind() -> None:
    gate = CapacityLimiter(RequestCost(10, 20, 30, 40, 50))
    for kind, limit in zip(RequestCost._fields, gate.limits, strict=True):
        with gate.holding(RequestCost(**{kind: limit - 1})):
            with pytest.raises(Exception, match=f"has {limit - 1} .*takes {limit}; try again") as refused:
                gate.acquire(RequestCost(**{kind: 2}))
            assert refused.value.status == 429 and refused.value.headers["Retry-After"]  # type: ignore[attr-defined]
            gate.acquire(RequestCost(**{other: 1 for other in RequestCost._fields if other != kind}))
            gate.release(RequestCost(**{other: 1 for other in RequestCost._fields if other != kind}))
        with pytest.raises(Exception, match=f"{limit + 1} .*takes {limit} at most") as refused:
            gate.acquire(RequestCost(**{kind: limit + 1}))
        assert refused.value.status == 400  # type: ignore[attr-defined]
        assert gate.held == RequestCost()


LOGPROBS = {"prompt": "a", "max_tokens": 10, "ignore_eos": True, "logprobs": 4, "n": 2}  # 100 of them


async def test_log_probabilities_are_counted_where_they_are_held() -> None:
    async with client(prepared(), max_queued_logprobs=100) as http:
        for more, counts in (
            ({}, 200),
            ({"max_tokens": 11}, 400),
            ({"logprobs": 5}, 400),
            ({"max_tokens": 400, "stream": True}, 200),  # its go out as they come
            ({"prompt": [853] * 10, "max_tokens": 1, "logprobs": None, "prompt_logprobs": 4}, 200),
            ({"prompt": [853] * 11, "max_tokens": 1, "logprobs": None, "prompt_logprobs": 4}, 400),
            ({"prompt": [853] * 11, "max_tokens": 1, "logprobs": 4, "n": 1, "echo": True, "stream": True}, 200),
            ({"prompt": [853] * 20, "max_tokens": 1, "logprobs": 4, "n": 1, "echo": True, "stream": True}, 400),
        ):
            response = await http.post("/v1/completions", json={**LOGPROBS, **more})
            assert response.status_code == counts, (more, response.text)
            if counts == 400:
                assert "log-probabilities, and the server takes 100" in response.json()["error"]["message"]
        response = await http.post("/v1/responses", json={"input": "a", "max_output_tokens": 21, "top_logprobs": 4,
                                   "include": ["message.output_text.logprobs"], "background": True})  # fmt: skip
        assert response.status_code == 400 and "log-probabilities" in response.text  # they stay, nobody has them yet


async def test_a_place_is_kept_until_the_answer_is_read() -> None:
    """What is made for a caller who does not read takes memory as well."""
    service = AppState(prepared(), ServerConfig(max_queued_logprobs=100))
    app, reads = make_app(service), asyncio.Event()
    content, taken = json.dumps(LOGPROBS).encode(), []

    async def receive() -> dict[str, Any]:
        if not taken:
            taken.append(content)
            return {"type": "http.request", "body": content}
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await reads.wait()

    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions", "headers": [],
        "query_string": b"", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "scheme": "http",
        "http_version": "1.1", "root_path": "",
    }  # fmt: skip
    slow = asyncio.create_task(app(scope, receive, send))
    backend = service.backend
    assert isinstance(backend, FakeBackend)
    while not backend.submitted or backend.running:
        await asyncio.sleep(0)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=HOST) as http:
        response = await http.post("/v1/completions", json=LOGPROBS)
        assert response.status_code == 429 and "100 log-probabilities to work on" in response.text
        reads.set()
        await slow
        assert (await http.post("/v1/completions", json=LOGPROBS)).status_code == 200
    assert service.capacity.held == RequestCost()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a " * 5000}),
        ("/tokenize", chat("a " * 5000)),
        ("/detokenize", {"tokens": [8] * 10_000}),
        ("/v1/completions", {"prompt": "a " * 5000, "truncate_prompt_tokens": 5}),
        ("/v1/chat/completions", chat("a " * 5000, truncate_prompt_tokens=5)),
        ("/v1/messages/count_tokens", chat("a " * 5000)),
        ("/v1/responses", {"input": "a " * 5000}),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
async def test_characters_to_tokenize_are_counted_on_every_route(path: str, body: dict[str, Any]) -> None:
    service = AppState(prepared(), ServerConfig(max_queued_characters=15_000, max_body_bytes=30_000))
    service.capacity.limits = service.capacity.limits._replace(characters=15_000)
    transport = httpx.ASGITransport(make_app(service))
    async with httpx.AsyncClient(transport=transport, base_url=HOST) as http:
        with service.capacity.holding(RequestCost(characters=10_000)):
            response = await http.post(path, json=body)
            assert response.status_code == 429 and "10000 characters to tokenize" in response.text
            assert response.headers["retry-after"]
        assert (await http.post(path, json=body)).status_code in (200, 400)  # the context is short
    assert service.capacity.held == RequestCost()


async def test_bytes_of_all_bodies_are_counted_while_they_come() -> None:
    service = AppState(prepared(), ServerConfig(max_queued_bytes=2000, max_body_bytes=1000, max_upload_bytes=1000))
    transport, go_on, half = httpx.ASGITransport(make_app(service)), asyncio.Event(), asyncio.Event()
    raw = json.dumps({"prompt": "a"}).encode().ljust(1000)

    async def slowly() -> Any:
        yield raw[:900]
        half.set()
        await go_on.wait()
        yield raw[900:]

    headers = {"content-type": "application/json"}
    async with httpx.AsyncClient(transport=transport, base_url=HOST) as http:
        slow = [asyncio.create_task(http.post("/tokenize", content=slowly(), headers=headers)) for _ in range(2)]
        await half.wait()
        while service.capacity.held.body_bytes < 1800:
            await asyncio.sleep(0)
        response = await http.post("/tokenize", content=raw, headers=headers)
        assert response.status_code == 429 and "1800 bytes of requests" in response.text
        assert (await http.post("/tokenize", json={"prompt": "a"})).status_code == 200
        go_on.set()
        assert [(await each).status_code for each in slow] == [200, 200]
        assert (await http.post("/tokenize", content=raw, headers=headers)).status_code == 200
    assert service.capacity.held == RequestCost()


def test_a_limit_below_the_largest_body_is_raised_aloud(caplog: pytest.LogCaptureFixture) -> None:
    AppState(prepared(), ServerConfig(max_queued_bytes=2000, max_body_bytes=1000, max_upload_bytes=5000))
    assert "max_queued_bytes is 2000, less than the largest body, 5000 (max_upload_bytes)" in caplog.text
    caplog.clear()
    AppState(prepared(), ServerConfig(max_queued_bytes=5000, max_body_bytes=1000, max_upload_bytes=5000))
    assert not caplog.text
