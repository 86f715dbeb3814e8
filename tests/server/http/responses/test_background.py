"""Responses in the background: they need nobody who waits, can be read from any place, and end when they are told."""

import asyncio
from typing import Any

import httpx

from quintet.server.config import ServerConfig
from quintet.server.http.app import make_app
from quintet.server.http.app_state import AppState
from tests.server.fakes import FakeBackend
from tests.server.http.responses.responses_requests import PATH, SAY, backend, create, fail, is_response, read_events
from tests.server.http.serving import HOST, serving


class Open:
    """An app whose service the test holds."""

    def __init__(self, fake: FakeBackend, **settings: Any) -> None:
        self.service = AppState(fake, ServerConfig(**settings))
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(make_app(self.service)), base_url=HOST)

    async def get(self, response_id: str) -> dict[str, Any]:
        answer: dict[str, Any] = (await self.http.get(f"{PATH}/{response_id}")).json()
        is_response(answer)
        return answer

    async def events(self, response_id: str, after: int = -1) -> list[dict[str, Any]]:
        query = {"stream": "true"} if after < 0 else {"stream": "true", "starting_after": str(after)}
        answer = await self.http.get(f"{PATH}/{response_id}", params=query)
        assert answer.status_code == 200, answer.text
        return read_events(answer.text, after + 1)

    async def has_text(self, response_id: str) -> dict[str, Any]:
        """The response, once its first token is there."""
        while not (answer := await self.get(response_id))["output"]:
            await asyncio.sleep(0)
        return answer


async def test_it_answers_at_once_and_is_there_later() -> None:
    fake = backend(hang=3)
    app = Open(fake)
    begun = await create(app.http, background=True)
    assert begun["status"] == "queued" and begun["background"] and begun["output"] == []
    assert (await app.has_text(begun["id"]))["status"] == "in_progress"
    error = await fail(app.http, "POST", PATH, json={"input": "Hi", "previous_response_id": begun["id"]})
    assert "in progress" in error["message"]
    fake.go_on.set()
    made = await app.events(begun["id"])  # ends when it ends
    end = await app.get(begun["id"])
    assert made[-1]["type"] == "response.completed" and made[-1]["response"] == end
    assert end["output"][0]["content"][0]["text"] == SAY and end["usage"]["output_tokens"] == len(fake.reply or ()) + 1
    assert not app.service.calls


async def test_its_events_can_be_read_from_any_place() -> None:
    fake = backend()
    app = Open(fake)
    made = await create(app.http, background=True, stream=True)
    assert [event["type"] for event in made[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert [event["response"]["status"] for event in made[:3]] == ["queued", "queued", "in_progress"]
    response_id = made[0]["response"]["id"]
    for after in (-1, 0, 4, len(made) - 1, len(made) + 10):
        assert await app.events(response_id, after) == made[after + 1 :]


async def test_cancelling_frees_its_pages_and_tells_its_readers() -> None:
    fake = backend(hang=3)
    app = Open(fake)
    begun = await create(app.http, background=True)
    await app.has_text(begun["id"])
    reader = asyncio.create_task(app.events(begun["id"]))
    await asyncio.sleep(0)
    answer = (await app.http.post(f"{PATH}/{begun['id']}/cancel")).json()
    assert answer["status"] == "cancelled" and answer["output"][0]["status"] == "incomplete"
    assert fake.aborted == [fake.submitted[0].request_id] and not fake.running and not app.service.calls
    last = (await reader)[-1]
    assert last["type"] == "error" and last["code"] == "response_cancelled"
    assert (await app.http.post(f"{PATH}/{begun['id']}/cancel")).json() == answer == await app.get(begun["id"])
    error = await fail(app.http, "POST", PATH, json={"input": "Hi", "previous_response_id": begun["id"]})
    assert "cancelled" in error["message"]


async def test_only_the_background_can_be_cancelled() -> None:
    app = Open(backend())
    whole = await create(app.http)
    assert "background" in (await fail(app.http, "POST", f"{PATH}/{whole['id']}/cancel"))["message"]
    done = (await create(app.http, background=True, stream=True))[-1]["response"]
    assert (await app.http.post(f"{PATH}/{done['id']}/cancel")).json() == done  # it was over


async def test_deleting_ends_it() -> None:
    fake = backend(hang=3)
    app = Open(fake)
    begun = await create(app.http, background=True)
    assert (await app.http.delete(f"{PATH}/{begun['id']}")).status_code == 200
    assert fake.aborted and not app.service.calls
    await fail(app.http, "GET", f"{PATH}/{begun['id']}", 404)


async def test_it_counts_in_the_limits() -> None:
    fake = backend(hang=3)
    app = Open(fake, max_queued_requests=1)
    begun = await create(app.http, background=True)
    error = await fail(app.http, "POST", PATH, 429, json={"input": "Hi", "background": True})
    assert error["type"] == "rate_limit_error"
    await app.http.post(f"{PATH}/{begun['id']}/cancel")
    fake.hang = None
    assert (await create(app.http))["status"] == "completed"


async def test_it_fails_alone() -> None:
    app = Open(backend(fail_at=2))
    made = await create(app.http, background=True, stream=True)
    failed = made[-1]["response"]
    assert failed["status"] == "failed" and "the fake failed" in failed["error"]["message"]
    assert await app.get(failed["id"]) == failed and not app.service.calls


async def test_it_ends_at_shutdown() -> None:
    fake = backend(hang=3)
    app = Open(fake, drain_timeout=0.01)
    begun = await create(app.http, background=True)
    await app.has_text(begun["id"])
    reader = asyncio.create_task(app.events(begun["id"]))
    await app.service.drain()
    last = (await reader)[-1]
    assert last["type"] == "response.failed" and "shutting down" in last["response"]["error"]["message"]
    assert fake.aborted and not app.service.calls


def test_it_goes_on_when_its_client_hangs_up() -> None:
    fake = backend(hang=3)
    with serving(fake) as live:
        wire = live.begin(PATH, {"input": "Hi", "background": True, "stream": True})
        head = b""
        while b"output_text.delta" not in head:
            head += wire.recv(65536)
        wire.close()
        response_id = head.partition(b'"id":"')[2].partition(b'"')[0].decode()
        live.go_on()
        query = {"stream": "true", "starting_after": 4}
        answer = httpx.get(f"{live.url}{PATH}/{response_id}", params=query, timeout=60)
        assert read_events(answer.text, 5)[-1]["type"] == "response.completed"
        assert not fake.aborted


def test_a_stream_in_the_foreground_ends_with_its_client() -> None:
    fake = backend(hang=3)
    with serving(fake) as live:
        wire = live.begin(PATH, {"input": "Hi", "stream": True})
        head = b""
        while b"output_text.delta" not in head:
            head += wire.recv(65536)
        wire.close()
        live.wait_for_abort()
        assert fake.aborted == [fake.submitted[0].request_id]
